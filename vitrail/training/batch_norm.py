"""BatchNorm running statistics that do not depend on how the micro-batches of a step are distributed over processes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vitrail.training.distributed import Devices


class BatchNormStatistics:
    """Updates the running statistics once per step, with the mean over its micro-batches.

    Each micro-batch is normalized by its own statistics. Plain BatchNorm would update the running statistics after every
    micro-batch, differently on each process, twice with activation checkpointing, and to NaN in a step that is then skipped.
    """

    def __init__(self, model: nn.Module, devices: Devices) -> None:
        self.devices = devices
        norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        self.running: list[Tensor] = []
        self.counts: list[Tensor] = []
        for norm in norms:
            for buffer in norm.buffers(recurse=False):
                (self.running if buffer.is_floating_point() else self.counts).append(buffer)
        self.model = model
        # At fixed addresses, for CUDA graphs: the values at the start of the step, and the sum over its micro-batches.
        self.before = [tensor.clone() for tensor in (*self.running, *self.counts)]
        self.total = [torch.zeros_like(tensor) for tensor in self.running]

    @property
    def enabled(self) -> bool:
        return bool(self.running) and self.model.training

    @torch.no_grad()
    def start_step(self) -> None:
        if self.enabled:
            torch._foreach_copy_(self.before, [*self.running, *self.counts])
            torch._foreach_zero_(self.total)

    @contextmanager
    def micro_batch_forward(self) -> Iterator[None]:
        """Context for the forward pass of one micro-batch."""
        if not self.enabled:
            yield
            return
        torch._foreach_copy_([*self.running, *self.counts], self.before)
        yield
        torch._foreach_add_(self.total, self.running)

    @torch.no_grad()
    def finish_step(self, skip: Tensor) -> None:
        """Set the running statistics to the mean over micro-batches; where `skip` [] is 1, to those before the step."""
        if not self.enabled:
            return
        total = self.devices.all_reduce_sum(torch.cat([tensor.flatten() for tensor in self.total])) / self.devices.micro_batches
        parts = total.split([tensor.numel() for tensor in self.running])
        for tensor, old, new in zip(self.running, self.before, parts, strict=False):
            tensor.copy_(torch.where(skip > 0, old, new.view_as(old)))
        for count, old in zip(self.counts, self.before[len(self.running) :], strict=True):
            count.copy_(old + (skip == 0))
