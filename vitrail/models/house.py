"""Models of our own for small data: convolutions first, where a plain ViT would need a hundred thousand pictures to learn them.

`house_mini` mixes tokens by depth-wise convolutions throughout and trains on a CPU; `house_small` is a ViT as wide as DeiT-S
and two thirds as deep behind a short tower of convolutions. Recipes set their patch size to suit the pictures.
"""

from vitrail.models.architecture import Architecture
from vitrail.models.preprocessing import Preprocessing

MODELS = {
    "house_mini": Architecture(
        width=128,
        depth=6,
        heads=4,
        mlp_ratio=3.0,
        stem="conv",
        mixer="depthwise",
        positions="none",
        readout="mean",
        start="vit",
        image_size=(32, 32),
        patch_size=4,
    ),
    "house_small": Architecture(
        width=384,
        depth=8,
        heads=6,
        stem="tower",
        stem_width=128,
        stem_kernels=(3, 3, 3, 3, 4),
        stem_strides=(1, 1, 2, 1, 2),
        residual="layerscale",
        residual_start=0.1,
        readout="mean",
        image_size=(32, 32),
        patch_size=4,
    ),
}
ALIASES: dict[str, str] = {}


def tower_strides(patch: int) -> tuple[int, ...]:
    """Of `house_small`: which of its five convolutions halve the picture, the last one first."""
    halving = (4, 2, 0, 3)[: patch.bit_length() - 1]
    return tuple(2 if stage in halving else 1 for stage in range(5))


PREPROCESSING = Preprocessing(image_size=(32, 32), crop_ratio=1.0)
