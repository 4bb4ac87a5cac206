"""Policies: which colour and shape operations a picture gets, and how strongly.

A layer of a policy is one operation per picture out of a list. Pillow's operations fall into a table of values, a saturation, a
sharpness and a warp; each picture fills in the one it drew and leaves the others neutral, so a batch is done in four passes
whatever was drawn, without asking the device what it was.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.data.augment import colour
from vitrail.data.augment.warp import rotation, shear_and_shift, warp
from vitrail.data.randomness import between, bits, chance, integers, normal, uniform

# The order in which timm's "increasing" RandAugment lists them.
OPERATIONS = (
    "autocontrast",
    "equalise",
    "invert",
    "rotate",
    "posterise",
    "solarise",
    "solarise_add",
    "saturation",
    "contrast",
    "brightness",
    "sharpness",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
)
FILL = (124, 116, 104)  # the rounded ImageNet mean


class Warped(NamedTuple):
    """Pictures after some operations, and where their pixels came from."""

    pixels: Tensor  # uint8 [B, 3, height, width]
    matrix: Tensor  # [B, 3, 3], output place to input place, pixel centres at .5

    def then(self, other: "Warped") -> "Warped":
        return Warped(other.pixels, self.matrix @ other.matrix)


def unchanged(pixels: Tensor) -> Warped:
    return Warped(pixels, torch.eye(3, device=pixels.device).expand(len(pixels), 3, 3))


@dataclass(frozen=True)
class Strength:
    """The argument of each operation for a magnitude [B] in 0..10, with a random sign [B] where one is meant."""

    magnitude: Tensor
    sign: Tensor

    def argument(self, operation: str) -> Tensor:
        share = self.magnitude / 10
        match operation:
            case "rotate":
                return self.sign * 30 * share
            case "posterise":
                return 4 - (4 * share).floor()
            case "solarise":
                return 256 - (256 * share).floor()
            case "solarise_add":
                return (110 * share).floor()
            case "saturation" | "contrast" | "brightness" | "sharpness":
                return 1 + self.sign * 0.9 * share
            case "shear_x" | "shear_y":
                return self.sign * 0.3 * share
            case "translate_x" | "translate_y":
                return self.sign * 0.45 * share
        return self.magnitude  # the rest has no strength


class OriginalStrength(Strength):
    """AutoAugment's own levels, where more is not always stronger."""

    def argument(self, operation: str) -> Tensor:
        share = self.magnitude / 10
        match operation:
            case "posterise":
                return 4 + (4 * share).floor()
            case "solarise":
                return (256 * share).floor()
            case "saturation" | "contrast" | "brightness" | "sharpness":
                return 0.1 + 1.8 * share
        return super().argument(operation)


def apply_operations(pixels: Tensor, chosen: Tensor, names: tuple[str, ...], arguments: list[Tensor]) -> Warped:
    """One operation per picture: `chosen` [B] indexes `names` (len(names): none); `arguments[i]` [B] belongs to `names[i]`."""
    height, width = pixels.shape[-2:]
    counts = colour.histogram(pixels) if {"autocontrast", "equalise"} & set(names) else None
    table = colour.ramp(pixels).to(torch.uint8).expand(len(pixels), 3, 256)
    one, zero = torch.ones(len(pixels), device=pixels.device), torch.zeros(len(pixels), device=pixels.device)
    factors = {"saturation": one, "sharpness": one}
    matrix = shear_and_shift(zero, zero, zero, zero)
    for place, (name, value) in enumerate(zip(names, arguments, strict=True)):
        mine = chosen == place
        if name in factors:
            factors[name] = torch.where(mine, value, factors[name])
        elif name == "rotate":
            matrix = torch.where(mine[:, None, None], rotation(value, height, width), matrix)
        elif name in ("shear_x", "shear_y", "translate_x", "translate_y"):
            shears = {"shear_x": zero, "shear_y": zero, "translate_x": zero, "translate_y": zero}
            shears[name] = value * {"translate_x": width, "translate_y": height}.get(name, 1)
            matrix = torch.where(mine[:, None, None], shear_and_shift(*shears.values()), matrix)
        else:
            table = torch.where(mine[:, None, None], make_table(name, pixels, value, counts), table)
    pixels = colour.apply_table(pixels, table)
    for name, operation in (("saturation", colour.saturation), ("sharpness", colour.sharpness)):
        if name in names:
            pixels = operation(pixels, factors[name])
    if {"rotate", "shear_x", "shear_y", "translate_x", "translate_y"} & set(names):
        pixels = warp(pixels, matrix, torch.tensor(FILL, device=pixels.device))
    return Warped(pixels, square(matrix))


def square(matrix: Tensor) -> Tensor:
    """[B, 2, 3] to [B, 3, 3]."""
    return torch.cat([matrix, matrix.new_tensor([0.0, 0.0, 1.0]).expand(len(matrix), 1, 3)], 1)


def make_table(name: str, pixels: Tensor, value: Tensor, counts: Tensor | None) -> Tensor:
    match name:
        case "autocontrast":
            assert counts is not None
            return colour.autocontrast_table(counts)
        case "equalise":
            assert counts is not None
            return colour.equalise_table(counts)
        case "invert":
            return colour.invert_table(value)
        case "posterise":
            return colour.posterise_table(value)
        case "solarise":
            return colour.solarise_table(value)
        case "solarise_add":
            return colour.solarise_add_table(value)
        case "contrast":
            return colour.contrast_table(pixels, value)
        case "brightness":
            return colour.brightness_table(value)
    raise ValueError(f"unknown operation {name!r}")


def rand_augment(pixels: Tensor, key: Tensor, magnitude: float = 9, deviation: float = 0.5, layers: int = 2) -> Warped:
    """`rand-m9-mstd0.5-inc1`: `layers` operations with replacement out of 15, each with probability 0.5, magnitudes N(m, std)."""
    done = unchanged(pixels)
    for layer in range(layers):
        name = f"rand.{layer}"
        chosen = integers(key, f"{name}.operation", len(OPERATIONS))[:, 0]
        chosen = torch.where(chance(key, f"{name}.apply", 0.5), chosen, len(OPERATIONS))
        strength = Strength((magnitude + deviation * normal(key, f"{name}.magnitude")[:, 0]).clamp(0, 10), random_sign(key, name))
        arguments = [strength.argument(operation) for operation in OPERATIONS]
        done = done.then(apply_operations(done.pixels, chosen, OPERATIONS, arguments))
    return done


def random_sign(key: Tensor, name: str) -> Tensor:
    return 1.0 - 2.0 * (bits(key, f"{name}.sign", 1)[:, 0] & 1)


def trivial_augment(pixels: Tensor, key: Tensor) -> Warped:
    """One operation out of all (or none) at a uniformly drawn strength."""
    chosen = integers(key, "trivial.operation", len(OPERATIONS) + 1)[:, 0]
    strength = Strength(between(key, "trivial.magnitude", 0.0, 10.0), random_sign(key, "trivial"))
    return apply_operations(pixels, chosen, OPERATIONS, [strength.argument(operation) for operation in OPERATIONS])


# The 25 sub-policies for ImageNet: (operation, probability, level 0..9) twice.
AUTO = (
    (("posterise", 0.4, 8), ("rotate", 0.6, 9)),
    (("solarise", 0.6, 5), ("autocontrast", 0.6, 5)),
    (("equalise", 0.8, 8), ("equalise", 0.6, 3)),
    (("posterise", 0.6, 7), ("posterise", 0.6, 6)),
    (("equalise", 0.4, 7), ("solarise", 0.2, 4)),
    (("equalise", 0.4, 4), ("rotate", 0.8, 8)),
    (("solarise", 0.6, 3), ("equalise", 0.6, 7)),
    (("posterise", 0.8, 5), ("equalise", 1.0, 2)),
    (("rotate", 0.2, 3), ("solarise", 0.6, 8)),
    (("equalise", 0.6, 8), ("posterise", 0.4, 6)),
    (("rotate", 0.8, 8), ("saturation", 0.4, 0)),
    (("rotate", 0.4, 9), ("equalise", 0.6, 2)),
    (("equalise", 0.0, 7), ("equalise", 0.8, 8)),
    (("invert", 0.6, 4), ("equalise", 1.0, 8)),
    (("saturation", 0.6, 4), ("contrast", 1.0, 8)),
    (("rotate", 0.8, 8), ("saturation", 1.0, 2)),
    (("saturation", 0.8, 8), ("solarise", 0.8, 7)),
    (("sharpness", 0.4, 7), ("invert", 0.6, 8)),
    (("shear_x", 0.6, 5), ("equalise", 1.0, 9)),
    (("saturation", 0.4, 0), ("equalise", 0.6, 3)),
    (("equalise", 0.4, 7), ("solarise", 0.2, 4)),
    (("solarise", 0.6, 5), ("autocontrast", 0.6, 5)),
    (("invert", 0.6, 4), ("equalise", 1.0, 8)),
    (("saturation", 0.6, 4), ("contrast", 1.0, 8)),
    (("equalise", 0.8, 8), ("equalise", 0.6, 3)),
)


def auto_augment(pixels: Tensor, key: Tensor) -> Warped:
    """One of the learned pairs of operations, at its own probabilities and levels."""
    policy = integers(key, "auto.policy", len(AUTO))[:, 0]
    done = unchanged(pixels)
    for layer in (0, 1):
        rows = [OPERATIONS.index(pair[layer][0]) for pair in AUTO]
        chosen = torch.tensor(rows, device=pixels.device)[policy]
        probability = torch.tensor([pair[layer][1] for pair in AUTO], device=pixels.device)[policy]
        level = torch.tensor([float(pair[layer][2]) for pair in AUTO], device=pixels.device)[policy]
        chosen = torch.where(uniform(key, f"auto.{layer}.apply")[:, 0] < probability, chosen, len(OPERATIONS))
        strength = OriginalStrength(level, random_sign(key, f"auto.{layer}"))
        arguments = [strength.argument(operation) for operation in OPERATIONS]
        done = done.then(apply_operations(done.pixels, chosen, OPERATIONS, arguments))
    return done


def three_augment(pixels: Tensor, which: Tensor) -> Tensor:
    """DeiT III's choice after the crop: grey (which = 0) or solarise (1); the blur (2) is part of the crop's matrices."""
    solarised = torch.where(pixels < 128, pixels, 255 - pixels)
    which = which[:, None, None, None]
    return torch.where(which == 0, colour.grey(pixels), torch.where(which == 1, solarised, pixels))


def colour_jitter(pixels: Tensor, key: Tensor, brightness: float, contrast: float, saturation: float) -> Tensor:
    """Brightness, contrast and saturation in a random order per picture, factors 1 +- the strength."""
    names = ("brightness", "contrast", "saturation")
    strengths = (brightness, contrast, saturation)
    factors = [between(key, f"jitter.{name}", max(0.0, 1 - s), 1 + s) for name, s in zip(names, strengths, strict=True)]
    order = uniform(key, "jitter.order", 3).argsort(1)
    for turn in range(3):
        pixels = apply_operations(pixels, order[:, turn], names, factors).pixels
    return pixels
