"""Preprocessing as part of an exported program: uint8 images of any size to the normalized input of a network.

The arithmetic is that of `Preprocessing.apply`: Pillow's antialiased weights as integer multiples of 2**-22, sums without
rounding, 8 bits after each axis. The number of source pixels per output pixel depends on the size of the image, which a program
does not know in advance. So the output pixels are computed in blocks: the source pixels of a block are one window, whose length
is a linear function of the size, and a matrix product in float64, which is exact for these integers, sums them.
"""

import torch
from torch import Tensor, nn

from vitrail.data.transforms.config import NO_ANTIALIAS
from vitrail.data.transforms.crops import Axis
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
        height, width = images.shape[1:3]
        sizes = torch.stack([torch.full((), side, dtype=torch.int64, device=images.device) for side in (height, width)])[None]
        rows, columns = view = p.view(sizes)
        if p.interpolation == NO_ANTIALIAS:
            resized = resize_without_antialias(images.permute(0, 3, 1, 2), view)
        else:
            # The image is resized to at least this size, before it is cropped.
            least = [side if p.resize == "square" else int(side / p.crop_ratio) for side in p.image_size]
            lines = resample(images.permute(2, 0, 1, 3), columns, least[1], p.interpolation)  # [width, B, H, 3]
            lines = resample(lines.permute(2, 1, 3, 0), rows, least[0], p.interpolation)  # [height, B, 3, width]
            resized = lines.permute(1, 2, 0, 3)
        return normalize(resized, p.mean, p.std, None, sizes)


def resample(lines: Tensor, axis: Axis, least: int, filter: str) -> Tensor:
    """uint8 [n, ...] to [out, ...], rounded and clipped, along an axis [1] that is resized to at least `least` pixels."""
    size, reach = lines.shape[0], int(2 * SUPPORT[filter])
    center, scale = axis_centers(axis)
    if filter == "nearest":
        return lines.index_select(0, torch.minimum(center[0].floor().long(), axis.length - 1))
    stretch = scale[0].clamp(min=1.0)
    blocks = -(-axis.out // BLOCK)
    center = center[0, (torch.arange(blocks * BLOCK, device=lines.device)).clamp(max=axis.out - 1)].unflatten(0, (blocks, BLOCK))
    first = (center[:, :1] - SUPPORT[filter] * stretch + 0.5).floor().long()
    window = (BLOCK + reach) * size // least + reach + 3  # at least what a block covers, whatever the other side
    source = first + torch.arange(window, device=lines.device)  # [blocks, window]
    weights = kernel(filter, (source[:, None] + 0.5 - center[:, :, None]) / stretch)  # [blocks, BLOCK, window]
    weights = weights * ((source >= 0) & (source < size))[:, None]
    weights = to_fixed_point(weights / weights.sum(2, keepdim=True)).double()
    windows = lines.flatten(1).index_select(0, source.clamp(0, size - 1).flatten()).unflatten(0, (blocks, window))
    total = torch.bmm(weights, windows.double()) + UNIT // 2
    pixels = (total / UNIT).floor().clamp(0, 255).to(torch.uint8)
    out: Tensor = pixels.flatten(0, 1)[: axis.out].unflatten(1, lines.shape[1:])
    return out
