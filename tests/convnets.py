"""Small convnets, and their tensors under the names of torchvision and timm."""

from vitrail.checkpoints.conversion import export_tensors
from vitrail.layers.convnet import ConvNetConfig
from vitrail.models.registry import build
from vitrail.models.resnet import convnet


def small_resnet(depths=(1, 1), width=8, classes=4, bottleneck=False, **changes):
    """The architecture of a ResNet whose first stage has `width` channels, four times as many with bottlenecks."""
    inner = tuple(width << stage for stage in range(len(depths)))
    config = ConvNetConfig(
        depths=depths,
        widths=tuple(4 * each for each in inner) if bottleneck else inner,
        inner_widths=inner,
        groups=(1,) * len(depths),
        block="bottleneck" if bottleneck else "basic",
        root_widths=(width,),
    )
    return convnet(config.replace(**changes), classes=classes)


def timm_state(model):
    """The state dict of a model, or of a new one of an architecture, in timm's names."""
    return export_tensors(build(model) if not hasattr(model, "state_dict") else model, "timm")
