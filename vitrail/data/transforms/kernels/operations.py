"""One operation of a policy per image."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.data.transforms import reference


def operation_indices(*names: str) -> list[tl.constexpr]:
    return [tl.constexpr(reference.OPERATION_INDEX[name]) for name in names]


AUTOCONTRAST, EQUALIZE, CONTRAST = operation_indices("autocontrast", "equalize", "contrast")
INVERT, POSTERIZE, SOLARIZE, SOLARIZE_ADD = operation_indices("invert", "posterize", "solarize", "solarize_add")
BRIGHTNESS, SATURATION, SHARPNESS = operation_indices("brightness", "saturation", "sharpness")
ROTATE, SHEAR_X, SHEAR_Y, TRANSLATE_X, TRANSLATE_Y = operation_indices(*reference.WARPS)
IDENTITY = tl.constexpr(reference.IDENTITY)
PI = tl.constexpr(math.pi)
SHAPES = ["stride_b", "stride_c", "stride_y", "height", "width"]  # they vary from batch to batch: compile one kernel for all


@triton.jit
def luma(red, green, blue):
    return (red.to(tl.int32) * 19595 + green.to(tl.int32) * 38470 + blue.to(tl.int32) * 7471 + 0x8000) >> 16


@triton.jit
def blend(base, value, factor):
    """See `color.blend`. The product is computed in float64 so that the compiler cannot fuse away its rounding."""
    product = (factor.to(tl.float64) * (value - base).to(tl.float64)).to(tl.float32)
    mixed = tl.floor(base.to(tl.float32) + product)
    return tl.minimum(tl.maximum(mixed, 0.0), 255.0).to(tl.int32)


@triton.jit(do_not_specialize=SHAPES)
def histogram_kernel(
    pixels, sizes, operation, counts, stride_b, stride_c, stride_y, stride_x, height, width, BLOCK: tl.constexpr
):
    """Histograms of red, green and blue and the sum of all lumas, in counts [B, 4, 256], if the operation needs them."""
    image = tl.program_id(1).to(tl.int64)
    drawn = tl.load(operation + image)
    if (drawn != AUTOCONTRAST) & (drawn != EQUALIZE) & (drawn != CONTRAST):
        return
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y, x = offset // width, offset % width
    mask = (y < tl.load(sizes + image * 2)) & (x < tl.load(sizes + image * 2 + 1))
    source = pixels + image * stride_b + y * stride_y + x * stride_x
    red, green = tl.load(source, mask, 0), tl.load(source + stride_c, mask, 0)
    blue = tl.load(source + 2 * stride_c, mask, 0)
    if drawn == CONTRAST:
        tl.atomic_add(counts + image * 1024 + 768, tl.sum(luma(red, green, blue), 0).to(tl.int64))
    else:
        target = counts + image * 1024 + tl.arange(0, 256)
        tl.atomic_add(target, tl.histogram(red.to(tl.int32), 256, mask).to(tl.int64))
        tl.atomic_add(target + 256, tl.histogram(green.to(tl.int32), 256, mask).to(tl.int64))
        tl.atomic_add(target + 512, tl.histogram(blue.to(tl.int32), 256, mask).to(tl.int64))


@triton.jit
def table_kernel(sizes, operation, value, counts, table):
    """Lookup tables uint8 [B, 3, 256], one program per image and channel; see `reference.apply_operation`."""
    image, channel = tl.program_id(0).to(tl.int64), tl.program_id(1)
    drawn, argument, v = tl.load(operation + image), tl.load(value + image), tl.arange(0, 256)
    count = tl.load(counts + image * 1024 + channel * 256 + v)
    high, low = tl.max(tl.where(count > 0, v, 0), 0), tl.min(tl.where(count > 0, v, 255), 0)
    total, new = tl.sum(count, 0), v
    if drawn == AUTOCONTRAST:
        if high > low:
            scale = tl.full([1], 255.0, tl.float64) / (high - low).to(tl.float64)
            # The condition is always true. It keeps the compiler from fusing away the rounding of the products.
            raised = tl.where(total > 0, v.to(tl.float64) * scale, 0.0)
            new = (raised - tl.where(total > 0, low.to(tl.float64) * scale, 0.0)).to(tl.int32)
    elif drawn == EQUALIZE:
        step = (total - tl.sum(tl.where(v == high, count, 0), 0)) // 255
        if (step > 0) & (high > low):
            new = ((tl.cumsum(count, 0) - count + step // 2) // step).to(tl.int32)
    elif drawn == INVERT:
        new = 255 - v
    elif drawn == POSTERIZE:
        step = 1 << (8 - argument.to(tl.int32))
        new = v // step * step
    elif drawn == SOLARIZE:
        new = tl.where(v < argument, v, 255 - v)
    elif drawn == SOLARIZE_ADD:
        new = tl.where(v < 128, v + argument.to(tl.int32), v)
    elif (drawn == CONTRAST) | (drawn == BRIGHTNESS):
        area = tl.load(sizes + image * 2) * tl.load(sizes + image * 2 + 1)
        mean = ((2 * tl.load(counts + image * 1024 + 768) + area) // (2 * area)).to(tl.int32)  # 0 unless contrast was drawn
        new = blend(mean, v, argument)
    tl.store(table + (image * 3 + channel) * 256 + v, tl.minimum(tl.maximum(new, 0), 255).to(tl.uint8))


@triton.jit
def clip(position, size):
    return tl.minimum(tl.maximum(position, 0), size - 1)


@triton.jit
def product(a, b, rounded):
    """a * b. `rounded` is always true; it keeps the compiler from fusing the product with a sum, which would not round it.

    Two products that are added need two conditions: the compiler would merge equal ones and fuse nevertheless.
    """
    return tl.where(rounded, a * b, 0.0)


@triton.jit
def cubic(a, b, c, d, t, rounded):
    """See `affine.cubic`."""
    inner = 2 * (a - b) + c - d + product(t, b - a - c + d, rounded)
    return b + product(t, c - a + product(t, inner, rounded), rounded)


@triton.jit
def linear(a, b, t, rounded):
    """See `affine.linear`."""
    return a + product(b - a, t, rounded)


@triton.jit
def round_15(value):
    return tl.floor(value * 1e15 + 0.5) / 1e15


@triton.jit
def warp_coordinates(x, y, drawn, value, rows, columns, flipped):
    """Input coordinates of an output pixel, float64; see `reference.Layer.matrix`."""
    first, second = rows > 0, columns > 0  # see `product`
    value, rows, columns = value.to(tl.float64), rows.to(tl.float64), columns.to(tl.float64)
    degrees = tl.where(drawn == ROTATE, value, 0.0)
    angle = -(tl.where(degrees < 0, degrees + 360.0, degrees) * (PI / 180))
    cos, sin = round_15(tl.cos(angle)), round_15(tl.sin(angle))
    center_x, center_y = columns / 2.0, rows / 2.0
    b, d = sin + tl.where(drawn == SHEAR_X, value, 0.0), -sin + tl.where(drawn == SHEAR_Y, value, 0.0)
    c = product(cos, -center_x, first) + product(sin, -center_y, second) + center_x
    f = product(-sin, -center_x, first) + product(cos, -center_y, second) + center_y
    c += tl.where(drawn == TRANSLATE_X, value * columns, 0.0)
    f += tl.where(drawn == TRANSLATE_Y, value * rows, 0.0)
    if flipped:
        b, c, d, f = -b, columns - product(cos, columns, first) - c, -d, f + product(d, columns, first)
    source_x = product(cos, x, first) + product(b, y, second) + c
    return source_x, product(d, x, first) + product(cos, y, second) + f


@triton.jit
def warp_line(line, left, part_x, columns, stride, bicubic, rounded, mask):
    """One row of the input interpolated between the columns `left` and `left` + 1, float64."""
    b = tl.load(line + clip(left, columns) * stride, mask, 0).to(tl.float64)
    c = tl.load(line + clip(left + 1, columns) * stride, mask, 0).to(tl.float64)
    if bicubic:
        a = tl.load(line + clip(left - 1, columns) * stride, mask, 0).to(tl.float64)
        d = tl.load(line + clip(left + 2, columns) * stride, mask, 0).to(tl.float64)
        value = cubic(a, b, c, d, part_x, rounded)
    else:
        value = linear(b, c, part_x, rounded)
    return value


@triton.jit
def warp_channel(plane, left, top, part_x, part_y, rows, columns, stride_y, stride_x, bicubic, rounded, mask):
    """Warped pixels of one channel, truncated as in Pillow; see `affine.warp`."""
    b = warp_line(plane + clip(top, rows) * stride_y, left, part_x, columns, stride_x, bicubic, rounded, mask)
    c = warp_line(plane + clip(top + 1, rows) * stride_y, left, part_x, columns, stride_x, bicubic, rounded, mask)
    if bicubic:
        a = warp_line(plane + clip(top - 1, rows) * stride_y, left, part_x, columns, stride_x, bicubic, rounded, mask)
        d = warp_line(plane + clip(top + 2, rows) * stride_y, left, part_x, columns, stride_x, bicubic, rounded, mask)
        value = cubic(a, b, c, d, part_y, rounded)
    else:
        value = linear(b, c, part_y, rounded)
    return tl.minimum(tl.maximum(value, 0.0), 255.0).to(tl.int32)


@triton.jit(do_not_specialize=SHAPES)
def operations_kernel(
    pixels,
    out,
    sizes,
    operation,
    value,
    table,
    flips,
    cubics,
    stride_b,
    stride_c,
    stride_y,
    stride_x,
    height,
    width,
    FILL_RED: tl.constexpr,
    FILL_GREEN: tl.constexpr,
    FILL_BLUE: tl.constexpr,
    FLIPS: tl.constexpr,
    CUBICS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    image = tl.program_id(1).to(tl.int64)
    rows, columns = tl.load(sizes + image * 2).to(tl.int32), tl.load(sizes + image * 2 + 1).to(tl.int32)
    drawn, argument = tl.load(operation + image), tl.load(value + image)
    flipped = tl.load(flips + image) != 0 if FLIPS else False
    bicubic = tl.load(cubics + image) != 0 if CUBICS else True
    plane, source = height * width, pixels + image * stride_b
    for block in range(BLOCKS):
        offset = (tl.program_id(0) * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        y, x = offset // width, offset % width
        mask = (y < rows) & (x < columns)
        own = source + y * stride_y + x * stride_x
        target = out + image * 3 * plane + offset
        if (drawn == ROTATE) | (drawn == SHEAR_X) | (drawn == SHEAR_Y) | (drawn == TRANSLATE_X) | (drawn == TRANSLATE_Y):
            rounded = rows > 0  # see `product`
            center_x, center_y = x.to(tl.float64) + 0.5, y.to(tl.float64) + 0.5
            source_x, source_y = warp_coordinates(center_x, center_y, drawn, argument, rows, columns, flipped)
            inside = (source_x >= 0) & (source_x < columns) & (source_y >= 0) & (source_y < rows) & mask
            left, top = tl.floor(source_x - 0.5), tl.floor(source_y - 0.5)
            part_x, part_y = source_x - 0.5 - left, source_y - 0.5 - top
            left, top = left.to(tl.int32), top.to(tl.int32)
            for channel in tl.static_range(3):
                warped = warp_channel(
                    source + channel * stride_c,
                    left,
                    top,
                    part_x,
                    part_y,
                    rows,
                    columns,
                    stride_y,
                    stride_x,
                    bicubic,
                    rounded,
                    inside,
                )
                if channel == 0:
                    red = tl.where(inside, warped, FILL_RED)
                elif channel == 1:
                    green = tl.where(inside, warped, FILL_GREEN)
                else:
                    blue = tl.where(inside, warped, FILL_BLUE)
        else:
            red, green = tl.load(own, mask, 0).to(tl.int32), tl.load(own + stride_c, mask, 0).to(tl.int32)
            blue = tl.load(own + 2 * stride_c, mask, 0).to(tl.int32)
            if drawn == SATURATION:
                gray = luma(red, green, blue)
                red, green, blue = blend(gray, red, argument), blend(gray, green, argument), blend(gray, blue, argument)
            elif drawn == SHARPNESS:
                inner = (y > 0) & (y < rows - 1) & (x > 0) & (x < columns - 1)
                smooth_red, smooth_green, smooth_blue = 4 * red, 4 * green, 4 * blue
                for neighbor in tl.static_range(9):
                    pointer = own + (neighbor // 3 - 1) * stride_y + (neighbor % 3 - 1) * stride_x
                    smooth_red += tl.load(pointer, inner, 0).to(tl.int32)
                    smooth_green += tl.load(pointer + stride_c, inner, 0).to(tl.int32)
                    smooth_blue += tl.load(pointer + 2 * stride_c, inner, 0).to(tl.int32)
                red = blend(tl.where(inner, (2 * smooth_red + 13) // 26, red), red, argument)
                green = blend(tl.where(inner, (2 * smooth_green + 13) // 26, green), green, argument)
                blue = blend(tl.where(inner, (2 * smooth_blue + 13) // 26, blue), blue, argument)
            elif drawn != IDENTITY:
                entries = table + image * 768
                red = tl.load(entries + red, mask, 0).to(tl.int32)
                green = tl.load(entries + 256 + green, mask, 0).to(tl.int32)
                blue = tl.load(entries + 512 + blue, mask, 0).to(tl.int32)
        tl.store(target, red.to(tl.uint8), mask)
        tl.store(target + plane, green.to(tl.uint8), mask)
        tl.store(target + 2 * plane, blue.to(tl.uint8), mask)


def apply_operations(pixels: Tensor, sizes: Tensor, layer: reference.Layer) -> Tensor:
    batch, (height, width) = len(pixels), pixels.shape[-2:]
    operation, value, flips, cubics = layer
    operation, value, sizes = operation.contiguous(), value.contiguous(), sizes.contiguous()
    shape = (*pixels.stride(), height, width)
    counts = torch.zeros(batch, 4, 256, dtype=torch.int64, device=pixels.device)
    histogram_kernel[(triton.cdiv(height * width, 1024), batch)](pixels, sizes, operation, counts, *shape, BLOCK=1024)
    table = torch.empty(batch, 3, 256, dtype=torch.uint8, device=pixels.device)
    table_kernel[(batch, 3)](sizes, operation, value, counts, table)
    out = torch.empty(pixels.shape, dtype=torch.uint8, device=pixels.device)
    operations_kernel[(triton.cdiv(height * width, 2048), batch)](
        pixels,
        out,
        sizes,
        operation,
        value,
        table,
        operation if flips is None else flips.to(torch.uint8),
        operation if cubics is None else cubics.to(torch.uint8),
        *shape,
        *reference.FILL,
        FLIPS=flips is not None,
        CUBICS=cubics is not None,
        BLOCK=512,
        BLOCKS=4,
    )
    return out
