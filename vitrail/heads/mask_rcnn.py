"""Mask R-CNN (arXiv 1703.06870) on a feature pyramid (arXiv 1612.03144): modules, anchors and proposals.

The pyramid has levels of strides 4 to 64. A single map, of a transformer, becomes the first four by the neck: one deconvolution
after another towards the finer levels, max-pooling towards the coarser one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.heads.boxes import clip_boxes, decode_boxes, suppress
from vitrail.heads.upernet import LEVELS, MapPooling, Neck

RATIOS = (0.5, 1.0, 2.0)  # height by width of anchors
ANCHOR_SCALE = 8  # side of a square anchor in cells of its level
PROPOSAL_WEIGHTS, BOX_WEIGHTS = (1.0, 1.0, 1.0, 1.0), (10.0, 10.0, 5.0, 5.0)  # of offsets
POOLED, MASK_POOLED = 7, 14  # sides of the features of a box
MASK_SIDE = 2 * MASK_POOLED  # of a predicted mask


class PyramidNeck(nn.Module):
    """Maps of a trunk to the pyramid's first four levels; `channels` and `strides` are those of its outputs."""

    def __init__(self, channels: Sequence[int], strides: Sequence[int]) -> None:
        super().__init__()
        self.single = len(channels) == 1
        self.channels: list[int] = [*channels]
        self.strides: list[float] = [float(level) for level in LEVELS]
        if not self.single:
            self.levels = Neck(channels, strides)
            return
        width, stride = channels[0], strides[0]
        finer = [level for level in LEVELS if level * 1.5 < stride]
        # The stride after each deconvolution; levels between them, of patches that are no power of two, are those strides.
        self.deconvolutions = nn.ModuleList(nn.ConvTranspose2d(width, width, 2, stride=2) for _ in finer)
        self.norms = nn.ModuleList(nn.Sequential(nn.BatchNorm2d(width), nn.GELU()) for _ in finer[1:])
        coarser = range(len(LEVELS) - len(finer))
        self.pools = nn.ModuleList(MapPooling(2**step) if step else nn.Identity() for step in coarser)
        self.channels = [width] * len(LEVELS)
        self.strides = [stride / 2 ** (len(finer) - step) for step in range(len(finer))]
        self.strides += [float(stride * 2**step) for step in coarser]

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        if not self.single:
            out: list[Tensor] = self.levels(maps)
            return out
        found = [pool(maps[0]) for pool in self.pools]
        x = maps[0]
        for step, deconvolution in enumerate(self.deconvolutions):
            x = deconvolution(self.norms[step - 1](x) if step else x)
            found.insert(0, x)
        return found


class FeaturePyramid(nn.Module):
    """Lateral and smoothing convolutions from the coarsest level down; the fifth level is every second cell of the fourth."""

    def __init__(self, channels: Sequence[int], width: int) -> None:
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(each, width, 1) for each in channels)
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in channels)
        for conv in (*self.lateral, *self.smooth):
            nn.init.xavier_uniform_(conv.weight)
            nn.init.zeros_(conv.bias)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        found: list[Tensor] = []
        x: Tensor | None = None
        for each, lateral, smooth in reversed(list(zip(maps, self.lateral, self.smooth, strict=True))):
            own = lateral(each)
            x = own if x is None else own + F.interpolate(x, own.shape[-2:])
            found.insert(0, smooth(x))
        return [*found, F.max_pool2d(found[-1], 1, 2)]


class ProposalHead(nn.Module):
    """Objectness and box offsets of the anchors of every cell (RPN)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.objectness = nn.Conv2d(width, len(RATIOS), 1)
        self.offsets = nn.Conv2d(width, 4 * len(RATIOS), 1)
        init_normal(self, 0.01)

    def forward(self, levels: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Of each level, logits [B, n] and offsets [B, n, 4] of its anchors, in the order of `make_anchors`."""
        logits, offsets = [], []
        for level in levels:
            x = self.conv(level).relu()
            logits.append(self.objectness(x).movedim(1, -1).flatten(1))
            offsets.append(self.offsets(x).movedim(1, -1).flatten(1).unflatten(1, (-1, 4)))
        return logits, offsets


class BoxHead(nn.Module):
    """Two linear layers on the features of a box, then classes (the last is the background) and offsets for each class."""

    def __init__(self, width: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(width * POOLED**2, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.classifier, self.offsets = nn.Linear(hidden, classes + 1), nn.Linear(hidden, 4 * classes)
        for layer in self.hidden:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)
        for layer, std in ((self.classifier, 0.01), (self.offsets, 0.001)):
            nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)

    def forward(self, pooled: Tensor) -> tuple[Tensor, Tensor]:
        """Features [N, C, 7, 7] to logits [N, classes + 1] and offsets [N, classes, 4]."""
        x = self.hidden(pooled.flatten(1))
        return self.classifier(x), self.offsets(x).unflatten(1, (-1, 4))


class MaskHead(nn.Module):
    """Four convolutions and a deconvolution, then a mask for each class."""

    def __init__(self, width: int, classes: int, convs: int = 4) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(convs))
        self.up = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.classifier = nn.Conv2d(width, classes, 1)
        for conv in (*self.convs, self.up, self.classifier):
            nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(conv.bias)
        nn.init.normal_(self.classifier.weight, std=0.001)

    def forward(self, pooled: Tensor) -> Tensor:
        """Features [N, C, 14, 14] to logits [N, classes, 28, 28]."""
        for conv in self.convs:
            pooled = conv(pooled).relu()
        out: Tensor = self.classifier(self.up(pooled).relu())
        return out


class Proposals(NamedTuple):
    """Boxes that may contain an object, the most probable first."""

    boxes: Tensor  # [B, P, 4] in pixels
    valid: Tensor  # bool [B, P]: fewer boxes than P may be left


def make_anchors(level: Tensor, stride: float) -> Tensor:
    """The anchors [h * w * 3, 4] of a level [B, C, h, w], in pixels."""
    height, width = level.shape[-2:]
    y, x = ((torch.arange(side, device=level.device) + 0.5) * stride for side in (height, width))
    side = ANCHOR_SCALE * stride
    parts = []
    for ratio in RATIOS:
        half_w, half_h = side / ratio**0.5 / 2, side * ratio**0.5 / 2
        grid = torch.broadcast_tensors(x[None] - half_w, y[:, None] - half_h, x[None] + half_w, y[:, None] + half_h)
        parts.append(torch.stack(grid, -1))
    return torch.stack(parts, 2).flatten(0, 2)


@torch.no_grad()
def propose(
    logits: Sequence[Tensor],
    offsets: Sequence[Tensor],
    anchors: Sequence[Tensor],
    size: tuple[float | Tensor, float | Tensor],
    candidates: int,
    count: int,
    threshold: float,
    exact: bool,
) -> Proposals:
    """The `count` best boxes of all levels: of each level the best `candidates`, without those that overlap a better one."""
    boxes, scores = [], []
    for level_logits, level_offsets, level_anchors in zip(logits, offsets, anchors, strict=True):
        best, index = level_logits.float().topk(min(candidates, level_logits.shape[1]), 1)
        own = level_offsets.float().gather(1, index[..., None].expand(-1, -1, 4))
        decoded = clip_boxes(decode_boxes(own, level_anchors[index], PROPOSAL_WEIGHTS), *size)
        kept = suppress(decoded, threshold, exact) & ((decoded[..., 2:] - decoded[..., :2]) > 1e-3).all(-1)
        boxes.append(decoded)
        scores.append(torch.where(kept, best, -torch.inf))
    every, ranked = torch.cat(boxes, 1), torch.cat(scores, 1)
    best, index = ranked.topk(min(count, ranked.shape[1]), 1)
    return Proposals(every.gather(1, index[..., None].expand(-1, -1, 4)), best > -torch.inf)


def init_normal(module: nn.Module, std: float) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
