"""Preprocessing as part of an exported program: uint8 images of any size to the normalized input of a network.

The arithmetic is that of `Preprocessing.apply`: Pillow's antialiased weights as integer multiples of 2**-22, sums without
rounding, 8 bits after each axis. The number of source pixels per output pixel depends on the size of the image, which a program
does not know in advance. So the output pixels are computed in blocks: the source pixels of a block are one window, whose length
is a linear function of the size, and a matrix product in float64, which is exact for these integers, sums them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vitrail.data.transforms.config import NO_ANTIALIAS
from vitrail.data.transforms.crops import Axis, View
from vitrail.data.transforms.reference import normalize
from vitrail.data.transforms.resize import SUPPORT, UNIT, axis_centers, kernel, resize_without_antialias, to_fixed_point
from vitrail.models.preprocessing import Preprocessing

BLOCK = 16  # output pixels that share a window


class ImagePreprocessing(nn.Module):
    """uint8 images [B, height, width, 3] of one size, any, to float32 [B, 3, *image_size]."""

    def __init__(self, preprocessing: Preprocessing):
        super().__init__()
        preprocessing.check()
        self.preprocessing = preprocessing

    def forward(self, images: Tensor) -> Tensor:
        p = self.preprocessing
        sizes = read_sizes(images)
        # The image is resized to at least this size, before it is cropped.
        least = [side if p.resize == "square" else int(side / p.crop_ratio) for side in p.image_size]
        reach = find_reach(p.interpolation)
        # At least what a block covers, whatever the other side.
        windows = [(BLOCK + reach) * side // most + reach + 3 for side, most in zip(images.shape[1:3], least, strict=True)]
        return normalize(resize(images, p.view(sizes), windows, p.interpolation), p.mean, p.std, None, sizes)


class FramedImages(nn.Module):
    """uint8 images [B, height, width, 3] of one size, any, to float32 [B, 3, *image_size] and the resized size, int64 [2].

    The whole image is resized to fit into the upper left corner of the output; the rest has the mean color.
    """

    def __init__(self, preprocessing: Preprocessing):
        super().__init__()
        preprocessing.check()
        self.preprocessing = preprocessing

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        p = self.preprocessing
        sizes, reach = read_sizes(images), find_reach(p.interpolation)
        size = fit_size(sizes[0], p.image_size)
        # Both sides are reduced by the factor of one of them; rounding makes it larger for sides of few pixels.
        reduced = torch.sym_max(images.shape[1], images.shape[2])
        window = (BLOCK + 1 + 2 * reach) * reduced // min(p.image_size) + reach + 3
        resized = resize(images, fit_view(sizes, size, p.image_size), [window, window], p.interpolation)
        normalized = normalize(resized, p.mean, p.std, None, sizes)
        rows, columns = (
            torch.arange(side, device=images.device) < part for side, part in zip(p.image_size, size.unbind(), strict=True)
        )
        return torch.where(rows[:, None] & columns, normalized, 0.0), size


def fit_size(size: Tensor, frame: tuple[int, int]) -> Tensor:
    """The size, int64 [2], of an image of `size` [2] that is resized to fit into a frame."""
    factor = (torch.tensor(frame, dtype=torch.float64, device=size.device) / size.double()).min()
    return (size.double() * factor).round().clamp(min=1).long()


def fit_view(sizes: Tensor, size: Tensor, frame: tuple[int, int]) -> View:
    """The view of images of `sizes` [1, 2] resized to `size` [2] in the upper left corner of a frame."""
    zero = torch.zeros_like(sizes[:, 0])
    rows, columns = (Axis(zero, sizes[:, axis], size[axis : axis + 1], zero, zero > 0, frame[axis]) for axis in (0, 1))
    return View(rows, columns)


def read_sizes(images: Tensor) -> Tensor:
    """Height and width, int64 [1, 2], of images [B, height, width, 3]."""
    return torch.stack([torch.full((), side, dtype=torch.int64, device=images.device) for side in images.shape[1:3]])[None]


def find_reach(filter: str) -> int:
    """The source pixels that an output pixel depends on where nothing is reduced."""
    return 0 if filter == NO_ANTIALIAS else int(2 * SUPPORT[filter])


def resize(images: Tensor, view: View, windows: Sequence[int], filter: str) -> Tensor:
    """uint8 images [B, height, width, 3] to [B, 3, *out]; `windows`: at least the source pixels of a block of each axis."""
    if filter == NO_ANTIALIAS:
        return resize_without_antialias(images.permute(0, 3, 1, 2), view)
    lines = resample(images.permute(2, 0, 1, 3), view.columns, windows[1], filter)  # [width, B, H, 3]
    lines = resample(lines.permute(2, 1, 3, 0), view.rows, windows[0], filter)  # [height, B, 3, width]
    return lines.permute(1, 2, 0, 3)


def resample(lines: Tensor, axis: Axis, window: int, filter: str) -> Tensor:
    """uint8 [n, ...] to [out, ...], rounded and clipped, along an axis [1]; beyond the resized image its last pixel."""
    size = lines.shape[0]
    center, scale = axis_centers(axis)
    if filter == "nearest":
        return lines.index_select(0, torch.minimum(center[0].floor().long(), axis.length - 1))
    stretch = scale[0].clamp(min=1.0)
    blocks, last = -(-axis.out // BLOCK), (axis.resized[0] - axis.offset[0]).clamp(max=axis.out) - 1
    center = center[0, torch.arange(blocks * BLOCK, device=lines.device).minimum(last)].unflatten(0, (blocks, BLOCK))
    first = (center[:, :1] - SUPPORT[filter] * stretch + 0.5).floor().long()
    source = first + torch.arange(window, device=lines.device)  # [blocks, window]
    weights = kernel(filter, (source[:, None] + 0.5 - center[:, :, None]) / stretch)  # [blocks, BLOCK, window]
    weights = weights * ((source >= 0) & (source < size))[:, None]
    weights = to_fixed_point(weights / weights.sum(2, keepdim=True)).double()
    windows = lines.flatten(1).index_select(0, source.clamp(0, size - 1).flatten()).unflatten(0, (blocks, window))
    total = torch.bmm(weights, windows.double()) + UNIT // 2
    pixels = (total / UNIT).floor().clamp(0, 255).to(torch.uint8)
    pixels = pixels.flatten().unflatten(0, (blocks * BLOCK, -1))  # torch 2.11 exports no flatten(0, 1) of a dynamic batch size
    out: Tensor = pixels[: axis.out].unflatten(1, lines.shape[1:])
    return out
