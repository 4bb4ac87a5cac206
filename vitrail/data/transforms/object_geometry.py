"""Boxes and instance masks moved as augmented images are: crops and flips."""

import torch
from torch import Tensor

from vitrail.data.instance_masks import PER_PLANE
from vitrail.data.objects import UNKNOWN_CLASS, ObjectBatch, pad_objects, plane_count
from vitrail.data.transforms.crops import View
from vitrail.data.transforms.mask_geometry import crop_planes, inside_pixels

MIN_VISIBLE = 1.0  # pixels of the sides of a box; less is not an object


def move_objects(objects: ObjectBatch, view: View, count: int) -> ObjectBatch:
    """The first `count` objects of each image in its crop: fixed sizes [B, count], planes [B, ceil(count / 8), height, width].

    Boxes are cut at the borders of the crop; objects outside of it have no class. Masks are moved by nearest-neighbor
    interpolation, as `mask_geometry.py` moves those of classes.
    """
    planes = plane_count(count) if objects.planes.shape[1] else 0
    objects = pad_objects(objects, count, planes, 0, 0)
    boxes = move_boxes(objects.boxes[:, :count], view)
    visible = ((boxes[..., 2:] - boxes[..., :2]) >= MIN_VISIBLE).all(-1)
    classes = torch.where(visible, objects.classes[:, :count], UNKNOWN_CLASS)
    bits = crop_planes(objects.planes[:, :planes], view, outside=0)
    return ObjectBatch(boxes, classes, objects.flags[:, :count], objects.areas[:, :count], bits)


def blank_outside(images: Tensor, view: View) -> Tensor:
    """Normalized images [B, 3, height, width] with the mean color around a resized image that is smaller than the crop.

    `augment` reflects the image there, with objects that have no boxes.
    """
    rows, columns = (inside_pixels(axis) for axis in view)
    return images.masked_fill(~(rows[:, None, :, None] & columns[:, None, None]), 0.0)


def move_boxes(boxes: Tensor, view: View) -> Tensor:
    """Boxes [B, M, 4] of the source images in pixels of their crops, cut at the borders."""
    sides = []
    for axis, place in ((view.columns, 0), (view.rows, 1)):
        scale = (axis.resized / axis.length)[:, None]
        low, high = ((boxes[..., side] - axis.start[:, None]) * scale - axis.offset[:, None] for side in (place, place + 2))
        # Around a resized image that is smaller than the output there is no image.
        first, last = (-axis.offset).clamp(min=0)[:, None], (axis.resized - axis.offset).clamp(max=axis.out)[:, None]
        low, high = (torch.minimum(torch.maximum(each, first), last) for each in (low, high))
        flip = axis.flip[:, None]
        sides.append((torch.where(flip, axis.out - high, low), torch.where(flip, axis.out - low, high)))
    (left, right), (top, bottom) = sides
    return torch.stack([left, top, right, bottom], -1).to(boxes.dtype)


def has_mask(planes: Tensor, count: int) -> Tensor:
    """Which of `count` objects have a pixel in the planes [B, P, H, W], bool [B, count]."""
    if not planes.shape[1]:
        return torch.zeros(len(planes), count, dtype=torch.bool, device=planes.device)
    bits = [(planes & (1 << bit)).flatten(2).amax(-1) > 0 for bit in range(PER_PLANE)]
    return torch.stack(bits, 2).flatten(1)[:, :count]


def sample_masks(planes: Tensor, objects: Tensor, boxes: Tensor, side: int, samples: int = 2) -> Tensor:
    """Masks of objects [B, K] of the planes [B, P, H, W] inside of boxes [B, K, 4], as bool [B, K, side, side].

    A cell is inside if at least half of its samples x samples points are, each the nearest pixel.
    """
    height, width = planes.shape[-2:]
    steps = (torch.arange(side * samples, device=planes.device) + 0.5) / (side * samples)
    low, high = boxes[..., :2], boxes[..., 2:]
    x, y = (low[..., axis, None] + (high - low)[..., axis, None] * steps for axis in (0, 1))
    columns, rows = x.floor().long().clamp(0, width - 1), y.floor().long().clamp(0, height - 1)
    start = (objects // PER_PLANE * (height * width))[..., None, None]
    index = start + rows[..., :, None] * width + columns[..., None, :]
    found = planes.flatten(1).gather(1, index.flatten(1)).view_as(index).int()
    inside = (found >> (objects % PER_PLANE)[..., None, None]) & 1
    cells = torch.nn.functional.avg_pool2d(inside.float(), samples)
    return cells >= 0.5
