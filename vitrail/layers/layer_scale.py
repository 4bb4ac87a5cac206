"""Residual scales: what a branch is multiplied by before it is added (LayerScale and similar scales)."""

import torch
from torch import Tensor, nn

from vitrail.layers.norm import Affine

SCALES = ("plain", "layerscale", "affine", "constant", "scalar", "rezero", "skipinit", "fixup", "tfixup")


class LayerScale(nn.Module):
    """A learned factor per channel, initialized to a small value so that a deep network begins near the identity."""

    def __init__(self, width: int, init: float, mode: str = "constant", frozen: bool = False):
        super().__init__()
        values = {
            "constant": lambda: torch.full((width,), init),
            "zero": lambda: torch.zeros(width),
            "uniform": lambda: torch.rand(width) * 2 * init,
        }[mode]()
        self.weight = nn.Parameter(values, requires_grad=not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class ScalarScale(nn.Module):
    """One learned factor for the whole branch (ReZero, SkipInit, Fixup, T-Fixup)."""

    def __init__(self, init: float, frozen: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(float(init)), requires_grad=not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class ConstantScale(nn.Module):
    """A fixed factor (LV-ViT), no parameter."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor

    def extra_repr(self) -> str:
        return f"{self.factor:g}"


def residual_scale(kind: str, width: int, init: float, mode: str = "constant", frozen: bool = False) -> nn.Module:
    """The module for `Architecture.residual`."""
    match kind:
        case "plain":
            return nn.Identity()
        case "layerscale":
            return LayerScale(width, init, mode, frozen)
        case "affine":
            return Affine(width, init).requires_grad_(not frozen)
        case "constant":
            return ConstantScale(init)
        case "scalar":
            return ScalarScale(init, frozen)
        case "rezero" | "skipinit":
            return ScalarScale(0.0, frozen)
        case "fixup" | "tfixup":
            return ScalarScale(1.0, frozen)
    raise ValueError(f"residual {kind!r} is not one of {', '.join(SCALES)}")


class ShiftedLinear(nn.Linear):
    """Fixup's linear layer: a learned scalar is added to the input."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True):
        super().__init__(inputs, outputs, bias)
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.shift)
