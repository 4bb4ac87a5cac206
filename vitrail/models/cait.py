"""CaiT: "Going deeper with image transformers" (arXiv 2103.17239).

Talking-heads attention on the patches with LayerScale, then two class-attention blocks that update the class vector only. Heads
have a width of 48.
"""

from vitrail.models.config import Architecture
from vitrail.models.preprocessing import Preprocessing

PREPROCESSING = Preprocessing(crop_ratio=1.0)

CAIT = Architecture(mixer="talking_heads", residual="layerscale", pooling="class_attention", pooling_depth=2)
#            width depth
SIZES = {
    "xxs24": (192, 24),
    "xxs36": (192, 36),
    "xs24": (288, 24),
    "xs36": (288, 36),
    "s24": (384, 24),
    "s36": (384, 36),
    "s48": (384, 48),
    "m24": (768, 24),
    "m36": (768, 36),
    "m48": (768, 48),
    "b12": (768, 12),  # the extra row of the DeiT III comparison
}
RELEASED_SIZE = {"s36": 384, "m36": 384, "m48": 448, "xs24": 384, "s24": 384, "xxs24": 384, "xxs36": 384}


def layerscale_init_at_depth(depth: int) -> float:
    """The paper's rule: 0.1 up to 18 blocks, 1e-5 up to 24, 1e-6 beyond."""
    return 0.1 if depth <= 18 else 1e-5 if depth <= 24 else 1e-6


def cait(width: int, depth: int) -> Architecture:
    return CAIT.replace(width=width, depth=depth, heads=width // 48, layerscale_init=layerscale_init_at_depth(depth))


MODELS = {f"cait_{name}": cait(width, depth) for name, (width, depth) in SIZES.items()}

# Names of the released models contain the image size only where it is 224.
ALIASES = {f"cait_{name.upper()}": f"cait_{name}_{size}" for name, size in RELEASED_SIZE.items()}
ALIASES |= {f"cait_{name.upper()}_224": f"cait_{name}_224" for name in SIZES}
