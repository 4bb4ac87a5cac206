"""Crops, resizing and blurring (see `transforms/resize.py`): one kernel for the taps of an axis, one for the weighted sums."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.data.transforms import resize
from vitrail.data.transforms.config import NO_ANTIALIAS
from vitrail.data.transforms.crops import Axis, View
from vitrail.data.transforms.resize import BLUR_RADIUS, FILTERS, SUPPORT, Taps, max_taps, resize_without_antialias

NEAREST, BILINEAR, BICUBIC, LANCZOS, RANDOM, GAUSSIAN = (tl.constexpr(number) for number in range(len(FILTERS) + 1))
PI, UNIT = tl.constexpr(math.pi), tl.constexpr(resize.UNIT)
SHAPES = ["stride_b", "stride_c", "stride_y", "height", "width"]  # they vary from batch to batch: compile one kernel for all


@triton.jit
def cubic_filter(x):
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return tl.where(x < 1, near, tl.where(x < 2, far, 0.0))


@triton.jit
def sinc(x):
    turn = x * PI
    return tl.where(x == 0, 1.0, tl.sin(turn) / tl.where(x == 0, 1.0, turn))


@triton.jit
def filter_weight(distance, shape, FILTER: tl.constexpr):
    """Unnormalized weight of a source pixel at a distance (float64)."""
    x = tl.abs(distance)
    if FILTER == BILINEAR:
        weight = tl.maximum(1 - x, 0.0)
    elif FILTER == BICUBIC:
        weight = cubic_filter(x)
    elif FILTER == LANCZOS:
        weight = tl.where(x < 3, sinc(x) * sinc(x / 3), 0.0)
    elif FILTER == RANDOM:
        weight = tl.where(shape != 0, cubic_filter(x), tl.maximum(1 - x, 0.0))
    elif FILTER == GAUSSIAN:  # convolved with a pixel
        weight = tl.erf((distance + 0.5) / shape) - tl.erf((distance - 0.5) / shape)
    else:  # nearest: a single tap
        weight = x * 0 + 1
    return weight


@triton.jit(do_not_specialize=["size", "num_taps"])
def taps_kernel(
    axes,  # int64 [B, 5]: see `crops.Axis`
    shapes,  # float32 [B]: standard deviation of the Gaussian; whether the filter "random" is bicubic
    first,  # the next four: see `resize.Taps`
    weights,
    used,
    last,
    size,
    num_taps,
    REACH: tl.constexpr,
    FILTER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """See `resize.axis_taps` and `resize.blur_taps`."""
    image = tl.program_id(1).to(tl.int64)
    axis = axes + image * 5
    start, length, resized = tl.load(axis), tl.load(axis + 1), tl.load(axis + 2)
    out = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    position = tl.where(tl.load(axis + 4) != 0, size - 1 - out, out) + tl.load(axis + 3)
    period = tl.maximum(2 * (resized - 1), 1)
    position = (position % period + period) % period
    position = tl.where(position >= resized, period - position, position)
    scale = length.to(tl.float64) / resized.to(tl.float64)
    center = start.to(tl.float64) + (position.to(tl.float64) + 0.5) * scale
    shape = tl.load(shapes + image).to(tl.float64)
    stretch = tl.maximum(scale, 1.0)
    low, high = start, start + length
    if FILTER == GAUSSIAN:
        variance = shape * shape - 1 / 12
        radius = tl.where(variance > 1e-6, tl.minimum(tl.ceil(5 * shape), REACH), 0.0).to(tl.int32)
        shape = tl.sqrt(2 * tl.where(variance > 1e-6, variance, 1.0))
        begin, own = position - radius, 2 * radius + 1
        low, high = begin, begin + own  # edge pixels are repeated
    elif FILTER == NEAREST:
        begin, own = tl.minimum(tl.floor(center).to(tl.int64), high - 1), tl.full([], 1, tl.int32)
    else:
        begin, own = tl.floor(center - REACH * stretch + 0.5).to(tl.int64), tl.ceil(2 * REACH * stretch).to(tl.int32)
    total = tl.zeros([BLOCK], tl.float64)
    for tap in range(own):
        source = begin + tap
        weight = filter_weight((source.to(tl.float64) + 0.5 - center) / stretch, shape, FILTER)
        total += tl.where((source >= low) & (source < high), weight, 0.0)
    for tap in range(own):
        source = begin + tap
        weight = filter_weight((source.to(tl.float64) + 0.5 - center) / stretch, shape, FILTER)
        weight = tl.where((source >= low) & (source < high), weight, 0.0) / total
        fixed = tl.floor(weight * UNIT + 0.5).to(tl.int32)
        tl.store(weights + (image * num_taps + tap) * size + out, fixed, out < size)
    tl.store(first + image * size + out, begin.to(tl.int64), out < size)
    tl.store(used + image, own.to(tl.int64))
    tl.store(last + image, start + length - 1)


def make_taps(axis: Axis, shapes: Tensor, num_taps: int, reach: float, filter: int) -> Taps:
    batch = len(axis.start)
    first, used, last = (torch.empty(batch, *shape, dtype=torch.int64, device=shapes.device) for shape in ((axis.out,), (), ()))
    taps = Taps(first, torch.empty(batch, num_taps, axis.out, dtype=torch.int32, device=shapes.device), used, last)
    taps_kernel[(triton.cdiv(axis.out, 128), batch)](
        torch.stack([axis.start, axis.length, axis.resized, axis.offset, axis.flip.long()], 1),
        shapes,
        *taps,
        axis.out,
        num_taps,
        REACH=reach,
        FILTER=filter,
        BLOCK=128,
    )
    return taps


@triton.jit(do_not_specialize=SHAPES)
def resample_kernel(
    pixels,
    out,
    first,
    weights,
    used,
    last,
    begins,  # int64 [B]: with `ends`, the range of rows to compute
    ends,
    num_taps,
    stride_b,
    stride_c,
    stride_y,
    stride_x,
    height,
    width,
    ALONG_X: tl.constexpr,
    BLOCK: tl.constexpr,
):
    position, image = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    top, bottom = tl.program_id(0) * BLOCK // width, (tl.program_id(0) * BLOCK + BLOCK - 1) // width
    if (top >= tl.load(ends + image)) | (bottom < tl.load(begins + image)):
        return
    plane = height * width
    y, x, mask = position // width, position % width, position < plane
    source = pixels + image * stride_b
    if ALONG_X:
        along, size, step, source = x, width, stride_x, source + y * stride_y
    else:
        along, size, step, source = y, height, stride_y, source + x * stride_x
    start = tl.load(first + image * size + along, mask, 0).to(tl.int32)
    weight = weights + image * num_taps * size + along
    limit = tl.load(last + image).to(tl.int32)
    red = tl.full([BLOCK], 1 << 21, tl.int32)
    green, blue = red, red
    for tap in range(tl.load(used + image).to(tl.int32)):
        pointer = source + tl.minimum(tl.maximum(start + tap, 0), limit) * step
        factor = tl.load(weight + tap * size, mask, 0)
        red += factor * tl.load(pointer, mask, 0).to(tl.int32)
        green += factor * tl.load(pointer + stride_c, mask, 0).to(tl.int32)
        blue += factor * tl.load(pointer + 2 * stride_c, mask, 0).to(tl.int32)
    target = out + image * 3 * plane + position
    tl.store(target, tl.minimum(tl.maximum(red >> 22, 0), 255).to(tl.uint8), mask)
    tl.store(target + plane, tl.minimum(tl.maximum(green >> 22, 0), 255).to(tl.uint8), mask)
    tl.store(target + 2 * plane, tl.minimum(tl.maximum(blue >> 22, 0), 255).to(tl.uint8), mask)


def resample(pixels: Tensor, out: Tensor, taps: Taps, along_x: bool, begins: Tensor, ends: Tensor) -> Tensor:
    """Resample one axis of uint8 [B, 3, height, width] into `out`; only the rows from `begins` [B] to `ends` [B] are written."""
    height, width = out.shape[-2:]
    resample_kernel[(triton.cdiv(height * width, 512), len(pixels))](
        pixels,
        out,
        *taps,
        begins.contiguous(),
        ends.contiguous(),
        taps.weights.shape[1],
        *pixels.stride(),
        height,
        width,
        ALONG_X=along_x,
        BLOCK=512,
    )
    return out


def crop_resize(pixels: Tensor, view: View, filter: str, cubic: Tensor | None) -> Tensor:
    if filter == NO_ANTIALIAS:
        return resize_without_antialias(pixels, view)
    shapes, number = (view.rows.start if cubic is None else cubic).float(), FILTERS.index(filter)
    columns, rows = (
        make_taps(axis, shapes, max_taps(filter, size, axis), SUPPORT[filter], number)
        for axis, size in ((view.columns, pixels.shape[3]), (view.rows, pixels.shape[2]))
    )
    top, zeros = view.rows.start, torch.zeros_like(view.rows.start)
    heights = (pixels.shape[2], view.rows.out)
    horizontal, resized = (pixels.new_empty(len(pixels), 3, height, view.columns.out) for height in heights)
    resample(pixels, horizontal, columns, True, top, top + view.rows.length)
    return resample(horizontal, resized, rows, False, zeros, view.rows.resized.clamp(min=view.rows.out))


def blur(pixels: Tensor, sizes: Tensor, sigma: Tensor) -> Tensor:
    height, width = (side.contiguous() for side in sizes.unbind(1))
    zeros, num_taps = torch.zeros_like(height), 2 * BLUR_RADIUS + 1
    rows, columns = (
        make_taps(Axis(zeros, side, side, zeros, zeros, size), sigma, num_taps, BLUR_RADIUS, len(FILTERS))
        for side, size in ((height, pixels.shape[2]), (width, pixels.shape[3]))
    )
    blurred_rows = height * (sigma > 0)  # none of an image without blur
    out = pixels.clone(memory_format=torch.contiguous_format)
    horizontal = resample(pixels, torch.empty_like(out), columns, True, zeros, blurred_rows)
    return resample(horizontal, out, rows, False, zeros, blurred_rows)
