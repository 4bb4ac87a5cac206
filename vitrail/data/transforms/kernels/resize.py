"""Crops, resizing and blurring (`augment/resampling.py`): a kernel for the taps of an axis, and one for the sums."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.data.transforms import resize
from vitrail.data.transforms.crops import Axis, View
from vitrail.data.transforms.resize import BLUR_RADIUS, FILTERS, SUPPORT, Taps, most_taps

NEAREST, BILINEAR, BICUBIC, LANCZOS, RANDOM, GAUSSIAN = (tl.constexpr(number) for number in range(len(FILTERS) + 1))
PI, UNIT = tl.constexpr(math.pi), tl.constexpr(resize.UNIT)
SHAPES = ["stride_b", "stride_c", "stride_y", "height", "width"]  # canvases vary from batch to batch: one kernel for all of them


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
    """How much a source pixel counts at a distance (float64), before the division by the sum of all."""
    x = tl.abs(distance)
    if FILTER == BILINEAR:
        weight = tl.maximum(1 - x, 0.0)
    elif FILTER == BICUBIC:
        weight = cubic_filter(x)
    elif FILTER == LANCZOS:
        weight = tl.where(x < 3, sinc(x) * sinc(x / 3), 0.0)
    elif FILTER == RANDOM:
        weight = tl.where(shape != 0, cubic_filter(x), tl.maximum(1 - x, 0.0))
    elif FILTER == GAUSSIAN:  # folded with a pixel
        weight = tl.erf((distance + 0.5) / shape) - tl.erf((distance - 0.5) / shape)
    else:  # nearest: the one tap there is
        weight = x * 0 + 1
    return weight


@triton.jit(do_not_specialize=["size", "most"])
def taps_kernel(
    axes,  # int64 [B, 5]: see `geometry.Axis`
    shapes,  # float32 [B]: of the Gaussian, its standard deviation; of the filter "random", whether it is cubic
    first,  # these four: see `resampling.Taps`
    weights,
    used,
    last,
    size,
    most,
    REACH: tl.constexpr,
    FILTER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`resampling.axis_taps` and `resampling.blur_taps`."""
    image = tl.program_id(1).to(tl.int64)
    axis = axes + image * 5
    start, length, resized = tl.load(axis), tl.load(axis + 1), tl.load(axis + 2)
    out = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.where(tl.load(axis + 4) != 0, size - 1 - out, out) + tl.load(axis + 3)
    period = tl.maximum(2 * (resized - 1), 1)
    place = (place % period + period) % period
    place = tl.where(place >= resized, period - place, place)
    scale = length.to(tl.float64) / resized.to(tl.float64)
    centre = start.to(tl.float64) + (place.to(tl.float64) + 0.5) * scale
    shape = tl.load(shapes + image).to(tl.float64)
    stretch = tl.maximum(scale, 1.0)
    low, high = start, start + length
    if FILTER == GAUSSIAN:
        variance = shape * shape - 1 / 12
        radius = tl.where(variance > 1e-6, tl.minimum(tl.ceil(5 * shape), REACH), 0.0).to(tl.int32)
        shape = tl.sqrt(2 * tl.where(variance > 1e-6, variance, 1.0))
        begin, own = place - radius, 2 * radius + 1
        low, high = begin, begin + own  # the edges go on
    elif FILTER == NEAREST:
        begin, own = tl.minimum(tl.floor(centre).to(tl.int64), high - 1), tl.full([], 1, tl.int32)
    else:
        begin, own = tl.floor(centre - REACH * stretch + 0.5).to(tl.int64), tl.ceil(2 * REACH * stretch).to(tl.int32)
    total = tl.zeros([BLOCK], tl.float64)
    for tap in range(own):
        source = begin + tap
        weight = filter_weight((source.to(tl.float64) + 0.5 - centre) / stretch, shape, FILTER)
        total += tl.where((source >= low) & (source < high), weight, 0.0)
    for tap in range(own):
        source = begin + tap
        weight = filter_weight((source.to(tl.float64) + 0.5 - centre) / stretch, shape, FILTER)
        weight = tl.where((source >= low) & (source < high), weight, 0.0) / total
        fixed = tl.floor(weight * UNIT + 0.5).to(tl.int32)
        tl.store(weights + (image * most + tap) * size + out, fixed, out < size)
    tl.store(first + image * size + out, begin.to(tl.int64), out < size)
    tl.store(used + image, own.to(tl.int64))
    tl.store(last + image, start + length - 1)


def make_taps(axis: Axis, shapes: Tensor, most: int, reach: float, filter: int) -> Taps:
    batch = len(axis.start)
    first, used, last = (torch.empty(batch, *shape, dtype=torch.int64, device=shapes.device) for shape in ((axis.out,), (), ()))
    taps = Taps(first, torch.empty(batch, most, axis.out, dtype=torch.int32, device=shapes.device), used, last)
    taps_kernel[(triton.cdiv(axis.out, 128), batch)](
        torch.stack([axis.start, axis.length, axis.resized, axis.offset, axis.flip.long()], 1),
        shapes,
        *taps,
        axis.out,
        most,
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
    begins,  # int64 [B], with `ends`: the rows that anybody will look at
    ends,
    most,
    stride_b,
    stride_c,
    stride_y,
    stride_x,
    height,
    width,
    ALONG_X: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place, image = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    top, bottom = tl.program_id(0) * BLOCK // width, (tl.program_id(0) * BLOCK + BLOCK - 1) // width
    if (top >= tl.load(ends + image)) | (bottom < tl.load(begins + image)):
        return
    plane = height * width
    y, x, mask = place // width, place % width, place < plane
    source = pixels + image * stride_b
    if ALONG_X:
        along, size, step, source = x, width, stride_x, source + y * stride_y
    else:
        along, size, step, source = y, height, stride_y, source + x * stride_x
    start = tl.load(first + image * size + along, mask, 0).to(tl.int32)
    weight = weights + image * most * size + along
    limit = tl.load(last + image).to(tl.int32)
    red = tl.full([BLOCK], 1 << 21, tl.int32)
    green, blue = red, red
    for tap in range(tl.load(used + image).to(tl.int32)):
        taken = source + tl.minimum(tl.maximum(start + tap, 0), limit) * step
        factor = tl.load(weight + tap * size, mask, 0)
        red += factor * tl.load(taken, mask, 0).to(tl.int32)
        green += factor * tl.load(taken + stride_c, mask, 0).to(tl.int32)
        blue += factor * tl.load(taken + 2 * stride_c, mask, 0).to(tl.int32)
    target = out + image * 3 * plane + place
    tl.store(target, tl.minimum(tl.maximum(red >> 22, 0), 255).to(tl.uint8), mask)
    tl.store(target + plane, tl.minimum(tl.maximum(green >> 22, 0), 255).to(tl.uint8), mask)
    tl.store(target + 2 * plane, tl.minimum(tl.maximum(blue >> 22, 0), 255).to(tl.uint8), mask)


def resample(pixels: Tensor, out: Tensor, taps: Taps, along_x: bool, begins: Tensor, ends: Tensor) -> Tensor:
    """One axis of uint8 [B, 3, height, width] into `out`, of which only the rows from `begins` [B] to `ends` [B] are written."""
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


def render(pixels: Tensor, view: View, filter: str, cubic: Tensor | None) -> Tensor:
    shapes, number = (view.rows.start if cubic is None else cubic).float(), FILTERS.index(filter)
    columns, rows = (
        make_taps(axis, shapes, most_taps(filter, size, axis.out), SUPPORT[filter], number)
        for axis, size in ((view.columns, pixels.shape[3]), (view.rows, pixels.shape[2]))
    )
    top, still = view.rows.start, torch.zeros_like(view.rows.start)
    wide, seen = (pixels.new_empty(len(pixels), 3, height, view.columns.out) for height in (pixels.shape[2], view.rows.out))
    resample(pixels, wide, columns, True, top, top + view.rows.length)
    return resample(wide, seen, rows, False, still, view.rows.resized)


def blur(pixels: Tensor, sizes: Tensor, sigma: Tensor) -> Tensor:
    height, width = (side.contiguous() for side in sizes.unbind(1))
    still, most = torch.zeros_like(height), 2 * BLUR_RADIUS + 1
    rows, columns = (
        make_taps(Axis(still, side, side, still, still, size), sigma, most, BLUR_RADIUS, len(FILTERS))
        for side, size in ((height, pixels.shape[2]), (width, pixels.shape[3]))
    )
    touched = height * (sigma > 0)  # no row of an image that stays sharp
    done = pixels.clone(memory_format=torch.contiguous_format)
    wide = resample(pixels, torch.empty_like(done), columns, True, still, touched)
    return resample(wide, done, rows, False, still, touched)
