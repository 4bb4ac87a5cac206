"""RegNets by timm's names: X, and Y with squeeze-and-excitation, the teachers of DeiT, CaiT and ResMLP (arXiv 2003.13678)."""

from dataclasses import dataclass

from torch import Tensor, nn

from vitrail.checkpoints.codecs import Shapes
from vitrail.teachers.network import ConvNet


@dataclass(frozen=True)
class RegNetPlan:
    """The defaults are a RegNetY-16GF."""

    depths: tuple[int, ...] = (2, 4, 11, 1)
    widths: tuple[int, ...] = (224, 448, 1232, 3024)
    group: int = 112  # channels of each group of the 3x3 convolutions
    stem: int = 32
    squeeze: bool = True  # RegNetY
    classes: int = 1000


def infer(shapes: Shapes) -> RegNetPlan:
    """The network that names and shapes stand for."""
    stages = sorted({key.split(".")[0] for key in shapes if key.startswith("s") and key.split(".")[0][1:].isdigit()})
    return RegNetPlan(
        depths=tuple(len({key.split(".")[1] for key in shapes if key.startswith(f"{stage}.")}) for stage in stages),
        widths=tuple(shapes[f"{stage}.b1.conv3.conv.weight"][0] for stage in stages),
        group=shapes["s1.b1.conv2.conv.weight"][1],
        stem=shapes["stem.conv.weight"][0],
        squeeze="s1.b1.se.fc1.weight" in shapes,
        classes=shapes["head.fc.weight"][0],
    )


class Convolution(nn.Module):
    """A convolution without bias, and its batch norm."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.bn = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x))


class Squeeze(nn.Module):
    """Channels weighted by what the whole map says."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(width, inner, 1), nn.Conv2d(inner, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.fc2(self.fc1(x.mean((2, 3), keepdim=True)).relu()).sigmoid()


class Block(nn.Module):
    """1x1, grouped 3x3 (strided), squeeze, 1x1; the squeeze has a quarter of the channels that come in."""

    def __init__(self, plan: RegNetPlan, inputs: int, width: int, stride: int):
        super().__init__()
        group = min(plan.group, width)
        self.conv1 = Convolution(inputs, width, 1)
        self.conv2 = Convolution(width, width, 3, stride, width // group)
        self.se = Squeeze(width, round(inputs / 4)) if plan.squeeze else nn.Identity()
        self.conv3 = Convolution(width, width, 1)
        plain = inputs == width and stride == 1
        self.downsample = nn.Identity() if plain else Convolution(inputs, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.se(self.conv2(self.conv1(x).relu()).relu())
        return (self.conv3(branch) + self.downsample(x)).relu()


class RegNet(ConvNet):
    def __init__(self, plan: RegNetPlan):
        super().__init__()
        self.plan = plan
        self.stem = Convolution(3, plan.stem, 3, 2)
        inputs = plan.stem
        for stage, (depth, width) in enumerate(zip(plan.depths, plan.widths, strict=True), 1):
            blocks = nn.Sequential()
            for index in range(depth):
                blocks.add_module(f"b{index + 1}", Block(plan, inputs, width, 1 if index else 2))
                inputs = width
            self.add_module(f"s{stage}", blocks)
        self.head = nn.ModuleDict({"fc": nn.Linear(inputs, plan.classes)})

    def maps(self, images: Tensor) -> Tensor:
        x = self.stem(images).relu()
        for stage in range(1, len(self.plan.depths) + 1):
            x = self.get_submodule(f"s{stage}")(x)
        return x

    def classifier(self) -> nn.Linear:
        head = self.head["fc"]
        assert isinstance(head, nn.Linear)
        return head
