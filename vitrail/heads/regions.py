"""Features of boxes: RoIAlign (arXiv 1703.06870) over the levels of a pyramid, for all images of a batch at once."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.heads.boxes import box_area, library

SAMPLES = 2  # points per cell and axis
CANONICAL = 224.0  # a box of this side is pooled from the level of stride 16
OUTSIDE = -1e6  # pixels; far from any map


def choose_levels(boxes: Tensor, strides: Sequence[float]) -> Tensor:
    """The level of the pyramid that each box [..., 4] is pooled from, int64: larger boxes from coarser levels."""
    side = box_area(boxes).clamp(min=1e-6).sqrt()
    level = torch.floor(torch.log2(side / (CANONICAL * strides[0] / 16)) + 1e-6)
    return level.clamp(0, len(strides) - 1).long()


def pool_regions(maps: Sequence[Tensor], strides: Sequence[float], boxes: Tensor, size: int) -> Tensor:
    """Features [B, R, C, size, size] of boxes [B, R, 4] in pixels, each from one of the maps [B, C, h, w].

    A cell is the mean of bilinearly interpolated features at SAMPLES x SAMPLES points; a point more than one cell outside of its
    map is 0. The same as torchvision's `roi_align` with aligned=True, which is used on a GPU where it is installed, but not in
    exported programs, which run without it.
    """
    levels = choose_levels(boxes, strides)
    operators = library()
    if operators is not None and boxes.is_cuda and not torch.compiler.is_exporting():
        batch = torch.arange(len(boxes), device=boxes.device)[:, None, None].expand(-1, boxes.shape[1], 1)
        pooled = []
        for level, (each, stride) in enumerate(zip(maps, strides, strict=True)):
            # Boxes of other levels are moved out of the map, where nothing is read or added to.
            own = torch.where((levels == level)[..., None], boxes.float(), OUTSIDE)
            # In float32 also under autocast: coordinates have more digits than bfloat16.
            regions = torch.cat([batch.float(), own], -1).flatten(0, 1)
            pooled.append(operators.roi_align(each.float(), regions, size, 1 / stride, SAMPLES, aligned=True))
        chosen = pooled[0]
        for level, other in enumerate(pooled[1:], 1):
            chosen = torch.where((levels == level).flatten()[:, None, None, None], other, chosen)
        out: Tensor = chosen.unflatten(0, boxes.shape[:2])
        return out
    return roi_align(maps, strides, boxes, levels, size)


def roi_align(maps: Sequence[Tensor], strides: Sequence[float], boxes: Tensor, levels: Tensor, size: int) -> Tensor:
    """`pool_regions` in plain torch: the levels below each other are one map, from which all points are sampled at once."""
    dtype = torch.promote_types(maps[0].dtype, torch.float32)
    widest, heights = max(each.shape[-1] for each in maps), [each.shape[-2] for each in maps]
    whole = torch.cat([F.pad(each.to(dtype), (0, widest - each.shape[-1])) for each in maps], 2)
    starts = [sum(heights[:level]) for level in range(len(maps))]
    scale = by_level(levels, [1 / stride for stride in strides], dtype)
    points = []
    for axis, sides in ((0, [each.shape[-1] for each in maps]), (1, heights)):
        low, high = boxes[..., axis].to(dtype) * scale - 0.5, boxes[..., axis + 2].to(dtype) * scale - 0.5
        steps = (torch.arange(size * SAMPLES, device=boxes.device, dtype=dtype) + 0.5) / (size * SAMPLES)
        position = low[..., None] + (high - low)[..., None] * steps  # [B, R, size * SAMPLES]
        side = by_level(levels, sides, dtype)[..., None]
        points.append((position.clamp(min=0).minimum(side - 1), (position >= -1) & (position <= side)))
    (x, inside_x), (y, inside_y) = points
    y = y + by_level(levels, starts, dtype)[..., None]
    total = whole.shape[-2]
    grid = torch.stack(
        torch.broadcast_tensors(x[:, :, None] * (2 / max(widest - 1, 1)) - 1, y[..., None] * (2 / max(total - 1, 1)) - 1),
        -1,
    )
    sampled = F.grid_sample(whole, grid.flatten(1, 2), mode="bilinear", padding_mode="border", align_corners=True)
    sampled = sampled.unflatten(2, (boxes.shape[1], -1)).transpose(1, 2)  # [B, R, C, points, points]
    sampled = sampled * (inside_y[..., None] & inside_x[:, :, None])[:, :, None]
    out: Tensor = F.avg_pool2d(sampled.flatten(0, 1), SAMPLES).unflatten(0, boxes.shape[:2])
    return out


def by_level(levels: Tensor, values: Sequence[float], dtype: torch.dtype) -> Tensor:
    """values[level] of each box, without copying them from the host."""
    chosen = torch.full(levels.shape, float(values[0]), dtype=dtype, device=levels.device)
    for level, value in enumerate(values[1:], 1):
        chosen = torch.where(levels == level, float(value), chosen)
    return chosen
