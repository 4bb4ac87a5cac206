"""Vitrail's own models for small data sets: they begin with convolutions, which a plain ViT learns from 100,000 images or more.

`vitrail_mini` mixes tokens by depthwise convolutions and trains on a CPU; `vitrail_small` has the width of DeiT-S and half its
depth after the first stages of a small ResNet; `vitrail_tiny` is similar, with the width of DeiT-Ti. Recipes choose the patch
size for the images.
"""

from vitrail.models.config import Architecture
from vitrail.models.preprocessing import Preprocessing

SMALL = Architecture(
    width=384,
    depth=7,
    heads=6,
    stem="basic",
    stem_width=64,
    stem_layers=(2, 2, 2),
    residual="layerscale",
    layerscale_init=0.1,
    pooling="mean",
    image_size=(32, 32),
    patch_size=4,
)
MODELS = {
    "vitrail_mini": Architecture(
        width=128,
        depth=6,
        heads=4,
        mlp_ratio=3.0,
        stem="conv",
        mixer="depthwise",
        pos_embed="none",
        pooling="mean",
        weight_init="vit",
        image_size=(32, 32),
        patch_size=4,
    ),
    "vitrail_tiny": SMALL.replace(
        width=192, depth=11, heads=3, stem_width=32, stem_layers=(1, 1, 1), image_size=128, patch_size=16
    ),
    "vitrail_small": SMALL,
}
ALIASES: dict[str, str] = {}
PREPROCESSING = Preprocessing(image_size=(32, 32), crop_ratio=1.0)
