"""Part of a batch: taken out to be computed, and put back among the others.

Either way is the other's gradient. Both read with an index and write in order, so that nothing is cleared first or added to in
passing, and a compiler can join them with what comes before and after.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Subset(NamedTuple):
    """Which `rows` [k] of a batch [B] are in, ascending, and the `place` [B] of each row among them, -1 for the others."""

    rows: Tensor
    place: Tensor


def draw_subset(size: int, count: int, device: torch.device) -> Subset:
    """`count` rows of `size`, each as likely as any other."""
    rows = torch.rand(size, device=device).argsort()[:count].sort().values
    return Subset(rows, rows.new_full((size,), -1).scatter(0, rows, torch.arange(count, device=device)))


def take(x: Tensor, subset: Subset) -> Tensor:
    """[B, ...] to [k, ...]."""
    return Take.apply(x, *subset)


def put(part: Tensor, subset: Subset) -> Tensor:
    """[k, ...] to [B, ...], zero where the others are."""
    return Put.apply(part, *subset)


def spread(part: Tensor, place: Tensor) -> Tensor:
    inside = (place >= 0).view(-1, *[1] * (part.ndim - 1))
    return torch.where(inside, part.index_select(0, place.clamp_min(0)), 0)


class Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return spread(gradient, *ctx.saved_tensors), None, None


class Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, rows: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return spread(part, place)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return gradient.index_select(0, *ctx.saved_tensors), None, None
