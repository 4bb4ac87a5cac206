"""Convolutional networks with BatchNorm as a stem: ResNet, ResNeXt, ResNet-D and RegNet.

A convnet is this stem without blocks behind it. Its tokens are the positions of the last feature map.
"""

import dataclasses
from collections import OrderedDict
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vitrail.errors import UserError
from vitrail.layers.drop_path import DropPath
from vitrail.layers.layout import Grid, to_tokens

BLOCKS = ("bottleneck", "basic")
SHORTCUTS = ("conv", "average", "pad")
MAX_CHANNELS, MAX_BLOCKS = 1 << 16, 1000


@dataclass(frozen=True)
class ConvNetConfig:
    """What defines a convnet. The defaults are those of ResNet-50."""

    depths: tuple[int, ...] = (3, 4, 6, 3)  # blocks of each stage
    widths: tuple[int, ...] = (256, 512, 1024, 2048)  # output channels of each stage
    inner_widths: tuple[int, ...] = (64, 128, 256, 512)  # channels of its 3x3 convolutions
    groups: tuple[int, ...] = (1, 1, 1, 1)  # of its 3x3 convolutions
    block: str = "bottleneck"  # 1x1, 3x3, 1x1 convolutions; "basic": 3x3, 3x3
    squeeze: bool = False  # squeeze-and-excitation in every block
    root_widths: tuple[int, ...] = (64,)  # of one convolution (7x7 where root_stride=4, else 3x3), or of three of 3x3
    root_stride: int = 4  # 4: a convolution of stride 2 and max-pooling; 2: without pooling; 1: for small images
    first_stride: int = 1  # of the first stage; the others have 2
    shortcut: str = "conv"  # where the shape changes; "average": pooling before it (ResNet-D), "pad": no parameters
    stride_in_1x1: bool = False  # the stride of a bottleneck is in its first convolution, not in the 3x3
    eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("depths", "widths", "inner_widths", "groups", "root_widths"):
            value = getattr(self, name)
            if not isinstance(value, tuple | list) or not all(type(item) is int and 0 < item <= MAX_CHANNELS for item in value):
                raise UserError(f"convnet.{name}={value!r} is not a valid value; give a list of positive integers.")
            object.__setattr__(self, name, tuple(value))
        for violated, message in self._constraints():
            if violated:
                raise UserError(message)

    def _constraints(self) -> list[tuple[bool, str]]:
        stages = len(self.depths)
        sizes = (self.widths, self.inner_widths, self.groups)
        flags = (self.squeeze, self.stride_in_1x1)
        divide = all(inner % groups == 0 for inner, groups in zip(self.inner_widths, self.groups, strict=False))
        same = self.inner_widths == self.widths and set(self.groups) <= {1}
        return [
            (not 1 <= stages <= 16 or sum(self.depths) > MAX_BLOCKS, f"a convnet has 1 to 16 stages and {MAX_BLOCKS} blocks."),
            (any(len(each) != stages for each in sizes), f"convnet: widths, inner_widths and groups need {stages} values each."),
            (self.block not in BLOCKS, f"convnet.block={self.block!r} is not known; choose from {', '.join(BLOCKS)}."),
            (self.shortcut not in SHORTCUTS, f"convnet.shortcut={self.shortcut!r} is not one of {', '.join(SHORTCUTS)}."),
            (len(self.root_widths) not in (1, 3), "convnet.root_widths needs one or three values."),
            (self.root_stride not in (1, 2, 4), "convnet.root_stride must be 1, 2 or 4."),
            (self.first_stride not in (1, 2), "convnet.first_stride must be 1 or 2."),
            (any(type(flag) is not bool for flag in flags), "convnet: squeeze and stride_in_1x1 must be true or false."),
            (not divide, "convnet: the groups do not divide the inner_widths."),
            (self.block == "basic" and not same, "convnet.block=basic needs inner_widths equal to the widths, and no groups."),
            (type(self.eps) is not float or not 0 < self.eps < 1, f"convnet.eps={self.eps!r} is not a number between 0 and 1."),
        ]

    @property
    def stride(self) -> int:
        """From pixels to positions of the last feature map."""
        stride: int = self.root_stride * self.first_stride * 2 ** (len(self.depths) - 1)
        return stride

    def replace(self, **changes: Any) -> "ConvNetConfig":
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ConvNetConfig":
        unknown = sorted(set(values) - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            raise UserError(f"convnet has no {unknown[0]!r}.")
        return cls(**values)


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)


class Root(nn.Module):
    """The first convolutions, each with a norm and ReLU, and max-pooling where the stride is 4."""

    def __init__(self, channels: int, config: ConvNetConfig):
        super().__init__()
        self.count, self.pool = len(config.root_widths), config.root_stride == 4
        kernel, stride = 7 if self.count == 1 and self.pool else 3, min(config.root_stride, 2)
        for number, width in enumerate(config.root_widths, 1):
            self.add_module(f"conv{number}", conv(channels, width, kernel, stride if number == 1 else 1))
            self.add_module(f"norm{number}", nn.BatchNorm2d(width, config.eps))
            channels = width

    def forward(self, x: Tensor) -> Tensor:
        for number in range(1, self.count + 1):
            x = self.get_submodule(f"norm{number}")(self.get_submodule(f"conv{number}")(x)).relu()
        return F.max_pool2d(x, 3, 2, 1) if self.pool else x


class PadShortcut(nn.Module):
    """Every second pixel; new channels are zero, half of them in front."""

    def __init__(self, new: int, stride: int):
        super().__init__()
        self.new, self.stride = new, stride

    def forward(self, x: Tensor) -> Tensor:
        before = self.new // 2
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, self.new - before))


def make_shortcut(config: ConvNetConfig, inputs: int, outputs: int, stride: int) -> nn.Module:
    if inputs == outputs and stride == 1:
        return nn.Identity()
    if config.shortcut == "pad":
        return PadShortcut(outputs - inputs, stride)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    if config.shortcut == "average" and stride > 1:
        layers["pool"] = nn.AvgPool2d(2, stride, ceil_mode=True, count_include_pad=False)
        stride = 1
    layers["conv"] = conv(inputs, outputs, 1, stride)
    layers["norm"] = nn.BatchNorm2d(outputs, config.eps)
    return nn.Sequential(layers)


class SqueezeExcitation(nn.Module):
    """Channel weights computed from the spatial mean."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(width, inner, 1), nn.Conv2d(inner, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x * self.fc2(self.fc1(x.mean((2, 3), keepdim=True)).relu()).sigmoid()
        return out


class ConvBlock(nn.Module):
    """1x1, 3x3, squeeze-and-excitation, 1x1, or 3x3, 3x3, each convolution with a norm; ReLU after the sum."""

    def __init__(self, config: ConvNetConfig, stage: int, inputs: int, stride: int, drop_path: float):
        super().__init__()
        inner, outputs, groups = config.inner_widths[stage], config.widths[stage], config.groups[stage]
        bottleneck = config.block == "bottleneck"
        first, second = (stride, 1) if config.stride_in_1x1 or not bottleneck else (1, stride)
        self.shortcut = make_shortcut(config, inputs, outputs, stride)  # before the others: the last norm is that of the branch
        self.conv1, self.norm1 = conv(inputs, inner, 1 if bottleneck else 3, first), nn.BatchNorm2d(inner, config.eps)
        self.conv2, self.norm2 = conv(inner, inner, 3, second, groups), nn.BatchNorm2d(inner, config.eps)
        # Reduced to a quarter of the channels of the block's input, as in RegNetY.
        self.squeeze = SqueezeExcitation(inner, max(round(inputs / 4), 1)) if config.squeeze else nn.Identity()
        self.conv3 = conv(inner, outputs, 1) if bottleneck else None
        self.norm3 = nn.BatchNorm2d(outputs, config.eps) if bottleneck else None
        self.drop_path = DropPath(drop_path)

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        return self.norm3 or self.norm2

    def forward(self, x: Tensor) -> Tensor:
        branch: Tensor = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        if self.conv3 is not None and self.norm3 is not None:
            branch = self.norm3(self.conv3(self.squeeze(branch.relu())))
        else:
            branch = self.squeeze(branch)
        out: Tensor = (self.drop_path(branch) + self.shortcut(x)).relu()
        return out


class ConvNetStem(nn.Module):
    """Images [B, K, height, width] to the tokens [B, N, D] of the last feature map."""

    def __init__(self, channels: int, config: ConvNetConfig, drop_path_rates: list[float]):
        super().__init__()
        self.config = config
        self.recompute = False  # gradient checkpointing
        self.root = Root(channels, config)
        self.blocks = nn.ModuleList()
        inputs = config.root_widths[-1]
        for stage, depth in enumerate(config.depths):
            for index in range(depth):
                stride = (2 if stage else config.first_stride) if index == 0 else 1
                self.blocks.append(ConvBlock(config, stage, inputs, stride, drop_path_rates[len(self.blocks)]))
                inputs = config.widths[stage]
        self.last_blocks = [end - 1 for end in accumulate(config.depths)]  # of each stage

    def grid(self, height: int, width: int) -> Grid:
        """Every stride of 2 rounds up."""
        stride = self.config.stride
        return -(-height // stride), -(-width // stride)

    def stages(self, image: Tensor) -> list[Tensor]:
        """The feature maps [B, C, h, w] of all stages, at falling resolutions."""
        if image.is_cuda:
            image = image.contiguous(memory_format=torch.channels_last)  # which all later maps keep: cuDNN is faster
        x, maps = self.root(image), []
        recompute = self.recompute and torch.is_grad_enabled()
        for index, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
            if index in self.last_blocks:
                maps.append(x)
        return maps

    def forward(self, image: Tensor) -> Tensor:
        return to_tokens(self.stages(image)[-1])
