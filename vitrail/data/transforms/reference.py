"""Reference implementation of the pixel operations in plain torch: crop_resize, blur, apply_operations, normalize.

`kernels` implements the same four functions for GPUs. Every image of a batch has its own parameters. Images are padded at the
bottom and on the right to a common size; `sizes` [B, 2] are their heights and widths. The padding is not read, and its values
in the output are undefined.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.data.rng import hash32
from vitrail.data.transforms import color
from vitrail.data.transforms.affine import mirror_warp, rotation, warp
from vitrail.data.transforms.config import NO_ANTIALIAS
from vitrail.data.transforms.crops import View
from vitrail.data.transforms.resize import axis_taps, blur_taps, resample, resize_without_antialias

# The operations of a policy, in the order of timm's "increasing" RandAugment. All except saturation, sharpness and the warps are
# lookup tables.
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
OPERATION_INDEX = {name: index for index, name in enumerate(OPERATIONS)}
IDENTITY = len(OPERATIONS)  # index of "no operation"
WARPS = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
FILL = (124, 116, 104)  # the rounded ImageNet mean, outside of the image


class Layer(NamedTuple):
    """One operation per image."""

    operation: Tensor  # int64 [B], index in `OPERATIONS`, or `IDENTITY`
    value: Tensor  # float32 [B]: its argument (a factor, a threshold, bits, degrees, a fraction of a side, ...)
    flip: Tensor | None = None  # bool [B]: the warp applies to the horizontally flipped image; None: to no image
    cubic: Tensor | None = None  # bool [B]: the warp is bicubic, else bilinear; None: all bicubic

    def matrix(self, sizes: Tensor) -> Tensor:
        """Matrices from output to input pixels, float64 [B, 2, 3], of images of `sizes` [B, 2]; the identity without a warp."""
        value = self.value.double()
        degrees, shear_x, shear_y, shift_x, shift_y = (value * (self.operation == OPERATION_INDEX[name]) for name in WARPS)
        height, width = sizes.unbind(1)
        zeros = torch.zeros_like(degrees)
        offsets = torch.stack([zeros, shear_x, shift_x * width, shear_y, zeros, shift_y * height], 1)
        matrix = rotation(degrees, height, width) + offsets.unflatten(1, (2, 3))
        return matrix if self.flip is None else torch.where(self.flip[:, None, None], mirror_warp(matrix, width), matrix)

    def select(self, rows: Tensor) -> "Layer":
        return Layer(*(None if values is None else values[rows] for values in self))  # type: ignore[arg-type]


def crop_resize(pixels: Tensor, view: View, filter: str, cubic: Tensor | None) -> Tensor:
    """Crop and resize uint8 [B, 3, H, W] to uint8 [B, 3, out, out]; `cubic` [B] is used with the filter "random".

    The result of the filter "bilinear_no_antialias" is float32.
    """
    if filter == NO_ANTIALIAS:
        return resize_without_antialias(pixels, view)
    height, width = pixels.shape[-2:]
    horizontal = resample(pixels, axis_taps(view.columns, width, filter, cubic), 3)
    return resample(horizontal, axis_taps(view.rows, height, filter, cubic), 2)


def blur(pixels: Tensor, sizes: Tensor, sigma: Tensor) -> Tensor:
    """Gaussian blur of uint8 [B, 3, H, W] with sigma [B] (0: none; at most 2), rounded to uint8 after each direction."""
    out, blurred = pixels.clone(), sigma.nonzero()[:, 0]
    if not len(blurred):
        return out
    columns, rows = (blur_taps(sigma[blurred], sizes[blurred, dim - 2], pixels.shape[dim]) for dim in (3, 2))
    out[blurred] = resample(resample(pixels[blurred], columns, 3), rows, 2)
    return out


def apply_operations(pixels: Tensor, sizes: Tensor, layer: Layer) -> Tensor:
    """Apply one operation per image to uint8 [B, 3, H, W]."""
    out = pixels.clone()
    for index in layer.operation.unique().tolist():
        if index != IDENTITY:
            rows = (layer.operation == index).nonzero()[:, 0]
            out[rows] = apply_operation(OPERATIONS[index], pixels[rows], sizes[rows], layer.select(rows))
    return out


def apply_operation(name: str, pixels: Tensor, sizes: Tensor, layer: Layer) -> Tensor:
    """Apply the same operation to every image, each with its own argument."""
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
            if layer.cubic is None:
                return warp(pixels, matrix, fill, "bicubic", sizes)
            out = pixels.clone()
            for filter, selected in (("bicubic", layer.cubic), ("bilinear", ~layer.cubic)):
                rows = selected.nonzero()[:, 0]
                out[rows] = warp(pixels[rows], matrix[rows], fill, filter, sizes[rows])
            return out
    return color.apply_table(pixels, table)


def normalize(pixels: Tensor, mean: Sequence[float], std: Sequence[float], boxes: Tensor | None, key: Tensor) -> Tensor:
    """Normalize uint8 or float32 [B, 3, H, W] to float32 and fill `boxes` [B, 4] (top, bottom, left, right) with noise."""
    center = torch.tensor(mean, device=pixels.device)[:, None, None] * 255
    scale = torch.tensor(std, device=pixels.device)[:, None, None] * 255
    images = (pixels.float() - center) / scale
    for image, (top, bottom, left, right) in enumerate([] if boxes is None else boxes.tolist()):
        if bottom > top:
            box = (image, slice(None), slice(top, bottom), slice(left, right))
            images[box] = pixel_noise(images[image : image + 1], key[image : image + 1])[(0, *box[1:])]
    return images


def pixel_noise(images: Tensor, key: Tensor) -> Tensor:
    """Standard normal numbers for every value of images [B, 3, H, W], keyed by image and position."""
    position = torch.arange(images[0].numel(), device=images.device).reshape(images.shape[1:])
    first = hash32(hash32(key[:, None, None, None] + position * 2) ^ 0x5BD1E995)
    second = hash32(first + 0x9E3779B9)
    radius = torch.sqrt(-2.0 * torch.log1p(-(first >> 8).float() * 2.0**-24))
    return radius * torch.cos(2.0 * math.pi * (second >> 8).float() * 2.0**-24)
