"""Augmentation policies: RandAugment, TrivialAugment, AutoAugment, 3-Augment and color jitter.

A layer of a policy applies one operation per image (`reference.Layer`). All drawn parameters stay on the device.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.data.rng import bernoulli, normal, randint, random_bits, uniform, uniform_between
from vitrail.data.transforms import color
from vitrail.data.transforms.backend import backend_for
from vitrail.data.transforms.reference import IDENTITY, OPERATION_INDEX, OPERATIONS, Layer


class PaddedImages(NamedTuple):
    """A batch of padded images."""

    pixels: Tensor  # uint8 [B, 3, height, width]
    sizes: Tensor  # int64 [B, 2]: heights and widths without padding
    flip: Tensor | None = None  # bool [B]: operations apply to the horizontally flipped image (`Layer.flip`)


class PolicyOutput(NamedTuple):
    """The images after a policy, and its layers that may contain warps, in the order of application."""

    pixels: Tensor  # uint8 [B, 3, height, width]
    layers: tuple[Layer, ...] = ()


class Level(NamedTuple):
    """The argument of an operation at a magnitude in 0 ... 10: base + direction * size * magnitude / 10."""

    size: float = 0.0
    base: float = 0.0
    direction: float = 1.0
    integer: bool = False  # size * magnitude / 10 is truncated to an integer
    signed: bool = False  # the sign is random


ENHANCEMENTS = ("saturation", "contrast", "brightness", "sharpness")
INCREASING = dict.fromkeys(ENHANCEMENTS, Level(0.9, base=1.0, signed=True)) | {
    "rotate": Level(30.0, signed=True),
    "shear_x": Level(0.3, signed=True),
    "shear_y": Level(0.3, signed=True),
    "translate_x": Level(0.45, signed=True),
    "translate_y": Level(0.45, signed=True),
    "posterize": Level(4.0, base=4.0, direction=-1.0, integer=True),
    "solarize": Level(256.0, base=256.0, direction=-1.0, integer=True),
    "solarize_add": Level(110.0, integer=True),
}
# The original levels of AutoAugment, in which a higher level is not always stronger.
ORIGINAL = INCREASING | dict.fromkeys(ENHANCEMENTS, Level(1.8, base=0.1))
ORIGINAL |= {"posterize": Level(4.0, base=4.0, integer=True), "solarize": Level(256.0, integer=True)}
# The wide ranges of TrivialAugment: the authors' of posterize and solarize, torchvision's of the enhancements. Translations of
# up to 32 pixels are a fraction of 224 pixels here.
WIDE = INCREASING | dict.fromkeys(ENHANCEMENTS, Level(0.99, base=1.0, signed=True)) | {"rotate": Level(135.0, signed=True)}
WIDE |= dict.fromkeys(("shear_x", "shear_y"), Level(0.99, signed=True))
WIDE |= dict.fromkeys(("translate_x", "translate_y"), Level(32 / 224, signed=True))
WIDE |= {"posterize": Level(6.0, base=8.0, direction=-1.0, integer=True)}
# The 14 operations of TrivialAugment, one of which changes nothing.
TRIVIAL = (IDENTITY, *(index for name, index in OPERATION_INDEX.items() if name not in ("invert", "solarize_add")))


def arguments(levels: dict[str, Level], operation: Tensor, magnitude: Tensor, sign: Tensor) -> Tensor:
    """Arguments (float32) of the drawn operations at their magnitudes; all tensors have the same shape."""
    rows = [levels.get(name, Level()) for name in (*OPERATIONS, "none")]
    size, base, direction, integer, signed = gather_rows(rows, operation)
    amount = size * magnitude / 10  # in this order exact for the 31 magnitudes of TrivialAugment
    amount = torch.where(integer > 0, amount.floor(), amount)
    return base + direction * torch.where(signed > 0, sign * amount, amount)


def gather_rows(rows: Sequence[Sequence[float]], index: Tensor) -> tuple[Tensor, ...]:
    """The columns of a small table, float32, each gathered at `index`."""
    return table_on(index.device, tuple(tuple(row) for row in rows))[index].unbind(-1)


@cache
def table_on(device: torch.device, rows: tuple[tuple[float, ...], ...]) -> Tensor:
    """A small table on a device, copied once: a copy from the host in every call could not be captured in a CUDA graph."""
    return torch.tensor(rows, dtype=torch.float32).to(device, non_blocking=True)  # without synchronization


def apply_layer(images: PaddedImages, layer: Layer) -> Tensor:
    out: Tensor = backend_for(images.pixels).apply_operations(images.pixels, images.sizes, layer)
    return out


def apply_layers(images: PaddedImages, operations: Tensor, values: Tensor, cubics: list[Tensor | None]) -> PolicyOutput:
    """Apply L layers of operations [B, L] with arguments [B, L], one after the other."""
    drawn = zip(operations.T.contiguous(), values.T.contiguous(), cubics, strict=True)
    layers = [Layer(operation, value, images.flip, cubic) for operation, value, cubic in drawn]
    for layer in layers:
        images = images._replace(pixels=apply_layer(images, layer))
    return PolicyOutput(images.pixels, tuple(layers))


def random_signs(key: Tensor, names: list[str]) -> Tensor:
    """Random signs, +1 or -1, float32 [B, len(names)]."""
    return 1.0 - 2.0 * (torch.cat([random_bits(key, f"{name}.sign", 1) for name in names], 1) & 1)


def sample_cubic(key: Tensor, name: str, filter: str) -> Tensor | None:
    """For the filter "random", draw which images use bicubic interpolation, bool [B]; else None."""
    return bernoulli(key, f"{name}.filter", 0.5) if filter == "random" else None


def rand_augment(
    images: PaddedImages, key: Tensor, magnitude: float = 9, magnitude_std: float = 0.5, num_ops: int = 2, filter: str = "bicubic"
) -> PolicyOutput:
    """RandAugment as in timm (`rand-m9-mstd0.5-inc1`): `num_ops` of 15 operations, drawn with replacement.

    Each operation is applied with probability 0.5, with a magnitude drawn from N(magnitude, magnitude_std).
    """
    names = [f"rand.{layer}" for layer in range(num_ops)]
    operations = torch.cat([randint(key, f"{name}.operation", len(OPERATIONS)) for name in names], 1)
    applied = torch.stack([bernoulli(key, f"{name}.apply", 0.5) for name in names], 1)
    operations = torch.where(applied, operations, IDENTITY)
    magnitudes = torch.cat([normal(key, f"{name}.magnitude") for name in names], 1)
    magnitudes = (magnitude + magnitude_std * magnitudes).clamp(0, 10)
    values = arguments(INCREASING, operations, magnitudes, random_signs(key, names))
    return apply_layers(images, operations, values, [sample_cubic(key, name, filter) for name in names])


def trivial_augment(images: PaddedImages, key: Tensor, filter: str = "bicubic") -> PolicyOutput:
    """TrivialAugment with wide ranges: one of 14 operations at one of 31 magnitudes, all equally likely."""
    (operations,) = gather_rows([(index,) for index in TRIVIAL], randint(key, "trivial.operation", len(TRIVIAL)))
    operations, magnitudes = operations.long(), randint(key, "trivial.magnitude", 31) / 3
    values = arguments(WIDE, operations, magnitudes, random_signs(key, ["trivial"]))
    return apply_layers(images, operations, values, [sample_cubic(key, "trivial", filter)])


# The 25 sub-policies of AutoAugment for ImageNet: two (operation, probability, level 0 ... 9) each.
AUTO_AUGMENT = (
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


def auto_augment(images: PaddedImages, key: Tensor, filter: str = "bicubic") -> PolicyOutput:
    """AutoAugment: one of the 25 sub-policies."""
    names = ["auto.0", "auto.1"]
    rows = [(OPERATION_INDEX[operation], probability, level) for pair in AUTO_AUGMENT for operation, probability, level in pair]
    policy = 2 * randint(key, "auto.policy", len(AUTO_AUGMENT)) + torch.arange(2, device=key.device)
    operations, probabilities, levels = gather_rows(rows, policy)
    applied = torch.cat([uniform(key, f"{name}.apply") for name in names], 1) < probabilities
    operations = torch.where(applied, operations.long(), IDENTITY)
    values = arguments(ORIGINAL, operations, levels, random_signs(key, names))
    return apply_layers(images, operations, values, [sample_cubic(key, name, filter) for name in names])


def three_augment(images: PaddedImages, key: Tensor) -> Tensor:
    """3-Augment of DeiT III: grayscale, solarize or blur."""
    choice = randint(key, "three", 3)[:, 0]
    sigma = uniform_between(key, "three.blur", 0.1, 2.0) * (choice == 2)
    pixels = backend_for(images.pixels).blur(images.pixels, images.sizes, sigma)
    # Grayscale is a saturation of 0.
    operation, value = gather_rows(
        [(OPERATION_INDEX["saturation"], 0.0), (OPERATION_INDEX["solarize"], 128.0), (IDENTITY, 0.0)], choice
    )
    return apply_layer(images._replace(pixels=pixels), Layer(operation.long(), value))


def apply_masked(images: PaddedImages, selected: Tensor, operation: str, value: float) -> Tensor:
    """Apply one operation with one argument to the images `selected` [B]."""
    index = torch.where(selected, OPERATION_INDEX[operation], IDENTITY)
    return apply_layer(images, Layer(index, torch.full_like(index, value, dtype=torch.float32)))


def color_jitter(images: PaddedImages, key: Tensor, strengths: tuple[float, float, float, float], selected: Tensor) -> Tensor:
    """Brightness, contrast, saturation and hue of the images `selected` [B], in random order per image.

    The first three of the four `strengths` are those of factors in 1 +- strength, the last one is the largest shift of the hue.
    """
    *others, max_shift = strengths
    names = ("brightness", "contrast", "saturation")
    factors = [uniform_between(key, f"jitter.{name}", max(0.0, 1 - s), 1 + s) for name, s in zip(names, others, strict=True)]
    draws = uniform(key, "jitter.order", 4)
    order = draws[:, :3].argsort(1)
    (operations,) = gather_rows([(OPERATION_INDEX[name],) for name in names], order)
    operations = torch.where(selected[:, None], operations.long(), IDENTITY)
    values = torch.stack(factors, 1).gather(1, order)
    if not max_shift:
        return apply_layers(images, operations, values, [None] * 3).pixels
    # The hue is shifted once for all images, between the operations before it and those after it.
    before = draws.gather(1, order) < draws[:, 3:]
    pixels = apply_layers(images, torch.where(before, operations, IDENTITY), values, [None] * 3).pixels
    shifted = color.hue(pixels, uniform_between(key, "jitter.hue", -max_shift, max_shift))
    images = images._replace(pixels=torch.where(selected[:, None, None, None], shifted, pixels))
    return apply_layers(images, torch.where(before, IDENTITY, operations), values, [None] * 3).pixels
