"""Random numbers of stochastic depth that depend on the image's position in the epoch, not on how a step is divided."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vitrail.data.rng import sample_key, uniform
from vitrail.layers.drop_path import DropPath
from vitrail.layers.fused import SubsetDropPath
from vitrail.training.task import Position

SALT = 0xD409  # other random numbers than those of the augmentation


class DropPathNoise:
    """Uniform numbers for every drop-path module and image of a micro-batch, which `applied` sets in the modules.

    The numbers lie in a buffer for each size of micro-batch, at fixed addresses, for CUDA graphs.
    """

    def __init__(self, model: nn.Module, seed: int, batch_size: int, group_size: int) -> None:
        self.modules = [module for module in model.modules() if isinstance(module, DropPath) and module.active]
        self.subsets = [index for index, module in enumerate(self.modules) if isinstance(module, SubsetDropPath)]
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
        buffer = self.buffers[size]
        buffer.copy_(self.draw(positions, position.epoch))
        if self.subsets and size < self.group_size:
            buffer[self.subsets] = self.ranks(positions, position)
        for module, noise in zip(self.modules, buffer.unbind(0), strict=True):
            vars(module).update(noise=noise, group_size=self.group_size)  # `setattr` of a module takes microseconds
        try:
            yield
        finally:
            for module in self.modules:
                vars(module).update(noise=None, group_size=0)

    def draw(self, positions: Tensor, epoch: int) -> Tensor:
        """Uniform numbers [modules, B]."""
        key = sample_key(self.seed ^ SALT, epoch, positions, torch.zeros_like(positions))
        return uniform(key, "drop_path", len(self.modules)).T

    def ranks(self, positions: Tensor, position: Position) -> Tensor:
        """The ranks [subset modules, B] of a part of a group among the numbers of the group, divided by the group size."""
        start, groups = position.step_in_epoch * self.batch_size, self.batch_size // self.group_size
        first = start + position.groups[0]
        members = torch.arange(first, start + self.batch_size, groups, device=positions.device)
        ranks = self.draw(members, position.epoch)[self.subsets].argsort(1).argsort(1)
        own = (positions - first) // groups
        return (ranks[:, own.clamp(0, self.group_size - 1)] + 0.5) / self.group_size
