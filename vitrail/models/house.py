"""Models of our own for small data: convolutions first, where a plain ViT would need a hundred thousand pictures to learn them.

`house_mini` mixes tokens by depth-wise convolutions throughout and trains on a CPU; `house_small` is a ViT of about DeiT-Ti's
size behind a short tower of convolutions. Recipes set their patch size to suit the pictures.
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
}
ALIASES: dict[str, str] = {}
PREPROCESSING = Preprocessing(image_size=(32, 32), crop_ratio=1.0)
