"""What anchors and boxes are compared with in the losses of a detector: pure functions of boxes and of the keys of images.

All results have fixed sizes, and nothing waits for the device, so that a step can be captured as a CUDA graph. Every image is
treated on its own, so that nothing depends on how a batch is divided.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.data.rng import random_bits
from vitrail.heads.boxes import box_iou, covered_share

IGNORED_SHARE = 0.5  # a box with more of its area in an ignored object is neither an object nor background
BACKGROUND, OBJECT, NEITHER = 0, 1, -1


class Assignment(NamedTuple):
    labels: Tensor  # int64 [B, A]: BACKGROUND, OBJECT or NEITHER
    objects: Tensor  # int64 [B, A]: the object with the highest IoU


class Sample(NamedTuple):
    rows: Tensor  # int64 [B, count]: boxes, those with an object first
    positive: Tensor  # bool [B, count]: it has an object
    valid: Tensor  # bool [B, count]: there are enough boxes


def assign(
    boxes: Tensor, objects: Tensor, used: Tensor, ignored: Tensor, low: float, high: float, best: bool = False
) -> Assignment:
    """Which of boxes [B or 1, A, 4] contain which of the objects [B, M, 4].

    An IoU of at least `high` is an object, below `low` background, between them neither. With `best`, the boxes with the highest
    IoU of an object contain it however low it is. `used` and `ignored` [B, M] are the objects to find and those to avoid.
    """
    overlaps = torch.where(used[:, None], box_iou(boxes, objects), -1.0)
    highest, nearest = overlaps.max(2)
    positive = highest >= high
    if best:
        most = overlaps.amax(1, keepdim=True)
        positive = positive | ((overlaps == most) & (most > 0)).any(2)
    avoided = torch.where(ignored[:, None], covered_share(boxes, objects), 0.0).amax(2) > IGNORED_SHARE
    labels = torch.where((highest >= low) | avoided, NEITHER, BACKGROUND)
    return Assignment(torch.where(positive, OBJECT, labels), nearest)


def sample(labels: Tensor, keys: Tensor, name: str, count: int, positives: int) -> Sample:
    """`count` random boxes of each image, at most `positives` of them with an object, drawn from the keys [B] of the images."""
    boxes = labels.shape[1]
    count, positives = min(count, boxes), min(positives, boxes)
    # 32 random bits, then the index: an order without ties.
    rank = (random_bits(keys, name, boxes) << 24) | torch.arange(boxes, device=labels.device)
    chosen, index = torch.where(labels == OBJECT, rank, -1).topk(positives, 1)
    first = torch.zeros_like(labels).scatter(1, index, (chosen >= 0).to(labels.dtype)) > 0
    order = torch.where(first, rank + (1 << 60), torch.where(labels == BACKGROUND, rank, -1))
    chosen, index = order.topk(count, 1)
    return Sample(index, chosen >= 1 << 60, chosen >= 0)


def gather_boxes(boxes: Tensor, index: Tensor) -> Tensor:
    """Boxes [B, A, 4] at index [B, n]."""
    return boxes.expand(len(index), -1, -1).gather(1, index[..., None].expand(-1, -1, 4))
