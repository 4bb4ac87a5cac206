"""Heads for dense prediction: linear, convolutions (FCN), and UperNet (arXiv 1807.10221) with the neck for one-scale trunks.

A head takes a list of feature maps [B, C, h, w], one for each of its `channels` and `strides` (pixels of the image per cell), and
returns logits [B, classes, h, w] at the resolution of its finest map.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LEVELS = (4, 8, 16, 32)  # strides of the pyramid
POOLED = (1, 2, 3, 6)  # sides of the pooled grids


class ConvNormAct(nn.Sequential):
    """Convolution without bias, BatchNorm, ReLU; the size of the map is kept."""

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
        super().__init__(conv, nn.BatchNorm2d(outputs), nn.ReLU())


class MapPooling(nn.Module):
    """Max-pooling of squares; of a smaller map, of the largest square that it contains."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, min(self.side, *x.shape[-2:]))


def rescale(channels: int, factor: float) -> nn.Module:
    """A layer that multiplies the sides of a map by about `factor`, a power of two: deconvolutions or a max-pooling."""
    steps = round(math.log2(factor))
    if steps <= 0:
        return MapPooling(2**-steps) if steps else nn.Identity()
    layers: list[nn.Module] = []
    for step in range(steps):
        layers += [nn.BatchNorm2d(channels), nn.GELU()] if step else []
        layers.append(nn.ConvTranspose2d(channels, channels, 2, stride=2))
    return nn.Sequential(*layers)


class Neck(nn.Module):
    """Maps of any strides to the pyramid `LEVELS`; a single map is used at all levels, as in PatchConvNet and DeiT III."""

    def __init__(self, channels: Sequence[int], strides: Sequence[int]) -> None:
        super().__init__()
        self.single = len(channels) == 1
        self.channels = list(channels) * (len(LEVELS) if self.single else 1)
        from_strides = list(strides) * (len(LEVELS) if self.single else 1)
        if len(self.channels) != len(LEVELS):
            raise ValueError(f"a pyramid has {len(LEVELS)} levels, not {len(self.channels)} maps")
        self.levels = nn.ModuleList(
            rescale(width, stride / level) for width, stride, level in zip(self.channels, from_strides, LEVELS, strict=True)
        )

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        maps = maps * len(self.levels) if self.single else maps
        return [level(each) for level, each in zip(self.levels, maps, strict=True)]


class LinearHead(nn.Module):
    """One linear layer on the concatenated maps, each resized to the first; with `normalize`, on normalized vectors of each."""

    def __init__(self, channels: Sequence[int], classes: int, normalize: bool = False) -> None:
        super().__init__()
        self.normalize = normalize
        self.classifier = nn.Conv2d(sum(channels), classes, 1)
        nn.init.normal_(self.classifier.weight, std=0.01)
        nn.init.zeros_(self.classifier.bias)  # type: ignore[arg-type]

    def forward(self, maps: list[Tensor]) -> Tensor:
        out: Tensor = self.classifier(concatenate([normalize_channels(each) for each in maps] if self.normalize else maps))
        return out


class FcnHead(nn.Module):
    """`convs` 3 x 3 convolutions and a linear layer on the concatenated maps."""

    def __init__(self, channels: Sequence[int], width: int, classes: int, convs: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        sizes = [sum(channels), *[width] * convs]
        self.convs = nn.Sequential(*(ConvNormAct(sizes[i], sizes[i + 1], 3) for i in range(convs)))
        self.dropout = nn.Dropout2d(dropout)
        self.classifier = nn.Conv2d(width, classes, 1)
        init_convs(self)

    def forward(self, maps: list[Tensor]) -> Tensor:
        out: Tensor = self.classifier(self.dropout(self.convs(concatenate(maps))))
        return out


class UperNetHead(nn.Module):
    """Pyramid pooling of the coarsest level, a feature pyramid over the others, and their fusion at the finest level."""

    def __init__(self, channels: Sequence[int], strides: Sequence[int], width: int, classes: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.neck = Neck(channels, strides)
        *finer, coarsest = self.neck.channels
        self.pooled = nn.ModuleList(ConvNormAct(coarsest, width, 1) for _ in POOLED)
        self.bottleneck = ConvNormAct(coarsest + len(POOLED) * width, width, 3)
        self.lateral = nn.ModuleList(ConvNormAct(each, width, 1) for each in finer)
        self.smooth = nn.ModuleList(ConvNormAct(width, width, 3) for _ in finer)
        self.fuse = ConvNormAct(len(LEVELS) * width, width, 3)
        self.dropout = nn.Dropout2d(dropout)
        self.classifier = nn.Conv2d(width, classes, 1)
        init_convs(self)

    def forward(self, maps: list[Tensor]) -> Tensor:
        *finer, coarsest = self.neck(maps)
        pooled = [conv(pool_map(coarsest, side)) for side, conv in zip(POOLED, self.pooled, strict=True)]
        pooled = [F.interpolate(each, coarsest.shape[-2:], mode="bilinear", align_corners=False) for each in pooled]
        x = self.bottleneck(torch.cat([coarsest, *pooled], 1))
        levels = [x]
        for each, lateral in zip(reversed(finer), reversed(self.lateral), strict=True):
            x = lateral(each) + resize_map(x, each.shape[-2:])
            levels.insert(0, x)
        smoothed = [conv(level) for conv, level in zip(self.smooth, levels, strict=False)] + levels[-1:]
        fused = self.fuse(torch.cat([resize_map(level, smoothed[0].shape[-2:]) for level in smoothed], 1))
        out: Tensor = self.classifier(self.dropout(fused))
        return out


def pool_map(x: Tensor, side: int) -> Tensor:
    """The means of side x side cells of a map, [B, C, side, side]."""
    if torch.compiler.is_exporting():  # torch's decomposition fixes which cells have equal lengths by the size of the example
        out: Tensor = cell_weights(x, -2, side) @ x @ cell_weights(x, -1, side).T
        return out
    return F.adaptive_avg_pool2d(x, side)


def cell_weights(x: Tensor, dim: int, side: int) -> Tensor:
    """The mean over each of `side` cells of a dimension with n positions, as a matrix [side, n]."""
    n = x.shape[dim]
    position, cell = torch.arange(n, device=x.device), torch.arange(side, device=x.device)[:, None]
    inside = (position >= cell * n // side) & (position < ((cell + 1) * n + side - 1) // side)
    return inside.to(x.dtype) / inside.sum(1, keepdim=True)


def resize_map(x: Tensor, size: Sequence[int]) -> Tensor:
    """A map [B, C, h, w] resized bilinearly to `size`."""
    return x if x.shape[-2:] == tuple(size) else F.interpolate(x, tuple(size), mode="bilinear", align_corners=False)


def normalize_channels(x: Tensor) -> Tensor:
    """Each vector of a map [B, C, h, w] with mean 0 and variance 1."""
    return F.layer_norm(x.movedim(1, -1), x.shape[1:2]).movedim(-1, 1)


def concatenate(maps: list[Tensor]) -> Tensor:
    return maps[0] if len(maps) == 1 else torch.cat([resize_map(each, maps[0].shape[-2:]) for each in maps], 1)


def init_convs(head: nn.Module) -> None:
    """Initialize convolutions as He et al. and the classifier with small weights, as the usual implementations do."""
    for module in head.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    nn.init.normal_(head.classifier.weight, std=0.01)  # type: ignore[union-attr,arg-type]
    nn.init.zeros_(head.classifier.bias)  # type: ignore[union-attr,arg-type]
