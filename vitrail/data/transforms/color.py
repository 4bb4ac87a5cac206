"""Color operations on uint8 images [B, 3, height, width] with Pillow's arithmetic.

Operations on single values (brightness, solarize, equalize, ...) are lookup tables of 256 entries per image and channel.
Saturation, sharpness and hue depend on several values.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.transforms.affine import full_sizes


def luma(pixels: Tensor) -> Tensor:
    """Luma [B, 1, height, width] with Pillow's integer weights."""
    red, green, blue = pixels.to(torch.int32).unbind(1)
    return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16).to(torch.uint8)[:, None]


def blend(base: Tensor, pixels: Tensor, factor: Tensor) -> Tensor:
    """base + factor * (pixels - base) with factor [B], truncated to integers as in Pillow."""
    factor = factor.reshape(-1, *[1] * (pixels.ndim - 1))
    mixed = base.float() + factor * (pixels.float() - base.float())
    return mixed.clamp(0, 255).floor().to(torch.uint8)


def saturation(pixels: Tensor, factor: Tensor) -> Tensor:
    return blend(luma(pixels), pixels, factor)


def sharpness(pixels: Tensor, factor: Tensor, sizes: Tensor | None = None) -> Tensor:
    """Blend with a 3x3 smoothing. The border pixels of the images (of `sizes` [B, 2]) stay unchanged."""
    sizes = full_sizes(pixels) if sizes is None else sizes
    values = pixels.float()
    box = F.avg_pool2d(values, 3, stride=1, padding=1, divisor_override=1)  # sums of nine integers, exact
    smooth = ((box + 4 * values) * 2 + 13).div(26, rounding_mode="floor")  # weights 1/13, 5/13 in the center, rounded
    inner = in_image(pixels, sizes - 1)
    inner[:, 0], inner[:, :, 0] = False, False
    return blend(torch.where(inner[:, None], smooth, values), pixels, factor)


def histogram(pixels: Tensor, sizes: Tensor) -> Tensor:
    """Histograms of red, green, blue and luma, int64 [B, 4, 256], of images of `sizes` [B, 2]."""
    inside = in_image(pixels, sizes)[:, None].expand(-1, 4, -1, -1)
    values = torch.cat([pixels, luma(pixels)], 1).long()
    counts = torch.zeros(len(pixels), 4, 256, dtype=torch.int64, device=pixels.device)
    return counts.scatter_add_(2, values.flatten(2), inside.flatten(2).long())


def in_image(pixels: Tensor, sizes: Tensor) -> Tensor:
    """Mask of the pixels that are not padding, bool [B, height, width]."""
    rows, columns = (torch.arange(side, device=pixels.device) for side in pixels.shape[-2:])
    return (rows < sizes[:, :1])[:, :, None] & (columns < sizes[:, 1:])[:, None, :]


def apply_table(pixels: Tensor, table: Tensor) -> Tensor:
    """Replace every value by its table entry; table uint8 [B, 3, 256], or [B, 1, 256] for all channels."""
    table = table.expand(-1, pixels.shape[1], -1)
    return table.gather(2, pixels.flatten(2).long()).reshape(pixels.shape)


def ramp(like: Tensor) -> Tensor:
    return torch.arange(256, device=like.device)


def to_table(values: Tensor) -> Tensor:
    """Convert float or int values [B, (K,) 256] to a table, truncated and clipped as in Pillow."""
    table = values.clamp(0, 255).to(torch.uint8)
    return table[:, None] if table.ndim == 2 else table


def brightness_table(factor: Tensor) -> Tensor:
    return to_table((ramp(factor) * factor[:, None]).floor())


def contrast_table(counts: Tensor, factor: Tensor) -> Tensor:
    """Scale the distance to the mean luma of the image, from its histogram [B, 4, 256]."""
    luma_counts = counts[:, 3]
    total = luma_counts.sum(1).clamp(min=1)
    mean = ((2 * (luma_counts * ramp(factor)).sum(1) + total) // (2 * total))[:, None]
    # In float32 a compiler may fuse the product with the sum; rounding it explicitly gives the same result everywhere.
    stretched = (factor.double()[:, None] * (ramp(factor) - mean)).float()
    return to_table((mean + stretched).floor())


def invert_table(like: Tensor) -> Tensor:
    return to_table((255 - ramp(like)).expand(len(like), -1))


def posterize_table(bits: Tensor) -> Tensor:
    """Keep the highest `bits` [B] bits of every value."""
    step = 2 ** (8 - bits.long().clamp(0, 8))[:, None]
    return to_table(ramp(bits) // step * step)


def solarize_table(threshold: Tensor) -> Tensor:
    """Invert values at or above `threshold` [B]."""
    values = ramp(threshold)
    return to_table(torch.where(values < threshold[:, None], values, 255 - values))


def solarize_add_table(amount: Tensor) -> Tensor:
    """Add `amount` [B] to values below 128."""
    values = ramp(amount)
    return to_table(torch.where(values < 128, values + amount[:, None].long(), values))


def autocontrast_table(counts: Tensor) -> Tensor:
    """Stretch each channel to the full range, from its histogram [B, 3, 256]."""
    present = counts > 0
    low = present.to(torch.uint8).argmax(-1, keepdim=True)
    high = 255 - present.flip(-1).to(torch.uint8).argmax(-1, keepdim=True)
    values = ramp(counts).expand_as(counts)
    span = (high - low).clamp(min=1).double()
    scale = torch.full_like(span, 255.0) / span  # scalar / tensor would use the reciprocal and round twice
    stretched = (values.double() * scale - low * scale).trunc()
    return to_table(torch.where(high > low, stretched, values.double()))


def equalize_table(counts: Tensor) -> Tensor:
    """Pillow's equalization of each channel, from its histogram [B, 3, 256]."""
    values = ramp(counts).expand_as(counts)
    last = 255 - (counts > 0).flip(-1).to(torch.uint8).argmax(-1, keepdim=True)
    step = (counts.sum(-1, keepdim=True) - counts.gather(-1, last)) // 255
    before = counts.cumsum(-1) - counts + step // 2
    table = torch.where(step > 0, before // step.clamp(min=1), values)
    single = (counts > 0).sum(-1, keepdim=True) <= 1
    return to_table(torch.where(single, values, table))


def hue(pixels: Tensor, shift: Tensor) -> Tensor:
    """Shift the hue by `shift` [B] turns of the color circle (-0.5 ... 0.5); value and saturation are kept."""
    red, green, blue = (pixels.float() / 255).unbind(1)
    high, low = torch.maximum(torch.maximum(red, green), blue), torch.minimum(torch.minimum(red, green), blue)
    spread = high - low
    safe = spread.clamp(min=1e-8)
    angle = torch.where(
        high == red, (green - blue) / safe, torch.where(high == green, 2 + (blue - red) / safe, 4 + (red - green) / safe)
    )
    angle = ((angle / 6 + shift[:, None, None]) % 1.0) * 6
    channels = [high - spread * torch.minimum(k, 4 - k).clamp(0, 1) for k in ((angle + n) % 6 for n in (5, 3, 1))]
    return (torch.stack(channels, 1) * 255 + 0.5).floor().clamp(0, 255).to(torch.uint8)
