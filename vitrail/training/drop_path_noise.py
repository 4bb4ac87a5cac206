"""Random numbers of stochastic depth that depend on the image's position in the epoch, not on how a step is divided."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vitrail.data.rng import sample_key, uniform
from vitrail.layers.drop_path import DropPath
from vitrail.layers.fused import SubsetDropPath
from vitrail.training.task import Position


class DropPathNoise:
    """Uniform numbers for every drop-path module and image of a micro-batch, which `applied` sets in the modules.

    The numbers lie in a buffer for each size of micro-batch, at fixed addresses, for CUDA graphs.
    """

    def __init__(self, model: nn.Module, seed: int, batch_size: int, group_size: int) -> None:
        self.modules = [module for module in model.modules() if isinstance(module, DropPath) and module.active]
        self.skips = any(isinstance(module, SubsetDropPath) for module in self.modules)
        self.kept = [module.count_kept(group_size) if isinstance(module, SubsetDropPath) else 0 for module in self.modules]
        self.seed, self.batch_size, self.group_size = seed, batch_size, group_size
        self.buffers: dict[int, Tensor] = {}

    @contextmanager
    def applied(self, positions: Tensor, position: Position) -> Iterator[None]:
        """Context for a micro-batch whose images have these `positions` [B] in the epoch."""
        if not self.modules:
            yield
            return
        size = len(positions)
        if size not in self.buffers:  # rows start at multiples of 16 bytes, which compiled kernels rely on
            self.buffers[size] = torch.empty(len(self.modules), -(-size // 4) * 4, device=positions.device)[:, :size]
        buffer, is_part = self.buffers[size], self.skips and size < self.group_size
        buffer.copy_(self.rank(positions, position) if is_part else self.draw(positions, position.epoch))
        for module, noise, kept in zip(self.modules, buffer.unbind(0), self.kept, strict=True):
            # `setattr` of a module takes microseconds.
            vars(module).update(noise=noise, group_size=self.group_size, num_kept=kept, is_part=is_part)
        try:
            yield
        finally:
            for module in self.modules:
                vars(module).update(noise=None, group_size=0, num_kept=0, is_part=False)

    def draw(self, positions: Tensor, epoch: int) -> Tensor:
        """Uniform numbers [modules, B]."""
        key = sample_key(self.seed, epoch, positions, torch.zeros_like(positions))
        return uniform(key, "drop_path", len(self.modules)).T

    def rank(self, positions: Tensor, position: Position) -> Tensor:
        """The ranks [modules, B] of a part of a group among the numbers of the group, divided by the group size."""
        start, groups = position.step_in_epoch * self.batch_size, self.batch_size // self.group_size
        first = start + position.groups[0]
        members = torch.arange(first, start + self.batch_size, groups, device=positions.device)
        ranks = self.draw(members, position.epoch).argsort(1).argsort(1)
        own = ((positions - first) // groups).clamp(0, self.group_size - 1)  # timed steps have other positions
        return (ranks[:, own] + 0.5) / self.group_size
