"""Affine warps of uint8 images with Pillow's arithmetic: output pixels are mapped to the input and filled outside of it."""

import torch
from torch import Tensor


def warp(pixels: Tensor, matrix: Tensor, fill: Tensor, filter: str = "bicubic", sizes: Tensor | None = None) -> Tensor:
    """Warp uint8 [B, K, height, width] by `matrix` [B, 2, 3], which maps output (x, y, 1) to input; `fill` [K] is used outside.

    `sizes` [B, 2] are the heights and widths of the images if they are padded.
    """
    sizes = full_sizes(pixels) if sizes is None else sizes
    height, width = sizes[:, 0, None, None], sizes[:, 1, None, None]
    y, x = (torch.arange(side, device=pixels.device) + 0.5 for side in pixels.shape[-2:])
    y = y[:, None]
    a, b, c, d, e, f = (matrix[:, row, column, None, None] for row in (0, 1) for column in (0, 1, 2))
    source_x, source_y = a * x + b * y + c, d * x + e * y + f  # [B, height, width]
    inside = (source_x >= 0) & (source_x < width) & (source_y >= 0) & (source_y < height)
    if filter == "nearest":
        value = gather_pixels(pixels, source_x.floor().long(), source_y.floor().long(), sizes).float()
    else:
        weights = cubic_weights if filter == "bicubic" else linear_weights
        source_x, source_y = source_x - 0.5, source_y - 0.5
        left, top = source_x.floor(), source_y.floor()
        columns, rows = weights(source_x - left), weights(source_y - top)
        first = -1 if filter == "bicubic" else 0
        value = torch.zeros(pixels.shape, device=pixels.device)
        for row, weight_y in enumerate(rows):
            line = torch.zeros(pixels.shape, device=pixels.device)
            for column, weight_x in enumerate(columns):
                line += weight_x[:, None] * gather_pixels(pixels, left.long() + first + column, top.long() + first + row, sizes)
            value += weight_y[:, None] * line
        # Pillow rounds bicubic values and truncates bilinear ones.
        value = (value + 0.5).floor() if filter == "bicubic" else value.floor()
    value = value.clamp(0, 255).to(torch.uint8)
    return torch.where(inside[:, None], value, fill.to(torch.uint8)[:, None, None])


def full_sizes(pixels: Tensor) -> Tensor:
    """Sizes [B, 2] of images without padding."""
    return torch.stack([torch.full((len(pixels),), side, device=pixels.device) for side in pixels.shape[-2:]], 1)


def gather_pixels(pixels: Tensor, x: Tensor, y: Tensor, sizes: Tensor) -> Tensor:
    """Pixel values at integer coordinates [B, height, width]; edge pixels are repeated outside of the image."""
    limit = (sizes - 1)[:, :, None, None]
    index = torch.minimum(y.clamp(min=0), limit[:, 0]) * pixels.shape[-1] + torch.minimum(x.clamp(min=0), limit[:, 1])
    index = index.flatten(1)[:, None].expand(-1, pixels.shape[1], -1)
    return pixels.flatten(2).gather(2, index).reshape(pixels.shape)


def cubic_weights(d: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pillow's cubic filter for warps, which is sharper than its filter for resizing."""
    return -d + 2 * d**2 - d**3, 1 - 2 * d**2 + d**3, d + d**2 - d**3, -(d**2) + d**3


def linear_weights(d: Tensor) -> tuple[Tensor, Tensor]:
    return 1 - d, d


def rotation(degrees: Tensor, height: Tensor | int, width: Tensor | int) -> Tensor:
    """Counter-clockwise rotation about the image center, as output-to-input matrix [B, 2, 3]."""
    angle = -torch.deg2rad(degrees)
    cos, sin = torch.cos(angle), torch.sin(angle)
    center_x, center_y = width / 2.0, height / 2.0
    c = -cos * center_x - sin * center_y + center_x
    f = sin * center_x - cos * center_y + center_y
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
