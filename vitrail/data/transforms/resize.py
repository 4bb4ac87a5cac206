"""Resizing and blurring, one axis after the other, in Pillow's whole-number arithmetic.

Each output pixel is a weighted sum of a few source pixels along an axis (`Taps`), with Pillow's weights, antialiased when
shrinking, as whole multiples of 2**-22. So an image comes out as Pillow has it in any batch, on any canvas and on any device.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.data.transforms.crops import Axis

SUPPORT = {"nearest": 0.5, "bilinear": 1.0, "bicubic": 2.0, "lanczos": 3.0, "random": 2.0}
FILTERS = tuple(SUPPORT)  # random: bilinear or bicubic, drawn for each image
UNIT = 1 << 22  # of weights
BLUR_RADIUS = 10  # five times the largest standard deviation


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
    """What each output place of an axis is made of: `used` [B] source pixels from `first` on, at most T, by their weights."""

    first: Tensor  # int64 [B, out]
    weights: Tensor  # int32 [B, T, out], in units of 2**-22, of which the first `used` are meant
    used: Tensor  # int64 [B]
    last: Tensor  # int64 [B]: the last source pixel; it stands for those beyond it, as pixel 0 does for those before


def axis_taps(axis: Axis, size: int, filter: str = "bicubic", cubic: Tensor | None = None) -> Taps:
    """The taps of a view along an axis of `size` source pixels; `cubic` [B] holds the draws of the filter "random"."""
    device, support = axis.start.device, SUPPORT[filter]
    place = torch.arange(axis.out, device=device)[None]
    place = torch.where(axis.flip[:, None], axis.out - 1 - place, place) + axis.offset[:, None]
    resized, length, start = (value[:, None] for value in (axis.resized, axis.length, axis.start))
    # Mirror at the ends without repeating the edge pixel.
    period = (2 * (resized - 1)).clamp(min=1)
    place = place.remainder(period)
    place = torch.where(place >= resized, period - place, place)
    scale = length.double() / resized
    centre = start + (place + 0.5) * scale
    if filter == "nearest":
        first = torch.minimum(centre.floor().long(), start + length - 1)
        weights = torch.full_like(first[:, None], UNIT, dtype=torch.int32)
        return Taps(first, weights, torch.ones_like(axis.start), axis.start + axis.length - 1)
    stretch = scale.clamp(min=1.0)
    first = (centre - support * stretch + 0.5).floor().long()
    taps = torch.arange(most_taps(filter, size, axis.out), device=device)
    source = first[:, None] + taps[:, None]
    distance = (source + 0.5 - centre[:, None]) / stretch[:, None]
    if filter == "random":
        assert cubic is not None
        weights = torch.where(cubic[:, None, None], kernel("bicubic", distance), kernel("bilinear", distance))
    else:
        weights = kernel(filter, distance)
    weights = weights * ((source >= start[:, None]) & (source < (start + length)[:, None]))
    used = (2 * support * stretch[:, 0]).ceil().long()
    return Taps(first, fixed(weights / weights.sum(1, keepdim=True)), used, axis.start + axis.length - 1)


def most_taps(filter: str, size: int, out: int) -> int:
    """How many source pixels an output pixel can be made of: no crop shrinks more than the whole canvas would."""
    return math.ceil(2 * SUPPORT[filter] * max(size / out, 1.0))


def blur_taps(sigma: Tensor, lengths: Tensor, size: int) -> Taps:
    """A Gaussian of standard deviation `sigma` [B] (0: nothing; at most 2) along axes of `lengths` [B], on a canvas of `size`."""
    # A pixel is a box of variance 1/12; what is left of sigma squared is the Gaussian that it is folded with.
    variance = sigma.double().square() - 1 / 12
    blurred = variance > 1e-6
    width = torch.where(blurred, variance, 1.0).sqrt()[:, None]
    radius = (5 * sigma).ceil().long().clamp(max=BLUR_RADIUS) * blurred
    distance = torch.arange(2 * BLUR_RADIUS + 1, device=sigma.device) - radius[:, None]

    def mass(x: Tensor) -> Tensor:  # share of a Gaussian to the left of x
        return 0.5 * torch.erfc(-x / (width * math.sqrt(2.0)))

    weights = (mass(distance + 0.5) - mass(distance - 0.5)) * (distance.abs() <= radius[:, None])
    weights = fixed(weights / weights.sum(1, keepdim=True))[:, :, None]
    first = torch.arange(size, device=sigma.device) - radius[:, None]
    return Taps(first, weights.expand(-1, -1, size), 2 * radius + 1, lengths - 1)


def fixed(weights: Tensor) -> Tensor:
    """Whole multiples of 2**-22, int32."""
    return (weights * UNIT + 0.5).floor().to(torch.int32)


def resample(pixels: Tensor, taps: Taps, dim: int) -> Tensor:
    """uint8 [B, K, height, width] along an axis, rounded and clipped; sums are exact, so their order does not matter."""
    lines = pixels.movedim(dim, 1)
    taken = taps.first[:, None] + torch.arange(taps.weights.shape[1], device=pixels.device)[:, None]
    taken = torch.minimum(taken.clamp(min=0), taps.last[:, None, None])
    done = []
    for line, index, weights, used in zip(lines.flatten(2).int(), taken, taps.weights, taps.used.tolist(), strict=True):
        total = torch.full((index.shape[1], line.shape[1]), UNIT // 2, dtype=torch.int32, device=pixels.device)
        for tap in range(used):
            total.addcmul_(line.index_select(0, index[tap]), weights[tap, :, None])
        done.append((total >> 22).clamp(0, 255).to(torch.uint8))
    return torch.stack(done).unflatten(2, lines.shape[2:]).movedim(1, dim)
