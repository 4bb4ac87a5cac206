"""LV-ViT: "All tokens matter: token labeling for training better vision transformers" (arXiv 2104.10858).

A convolutional stem, residuals scaled by a constant, and a classifier on every patch; in evaluation half of the maximum over the
patches is added to the class logits.
"""

from vitrail.models.config import Architecture
from vitrail.models.preprocessing import Preprocessing

PREPROCESSING = Preprocessing(crop_ratio=0.9)  # T and S; M and L are evaluated at 1.0
LARGE_PREPROCESSING = Preprocessing(crop_ratio=1.0)

LVVIT = Architecture(
    stem="tower",
    mlp_ratio=3.0,
    qkv_bias=False,
    norm_eps=1e-5,
    residual="constant",
    drop_path_schedule="linear",
    dense_head=True,
)
#       width depth heads residual stem size
SIZES = {
    "t": (240, 12, 4, 1.0, 64, 224),
    "s": (384, 16, 6, 1 / 2, 64, 224),
    "m": (512, 20, 8, 1 / 2, 64, 224),
    "l": (768, 24, 12, 1 / 3, 128, 288),
}

MODELS = {
    f"lvvit_{name}": LVVIT.replace(
        width=width, depth=depth, heads=heads, layerscale_init=factor, stem_width=stem, image_size=size
    )
    for name, (width, depth, heads, factor, stem, size) in SIZES.items()
}

ALIASES = {f"LV-ViT-{name.upper()}": f"lvvit_{name}" for name in SIZES}
