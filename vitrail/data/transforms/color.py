"""Color operations on uint8 images [B, 3, height, width], with Pillow's arithmetic.

Everything that maps a value to a value (brightness, solarize, equalize, ...) is a table of 256 entries per image and channel;
only saturation and sharpness look at more than one number.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.transforms.affine import whole_canvas


def grey(pixels: Tensor) -> Tensor:
    """Luma [B, 1, height, width] in Pillow's whole-number weights."""
    red, green, blue = pixels.to(torch.int32).unbind(1)
    return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16).to(torch.uint8)[:, None]


def blend(base: Tensor, pixels: Tensor, factor: Tensor) -> Tensor:
    """base + factor (pixels - base), cut to whole numbers as Pillow does; factor [B]."""
    factor = factor.reshape(-1, *[1] * (pixels.ndim - 1))
    mixed = base.float() + factor * (pixels.float() - base.float())
    return mixed.clamp(0, 255).floor().to(torch.uint8)


def saturation(pixels: Tensor, factor: Tensor) -> Tensor:
    return blend(grey(pixels), pixels, factor)


def sharpness(pixels: Tensor, factor: Tensor, sizes: Tensor | None = None) -> Tensor:
    """Blend with a 3x3 smoothing; the border of an image (of its own size, `sizes` [B, 2]) is left as it is."""
    sizes = whole_canvas(pixels) if sizes is None else sizes
    values = pixels.float()
    box = F.avg_pool2d(values, 3, stride=1, padding=1, divisor_override=1)  # sums of nine whole numbers, exact
    smooth = ((box + 4 * values) * 2 + 13).div(26, rounding_mode="floor")  # weights 1 and 5 in the middle, of 13, rounded
    inner = in_image(pixels, sizes - 1)
    inner[:, 0], inner[:, :, 0] = False, False
    return blend(torch.where(inner[:, None], smooth, values), pixels, factor)


def histogram(pixels: Tensor, sizes: Tensor) -> Tensor:
    """How often each value occurs in red, green, blue and luma, int64 [B, 4, 256], in images of `sizes` [B, 2]."""
    inside = in_image(pixels, sizes)[:, None].expand(-1, 4, -1, -1)
    values = torch.cat([pixels, grey(pixels)], 1).long()
    counts = torch.zeros(len(pixels), 4, 256, dtype=torch.int64, device=pixels.device)
    return counts.scatter_add_(2, values.flatten(2), inside.flatten(2).long())


def in_image(pixels: Tensor, sizes: Tensor) -> Tensor:
    """Which places of the canvas belong to the image in its upper left corner, bool [B, height, width]."""
    rows, columns = (torch.arange(side, device=pixels.device) for side in pixels.shape[-2:])
    return (rows < sizes[:, :1])[:, :, None] & (columns < sizes[:, 1:])[:, None, :]


def apply_table(pixels: Tensor, table: Tensor) -> Tensor:
    """Look every value up: table uint8 [B, 3, 256] (or [B, 1, 256] for all channels)."""
    table = table.expand(-1, pixels.shape[1], -1)
    return table.gather(2, pixels.flatten(2).long()).reshape(pixels.shape)


def ramp(like: Tensor) -> Tensor:
    return torch.arange(256, device=like.device)


def to_table(values: Tensor) -> Tensor:
    """Float or int values [B, (K,) 256] as a table, cut and clipped as Pillow does."""
    table = values.clamp(0, 255).to(torch.uint8)
    return table[:, None] if table.ndim == 2 else table


def brightness_table(factor: Tensor) -> Tensor:
    return to_table((ramp(factor) * factor[:, None]).floor())


def contrast_table(counts: Tensor, factor: Tensor) -> Tensor:
    """Away from (or towards) the mean luma of the image, from its histogram [B, 4, 256]."""
    luma = counts[:, 3]
    total = luma.sum(1).clamp(min=1)
    mean = ((2 * (luma * ramp(factor)).sum(1) + total) // (2 * total))[:, None]
    # In float32 the product would be rounded or not, as the compiler likes; so it is rounded here.
    stretched = (factor.double()[:, None] * (ramp(factor) - mean)).float()
    return to_table((mean + stretched).floor())


def invert_table(like: Tensor) -> Tensor:
    return to_table((255 - ramp(like)).expand(len(like), -1))


def posterize_table(bits: Tensor) -> Tensor:
    """Keep the highest `bits` [B] of every value."""
    step = 2 ** (8 - bits.long().clamp(0, 8))[:, None]
    return to_table(ramp(bits) // step * step)


def solarize_table(threshold: Tensor) -> Tensor:
    """Invert the values from `threshold` [B] on."""
    values = ramp(threshold)
    return to_table(torch.where(values < threshold[:, None], values, 255 - values))


def solarize_add_table(amount: Tensor) -> Tensor:
    """Add `amount` [B] to the values below 128."""
    values = ramp(amount)
    return to_table(torch.where(values < 128, values + amount[:, None].long(), values))


def autocontrast_table(counts: Tensor) -> Tensor:
    """Stretch each channel to the whole range, from its histogram [B, 3, 256]."""
    present = counts > 0
    low = present.to(torch.uint8).argmax(-1, keepdim=True)
    high = 255 - present.flip(-1).to(torch.uint8).argmax(-1, keepdim=True)
    values = ramp(counts).expand_as(counts)
    reach = (high - low).clamp(min=1).double()
    scale = torch.full_like(reach, 255.0) / reach  # a number over a tensor would go through the reciprocal and round twice
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


def hue(pixels: Tensor, turn: Tensor) -> Tensor:
    """Turn the color circle by `turn` [B] (in whole turns, -0.5 ... 0.5), value and saturation kept."""
    red, green, blue = (pixels.float() / 255).unbind(1)
    high, low = torch.maximum(torch.maximum(red, green), blue), torch.minimum(torch.minimum(red, green), blue)
    spread = high - low
    safe = spread.clamp(min=1e-8)
    angle = torch.where(
        high == red, (green - blue) / safe, torch.where(high == green, 2 + (blue - red) / safe, 4 + (red - green) / safe)
    )
    angle = ((angle / 6 + turn[:, None, None]) % 1.0) * 6
    channels = [high - spread * torch.minimum(k, 4 - k).clamp(0, 1) for k in ((angle + n) % 6 for n in (5, 3, 1))]
    return (torch.stack(channels, 1) * 255 + 0.5).floor().clamp(0, 255).to(torch.uint8)
