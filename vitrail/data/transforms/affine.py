"""Affine warps of uint8 images: output pixels are mapped to the input and filled outside of it.

Coordinates and values are computed in float64 in the order of Pillow's operations and truncated to integers, so that the
result is Pillow's bit by bit.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

CHUNK = 1 << 16  # pixels that are warped at a time: intermediate values stay in the cache of the CPU


def warp(pixels: Tensor, matrix: Tensor, fill: Tensor, filter: str = "bicubic", sizes: Tensor | None = None) -> Tensor:
    """Warp uint8 [B, 3, height, width] by `matrix` [B, 2, 3], which maps output (x, y, 1) to input; `fill` [3] is used outside.

    `sizes` [B, 2] are the heights and widths of the images if they are padded.
    """
    sizes = full_sizes(pixels) if sizes is None else sizes
    count = max(1, CHUNK // (pixels.shape[-2] * pixels.shape[-1]))
    chunks = zip(pixels.split(count), matrix.double().split(count), sizes.split(count), strict=True)
    return torch.cat([_warp_chunk(*chunk, fill, filter) for chunk in chunks])


def _warp_chunk(pixels: Tensor, matrix: Tensor, sizes: Tensor, fill: Tensor, filter: str) -> Tensor:
    height, width = sizes[:, 0, None, None], sizes[:, 1, None, None]
    y, x = (torch.arange(side, device=pixels.device, dtype=torch.float64) + 0.5 for side in pixels.shape[-2:])
    y = y[:, None]
    a, b, c, d, e, f = matrix.flatten(1)[:, :, None, None].unbind(1)
    source_x, source_y = a * x + b * y + c, d * x + e * y + f  # [B, height, width]
    inside = (source_x >= 0) & (source_x < width) & (source_y >= 0) & (source_y < height)
    source_x, source_y = source_x - 0.5, source_y - 0.5
    left, top = source_x.floor(), source_y.floor()
    part_x, part_y = (part[..., None].expand(-1, -1, -1, 4).contiguous() for part in (source_x - left, source_y - top))
    interpolate: Callable[..., Tensor] = cubic if filter == "bicubic" else linear
    taps = range(-1, 3) if filter == "bicubic" else range(2)
    columns = [clip(left.long() + tap, width) for tap in taps]
    rows = [clip(top.long() + tap, height) * pixels.shape[-1] for tap in taps]
    packed = pack_channels(pixels)
    lines = (interpolate(*(gather_pixels(packed, row + column) for column in columns), part_x) for row in rows)
    value = interpolate(*lines, part_y).clamp_(0, 255).to(torch.uint8)  # truncated, as in Pillow
    return torch.where(inside[:, None], value[..., :3].permute(0, 3, 1, 2), fill.to(torch.uint8)[:, None, None])


def full_sizes(pixels: Tensor) -> Tensor:
    """Sizes [B, 2] of images without padding."""
    return torch.stack([torch.full((len(pixels),), side, device=pixels.device) for side in pixels.shape[-2:]], 1)


def clip(position: Tensor, size: Tensor) -> Tensor:
    """Replace positions outside of the image by the nearest one inside."""
    return torch.minimum(position.clamp(min=0), size - 1)


def pack_channels(pixels: Tensor) -> Tensor:
    """uint8 [B, 3, height, width] to int32 [B, height * width], one number per pixel."""
    four = pixels.new_zeros(*pixels.shape[:1], *pixels.shape[2:], 4)
    four[..., :3] = pixels.permute(0, 2, 3, 1)
    return four.view(torch.int32).flatten(1)


def gather_pixels(packed: Tensor, index: Tensor) -> Tensor:
    """Values of the packed pixels [B, height * width] at `index` [B, h, w], int16 [B, h, w, 4]; the last channel is unused."""
    values = packed.gather(1, index.flatten(1)).view(torch.uint8)
    return values.to(torch.int16).reshape(*index.shape, 4)


def cubic(a: Tensor, b: Tensor, c: Tensor, d: Tensor, t: Tensor) -> Tensor:
    """Cubic interpolation at `t` (0 ... 1) between b and c, float64. Pillow's cubic is sharper for warps than for resizing."""
    return ((b - a - c + d) * t).add_(2 * (a - b) + c - d).mul_(t).add_(c - a).mul_(t).add_(b)


def linear(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
    """Linear interpolation at `t` (0 ... 1) between a and b, float64."""
    return ((b - a) * t).add_(a)


def rotation(degrees: Tensor, height: Tensor | int, width: Tensor | int) -> Tensor:
    """Counter-clockwise rotation about the image center, as output-to-input matrix, float64 [B, 2, 3]."""
    angle = -(degrees.double() % 360.0 * (math.pi / 180))
    cos, sin = ((value * 1e15).round() / 1e15 for value in (torch.cos(angle), torch.sin(angle)))  # as in Pillow
    center_x, center_y = width / 2.0, height / 2.0
    c = cos * -center_x + sin * -center_y + center_x
    f = -sin * -center_x + cos * -center_y + center_y
    out: Tensor = torch.stack([cos, sin, c, -sin, cos, f], -1).unflatten(-1, (2, 3))
    return out


def mirror_warp(matrix: Tensor, widths: Tensor) -> Tensor:
    """Conjugate a warp [B, 2, 3] by a horizontal flip: the warp of the flipped image, expressed for the unflipped image."""
    (a, b, c), (d, e, f) = (row.unbind(-1) for row in matrix.unbind(1))
    out: Tensor = torch.stack([a, -b, widths - a * widths - c, -d, e, f + d * widths], -1).unflatten(-1, (2, 3))
    return out


def square(matrix: Tensor) -> Tensor:
    """Extend matrices [B, 2, 3] to [B, 3, 3]."""
    last = torch.zeros_like(matrix[:, :1])
    last[:, :, 2] = 1
    return torch.cat([matrix, last], 1)


def compose(first: Tensor, second: Tensor) -> Tensor:
    """Matrix product of [B, 3, 3], always in full float32 precision (no TF32)."""
    return (first[:, :, :, None] * second[:, None]).sum(2)
