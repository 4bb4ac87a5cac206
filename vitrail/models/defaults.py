"""Models of our own for small data: convolutions first, where a plain ViT would need a hundred thousand images to learn them.

`vitrail_mini` mixes tokens by depth-wise convolutions throughout and trains on a CPU; `vitrail_small` is a ViT as wide as DeiT-S
and half as deep behind the first stages of a small ResNet, `vitrail_tiny` the like as wide as DeiT-Ti. Recipes set their patch size
to suit the images.
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
        width=192, depth=11, heads=3, stem_width=32, stem_layers=(1, 1, 1), image_size=64, patch_size=8
    ),
    "vitrail_small": SMALL,
}
ALIASES: dict[str, str] = {}
PREPROCESSING = Preprocessing(image_size=(32, 32), crop_ratio=1.0)
