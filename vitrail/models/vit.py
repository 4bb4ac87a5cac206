"""ViT: "An image is worth 16x16 words" (arXiv 2010.11929), its hybrids, its ResNet and axial baselines.

As the released Google models: LayerNorm epsilon 1e-6, tanh GELU, a position embedding for the class token too, resampled
bilinearly with aligned corners, inputs in [-1, 1] and resized to a square.
"""

from vitrail.layers.bit_resnet import LAYERS
from vitrail.models.config import Architecture
from vitrail.models.preprocessing import GOOGLE

PREPROCESSING = GOOGLE

VIT = Architecture(activation="gelu_tanh", pos_embed_resample="aligned", weight_init="vit")
#            width depth heads
SIZES = {
    "tiny": (192, 12, 3),
    "small": (384, 12, 6),
    "base": (768, 12, 12),
    "large": (1024, 24, 16),
    "huge": (1280, 32, 16),
}
PATCHES = {"tiny": (16,), "small": (16, 32), "base": (8, 16, 32), "large": (14, 16, 32), "huge": (14, 16)}
#            size     ResNet stages         patch size
HYBRIDS = {
    "vit_tiny_r_s16_p8": ("tiny", (), 32),
    "vit_small_r26_s32": ("small", LAYERS[26], 32),
    "vit_base_r26_s32": ("base", LAYERS[26], 32),
    "vit_base_r50_s32": ("base", LAYERS[50], 32),
    "vit_base_r50_s16": ("base", (3, 4, 9), 16),
    "vit_large_r50_s32": ("large", LAYERS[50], 32),
    "vit_large_r50_s16": ("large", (3, 4, 9), 16),
}
RESNETS = {
    "50x1": (50, 1),
    "50x2": (50, 2),
    "101x1": (101, 1),
    "152x1": (152, 1),
    "152x2": (152, 2),
    "152x4": (152, 4),
    "200x3": (200, 3),
}


def sized(base: Architecture, size: str) -> Architecture:
    width, depth, heads = SIZES[size]
    return base.replace(width=width, depth=depth, heads=heads)


def resnet(depth: int, factor: int) -> Architecture:
    """A BiT ResNet: the stem of the hybrids without blocks, and mean pooling."""
    return VIT.replace(
        stem="resnet_features",
        stem_layers=LAYERS[depth],
        stem_width=64 * factor,
        width=2048 * factor,
        heads=1,
        patch_size=32,
        depth=0,
        pos_embed="none",
        pooling="mean",
        final_norm=False,
    )


MODELS = {f"vit_{size}_patch{patch}": sized(VIT, size).replace(patch_size=patch) for size in SIZES for patch in PATCHES[size]}
MODELS |= {
    name: sized(VIT, size).replace(stem="resnet", stem_layers=layers, patch_size=stride)
    for name, (size, layers, stride) in HYBRIDS.items()
}
# Appendix D.2: the baseline whose depth, width, MLP width and patch size are scaled separately.
MODELS["vit_shape_patch32"] = VIT.replace(width=1024, depth=8, heads=16, mlp_ratio=2.0, patch_size=32)
# Appendix D.6: each block becomes a row block and a column block, so the depth doubles.
MODELS |= {
    f"axial_vit_base_patch{patch}": VIT.replace(mixer="axial", depth=24, pooling="mean", patch_size=patch) for patch in (16, 32)
}
MODELS |= {f"bit_r{name}": resnet(*size) for name, size in RESNETS.items()}

ALIASES = {
    "ViT-Ti_16": "vit_tiny_patch16",
    "ViT-S_16": "vit_small_patch16",
    "ViT-S_32": "vit_small_patch32",
    "ViT-B_16": "vit_base_patch16",
    "ViT-B_32": "vit_base_patch32",
    "ViT-L_16": "vit_large_patch16",
    "ViT-L_32": "vit_large_patch32",
    "ViT-H_14": "vit_huge_patch14",
    "R50+ViT-B_16": "vit_base_r50_s16",
    "R50+ViT-L_32": "vit_large_r50_s32",
    "R26+ViT-S_32": "vit_small_r26_s32",
    "R26+ViT-B_32": "vit_base_r26_s32",
    "R+ViT-Ti_16": "vit_tiny_r_s16_p8",
    "ViT-b_32": "vit_small_patch32",  # "b": all dimensions of Base halved
    "vit_base_resnet50": "vit_base_r50_s16",
}
