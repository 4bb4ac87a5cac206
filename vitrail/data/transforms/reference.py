"""The passes over the pixels of a batch in plain torch, the reference; `kernels` has the same four for GPUs.

A pass does one kind of thing to every image, with parameters of its own; here, image by image or to those alike together.
Images lie in the upper left corners of a common canvas; `sizes` [B, 2] are their heights and widths. What lies beyond an image
is neither read nor worth reading afterwards.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.data.rng import scramble
from vitrail.data.transforms import color
from vitrail.data.transforms.affine import mirrored, rotation, warp
from vitrail.data.transforms.crops import View
from vitrail.data.transforms.resize import axis_taps, blur_taps, resample

# What a layer can do to an image, in the order in which timm's "increasing" RandAugment lists it. Those that are neither
# saturation nor sharpness nor warps map a value to a value.
OPERATIONS = (
    "autocontrast",
    "equalize",
    "invert",
    "rotate",
    "posterize",
    "solarize",
    "solarize_add",
    "saturation",
    "contrast",
    "brightness",
    "sharpness",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
)
NUMBER = {name: number for number, name in enumerate(OPERATIONS)}
NONE = len(OPERATIONS)  # the number of no operation
WARPS = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
FILL = (124, 116, 104)  # the rounded ImageNet mean, where a warp finds nothing


class Layer(NamedTuple):
    """One operation per image."""

    operation: Tensor  # int64 [B], by number
    value: Tensor  # float32 [B]: its argument (a factor, a threshold, bits, degrees, a share of a side, ...)
    flip: Tensor | None = None  # bool [B]: those whose warp means the image turned round left to right; None: no image
    cubic: Tensor | None = None  # bool [B]: warps are bicubic, else bilinear; None: all bicubic

    def matrix(self, sizes: Tensor) -> Tensor:
        """Output to input places [B, 2, 3] in images of `sizes` [B, 2], the identity where no warp was drawn."""
        degrees, shear_x, shear_y, share_x, share_y = (self.value * (self.operation == NUMBER[name]) for name in WARPS)
        height, width = sizes.unbind(1)
        still = torch.zeros_like(degrees)
        moves = torch.stack([still, shear_x, share_x * width, shear_y, still, share_y * height], 1)
        matrix = rotation(degrees, height, width) + moves.unflatten(1, (2, 3))
        return matrix if self.flip is None else torch.where(self.flip[:, None, None], mirrored(matrix, width), matrix)

    def of(self, some: Tensor) -> "Layer":
        return Layer(*(None if drawn is None else drawn[some] for drawn in self))  # type: ignore[arg-type]


def render(pixels: Tensor, view: View, filter: str, cubic: Tensor | None) -> Tensor:
    """What the views see: uint8 [B, 3, H, W] to uint8 [B, 3, out, out]; `cubic` [B] belongs to the filter "random"."""
    height, width = pixels.shape[-2:]
    wide = resample(pixels, axis_taps(view.columns, width, filter, cubic), 3)
    return resample(wide, axis_taps(view.rows, height, filter, cubic), 2)


def blur(pixels: Tensor, sizes: Tensor, sigma: Tensor) -> Tensor:
    """Gaussian blur with sigma [B] (0: none; at most 2) of uint8 [B, 3, H, W], whole numbers between its two directions."""
    done, some = pixels.clone(), sigma.nonzero()[:, 0]
    if not len(some):
        return done
    columns, rows = (blur_taps(sigma[some], sizes[some, dim - 2], pixels.shape[dim]) for dim in (3, 2))
    done[some] = resample(resample(pixels[some], columns, 3), rows, 2)
    return done


def operate(pixels: Tensor, sizes: Tensor, layer: Layer) -> Tensor:
    """One operation per image on uint8 [B, 3, H, W]."""
    done = pixels.clone()
    for number in layer.operation.unique().tolist():
        if number != NONE:
            some = (layer.operation == number).nonzero()[:, 0]
            done[some] = apply_operation(OPERATIONS[number], pixels[some], sizes[some], layer.of(some))
    return done


def apply_operation(name: str, pixels: Tensor, sizes: Tensor, layer: Layer) -> Tensor:
    """The same operation on every image, each with its own argument."""
    value = layer.value
    match name:
        case "saturation":
            return color.saturation(pixels, value)
        case "sharpness":
            return color.sharpness(pixels, value, sizes)
        case "autocontrast":
            table = color.autocontrast_table(color.histogram(pixels, sizes)[:, :3])
        case "equalize":
            table = color.equalize_table(color.histogram(pixels, sizes)[:, :3])
        case "contrast":
            table = color.contrast_table(color.histogram(pixels, sizes), value)
        case "brightness":
            table = color.brightness_table(value)
        case "invert":
            table = color.invert_table(value)
        case "posterize":
            table = color.posterize_table(value)
        case "solarize":
            table = color.solarize_table(value)
        case "solarize_add":
            table = color.solarize_add_table(value)
        case _:
            fill, matrix = torch.tensor(FILL, device=pixels.device), layer.matrix(sizes)
            cubic = warp(pixels, matrix, fill, "bicubic", sizes)
            if layer.cubic is None:
                return cubic
            linear = warp(pixels, matrix, fill, "bilinear", sizes)
            return torch.where(layer.cubic[:, None, None, None], cubic, linear)
    return color.apply_table(pixels, table)


def finish(pixels: Tensor, mean: Sequence[float], std: Sequence[float], boxes: Tensor | None, key: Tensor) -> Tensor:
    """uint8 [B, 3, H, W] to normalized float32; noise in `boxes` [B, 4] (top, bottom, left, right)."""
    middle = torch.tensor(mean, device=pixels.device)[:, None, None] * 255
    spread = torch.tensor(std, device=pixels.device)[:, None, None] * 255
    images = (pixels.float() - middle) / spread
    for image, (top, bottom, left, right) in enumerate([] if boxes is None else boxes.tolist()):
        if bottom > top:
            box = (image, slice(None), slice(top, bottom), slice(left, right))
            images[box] = pixel_noise(images[image : image + 1], key[image : image + 1])[(0, *box[1:])]
    return images


def pixel_noise(images: Tensor, key: Tensor) -> Tensor:
    """Standard normal numbers for every value, keyed by image and place."""
    place = torch.arange(images[0].numel(), device=images.device).reshape(images.shape[1:])
    first = scramble(scramble(key[:, None, None, None] + place * 2) ^ 0x5BD1E995)
    second = scramble(first + 0x9E3779B9)
    radius = torch.sqrt(-2.0 * torch.log1p(-(first >> 8).float() * 2.0**-24))
    return radius * torch.cos(2.0 * math.pi * (second >> 8).float() * 2.0**-24)
