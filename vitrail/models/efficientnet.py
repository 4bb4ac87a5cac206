"""EfficientNet-Lite with the tensor names of its PyTorch port: inverted bottlenecks without squeeze-and-excitation, ReLU6
(arXiv 1905.11946).
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from vitrail.layers.bit_resnet import pad_same

Shapes = dict[str, tuple[int, ...]]  # of a state dict, by name
STRIDES = (1, 2, 2, 2, 1, 2, 1)  # of the seven stages
SIZES = {
    (16, 320): 224,
    (21, 320): 240,
    (21, 352): 260,
    (24, 384): 280,
    (30, 448): 300,
}  # by (blocks, last width)
EPS = 1e-3


class Stage(NamedTuple):
    depth: int
    outputs: int
    kernel: int
    expansion: int


@dataclass(frozen=True)
class EfficientNetConfig:
    """The defaults are those of Lite0."""

    stages: tuple[Stage, ...] = (
        *(Stage(1, 16, 3, 1), Stage(2, 24, 3, 6), Stage(2, 40, 5, 6), Stage(3, 80, 3, 6)),
        *(Stage(3, 112, 5, 6), Stage(4, 192, 5, 6), Stage(1, 320, 3, 6)),
    )
    stem: int = 32
    head: int = 1280
    classes: int = 1000

    @property
    def size(self) -> int:
        """The image size that the published network was trained with."""
        return SIZES.get((sum(stage.depth for stage in self.stages), self.stages[-1].outputs), 224)


def infer(shapes: Shapes) -> EfficientNetConfig:
    """The configuration of a state dict, from names and shapes; blocks of equal width are a stage."""
    stages: list[Stage] = []
    inputs = shapes["_conv_stem.weight"][0]
    for index in range(len({key.split(".")[1] for key in shapes if key.startswith("_blocks.")})):
        outputs, inner = shapes[f"_blocks.{index}._project_conv.weight"][:2]
        if stages and stages[-1].outputs == outputs:
            stages[-1] = stages[-1]._replace(depth=stages[-1].depth + 1)
        else:
            stages.append(Stage(1, outputs, shapes[f"_blocks.{index}._depthwise_conv.weight"][2], inner // inputs))
        inputs = outputs
    return EfficientNetConfig(
        tuple(stages), shapes["_conv_stem.weight"][0], shapes["_conv_head.weight"][0], shapes["_fc.weight"][0]
    )


class SameConv(nn.Conv2d):
    """A convolution with TensorFlow's SAME padding."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1):
        super().__init__(inputs, outputs, kernel, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(pad_same(x, self.kernel_size[0], self.stride[0]))


class Block(nn.Module):
    """1x1 expansion, depthwise (strided), 1x1 projection; with a residual connection if input and output have the same shape."""

    def __init__(self, stage: Stage, inputs: int, stride: int):
        super().__init__()
        inner = inputs * stage.expansion
        self.has_expansion, self.has_residual = stage.expansion > 1, stride == 1 and inputs == stage.outputs
        if self.has_expansion:
            self._expand_conv, self._bn0 = SameConv(inputs, inner, 1), nn.BatchNorm2d(inner, EPS)
        self._depthwise_conv = SameConv(inner, inner, stage.kernel, stride, inner)
        self._bn1 = nn.BatchNorm2d(inner, EPS)
        self._project_conv, self._bn2 = SameConv(inner, stage.outputs, 1), nn.BatchNorm2d(stage.outputs, EPS)

    def forward(self, x: Tensor) -> Tensor:
        branch = nn.functional.relu6(self._bn0(self._expand_conv(x))) if self.has_expansion else x
        branch = nn.functional.relu6(self._bn1(self._depthwise_conv(branch)))
        branch = self._bn2(self._project_conv(branch))
        out: Tensor = x + branch if self.has_residual else branch
        return out


class EfficientNet(nn.Module):
    """Convolutional features, global average pooling, a linear classifier. It can be a teacher and is not trained."""

    def __init__(self, config: EfficientNetConfig):
        super().__init__()
        self.config = config
        self._conv_stem, self._bn0 = SameConv(3, config.stem, 3, 2), nn.BatchNorm2d(config.stem, EPS)
        self._blocks = nn.Sequential()
        inputs = config.stem
        for stage, stride in zip(config.stages, STRIDES, strict=True):
            for index in range(stage.depth):
                self._blocks.append(Block(stage, inputs, 1 if index else stride))
                inputs = stage.outputs
        self._conv_head, self._bn1 = SameConv(inputs, config.head, 1), nn.BatchNorm2d(config.head, EPS)
        self._fc = nn.Linear(config.head, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, C]."""
        out: Tensor = self.get_classifier()(self.forward_features(images).mean((2, 3)))
        return out

    def forward_features(self, images: Tensor) -> Tensor:
        """Feature maps [B, D, h, w]."""
        x = nn.functional.relu6(self._bn0(self._conv_stem(images)))
        return nn.functional.relu6(self._bn1(self._conv_head(self._blocks(x))))

    def get_classifier(self) -> nn.Linear:
        return self._fc
