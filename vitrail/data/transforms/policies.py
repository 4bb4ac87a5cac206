"""Policies: which color and shape operations an image gets, and how strongly.

A layer of a policy is one operation per image out of a list (`passes.Layer`); what each image drew stays on the device.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.data.rng import between, bits, chance, integers, normal, uniform
from vitrail.data.transforms.backend import passes_for
from vitrail.data.transforms.reference import NONE, NUMBER, OPERATIONS, Layer


class Canvas(NamedTuple):
    """Images in the upper left corners of a batch, and how they lie there."""

    pixels: Tensor  # uint8 [B, 3, height, width]
    sizes: Tensor  # int64 [B, 2]: their own heights and widths
    flip: Tensor | None = None  # bool [B]: those whose operations mean the image turned round left to right (`Layer.flip`)


class Changed(NamedTuple):
    """Images after a policy, and the layers of it that may have moved their pixels, first to last."""

    pixels: Tensor  # uint8 [B, 3, height, width]
    layers: tuple[Layer, ...] = ()


class Level(NamedTuple):
    """An operation's argument at a magnitude in 0..10: base + direction * size * magnitude / 10."""

    size: float = 0.0
    base: float = 0.0
    direction: float = 1.0
    whole: bool = False  # the share of the size is cut to a whole number
    signed: bool = False  # in either direction, at random


ENHANCEMENTS = ("saturation", "contrast", "brightness", "sharpness")
INCREASING = dict.fromkeys(ENHANCEMENTS, Level(0.9, base=1.0, signed=True)) | {
    "rotate": Level(30.0, signed=True),
    "shear_x": Level(0.3, signed=True),
    "shear_y": Level(0.3, signed=True),
    "translate_x": Level(0.45, signed=True),
    "translate_y": Level(0.45, signed=True),
    "posterize": Level(4.0, base=4.0, direction=-1.0, whole=True),
    "solarize": Level(256.0, base=256.0, direction=-1.0, whole=True),
    "solarize_add": Level(110.0, whole=True),
}
# AutoAugment's own levels, where more is not always stronger.
ORIGINAL = INCREASING | dict.fromkeys(ENHANCEMENTS, Level(1.8, base=0.1))
ORIGINAL |= {"posterize": Level(4.0, base=4.0, whole=True), "solarize": Level(256.0, whole=True)}


def arguments(levels: dict[str, Level], operation: Tensor, magnitude: Tensor, sign: Tensor) -> Tensor:
    """The arguments of the operations that were drawn, at their magnitudes, float32; all of the same shape."""
    rows = [levels.get(name, Level()) for name in (*OPERATIONS, "none")]
    size, base, direction, whole, signed = look_up(rows, operation)
    amount = size * (magnitude / 10)
    amount = torch.where(whole > 0, amount.floor(), amount)
    return base + direction * torch.where(signed > 0, sign * amount, amount)


def look_up(rows: list, index: Tensor) -> tuple[Tensor, ...]:
    """The columns of a table, each at `index`, float32; a table this small goes over without waiting for the device."""
    return torch.tensor(rows, dtype=torch.float32).to(index.device, non_blocking=True)[index].unbind(-1)


def apply_layer(canvas: Canvas, layer: Layer) -> Tensor:
    """uint8 [B, 3, height, width]."""
    return passes_for(canvas.pixels).operate(canvas.pixels, canvas.sizes, layer)


def apply_layers(canvas: Canvas, operations: Tensor, values: Tensor, cubics: list[Tensor | None]) -> Changed:
    """Layers of operations [B, L], by number, and their arguments [B, L], one after the other."""
    drawn = zip(operations.T.contiguous(), values.T.contiguous(), cubics, strict=True)
    layers = [Layer(operation, value, canvas.flip, cubic) for operation, value, cubic in drawn]
    for layer in layers:
        canvas = canvas._replace(pixels=apply_layer(canvas, layer))
    return Changed(canvas.pixels, tuple(layers))


def random_signs(key: Tensor, names: list[str]) -> Tensor:
    """Plus or minus one, float32 [B, names]."""
    return 1.0 - 2.0 * (torch.cat([bits(key, f"{name}.sign", 1) for name in names], 1) & 1)


def random_cubic(key: Tensor, name: str, filter: str) -> Tensor | None:
    """Bilinear or bicubic [B] if the filter is "random"."""
    return chance(key, f"{name}.filter", 0.5) if filter == "random" else None


def rand_augment(
    canvas: Canvas, key: Tensor, magnitude: float = 9, deviation: float = 0.5, layers: int = 2, filter: str = "bicubic"
) -> Changed:
    """`rand-m9-mstd0.5-inc1`: `layers` operations with replacement out of 15, each with probability 0.5, magnitudes N(m, std)."""
    names = [f"rand.{layer}" for layer in range(layers)]
    operations = torch.cat([integers(key, f"{name}.operation", len(OPERATIONS)) for name in names], 1)
    some = torch.stack([chance(key, f"{name}.apply", 0.5) for name in names], 1)
    operations = torch.where(some, operations, NONE)
    strengths = torch.cat([normal(key, f"{name}.magnitude") for name in names], 1)
    strengths = (magnitude + deviation * strengths).clamp(0, 10)
    values = arguments(INCREASING, operations, strengths, random_signs(key, names))
    return apply_layers(canvas, operations, values, [random_cubic(key, name, filter) for name in names])


def trivial_augment(canvas: Canvas, key: Tensor, filter: str = "bicubic") -> Changed:
    """One operation out of all (or none) at a uniformly drawn strength."""
    operations = integers(key, "trivial.operation", len(OPERATIONS) + 1)
    strengths = between(key, "trivial.magnitude", 0.0, 10.0)[:, None]
    values = arguments(INCREASING, operations, strengths, random_signs(key, ["trivial"]))
    return apply_layers(canvas, operations, values, [random_cubic(key, "trivial", filter)])


# The 25 sub-policies for ImageNet: (operation, probability, level 0..9) twice.
AUTO = (
    (("posterize", 0.4, 8), ("rotate", 0.6, 9)),
    (("solarize", 0.6, 5), ("autocontrast", 0.6, 5)),
    (("equalize", 0.8, 8), ("equalize", 0.6, 3)),
    (("posterize", 0.6, 7), ("posterize", 0.6, 6)),
    (("equalize", 0.4, 7), ("solarize", 0.2, 4)),
    (("equalize", 0.4, 4), ("rotate", 0.8, 8)),
    (("solarize", 0.6, 3), ("equalize", 0.6, 7)),
    (("posterize", 0.8, 5), ("equalize", 1.0, 2)),
    (("rotate", 0.2, 3), ("solarize", 0.6, 8)),
    (("equalize", 0.6, 8), ("posterize", 0.4, 6)),
    (("rotate", 0.8, 8), ("saturation", 0.4, 0)),
    (("rotate", 0.4, 9), ("equalize", 0.6, 2)),
    (("equalize", 0.0, 7), ("equalize", 0.8, 8)),
    (("invert", 0.6, 4), ("equalize", 1.0, 8)),
    (("saturation", 0.6, 4), ("contrast", 1.0, 8)),
    (("rotate", 0.8, 8), ("saturation", 1.0, 2)),
    (("saturation", 0.8, 8), ("solarize", 0.8, 7)),
    (("sharpness", 0.4, 7), ("invert", 0.6, 8)),
    (("shear_x", 0.6, 5), ("equalize", 1.0, 9)),
    (("saturation", 0.4, 0), ("equalize", 0.6, 3)),
    (("equalize", 0.4, 7), ("solarize", 0.2, 4)),
    (("solarize", 0.6, 5), ("autocontrast", 0.6, 5)),
    (("invert", 0.6, 4), ("equalize", 1.0, 8)),
    (("saturation", 0.6, 4), ("contrast", 1.0, 8)),
    (("equalize", 0.8, 8), ("equalize", 0.6, 3)),
)


def auto_augment(canvas: Canvas, key: Tensor, filter: str = "bicubic") -> Changed:
    """One of the learned pairs of operations, at its own probabilities and levels."""
    names = ["auto.0", "auto.1"]
    rows = [(NUMBER[operation], probability, level) for pair in AUTO for operation, probability, level in pair]
    policy = 2 * integers(key, "auto.policy", len(AUTO)) + torch.arange(2, device=key.device)
    operations, probabilities, levels = look_up(rows, policy)
    some = torch.cat([uniform(key, f"{name}.apply") for name in names], 1) < probabilities
    operations = torch.where(some, operations.long(), NONE)
    values = arguments(ORIGINAL, operations, levels, random_signs(key, names))
    return apply_layers(canvas, operations, values, [random_cubic(key, name, filter) for name in names])


def three_augment(canvas: Canvas, key: Tensor) -> Tensor:
    """DeiT III's choice: grey, solarize or blur."""
    which = integers(key, "three", 3)[:, 0]
    sigma = between(key, "three.blur", 0.1, 2.0) * (which == 2)
    pixels = passes_for(canvas.pixels).blur(canvas.pixels, canvas.sizes, sigma)
    # Grey is no saturation at all.
    number, value = look_up([(NUMBER["saturation"], 0.0), (NUMBER["solarize"], 128.0), (NONE, 0.0)], which)
    return apply_layer(canvas._replace(pixels=pixels), Layer(number.long(), value))


def apply_some(canvas: Canvas, some: Tensor, operation: str, value: float) -> Tensor:
    """One operation with one argument, on the images `some` [B]."""
    number = torch.where(some, NUMBER[operation], NONE)
    return apply_layer(canvas, Layer(number, torch.full_like(number, value, dtype=torch.float32)))


def color_jitter(
    canvas: Canvas, key: Tensor, brightness: float, contrast: float, saturation: float, *, some: Tensor | None = None
) -> Tensor:
    """Brightness, contrast and saturation in a random order per image, factors 1 +- the strength; `some` [B]: only those."""
    names = ("brightness", "contrast", "saturation")
    strengths = (brightness, contrast, saturation)
    factors = [between(key, f"jitter.{name}", max(0.0, 1 - s), 1 + s) for name, s in zip(names, strengths, strict=True)]
    order = uniform(key, "jitter.order", 3).argsort(1)
    (operations,) = look_up([(NUMBER[name],) for name in names], order)
    operations = operations.long() if some is None else torch.where(some[:, None], operations.long(), NONE)
    values = torch.stack(factors, 1).gather(1, order)
    return apply_layers(canvas, operations, values, [None] * 3).pixels
