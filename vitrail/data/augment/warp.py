"""Affine warps of uint8 pictures, with Pillow's arithmetic: output pixel centres are looked up in the input, filled outside."""

import torch
from torch import Tensor


def warp(pixels: Tensor, matrix: Tensor, fill: Tensor, filter: str = "bicubic") -> Tensor:
    """pixels uint8 [B, K, height, width]; matrix [B, 2, 3] from output (x, y, 1) to input; fill [K]."""
    height, width = pixels.shape[-2:]
    y, x = torch.meshgrid(torch.arange(height, device=pixels.device), torch.arange(width, device=pixels.device), indexing="ij")
    x, y = (x + 0.5)[None], (y + 0.5)[None]
    a, b, c, d, e, f = (matrix[:, row, column, None, None] for row in (0, 1) for column in (0, 1, 2))
    source_x, source_y = a * x + b * y + c, d * x + e * y + f  # [B, height, width]
    inside = (source_x >= 0) & (source_x < width) & (source_y >= 0) & (source_y < height)
    if filter == "nearest":
        value = take(pixels, source_x.floor().long(), source_y.floor().long()).float()
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
                line += weight_x[:, None] * take(pixels, left.long() + first + column, top.long() + first + row)
            value += weight_y[:, None] * line
        # Pillow rounds a bicubic value and cuts a bilinear one.
        value = (value + 0.5).floor() if filter == "bicubic" else value.floor()
    value = value.clamp(0, 255).to(torch.uint8)
    return torch.where(inside[:, None], value, fill.to(torch.uint8)[:, None, None])


def take(pixels: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Values at whole positions [B, height, width], the edge going on beyond the ends."""
    height, width = pixels.shape[-2:]
    index = y.clamp(0, height - 1) * width + x.clamp(0, width - 1)
    index = index.flatten(1)[:, None].expand(-1, pixels.shape[1], -1)
    return pixels.flatten(2).gather(2, index).reshape(pixels.shape)


def cubic_weights(d: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pillow's cubic for warps, sharper than the one for resizing."""
    return -d + 2 * d**2 - d**3, 1 - 2 * d**2 + d**3, d + d**2 - d**3, -(d**2) + d**3


def linear_weights(d: Tensor) -> tuple[Tensor, Tensor]:
    return 1 - d, d


def rotation(degrees: Tensor, height: int, width: int) -> Tensor:
    """Counter-clockwise about the middle, as an output-to-input matrix [B, 2, 3]."""
    angle = -torch.deg2rad(degrees)
    cos, sin = torch.cos(angle), torch.sin(angle)
    centre_x, centre_y = width / 2.0, height / 2.0
    c = -cos * centre_x - sin * centre_y + centre_x
    f = sin * centre_x - cos * centre_y + centre_y
    return torch.stack([torch.stack([cos, sin, c], -1), torch.stack([-sin, cos, f], -1)], 1)


def shear_and_shift(shear_x: Tensor, shear_y: Tensor, shift_x: Tensor, shift_y: Tensor) -> Tensor:
    """x' = x + shear_x y + shift_x, y' = shear_y x + y + shift_y (output to input) [B, 2, 3]."""
    one = torch.ones_like(shear_x)
    return torch.stack([torch.stack([one, shear_x, shift_x], -1), torch.stack([shear_y, one, shift_y], -1)], 1)
