"""Masked patch prediction: corrupt patch embeddings, and predict the content of patches by a linear layer."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LEVELS = 8  # of each channel: 3 bits
COLORS = LEVELS**3


def corrupt_patches(patches: Tensor, mask_token: Tensor, masked: Tensor, source: Tensor) -> Tensor:
    """Patches [B, N, D], each replaced by the patch `source` [B, N], or by the mask token [D] where `masked` [B, N] is true."""
    patches = gather_patches(patches, source)
    return torch.where(masked[..., None], mask_token.to(patches.dtype), patches)


def gather_patches(values: Tensor, positions: Tensor) -> Tensor:
    """The values [B, N, D] of the patches `positions` [B, C]: [B, C, D]."""
    return values.gather(1, positions[..., None].expand(-1, -1, values.shape[-1]))


class LinearHead(nn.Module):
    """One linear layer."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, outputs)
        nn.init.trunc_normal_(self.linear.weight, std=0.02)
        nn.init.zeros_(self.linear.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [B, C, D] to predictions [B, C, outputs] in full precision."""
        out: Tensor = self.linear(tokens)
        return out.float() if out.dtype in (torch.bfloat16, torch.float16) else out


class ColorHead(LinearHead):
    """The colors of `cells` parts of a patch, in 512 classes."""

    def __init__(self, width: int, cells: int) -> None:
        super().__init__(width, cells * COLORS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [B, C, D] to logits [B, C, cells, 512]."""
        out: Tensor = super().forward(tokens).unflatten(-1, (-1, COLORS))
        return out

    def losses(self, logits: Tensor, colors: Tensor) -> Tensor:
        """The cross-entropy [B, C] with classes [B, C, cells], the mean over the parts of a patch."""
        return F.cross_entropy(logits.flatten(0, -2), colors.flatten(), reduction="none").view(colors.shape).mean(-1)


class PixelHead(LinearHead):
    """All values of the pixels of a patch."""

    def losses(self, values: Tensor, pixels: Tensor) -> Tensor:
        """The mean squared error [B, C] of values [B, C, K*P*P]."""
        return (values - pixels).square().mean(-1)
