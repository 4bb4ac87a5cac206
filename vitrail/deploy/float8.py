"""Matrix products in float8 (e4m3), up to twice as fast as bfloat16 on Hopper GPUs and later.

Weights have one scale per output channel, inputs one per token, computed dynamically. Tensor cores accumulate in fewer bits than
float32.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.deploy.fold import Notes
from vitrail.deploy.folded_layers import FoldedAttention, FoldedFeedForward
from vitrail.models.vision_transformer import VisionTransformer

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
MIN_SCALE = 1e-12  # for rows that are all zero
MULTIPLE = 16  # tensor cores need input and output widths that are multiples of this


def has_fp8(device: torch.device) -> bool:
    """Whether the device has float8 products with one scale per row."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (9, 0)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [M, K] in float8, and their scales [M, 1]."""
    scale = x.abs().amax(1, keepdim=True).float().clamp_min(MIN_SCALE) / FP8_MAX
    return (x / scale).to(FP8), scale


class Float8Linear(nn.Module):
    """A linear layer [..., K] to [..., L], computed in float8; input and output are bfloat16."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight, scale = quantize_rows(layer.weight.detach().float())
        self.weight, self.scale = weight, scale.t().contiguous()  # [L, K] and [1, L]; not buffers, which .to(dtype) would cast
        self.bias: Tensor | None = None if layer.bias is None else layer.bias.detach().to(torch.bfloat16)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Float8Linear":
        """Move to another device; the dtypes never change."""
        device = fn(torch.empty(0, device=self.scale.device)).device
        self.weight, self.scale = self.weight.to(device), self.scale.to(device)
        self.bias = None if self.bias is None else self.bias.to(device)
        return self

    def stored(self) -> dict[str, Tensor]:
        return {"weight": self.weight, "scale": self.scale} | ({} if self.bias is None else {"bias": self.bias})

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.weight, self.scale, self.bias = tensors["weight"], tensors["scale"], tensors.get("bias")

    def forward(self, x: Tensor) -> Tensor:
        rows, scale = quantize_rows(x.flatten(0, -2))
        # The slower, more exact accumulation takes a third longer and is not needed here.
        options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": x.is_cuda}
        output = torch._scaled_mm(rows, self.weight.t(), scale, self.scale, self.bias, **options)
        return output.view(*x.shape[:-1], self.out_features)


def to_float8(backbone: VisionTransformer, notes: Notes) -> None:
    """Replace the large products in the blocks of a folded network."""
    count = skipped = 0
    for block in backbone.blocks:
        for part in block.modules():
            for name in products_of(part):
                layer = getattr(part, name)
                if layer.in_features % MULTIPLE or layer.out_features % MULTIPLE:
                    skipped += 1
                    continue
                setattr(part, name, Float8Linear(layer))
                count += 1
    notes.done["products in float8"] += count
    if skipped:
        notes.leave(f"{skipped} products stay in bfloat16: their widths are not multiples of {MULTIPLE}")


def products_of(part: nn.Module) -> tuple[str, ...]:
    """Names of the linear layers that are called as a whole; with `num_output_tokens`, the rows of `qkv` are used separately."""
    if isinstance(part, FoldedFeedForward):
        return ("fc1", "fc2")
    if isinstance(part, FoldedAttention):
        return ("proj",) if part.num_output_tokens else ("qkv", "proj")
    return ()
