"""Normalization and random erasing."""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.data.transforms.kernels.rng import TINY, hash32

PI = tl.constexpr(math.pi)


@triton.jit(do_not_specialize=["height", "width"])
def normalize_kernel(
    pixels,
    out,
    boxes,
    key,
    height,
    width,
    mean_red,
    mean_green,
    mean_blue,
    std_red,
    std_green,
    std_blue,
    ERASE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    image = tl.program_id(1).to(tl.int64)
    plane = height * width
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < plane
    if ERASE:
        y, x = offset // width, offset % width
        box = boxes + image * 4
        inside = (y >= tl.load(box)) & (y < tl.load(box + 1)) & (x >= tl.load(box + 2)) & (x < tl.load(box + 3))
        any_inside = tl.max(inside.to(tl.int32), 0) > 0
    for channel in tl.static_range(3):
        mean = mean_red if channel == 0 else mean_green if channel == 1 else mean_blue
        std = std_red if channel == 0 else std_green if channel == 1 else std_blue
        target = image * 3 * plane + channel * plane + offset
        value = tl.load(pixels + target, mask, 0).to(tl.float32) - mean.to(tl.float32)
        value = tl.div_rn(value, std.to(tl.float32))  # torch.compile passes float64
        if ERASE:  # noqa: SIM102
            if any_inside:  # see `reference.pixel_noise`
                first = hash32(hash32(tl.load(key + image) + (channel * plane + offset) * 2) ^ 0x5BD1E995)
                second = hash32(first + 0x9E3779B9)
                radius = tl.sqrt(-2.0 * tl.log(1.0 - (first >> 8).to(tl.float32) * TINY))
                noise = radius * tl.cos((second >> 8).to(tl.float32) * (2 * PI * TINY))
                value = tl.where(inside, noise, value)
        tl.store(out + target, value, mask)


def normalize(pixels: Tensor, mean: Sequence[float], std: Sequence[float], boxes: Tensor | None, key: Tensor) -> Tensor:
    height, width = pixels.shape[-2:]
    out = torch.empty(pixels.shape, dtype=torch.float32, device=pixels.device)
    normalize_kernel[(triton.cdiv(height * width, 1024), len(pixels))](
        pixels.contiguous(),
        out,
        key if boxes is None else boxes.contiguous(),
        key.contiguous(),
        height,
        width,
        *(255.0 * value for value in (*mean, *std)),
        ERASE=boxes is not None,
        BLOCK=1024,
    )
    return out
