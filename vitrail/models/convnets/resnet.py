"""ResNets by the names of torchvision and timm: ImageNet's and CIFAR's, wide, grouped, with a deep stem or free shortcuts.

Deep residual learning: arXiv 1512.03385; grouped: 1611.05431; wide: 1605.07146; deep stem and averaged shortcuts: 1812.01187.
"""

import re
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.checkpoints.codecs import Shapes
from vitrail.teachers.network import ConvNet


@dataclass(frozen=True)
class ResNetPlan:
    """The defaults are a ResNet-50."""

    layers: tuple[int, ...] = (3, 4, 6, 3)  # blocks of each stage
    bottleneck: bool = True
    classes: int = 1000
    planes: int = 64  # channels of the first stage, a quarter of them with bottlenecks; they double with each stage
    inner: int = 64  # channels of the first stage's 3x3 convolutions
    groups: int = 1
    stem: tuple[int, ...] = (64,)  # channels of its one or three convolutions
    small: bool = False  # for small images: a 3x3 stem that keeps the size
    average: bool = False  # shortcuts shrink by averaging
    free: bool = False  # shortcuts without parameters: every second pixel, new channels zero
    early: bool = False  # a bottleneck's first convolution takes the stride, not its second
    eps: float = 1e-5


def infer(shapes: Shapes) -> ResNetPlan:
    """The network that names and shapes stand for; they do not tell `early` and `eps`."""
    depths = [len({key.split(".")[1] for key in shapes if key.startswith(f"layer{stage}.")}) for stage in range(1, 6)]
    layers = tuple(depth for depth in depths if depth)
    bottleneck = "layer1.0.conv3.weight" in shapes
    inner = shapes["layer1.0.conv1.weight"][0]
    stem = tuple(shapes[key][0] for key in shapes if re.fullmatch(r"conv1(\.\d)?\.weight", key) and len(shapes[key]) == 4)
    grouped = shapes["layer1.0.conv2.weight"][1] if bottleneck else inner
    return ResNetPlan(
        layers=layers,
        bottleneck=bottleneck,
        classes=shapes["fc.weight"][0],
        planes=shapes["layer1.0.conv3.weight"][0] // 4 if bottleneck else inner,
        inner=inner,
        groups=inner // grouped,
        stem=stem,
        small=shapes.get("conv1.weight", (0, 0, 0))[2] == 3,
        average=len(shapes.get("layer2.0.downsample.1.weight", ())) == 4,
        free=not any(".downsample." in key for key in shapes) and not (bottleneck or len(layers) == 1),
    )


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)


class FreeShortcut(nn.Module):
    """Every second pixel, the new channels zero on both sides."""

    def __init__(self, new: int, stride: int):
        super().__init__()
        self.new, self.stride = new, stride

    def forward(self, x: Tensor) -> Tensor:
        before = self.new // 2
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, self.new - before))


def shortcut(plan: ResNetPlan, inputs: int, outputs: int, stride: int) -> nn.Module:
    if inputs == outputs and stride == 1:
        return nn.Identity()
    if plan.free:
        return FreeShortcut(outputs - inputs, stride)
    norm = nn.BatchNorm2d(outputs, plan.eps)
    if plan.average:
        pool = nn.AvgPool2d(2, stride, ceil_mode=True, count_include_pad=False) if stride > 1 else nn.Identity()
        return nn.Sequential(pool, convolution(inputs, outputs, 1), norm)
    return nn.Sequential(convolution(inputs, outputs, 1, stride), norm)


class Block(nn.Module):
    """Two 3x3 convolutions, or 1x1, 3x3, 1x1; each with batch norm; ReLU after the sum."""

    def __init__(self, plan: ResNetPlan, inputs: int, stage: int, stride: int):
        super().__init__()
        inner, outputs = plan.inner << stage, (4 if plan.bottleneck else 1) * plan.planes << stage
        first, second = (stride, 1) if plan.early or not plan.bottleneck else (1, stride)
        self.conv1, self.bn1 = convolution(inputs, inner, 1 if plan.bottleneck else 3, first), nn.BatchNorm2d(inner, plan.eps)
        self.conv2, self.bn2 = convolution(inner, inner, 3, second, plan.groups), nn.BatchNorm2d(inner, plan.eps)
        self.conv3: nn.Module | None = None
        if plan.bottleneck:
            self.conv3, self.bn3 = convolution(inner, outputs, 1), nn.BatchNorm2d(outputs, plan.eps)
        self.downsample = shortcut(plan, inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        if self.conv3 is not None:
            branch = self.bn3(self.conv3(branch.relu()))
        return (branch + self.downsample(x)).relu()


class ResNet(ConvNet):
    def __init__(self, plan: ResNetPlan):
        super().__init__()
        self.plan = plan
        self.conv1 = stem(plan)
        self.bn1 = nn.BatchNorm2d(plan.stem[-1], plan.eps)
        inputs = plan.stem[-1]
        for stage, count in enumerate(plan.layers):
            blocks = nn.Sequential()
            for index in range(count):
                blocks.append(Block(plan, inputs, stage, 2 if stage and not index else 1))
                inputs = (4 if plan.bottleneck else 1) * plan.planes << stage
            self.add_module(f"layer{stage + 1}", blocks)
        self.fc = nn.Linear(inputs, plan.classes)

    def maps(self, images: Tensor) -> Tensor:
        x = self.bn1(self.conv1(images)).relu()
        if not self.plan.small:
            x = F.max_pool2d(x, 3, 2, 1)
        for stage in range(len(self.plan.layers)):
            x = self.get_submodule(f"layer{stage + 1}")(x)
        return x

    def classifier(self) -> nn.Linear:
        return self.fc


def stem(plan: ResNetPlan) -> nn.Module:
    if len(plan.stem) == 1:
        return convolution(3, plan.stem[0], 3 if plan.small else 7, 1 if plan.small else 2)
    first, second, third = plan.stem
    norms = [nn.BatchNorm2d(width, plan.eps) for width in (first, second)]
    return nn.Sequential(
        *(convolution(3, first, 3, 2), norms[0], nn.ReLU()),
        *(convolution(first, second, 3), norms[1], nn.ReLU()),
        convolution(second, third, 3),
    )
