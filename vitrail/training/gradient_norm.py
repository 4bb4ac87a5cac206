"""Norms of lists of tensors, plain or sharded (FSDP2's DTensors). Nothing here synchronizes the device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def local_tensors(tensors: Sequence[Any]) -> list[Tensor]:
    """The shard of each tensor on this process, sharing its memory; element-wise operations need no more."""
    return [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors]


def is_sharded(tensor: Any) -> bool:
    # By method instead of by class: importing DTensor takes half a second.
    return hasattr(tensor, "to_local")


def increment_steps(steps: list[Tensor], found_inf: Tensor | None) -> None:
    """Add 1 to every step count [], or 0 where `found_inf` is 1."""
    # A list although one tensor would do: `_foreach_add_` with a single tensor reads its value on the CPU.
    torch._foreach_add_(steps, 1.0) if found_inf is None else torch._foreach_add_(steps, [1.0 - found_inf] * len(steps))


def tensor_norms(tensors: Sequence[Any], like: Sequence[Any] | None = None) -> Tensor:
    """The 2-norm of every full tensor, [n]; if `tensors` are local shards, `like` are the sharded tensors."""
    norms = list(torch._foreach_norm(local_tensors(tensors)))
    sharded: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors if like is None else like):
        if is_sharded(tensor):
            sharded.setdefault((tensor.device_mesh, tensor.placements), []).append(index)
    for (mesh, placements), indices in sharded.items():
        from torch.distributed.tensor import DTensor, Partial, Replicate

        # Squares in float64: a norm above 1e19 is finite in float32, its square is not.
        squares = torch.stack([norms[index] for index in indices]).double().square()
        parts = [Partial() if placement.is_shard() else Replicate() for placement in placements]
        full = DTensor.from_local(squares, mesh, parts, run_check=False).full_tensor().sqrt().to(norms[indices[0]].dtype)
        for index, norm in zip(indices, full.unbind(), strict=True):
            norms[index] = norm
    return torch.stack(norms)


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all tensors concatenated, [], the same on every process."""
    out: Tensor = torch.linalg.vector_norm(tensor_norms(tensors))
    return out


def clip_divisor(norm: Tensor, max_norm: float) -> Tensor:
    """The divisor max(norm / max_norm, 1) that clips gradients of this norm."""
    return (norm / max_norm).clamp(min=1.0)
