"""Boxes (left, top, right, bottom): overlaps, offsets, clipping, and suppression of duplicates (NMS).

Nothing here synchronizes with a GPU, except `nms`, whose result has as many rows as boxes are kept.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

# Of the suppression on a GPU while training, and in exported programs; a round resolves one more link of a chain of boxes.
ROUNDS = 32
MAX_LOG = math.log(1000 / 16)  # of the growth of a box
EPS = 1e-9


@cache
def library() -> Any:
    """torchvision's operators, or None where it is missing or does not fit torch."""
    try:
        from torchvision import ops
    except (ImportError, RuntimeError, OSError):
        return None
    return ops


def box_area(boxes: Tensor) -> Tensor:
    """Areas [..., N] of boxes [..., N, 4]."""
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def intersections(first: Tensor, second: Tensor) -> Tensor:
    """Areas [..., N, M] that boxes [..., N, 4] and [..., M, 4] have in common."""
    sides = []
    for axis in (0, 1):  # one after the other: there may be millions of pairs
        low = torch.maximum(first[..., :, None, axis], second[..., None, :, axis])
        high = torch.minimum(first[..., :, None, axis + 2], second[..., None, :, axis + 2])
        sides.append((high - low).clamp(min=0))
    return sides[0] * sides[1]


def box_iou(first: Tensor, second: Tensor) -> Tensor:
    """Intersection over union [..., N, M] of boxes [..., N, 4] and [..., M, 4]; 0 of boxes without area."""
    common = intersections(first, second)
    union = box_area(first)[..., :, None] + box_area(second)[..., None, :] - common
    return common / union.clamp(min=EPS)


def covered_share(first: Tensor, second: Tensor) -> Tensor:
    """The share [..., N, M] of each box [..., N, 4] that a box [..., M, 4] covers."""
    return intersections(first, second) / box_area(first).clamp(min=EPS)[..., :, None]


def clip_boxes(boxes: Tensor, height: float | Tensor, width: float | Tensor) -> Tensor:
    """Boxes [..., 4] cut at the borders of an image, whose sides are numbers or tensors []."""
    x, y = (boxes[..., axis::2].clamp(min=0).clamp(max=side) for axis, side in ((0, width), (1, height)))
    return torch.stack([x[..., 0], y[..., 0], x[..., 1], y[..., 1]], -1)


def encode_boxes(boxes: Tensor, anchors: Tensor, weights: Sequence[float]) -> Tensor:
    """Offsets [..., 4] of centers and logarithms of sides of boxes relative to anchors, times `weights`."""
    sides, centers = boxes[..., 2:] - boxes[..., :2], (boxes[..., 2:] + boxes[..., :2]) / 2
    own_sides, own_centers = anchors[..., 2:] - anchors[..., :2], (anchors[..., 2:] + anchors[..., :2]) / 2
    own_sides, sides = own_sides.clamp(min=EPS), sides.clamp(min=EPS)
    shift, growth = (centers - own_centers) / own_sides, torch.log(sides / own_sides)
    parts = (shift[..., 0], shift[..., 1], growth[..., 0], growth[..., 1])
    return torch.stack([part * weight for part, weight in zip(parts, weights, strict=True)], -1)


def decode_boxes(offsets: Tensor, anchors: Tensor, weights: Sequence[float]) -> Tensor:
    """The inverse of `encode_boxes`; sides grow at most 62 times."""
    x, y, w, h = (part / weight for part, weight in zip(offsets.unbind(-1), weights, strict=True))
    left, top, right, bottom = anchors.unbind(-1)
    width, height = right - left, bottom - top
    center_x, center_y = (left + right) / 2 + x * width, (top + bottom) / 2 + y * height
    half_w, half_h = width * w.clamp(max=MAX_LOG).exp() / 2, height * h.clamp(max=MAX_LOG).exp() / 2
    return torch.stack([center_x - half_w, center_y - half_h, center_x + half_w, center_y + half_h], -1)


def suppress(boxes: Tensor, threshold: float, exact: bool = True, groups: Tensor | None = None) -> Tensor:
    """Which of boxes [..., N, 4], the highest score first, are kept: those whose IoU with each kept one before is not higher.

    Boxes of different `groups` [..., N] do not suppress each other.

    A box is kept if no kept box before it overlaps it. Starting with all, each round decides boxes one link further down a chain
    of overlapping boxes, for all images at once; it has converged when nothing changes. Asking whether it has waits for a GPU:
    without `exact`, as in training, a GPU does a fixed number of rounds, more than chains of proposals have links, and so does an
    exported program.
    """
    overlaps = box_iou(boxes, boxes) > threshold
    if groups is not None:
        overlaps = overlaps & (groups[..., :, None] == groups[..., None, :])
    counted = overlaps.to(torch.float16 if boxes.is_cuda else boxes.dtype).triu(1)
    kept = torch.ones_like(counted[..., :1, :])
    ask = (exact or not boxes.is_cuda) and not torch.compiler.is_exporting()
    for _ in range(boxes.shape[-2] if ask else ROUNDS):
        before, kept = kept, (kept @ counted == 0).to(counted.dtype)
        if ask and torch.equal(before, kept):
            break
    return kept[..., 0, :] > 0


def nms(boxes: Tensor, scores: Tensor, threshold: float, groups: Tensor | None = None) -> Tensor:
    """Indices of the boxes [N, 4] to keep, the highest score first; boxes of different `groups` [N] do not suppress each other.

    torchvision's operator on a GPU, where it is installed; otherwise the same in plain torch.
    """
    if not len(boxes):
        return torch.zeros(0, dtype=torch.int64, device=boxes.device)
    operators = library()
    if operators is not None and boxes.is_cuda:
        if groups is not None:  # far from each other
            boxes = boxes + (groups.to(boxes.dtype) * (boxes.abs().max() * 2 + 1))[:, None]
        kept: Tensor = operators.nms(boxes, scores, threshold)
        return kept
    order = scores.argsort(descending=True, stable=True)
    return order[suppress(boxes[order], threshold, groups=None if groups is None else groups[order])]
