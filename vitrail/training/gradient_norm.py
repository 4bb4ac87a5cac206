"""Norms of many tensors at once, plain or sharded over processes (FSDP2's DTensors). Nothing here waits for the device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def local(tensors: Sequence[Any]) -> list[Tensor]:
    """What this process holds of each tensor, sharing its memory: element-wise work needs no more, and plain kernels do it."""
    return [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors]


def is_sharded(tensor: Any) -> bool:
    # By its method, not by its class: importing DTensor costs half a second that most trainings need not spend.
    return hasattr(tensor, "to_local")


def count_up(steps: list[Tensor], found: Tensor | None) -> None:
    """Add one to every count [], or nothing where `found` is 1."""
    # A list, though one tensor would do: adding a single tensor to many makes the processor read its value.
    torch._foreach_add_(steps, 1.0) if found is None else torch._foreach_add_(steps, [1.0 - found] * len(steps))


def tensor_norms(tensors: Sequence[Any], like: Sequence[Any] | None = None) -> Tensor:
    """The 2-norm of every whole tensor, as one tensor [n]; `like` are the sharded ones where `tensors` are local parts."""
    norms = list(torch._foreach_norm(local(tensors)))
    sharded: dict[Any, list[int]] = {}
    for place, tensor in enumerate(tensors if like is None else like):
        if is_sharded(tensor):
            sharded.setdefault((tensor.device_mesh, tensor.placements), []).append(place)
    for (mesh, placements), places in sharded.items():
        from torch.distributed.tensor import DTensor, Partial, Replicate

        # Squares in double: a norm beyond 1e19 is still a number in single, its square is not.
        squares = torch.stack([norms[place] for place in places]).double().square()
        parts = [Partial() if placement.is_shard() else Replicate() for placement in placements]
        whole = DTensor.from_local(squares, mesh, parts, run_check=False).full_tensor().sqrt().to(norms[places[0]].dtype)
        for place, norm in zip(places, whole.unbind(), strict=True):
            norms[place] = norm
    return torch.stack(norms)


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all tensors as one vector: a plain tensor [] that every process agrees on."""
    return torch.linalg.vector_norm(tensor_norms(tensors))


def clip_divisor(norm: Tensor, limit: float) -> Tensor:
    """What gradients of this norm are divided by so that it stays within the limit: max(norm / limit, 1)."""
    return (norm / limit).clamp(min=1.0)
