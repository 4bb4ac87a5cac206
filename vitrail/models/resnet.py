"""ResNet (arXiv 1512.03385), wide ResNet (1605.07146), ResNeXt (1611.05431) and ResNet-D (1812.01187), for ImageNet and CIFAR.

ResNet-D has three convolutions in its root and average pooling in its shortcuts. The models for CIFAR have a root of 3x3 without
stride and pooling.
"""

from typing import Any

from vitrail.layers.convnet import ConvNetConfig
from vitrail.models.config import Architecture
from vitrail.models.preprocessing import Preprocessing

PREPROCESSING = Preprocessing(interpolation="bilinear")
SMALL_PREPROCESSING = Preprocessing(image_size=(32, 32), crop_ratio=1.0, interpolation="bilinear")

D: dict[str, Any] = {"root_widths": (32, 32, 64), "shortcut": "average"}
CIFAR: dict[str, Any] = {"root_stride": 1}


def convnet(config: ConvNetConfig, **changes: Any) -> Architecture:
    """The architecture of a convnet: its stem, no blocks, and the mean of its last feature map."""
    values: dict[str, Any] = {
        "stem": "convnet",
        "convnet": config,
        "width": config.widths[-1],
        "patch_size": config.stride,
        "image_size": (32, 32) if config.root_stride == 1 else (224, 224),
        "depth": 0,
        "heads": 1,
        "pos_embed": "none",
        "pooling": "mean",
        "final_norm": False,
        "weight_init": "resnet",
        "drop_path_schedule": "linear",
    }
    return Architecture(**(values | changes))


def resnet(depths: tuple[int, ...], basic: bool = False, inner: int = 64, groups: int = 1, **changes: Any) -> Architecture:
    """`inner` are the channels of the 3x3 convolutions of the first stage; every stage doubles them."""
    stages = range(len(depths))
    config = ConvNetConfig(
        depths=depths,
        widths=tuple((64 if basic else 256) << stage for stage in stages),
        inner_widths=tuple(inner << stage for stage in stages),
        groups=(groups,) * len(depths),
        block="basic" if basic else "bottleneck",
    )
    return convnet(config.replace(**changes))


MODELS = {
    "resnet18": resnet((2, 2, 2, 2), basic=True),
    "resnet34": resnet((3, 4, 6, 3), basic=True),
    "resnet50": resnet((3, 4, 6, 3)),
    "resnet101": resnet((3, 4, 23, 3)),
    "resnet152": resnet((3, 8, 36, 3)),
    "resnet50d": resnet((3, 4, 6, 3), **D),
    "wide_resnet50_2": resnet((3, 4, 6, 3), inner=128),
    "resnext50_32x4d": resnet((3, 4, 6, 3), inner=128, groups=32),
    "resnext50d_32x4d": resnet((3, 4, 6, 3), inner=128, groups=32, **D),
    "resnext50d_32x8d": resnet((3, 4, 6, 3), inner=256, groups=32, **D),
    "resnet18_cifar": resnet((2, 2, 2, 2), basic=True, **CIFAR),
    "resnet50_cifar": resnet((3, 4, 6, 3), **CIFAR),
}
ALIASES: dict[str, str] = {}
