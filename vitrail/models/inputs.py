"""Checks of the input of a model."""

from typing import Any

import torch
from torch import Tensor

from vitrail.errors import UserError
from vitrail.layers.layout import Grid
from vitrail.models.config import Architecture

FIXED_GRID = ("linear", "mlp", "class_mlp")  # mixers and poolings with weights for each patch
MAX_PIXELS, MAX_PATCHES = 1 << 22, 1 << 13  # of an image, whose size is a setting of an untrusted file


def has_fixed_grid(a: Architecture) -> bool:
    """Whether the model has weights for each patch, so that it takes images of one size until it is resized."""
    return a.mixer in FIXED_GRID or a.pooling in FIXED_GRID


def check_input_size(size: tuple[int, int], patch_size: int, name: str) -> None:
    """Raise UserError if one image would need too much time and memory; `patch_size` 0: the network has no patches."""
    height, width = size
    patches = -(-height // patch_size) * -(-width // patch_size) if patch_size else 0
    if height * width > MAX_PIXELS or patches > MAX_PATCHES:
        raise UserError(
            f"{name} has inputs of {height} x {width} pixels; at most {MAX_PIXELS:,} pixels and {MAX_PATCHES:,} patches are "
            "supported: give weights for smaller images, or a smaller size."
        )


def check_input(
    image: Any, a: Architecture, stem: Any, grid: Grid, name: str = "the images", resize_hint: str = "of the model first"
) -> None:
    """Raise UserError if a model with this stem and patch grid cannot process the images.

    Values are not checked, which would synchronize with the device. `resize_hint` names the model whose `resize` to call.
    """
    if not isinstance(image, Tensor) or image.ndim != 4 or image.shape[1] != a.channels:
        got = f"one of shape {tuple(image.shape)}" if isinstance(image, Tensor) else f"a {type(image).__name__}"
        hint = ""
        if isinstance(image, Tensor) and image.ndim == 3 and len(image) == a.channels:
            hint = "; a single image is image[None]"
        elif isinstance(image, Tensor) and image.ndim == 4 and image.shape[-1] == a.channels:
            hint = "; image.permute(0, 3, 1, 2) has the channels first"
        raise UserError(f"{name} must be a tensor [batch, {a.channels}, height, width], not {got}{hint}.")
    if not image.is_floating_point():
        raise UserError(
            f"{name} must be floating-point, not {image.dtype}; divide pixels by 255 and normalize them with the model's "
            "preprocessing.mean and preprocessing.std."
        )
    height, width = image.shape[-2:]
    rows, columns = stem.grid(height, width)
    if min(rows, columns) < 1:
        raise UserError(f"images of {height} x {width} pixels are smaller than a patch of {a.patch_size}; use larger images.")
    if (rows, columns) != grid and has_fixed_grid(a):
        raise UserError(
            f"images of {height} x {width} pixels have {rows} x {columns} patches, and this model is for a grid of "
            f"{grid[0]} x {grid[1]}; call resize({height}, {width}) {resize_hint}."
        )


def check_weights_match(image: Tensor, stem: Any) -> None:
    """Raise UserError if images and weights differ in device or, without autocast, in precision."""
    weight = next(iter(stem.parameters()), None)
    if weight is None or (weight.device, weight.dtype) == (image.device, image.dtype):
        return
    if weight.device != image.device:
        raise UserError(f"the images are on {image.device} and the model is on {weight.device}; move one of them with .to(…).")
    kind = image.device.type
    if kind == "meta" or (torch.is_autocast_enabled(kind) and torch.float64 not in (image.dtype, weight.dtype)):
        return
    raise UserError(f"the images are {image.dtype} and the weights {weight.dtype}; convert the images with .to({weight.dtype}).")
