"""Where the network looks: crops and flips. A `View` keeps what was done, so that label maps and masks can follow exactly."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.data.rng import integers, uniform


class Axis(NamedTuple):
    """One direction of a view, per image [B]: take `length` source pixels from `start`, resize them to `resized`, take `out`
    of those from `offset` on (beyond the ends: mirrored), turn round if `flip`."""

    start: Tensor
    length: Tensor
    resized: Tensor
    offset: Tensor
    flip: Tensor
    out: int


class View(NamedTuple):
    """What the network sees of each image."""

    rows: Axis
    columns: Axis

    def matrix(self) -> Tensor:
        """[B, 3, 3]: a pixel centre (x, y, 1) of the output to its place in the source image, in pixels."""
        values = []
        for axis in (self.columns, self.rows):
            scale, back = axis.length / axis.resized, axis.flip.float()
            values += [scale * (1 - 2 * back), axis.start + (axis.offset + axis.out * back) * scale]
        still, one = torch.zeros_like(values[0]), torch.ones_like(values[0])
        return torch.stack([values[0], still, values[1], still, values[2], values[3], still, still, one], 1).unflatten(1, (3, 3))

    def mirrored(self, widths: Tensor, flip: Tensor) -> "View":
        """The same view of images of these `widths` [B] that were turned round first where `flip` [B], seen as they lie."""
        axis = self.columns
        start = torch.where(flip, widths - axis.start - axis.length, axis.start)
        offset = torch.where(flip, axis.resized - axis.out - axis.offset, axis.offset)
        return View(self.rows, Axis(start, axis.length, axis.resized, offset, axis.flip ^ flip, axis.out))


def _axis(start, length, out: int, flip) -> Axis:
    """A box resized to the output: nothing cut, nothing mirrored."""
    return Axis(start, length, torch.full_like(start, out), torch.zeros_like(start), flip, out)


def random_resized_crop(
    sizes: Tensor,
    key: Tensor,
    out: tuple[int, int],
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    name: str = "crop",
) -> View:
    """A box of random area (share of the image) and aspect (log-uniform), ten tries, else the largest allowed centre box."""
    height, width = sizes[:, :1].float(), sizes[:, 1:].float()
    area = height * width * (scale[0] + (scale[1] - scale[0]) * uniform(key, f"{name}.area", 10))
    aspect = torch.exp(math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * uniform(key, f"{name}.aspect", 10))
    tries_w, tries_h = torch.sqrt(area * aspect).round(), torch.sqrt(area / aspect).round()
    valid = (tries_w > 0) & (tries_w <= width) & (tries_h > 0) & (tries_h <= height)
    first = valid.to(torch.uint8).argmax(1, keepdim=True)
    box_w, box_h = tries_w.gather(1, first)[:, 0].long(), tries_h.gather(1, first)[:, 0].long()
    place = uniform(key, f"{name}.place", 2)
    rows, columns = sizes[:, 0], sizes[:, 1]
    top = (place[:, 0] * (rows - box_h + 1)).long()
    left = (place[:, 1] * (columns - box_w + 1)).long()
    shape = columns / rows
    centre_w = torch.where(shape > ratio[1], (rows * ratio[1]).round().long(), columns)
    centre_h = torch.where(shape < ratio[0], (columns / ratio[0]).round().long(), rows)
    found = valid.any(1)
    box_h, box_w = torch.where(found, box_h, centre_h), torch.where(found, box_w, centre_w)
    top = torch.where(found, top, (rows - centre_h) // 2)
    left = torch.where(found, left, (columns - centre_w) // 2)
    still = torch.zeros_like(found)
    return View(_axis(top, box_h, out[0], still), _axis(left, box_w, out[1], still))


def simple_random_crop(sizes: Tensor, key: Tensor, out: tuple[int, int], padding: int = 4) -> View:
    """The shorter side to the output's, then a crop at a random place of the image mirrored by `padding` pixels."""
    resized = shorter_side(sizes, out)
    offsets = [
        integers(key, f"crop.{name}", resized[:, place] + 2 * padding - out[place] + 1)[:, 0] - padding
        for place, name in enumerate(("top", "left"))
    ]
    return _cut(sizes, resized, offsets, out)


def centre_crop(sizes: Tensor, out: tuple[int, int], crop_ratio: float = 0.875) -> View:
    """The test view: the shorter side to size / crop_ratio (whole part), then the middle."""
    target = (int(out[0] / crop_ratio), int(out[1] / crop_ratio))
    resized = shorter_side(sizes, target)
    offsets = [torch.round((resized[:, place] - out[place]) / 2.0).long() for place in (0, 1)]
    return _cut(sizes, resized, offsets, out)


def squash(sizes: Tensor, out: tuple[int, int]) -> View:
    """The whole image to the output's size, aspect not kept."""
    zeros, still = torch.zeros_like(sizes[:, 0]), torch.zeros_like(sizes[:, 0], dtype=torch.bool)
    return View(_axis(zeros, sizes[:, 0], out[0], still), _axis(zeros, sizes[:, 1], out[1], still))


def shorter_side(sizes: Tensor, out: tuple[int, int]) -> Tensor:
    """[B, 2] sizes after resizing so that the image just covers `out`, aspect kept, the other side cut to whole pixels."""
    rows, columns = sizes[:, 0], sizes[:, 1]
    by_rows = rows * out[1] <= columns * out[0]  # the rows are the shorter ones, in terms of the output
    new_rows = torch.where(by_rows, out[0], out[1] * rows // columns.clamp(min=1))
    new_columns = torch.where(by_rows, out[0] * columns // rows.clamp(min=1), out[1])
    return torch.stack([new_rows, new_columns], 1)


def _cut(sizes: Tensor, resized: Tensor, offsets: list[Tensor], out: tuple[int, int]) -> View:
    zeros, still = torch.zeros_like(sizes[:, 0]), torch.zeros_like(sizes[:, 0], dtype=torch.bool)
    rows, columns = (Axis(zeros, sizes[:, i], resized[:, i], offsets[i], still, out[i]) for i in (0, 1))
    return View(rows, columns)


def turned(view: View, flip: Tensor) -> View:
    """Left and right of what is seen exchanged where `flip` [B]."""
    axis = view.columns
    return View(view.rows, Axis(axis.start, axis.length, axis.resized, axis.offset, axis.flip ^ flip, axis.out))
