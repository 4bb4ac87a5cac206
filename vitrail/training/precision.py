"""In which precision a machine computes: bfloat16 is quick where there are instructions for its products, and slow elsewhere."""

import dataclasses
from collections.abc import Collection

import torch

from vitrail.recipes.schema import Recipe


def has_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies in bfloat16 itself; others imitate it, up to fifteen times slower than float32."""
    if device.type == "cuda":
        return bool(torch.version.hip) or torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.backends.mkldnn.is_available() and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def suited(recipe: Recipe, device: torch.device, said: Collection[str] = ()) -> tuple[Recipe, list[str]]:
    """The recipe in a precision that suits the device, and a sentence if it is another; one that the user has `said` stays."""
    if recipe.precision != "bf16" or "precision" in said or has_bfloat16(device):
        return recipe, []
    if device.type == "cuda":
        return dataclasses.replace(recipe, precision="fp16"), ["this GPU does not multiply in bfloat16: computing in float16"]
    return dataclasses.replace(recipe, precision="fp32"), ["this processor does not multiply in bfloat16: computing in float32"]
