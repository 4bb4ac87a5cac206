"""Resizing and blurring, one axis after the other, in Pillow's integer arithmetic; TensorFlow's bilinear resizing.

Each output pixel is a weighted sum of source pixels along an axis (`Taps`), with Pillow's antialiased weights as integer
multiples of 2**-22. The result equals that of Pillow 12 bit by bit, independent of the batch, the padding and the device.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.data.transforms.crops import Axis, View

SUPPORT = {"nearest": 0.5, "bilinear": 1.0, "bicubic": 2.0, "lanczos": 3.0, "random": 2.0}
FILTERS = tuple(SUPPORT)  # "random": bilinear or bicubic, drawn per image
UNIT = 1 << 22  # scale of the integer weights
BLUR_RADIUS = 10  # five times the largest sigma


def kernel(name: str, x: Tensor) -> Tensor:
    """Pillow's resampling filters."""
    x = x.abs()
    if name == "bilinear":
        return (1 - x).clamp(min=0)
    if name == "bicubic":
        near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
        return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
    return torch.where(x < 3, torch.sinc(x) * torch.sinc(x / 3), 0.0)


class Taps(NamedTuple):
    """The source pixels of every output pixel along an axis: `used` [B] of at most T pixels from `first` on, with weights."""

    first: Tensor  # int64 [B, out]
    weights: Tensor  # int32 [B, T, out], in units of 2**-22; only the first `used` are valid
    used: Tensor  # int64 [B]
    last: Tensor  # int64 [B]: the last source pixel; it is repeated beyond the end, as pixel 0 is before the start


def axis_taps(axis: Axis, size: int, filter: str = "bicubic", cubic: Tensor | None = None) -> Taps:
    """Taps of a view along an axis of `size` source pixels; `cubic` [B] selects bicubic for the filter "random"."""
    device, support = axis.start.device, SUPPORT[filter]
    center, scale = axis_centers(axis)
    length, start = axis.length[:, None], axis.start[:, None]
    if filter == "nearest":
        first = torch.minimum(center.floor().long(), start + length - 1)
        weights = torch.full_like(first[:, None], UNIT, dtype=torch.int32)
        return Taps(first, weights, torch.ones_like(axis.start), axis.start + axis.length - 1)
    stretch = scale.clamp(min=1.0)
    first = (center - support * stretch + 0.5).floor().long()
    taps = torch.arange(max_taps(filter, size, axis), device=device)
    source = first[:, None] + taps[:, None]
    distance = (source + 0.5 - center[:, None]) / stretch[:, None]
    if filter == "random":
        assert cubic is not None
        weights = torch.where(cubic[:, None, None], kernel("bicubic", distance), kernel("bilinear", distance))
    else:
        weights = kernel(filter, distance)
    weights = weights * ((source >= start[:, None]) & (source < (start + length)[:, None]))
    used = (2 * support * stretch[:, 0]).ceil().long()
    return Taps(first, to_fixed_point(weights / weights.sum(1, keepdim=True)), used, axis.start + axis.length - 1)


def axis_centers(axis: Axis) -> tuple[Tensor, Tensor]:
    """Centers of the output pixels of a view in source pixels, float64 [B, out], and source pixels per output pixel [B, 1]."""
    position = torch.arange(axis.out, device=axis.start.device)[None]
    position = torch.where(axis.flip[:, None], axis.out - 1 - position, position) + axis.offset[:, None]
    resized, length, start = (value[:, None] for value in (axis.resized, axis.length, axis.start))
    # Reflect at the ends without repeating the edge pixel.
    period = (2 * (resized - 1)).clamp(min=1)
    position = position.remainder(period)
    position = torch.where(position >= resized, period - position, position)
    scale = length.double() / resized
    return start + (position + 0.5) * scale, scale


def resize_without_antialias(pixels: Tensor, view: View) -> Tensor:
    """Crop and resize uint8 [B, K, H, W] to float32 [B, K, out, out]: bilinear between the four nearest pixels at any scale.

    This is `tf.image.resize`. The values are not rounded to integers.
    """
    images = pixels.permute(0, 2, 3, 1)
    batch = torch.arange(pixels.shape[0], device=pixels.device)[:, None, None]  # len() would fix it in an exported program
    (top, bottom, part_y), (left, right, part_x) = (nearest_two(axis) for axis in view)
    part_y, part_x = part_y[:, :, None, None], part_x[:, None, :, None]
    top, bottom, left, right = top[:, :, None], bottom[:, :, None], left[:, None], right[:, None]
    upper, lower = (
        torch.lerp(images[batch, row, left].float(), images[batch, row, right].float(), part_x) for row in (top, bottom)
    )
    return torch.lerp(upper, lower, part_y).permute(0, 3, 1, 2).contiguous()


def nearest_two(axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """The two source pixels around each output pixel, int64 [B, out], and the weight of the second, float32 [B, out]."""
    center = axis_centers(axis)[0] - 0.5
    first = center.floor()
    low, high = axis.start[:, None], (axis.start + axis.length - 1)[:, None]
    before, after = (torch.minimum(torch.maximum(first.long() + step, low), high) for step in (0, 1))
    return before, after, (center - first).float()


def max_taps(filter: str, size: int, axis: Axis) -> int:
    """The largest number of source pixels per output pixel, reached if the whole axis is reduced to the output."""
    return math.ceil(2 * SUPPORT[filter] * max(axis.shrink * size / axis.out, 1.0))


def blur_taps(sigma: Tensor, lengths: Tensor, size: int) -> Taps:
    """Taps of a Gaussian with `sigma` [B] (0: none; at most 2) along axes of `lengths` [B], padded to `size`."""
    # A pixel is a box of variance 1/12, which is subtracted from the variance of the Gaussian.
    variance = sigma.double().square() - 1 / 12
    blurred = variance > 1e-6
    width = torch.where(blurred, variance, 1.0).sqrt()[:, None]
    radius = (5 * sigma).ceil().long().clamp(max=BLUR_RADIUS) * blurred
    distance = torch.arange(2 * BLUR_RADIUS + 1, device=sigma.device) - radius[:, None]

    def cdf(x: Tensor) -> Tensor:  # of the Gaussian
        return 0.5 * torch.erfc(-x / (width * math.sqrt(2.0)))

    weights = (cdf(distance + 0.5) - cdf(distance - 0.5)) * (distance.abs() <= radius[:, None])
    weights = to_fixed_point(weights / weights.sum(1, keepdim=True))[:, :, None]
    first = torch.arange(size, device=sigma.device) - radius[:, None]
    return Taps(first, weights.expand(-1, -1, size), 2 * radius + 1, lengths - 1)


def to_fixed_point(weights: Tensor) -> Tensor:
    """Round to integer multiples of 2**-22, int32."""
    return (weights * UNIT + 0.5).floor().to(torch.int32)


def resample(pixels: Tensor, taps: Taps, dim: int) -> Tensor:
    """Resample uint8 [B, K, height, width] along an axis, rounded and clipped. Integer sums are exact, so their order is free."""
    lines = pixels.movedim(dim, 1)
    indices = taps.first[:, None] + torch.arange(taps.weights.shape[1], device=pixels.device)[:, None]
    indices = torch.minimum(indices.clamp(min=0), taps.last[:, None, None])
    outputs = []
    for line, index, weights, used in zip(lines.flatten(2).int(), indices, taps.weights, taps.used.tolist(), strict=True):
        total = torch.full((index.shape[1], line.shape[1]), UNIT // 2, dtype=torch.int32, device=pixels.device)
        for tap in range(used):
            total.addcmul_(line.index_select(0, index[tap]), weights[tap, :, None])
        outputs.append((total >> 22).clamp(0, 255).to(torch.uint8))
    out: Tensor = torch.stack(outputs).unflatten(2, lines.shape[2:]).movedim(1, dim)
    return out
