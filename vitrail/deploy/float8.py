"""Products in floating point of eight bits (four for the exponent), twice the pace of bfloat16 on Hopper GPUs and later.

A weight matrix has a scale for each output, its inputs get one for each token as they come; sums are those of the matrix units,
in fewer bits than float32.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.deploy.fold import Notes
from vitrail.deploy.folded_layers import WideAttention, WideFeedForward
from vitrail.models.vision_transformer import VisionTransformer

CODE = torch.float8_e4m3fn
TOP = torch.finfo(CODE).max
LEAST = 1e-12  # a scale of rows that are all zero
MULTIPLE = 16  # of inputs and outputs, which the matrix units take


def can_multiply(device: torch.device) -> bool:
    """Whether there are such products with a scale for each row."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (9, 0)


def coded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [M, K] in eight bits and their scales [M, 1]."""
    scale = x.abs().amax(1, keepdim=True).float().clamp_min(LEAST) / TOP
    return (x / scale).to(CODE), scale


class Float8Linear(nn.Module):
    """A linear layer [..., K] to [..., L] in bfloat16, computed in eight bits."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight, scale = coded(layer.weight.detach().float())
        self.weight, self.scale = weight, scale.t().contiguous()  # [L, K] and [1, L]; no buffers, which a cast would ruin
        self.bias = None if layer.bias is None else layer.bias.detach().to(torch.bfloat16)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Float8Linear":
        """Goes where the weights go, and is never cast."""
        device = fn(torch.empty(0, device=self.scale.device)).device
        self.weight, self.scale = self.weight.to(device), self.scale.to(device)
        self.bias = None if self.bias is None else self.bias.to(device)
        return self

    def forward(self, x: Tensor) -> Tensor:
        rows, scale = coded(x.flatten(0, -2))
        # Matrix units that sum 128 products at a time before they round are slower by a third, and no answer needs them.
        options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": x.is_cuda}
        found = torch._scaled_mm(rows, self.weight.t(), scale, self.scale, self.bias, **options)
        return found.view(*x.shape[:-1], self.out_features)


def to_float8(trunk: VisionTransformer, notes: Notes) -> None:
    """The large products of a folded network's blocks."""
    count = left = 0
    for block in trunk.blocks:
        for part in block.modules():
            for name in products_of(part):
                layer = getattr(part, name)
                if layer.in_features % MULTIPLE or layer.out_features % MULTIPLE:
                    left += 1
                    continue
                setattr(part, name, Float8Linear(layer))
                count += 1
    notes.done["products in eight bits"] += count
    if left:
        notes.leave(f"{left} products in bfloat16: their widths are no multiples of {MULTIPLE}")


def products_of(part: nn.Module) -> tuple[str, ...]:
    """Names of the layers that are called as they are; where only some tokens are read, the rows of a matrix are taken apart."""
    if isinstance(part, WideFeedForward):
        return ("fc1", "fc2")
    if isinstance(part, WideAttention):
        return ("proj",) if part.only else ("qkv", "proj")
    return ()
