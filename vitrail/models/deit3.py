"""DeiT III: "Revenge of the ViT" (arXiv 2204.07118).

A plain ViT with LayerScale 1e-4 at every depth; only patches have position embeddings, the class token has none.
"""

from vitrail.models.config import Architecture
from vitrail.models.preprocessing import Preprocessing

PREPROCESSING = Preprocessing(crop_ratio=1.0)

DEIT3 = Architecture(residual="layerscale", layerscale_init=1e-4, pos_embed_prefix=False)
#                             width depth heads branches patch
SIZES = {
    "tiny_patch16": (192, 12, 3, 1, 16),
    "small_patch16": (384, 12, 6, 1, 16),
    "medium_patch16": (512, 12, 8, 1, 16),
    "base_patch16": (768, 12, 12, 1, 16),
    "large_patch16": (1024, 24, 16, 1, 16),
    "huge_patch14": (1280, 32, 16, 1, 14),
    "huge_patch14_52": (1280, 52, 16, 1, 14),
    "huge_patch14_26x2": (1280, 26, 16, 2, 14),
}

MODELS = {
    f"deit3_{name}": DEIT3.replace(width=width, depth=depth, heads=heads, branches=branches, patch_size=patch)
    for name, (width, depth, heads, branches, patch) in SIZES.items()
}

ALIASES = {f"deit_{name}_LS": f"deit3_{name}" for name in SIZES}
