"""RegNetY: "Designing network design spaces" (arXiv 2003.13678), convnets with squeeze-and-excitation.

The names are timm's. torchvision's RegNetY-8GF has other channels in its first stage: `regnety_080_tv`.
"""

from vitrail.layers.convnet import ConvNetConfig
from vitrail.models.config import Architecture
from vitrail.models.preprocessing import Preprocessing
from vitrail.models.resnet import convnet

PREPROCESSING = Preprocessing()

#              blocks        channels                 channels per group
SIZES = {
    "040": ((2, 6, 12, 2), (128, 192, 512, 1088), 64),
    "080": ((2, 4, 10, 1), (168, 448, 896, 2016), 56),
    "080_tv": ((2, 4, 10, 1), (224, 448, 896, 2016), 56),
    "120": ((2, 5, 11, 1), (224, 448, 896, 2240), 112),
    "160": ((2, 4, 11, 1), (224, 448, 1232, 3024), 112),
}


def regnet(depths: tuple[int, ...], widths: tuple[int, ...], group: int, squeeze: bool = True, root: int = 32) -> Architecture:
    """RegNetY, or RegNetX without `squeeze`."""
    config = ConvNetConfig(
        depths=depths,
        widths=widths,
        inner_widths=widths,
        groups=tuple(max(width // group, 1) for width in widths),
        squeeze=squeeze,
        root_widths=(root,),
        root_stride=2,
        first_stride=2,
    )
    return convnet(config)


MODELS = {f"regnety_{name}": regnet(*size) for name, size in SIZES.items()}
ALIASES = {"regnet_y_8gf": "regnety_080_tv", "regnet_y_16gf": "regnety_160"}
