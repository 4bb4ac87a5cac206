"""ResNets with the tensor names of torchvision and timm: for ImageNet and CIFAR, wide, ResNeXt, ResNet-D.

ResNet: arXiv 1512.03385; ResNeXt: 1611.05431; wide: 1605.07146; deep stem and average pooling in shortcuts: 1812.01187.
"""

import re
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.models.convnets.convnet import ConvNet, Shapes


@dataclass(frozen=True)
class ResNetConfig:
    """The defaults are those of ResNet-50."""

    depths: tuple[int, ...] = (3, 4, 6, 3)  # blocks of each stage
    bottleneck: bool = True
    classes: int = 1000
    planes: int = 64  # output channels of the first stage, or a quarter of them with bottlenecks; doubled in each stage
    inner_width: int = 64  # channels of the 3x3 convolutions of the first stage
    groups: int = 1
    stem_widths: tuple[int, ...] = (64,)  # of its one or three convolutions
    small_stem: bool = False  # for small images: a 3x3 stem without stride and pooling
    avg_down: bool = False  # shortcuts with average pooling
    pad_shortcut: bool = False  # shortcuts without parameters: every second pixel, new channels zero
    stride_in_1x1: bool = False  # the stride of a bottleneck is in its first convolution, not in the 3x3 convolution
    eps: float = 1e-5


def infer(shapes: Shapes) -> ResNetConfig:
    """The configuration of a state dict, from names and shapes; `stride_in_1x1` and `eps` cannot be inferred."""
    counts = [len({key.split(".")[1] for key in shapes if key.startswith(f"layer{stage}.")}) for stage in range(1, 6)]
    depths = tuple(count for count in counts if count)
    bottleneck = "layer1.0.conv3.weight" in shapes
    inner = shapes["layer1.0.conv1.weight"][0]
    stem = tuple(shapes[key][0] for key in shapes if re.fullmatch(r"conv1(\.\d)?\.weight", key) and len(shapes[key]) == 4)
    grouped = shapes["layer1.0.conv2.weight"][1] if bottleneck else inner
    return ResNetConfig(
        depths=depths,
        bottleneck=bottleneck,
        classes=shapes["fc.weight"][0],
        planes=shapes["layer1.0.conv3.weight"][0] // 4 if bottleneck else inner,
        inner_width=inner,
        groups=inner // grouped,
        stem_widths=stem,
        small_stem=shapes.get("conv1.weight", (0, 0, 0))[2] == 3,
        avg_down=len(shapes.get("layer2.0.downsample.1.weight", ())) == 4,
        pad_shortcut=not any(".downsample." in key for key in shapes) and not (bottleneck or len(depths) == 1),
    )


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)


class PadShortcut(nn.Module):
    """Every second pixel; new channels are zero, half of them in front."""

    def __init__(self, new: int, stride: int):
        super().__init__()
        self.new, self.stride = new, stride

    def forward(self, x: Tensor) -> Tensor:
        before = self.new // 2
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, self.new - before))


def shortcut(config: ResNetConfig, inputs: int, outputs: int, stride: int) -> nn.Module:
    if inputs == outputs and stride == 1:
        return nn.Identity()
    if config.pad_shortcut:
        return PadShortcut(outputs - inputs, stride)
    norm = nn.BatchNorm2d(outputs, config.eps)
    if config.avg_down:
        pool = nn.AvgPool2d(2, stride, ceil_mode=True, count_include_pad=False) if stride > 1 else nn.Identity()
        return nn.Sequential(pool, convolution(inputs, outputs, 1), norm)
    return nn.Sequential(convolution(inputs, outputs, 1, stride), norm)


class Block(nn.Module):
    """Two 3x3 convolutions, or 1x1, 3x3, 1x1, each with batch norm; ReLU after the sum."""

    def __init__(self, config: ResNetConfig, inputs: int, stage: int, stride: int):
        super().__init__()
        inner, outputs = config.inner_width << stage, (4 if config.bottleneck else 1) * config.planes << stage
        first, second = (stride, 1) if config.stride_in_1x1 or not config.bottleneck else (1, stride)
        self.conv1, self.bn1 = convolution(inputs, inner, 1 if config.bottleneck else 3, first), nn.BatchNorm2d(inner, config.eps)
        self.conv2, self.bn2 = convolution(inner, inner, 3, second, config.groups), nn.BatchNorm2d(inner, config.eps)
        self.conv3: nn.Module | None = None
        if config.bottleneck:
            self.conv3, self.bn3 = convolution(inner, outputs, 1), nn.BatchNorm2d(outputs, config.eps)
        self.downsample = shortcut(config, inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        if self.conv3 is not None:
            branch = self.bn3(self.conv3(branch.relu()))
        out: Tensor = (branch + self.downsample(x)).relu()
        return out


class ResNet(ConvNet):
    def __init__(self, config: ResNetConfig):
        super().__init__()
        self.config = config
        self.conv1 = make_stem(config)
        self.bn1 = nn.BatchNorm2d(config.stem_widths[-1], config.eps)
        inputs = config.stem_widths[-1]
        for stage, count in enumerate(config.depths):
            blocks = nn.Sequential()
            for index in range(count):
                blocks.append(Block(config, inputs, stage, 2 if stage and not index else 1))
                inputs = (4 if config.bottleneck else 1) * config.planes << stage
            self.add_module(f"layer{stage + 1}", blocks)
        self.fc = nn.Linear(inputs, config.classes)

    def forward_features(self, images: Tensor) -> Tensor:
        x: Tensor = self.bn1(self.conv1(images)).relu()
        if not self.config.small_stem:
            x = F.max_pool2d(x, 3, 2, 1)
        for stage in range(len(self.config.depths)):
            x = self.get_submodule(f"layer{stage + 1}")(x)
        return x

    def get_classifier(self) -> nn.Linear:
        return self.fc


def make_stem(config: ResNetConfig) -> nn.Module:
    if len(config.stem_widths) == 1:
        return convolution(3, config.stem_widths[0], 3 if config.small_stem else 7, 1 if config.small_stem else 2)
    first, second, third = config.stem_widths
    norms = [nn.BatchNorm2d(width, config.eps) for width in (first, second)]
    return nn.Sequential(
        *(convolution(3, first, 3, 2), norms[0], nn.ReLU()),
        *(convolution(first, second, 3), norms[1], nn.ReLU()),
        convolution(second, third, 3),
    )
