"""The precision of a training: bfloat16 only where the device has instructions for it."""

import dataclasses
from collections.abc import Collection

import torch

from vitrail.devices import has_bfloat16
from vitrail.recipes.schema import Recipe


def choose_precision(recipe: Recipe, device: torch.device, overrides: Collection[str] = ()) -> tuple[Recipe, list[str]]:
    """The recipe with bf16 replaced if the device has no bfloat16, and messages about it.

    A precision that the user set (`overrides` are the recipe keys that were set) is kept.
    """
    if recipe.precision != "bf16" or "precision" in overrides or has_bfloat16(device):
        return recipe, []
    if device.type == "cuda":
        return dataclasses.replace(recipe, precision="fp16"), ["this GPU has no bfloat16 instructions: using float16"]
    return dataclasses.replace(recipe, precision="fp32"), ["this CPU has no bfloat16 instructions: using float32"]
