"""Crops and flips. A `View` records the geometry, so that label maps and masks can be transformed in exactly the same way."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.data.rng import randint, random_bits, uniform


class Axis(NamedTuple):  # made without _replace, which Dynamo of torch 2.11 does not compile
    """One axis of a view, per image [B].

    `length` source pixels from `start` on are resized to `resized` pixels; `out` of those are taken from `offset` on (reflected
    beyond the ends) and flipped if `flip`.
    """

    start: Tensor
    length: Tensor
    resized: Tensor
    offset: Tensor
    flip: Tensor
    out: int
    shrink: float = 1.0  # the image may be reduced so many times more than if the whole axis became the output


class View(NamedTuple):
    """The crop of each image."""

    rows: Axis
    columns: Axis

    def matrix(self) -> Tensor:
        """Matrices [B, 3, 3] from output coordinates (x, y, 1) to coordinates in the source image, in pixels."""
        values = []
        for axis in (self.columns, self.rows):
            scale, flip = axis.length / axis.resized, axis.flip.float()
            values += [scale * (1 - 2 * flip), axis.start + (axis.offset + axis.out * flip) * scale]
        zero, one = torch.zeros_like(values[0]), torch.ones_like(values[0])
        entries = [values[0], zero, values[1], zero, values[2], values[3], zero, zero, one]
        out: Tensor = torch.stack(entries, 1).unflatten(1, (3, 3))
        return out

    def after_flip(self, widths: Tensor, flip: Tensor) -> "View":
        """The view of unflipped images of `widths` [B] that equals this view of the images flipped where `flip` [B]."""
        axis = self.columns
        start = torch.where(flip, widths - axis.start - axis.length, axis.start)
        offset = torch.where(flip, axis.resized - axis.out - axis.offset, axis.offset)
        return View(self.rows, Axis(start, axis.length, axis.resized, offset, axis.flip ^ flip, axis.out, axis.shrink))


def _axis(start: Tensor, length: Tensor, out: int, flip: Tensor) -> Axis:
    """The axis of a box that is resized to the output without cropping or reflection."""
    return Axis(start, length, torch.full_like(start, out), torch.zeros_like(start), flip, out)


def random_resized_crop(
    sizes: Tensor,
    key: Tensor,
    out: tuple[int, int],
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> View:
    """A box of random area (fraction of the image) and log-uniform aspect ratio; after ten failed tries a center box."""
    height, width = sizes[:, :1].float(), sizes[:, 1:].float()
    area = height * width * (scale[0] + (scale[1] - scale[0]) * uniform(key, "crop.area", 10))
    aspect = torch.exp(math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * uniform(key, "crop.aspect", 10))
    tries_w, tries_h = torch.sqrt(area * aspect).round(), torch.sqrt(area / aspect).round()
    valid = (tries_w > 0) & (tries_w <= width) & (tries_h > 0) & (tries_h <= height)
    first = valid.to(torch.uint8).argmax(1, keepdim=True)
    box_w, box_h = tries_w.gather(1, first)[:, 0].long(), tries_h.gather(1, first)[:, 0].long()
    offset = uniform(key, "crop.place", 2)
    rows, columns = sizes[:, 0], sizes[:, 1]
    top = (offset[:, 0] * (rows - box_h + 1)).long()
    left = (offset[:, 1] * (columns - box_w + 1)).long()
    shape = columns / rows
    center_w = torch.where(shape > ratio[1], (rows * ratio[1]).round().long(), columns)
    center_h = torch.where(shape < ratio[0], (columns / ratio[0]).round().long(), rows)
    success = valid.any(1)
    box_h, box_w = torch.where(success, box_h, center_h), torch.where(success, box_w, center_w)
    top = torch.where(success, top, (rows - center_h) // 2)
    left = torch.where(success, left, (columns - center_w) // 2)
    no_flip = torch.zeros_like(success)
    return View(_axis(top, box_h, out[0], no_flip), _axis(left, box_w, out[1], no_flip))


def distorted_box(
    sizes: Tensor, key: Tensor, out: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float], tries: int = 100
) -> View:
    """A random box as drawn by TensorFlow's `sample_distorted_bounding_box`; the whole image if all tries fail.

    The aspect ratio is uniform in `ratio`; then the height is a uniform integer among those whose area is in `scale`. Small
    boxes are more frequent than in `random_resized_crop`: with (0.05, 1), the mean area is 34 % of a 500 x 375 image, not 42 %.
    """
    height, width = sizes[:, :1], sizes[:, 1:]
    aspect = uniform(key, "crop.aspect", tries) * (ratio[1] - ratio[0]) + ratio[0]
    min_area, max_area = (bound * width.float() * height.float() for bound in scale)
    low, high = (torch.sqrt(area / aspect).round().long() for area in (min_area, max_area))

    def box_width(box_height: Tensor) -> Tensor:
        return (box_height * aspect).round().long()

    # The largest height whose width fits into the image, corrected by one if the division was rounded up.
    fitting = ((width.double() + 0.5 - 1e-7) / aspect.double()).long()
    fitting = fitting - (box_width(fitting) > width).long()
    high = torch.minimum(torch.where(box_width(high) > width, fitting, high), height)
    low = torch.minimum(low, high)
    box_h = low + ((random_bits(key, "crop.height", tries) * (high - low + 1)) >> 32)
    # Rounding may have made the box slightly too small or too large.
    box_h = box_h + (box_width(box_h) * box_h < min_area).long()
    box_h = box_h - (box_width(box_h) * box_h > max_area).long()
    box_w = box_width(box_h)
    area = box_w * box_h
    valid = (area >= min_area) & (area <= max_area) & (box_w <= width) & (box_h <= height) & (area > 0)
    first, success = valid.to(torch.uint8).argmax(1, keepdim=True), valid.any(1)
    box_h, box_w = (
        torch.where(success, side.gather(1, first)[:, 0], whole[:, 0]) for side, whole in ((box_h, height), (box_w, width))
    )
    # TensorFlow never draws the last possible position.
    top, left = (
        randint(key, f"crop.{name}", (whole[:, 0] - side).clamp(min=1))[:, 0]
        for name, whole, side in (("top", height, box_h), ("left", width, box_w))
    )
    no_flip = torch.zeros_like(success)
    return View(_axis(top, box_h, out[0], no_flip), _axis(left, box_w, out[1], no_flip))


def simple_random_crop(sizes: Tensor, key: Tensor, out: tuple[int, int], padding: int = 4) -> View:
    """Resize so that the image just covers the output, then crop at a random position, with `padding` reflected pixels."""
    resized = cover_size(sizes, out)
    offsets = [
        randint(key, f"crop.{name}", resized[:, axis] + 2 * padding - out[axis] + 1)[:, 0] - padding
        for axis, name in enumerate(("top", "left"))
    ]
    return _crop_resized(sizes, resized, offsets, out)


def scaled_crop(sizes: Tensor, key: Tensor, out: tuple[int, int], factors: tuple[float, float]) -> View:
    """Resize the shorter side to that of the output times a uniform factor, then crop at a random position: for dense tasks.

    A side shorter than the output is placed at random, and the image is reflected around it. Masks are ignored there, and in
    detection `blank_outside` replaces the reflection.
    """
    factor = factors[0] + (factors[1] - factors[0]) * uniform(key, "crop.factor").double()
    resized = (sizes * (factor * min(out) / sizes.amin(1, keepdim=True)) + 0.5).long().clamp(min=1)
    offsets = []
    for axis, name in enumerate(("top", "left")):
        free = resized[:, axis] - out[axis]
        offsets.append(randint(key, f"crop.{name}", free.abs() + 1)[:, 0] * free.sign())
    view = _crop_resized(sizes, resized, offsets, out)
    rounding = 1.0 + 1.0 / max(min(out) * factors[0], 1.0)
    rows, columns = (Axis(*axis[:6], max(rounding * axis.out / (min(out) * factors[0]), 1.0)) for axis in view)
    return View(rows, columns)


def center_crop(sizes: Tensor, out: tuple[int, int], crop_ratio: float = 0.875) -> View:
    """Resize so that the image just covers int(out / crop_ratio), then crop the center."""
    target = (int(out[0] / crop_ratio), int(out[1] / crop_ratio))
    resized = cover_size(sizes, target)
    offsets = [torch.round((resized[:, axis] - out[axis]) / 2.0).long() for axis in (0, 1)]
    return _crop_resized(sizes, resized, offsets, out)


def squash(sizes: Tensor, out: tuple[int, int]) -> View:
    """Resize the whole image to the output size without keeping its aspect ratio."""
    zeros, no_flip = torch.zeros_like(sizes[:, 0]), torch.zeros_like(sizes[:, 0], dtype=torch.bool)
    return View(_axis(zeros, sizes[:, 0], out[0], no_flip), _axis(zeros, sizes[:, 1], out[1], no_flip))


def cover_size(sizes: Tensor, out: tuple[int, int]) -> Tensor:
    """Sizes [B, 2] after resizing so that the image just covers `out`; the aspect ratio is kept, the other side truncated."""
    rows, columns = sizes[:, 0], sizes[:, 1]
    by_rows = rows * out[1] <= columns * out[0]  # the height is the shorter side relative to the output
    new_rows = torch.where(by_rows, out[0], out[1] * rows // columns.clamp(min=1))
    new_columns = torch.where(by_rows, out[0] * columns // rows.clamp(min=1), out[1])
    return torch.stack([new_rows, new_columns], 1)


def _crop_resized(sizes: Tensor, resized: Tensor, offsets: list[Tensor], out: tuple[int, int]) -> View:
    zeros, no_flip = torch.zeros_like(sizes[:, 0]), torch.zeros_like(sizes[:, 0], dtype=torch.bool)
    rows, columns = (Axis(zeros, sizes[:, i], resized[:, i], offsets[i], no_flip, out[i]) for i in (0, 1))
    return View(rows, columns)


def flip_view(view: View, flip: Tensor) -> View:
    """Flip the view horizontally where `flip` [B]."""
    axis = view.columns
    return View(view.rows, Axis(*axis[:4], axis.flip ^ flip, *axis[5:]))
