"""BatchNorm's running statistics, the same however the units of a step are spread over processes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vitrail.training.distributed import Devices


class Statistics:
    """A step moves the running statistics once, by the mean over its units; each unit is normalized by its own batch.

    BatchNorm alone would move them unit by unit, each process its own ones, twice where a block is computed again for the
    backward pass, and to NaN by a step that is then not taken.
    """

    def __init__(self, model: nn.Module, devices: Devices) -> None:
        self.devices = devices
        norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        self.moving: list[Tensor] = []
        self.counts: list[Tensor] = []
        for norm in norms:
            for buffer in norm.buffers(recurse=False):
                (self.moving if buffer.is_floating_point() else self.counts).append(buffer)
        self.model = model
        # Of fixed places in memory, which a CUDA graph may use: values at the start of the step, and the sum over its units.
        self.before = [tensor.clone() for tensor in (*self.moving, *self.counts)]
        self.total = [torch.zeros_like(tensor) for tensor in self.moving]

    @property
    def idle(self) -> bool:
        return not self.moving or not self.model.training

    @torch.no_grad()
    def begin(self) -> None:
        """At the start of a step."""
        if not self.idle:
            torch._foreach_copy_(self.before, [*self.moving, *self.counts])
            torch._foreach_zero_(self.total)

    @contextmanager
    def of_micro_batch(self) -> Iterator[None]:
        """Around the forward pass of one unit."""
        if self.idle:
            yield
            return
        torch._foreach_copy_([*self.moving, *self.counts], self.before)
        yield
        torch._foreach_add_(self.total, self.moving)

    @torch.no_grad()
    def settle(self, skip: Tensor) -> None:
        """At the end of the step; where `skip` [] is 1 the statistics stay what they were before it."""
        if self.idle:
            return
        total = self.devices.all_reduce_sum(torch.cat([tensor.flatten() for tensor in self.total])) / self.devices.micro_batches
        parts = total.split([tensor.numel() for tensor in self.moving])
        for tensor, old, new in zip(self.moving, self.before, parts, strict=False):
            tensor.copy_(torch.where(skip > 0, old, new.view_as(old)))
        for count, old in zip(self.counts, self.before[len(self.moving) :], strict=True):
            count.copy_(old + (skip == 0))
