"""RegNetX and RegNetY (with squeeze-and-excitation) with the tensor names of timm: the teachers of DeiT, CaiT and ResMLP
(arXiv 2003.13678).
"""

from dataclasses import dataclass

from torch import Tensor, nn

from vitrail.models.convnets.convnet import ConvNet, Shapes


@dataclass(frozen=True)
class RegNetConfig:
    """The defaults are those of RegNetY-16GF."""

    depths: tuple[int, ...] = (2, 4, 11, 1)
    widths: tuple[int, ...] = (224, 448, 1232, 3024)
    group: int = 112  # channels per group of the 3x3 convolutions
    stem: int = 32
    squeeze: bool = True  # RegNetY
    classes: int = 1000


def infer(shapes: Shapes) -> RegNetConfig:
    """The configuration of a state dict, from names and shapes."""
    stages = sorted({key.split(".")[0] for key in shapes if key.startswith("s") and key.split(".")[0][1:].isdigit()})
    return RegNetConfig(
        depths=tuple(len({key.split(".")[1] for key in shapes if key.startswith(f"{stage}.")}) for stage in stages),
        widths=tuple(shapes[f"{stage}.b1.conv3.conv.weight"][0] for stage in stages),
        group=shapes["s1.b1.conv2.conv.weight"][1],
        stem=shapes["stem.conv.weight"][0],
        squeeze="s1.b1.se.fc1.weight" in shapes,
        classes=shapes["head.fc.weight"][0],
    )


class ConvNorm(nn.Module):
    """A convolution without bias, and batch norm."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.bn = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.bn(self.conv(x))
        return out


class SqueezeExcitation(nn.Module):
    """Channel weights computed from the spatial mean."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(width, inner, 1), nn.Conv2d(inner, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x * self.fc2(self.fc1(x.mean((2, 3), keepdim=True)).relu()).sigmoid()
        return out


class Block(nn.Module):
    """1x1, grouped 3x3 (strided), squeeze-and-excitation to a quarter of the input channels, 1x1."""

    def __init__(self, config: RegNetConfig, inputs: int, width: int, stride: int):
        super().__init__()
        group = min(config.group, width)
        self.conv1 = ConvNorm(inputs, width, 1)
        self.conv2 = ConvNorm(width, width, 3, stride, width // group)
        self.se = SqueezeExcitation(width, round(inputs / 4)) if config.squeeze else nn.Identity()
        self.conv3 = ConvNorm(width, width, 1)
        same_shape = inputs == width and stride == 1
        self.downsample = nn.Identity() if same_shape else ConvNorm(inputs, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.se(self.conv2(self.conv1(x).relu()).relu())
        out: Tensor = (self.conv3(branch) + self.downsample(x)).relu()
        return out


class RegNet(ConvNet):
    def __init__(self, config: RegNetConfig):
        super().__init__()
        self.config = config
        self.stem = ConvNorm(3, config.stem, 3, 2)
        inputs = config.stem
        for stage, (depth, width) in enumerate(zip(config.depths, config.widths, strict=True), 1):
            blocks = nn.Sequential()
            for index in range(depth):
                blocks.add_module(f"b{index + 1}", Block(config, inputs, width, 1 if index else 2))
                inputs = width
            self.add_module(f"s{stage}", blocks)
        self.head = nn.ModuleDict({"fc": nn.Linear(inputs, config.classes)})

    def forward_features(self, images: Tensor) -> Tensor:
        x: Tensor = self.stem(images).relu()
        for stage in range(1, len(self.config.depths) + 1):
            x = self.get_submodule(f"s{stage}")(x)
        return x

    def get_classifier(self) -> nn.Linear:
        head = self.head["fc"]
        assert isinstance(head, nn.Linear)
        return head
