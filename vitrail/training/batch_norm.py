"""BatchNorm whose results do not depend on how a step is divided into micro-batches and distributed over processes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from vitrail.errors import UserError
from vitrail.layers.norm import TokenBatchNorm
from vitrail.recipes.schema import Recipe
from vitrail.training.distributed import Devices


def has_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(each, _BatchNorm) for each in module.modules())


def frozen_norms(model: nn.Module, module: nn.Module | None = None) -> list[nn.Module]:
    """The BatchNorms of a model whose parameters are not trained: they use their running statistics and do not change them.

    With `module`, a task's, also those of the same names in its copies of the model, such as the teacher of DINO.
    """
    frozen = [
        name
        for name, each in model.named_modules()
        if isinstance(each, _BatchNorm) and not any(parameter.requires_grad for parameter in each.parameters())
    ]
    copies = [each for each in module.modules() if isinstance(each, type(model))] if module is not None else [model]
    return [copy.get_submodule(name) for copy in copies for name in frozen]


def is_synchronized(module: nn.Module, recipe: Recipe, micro_batches: int) -> bool:
    """Whether a group is larger than a micro-batch, so that all processes together compute its statistics."""
    return has_batch_norm(module) and recipe.images_per_group * micro_batches > recipe.batch_size


def group_batch_norms(module: nn.Module, recipe: Recipe, devices: Devices) -> None:
    """Compute the statistics of every BatchNorm over groups of images, by replacing its class in place."""
    synchronized = is_synchronized(module, recipe, devices.micro_batches)
    if synchronized and (recipe.images_per_group != recipe.batch_size or devices.accumulation > 1):
        raise UserError(
            f"BatchNorm needs the statistics of groups of {recipe.images_per_group} images, and {devices.world_size} "
            f"process(es) compute {recipe.batch_size // devices.micro_batches} each at a time: set a smaller group_size or start "
            f"{devices.micro_batches} processes."
        )
    for norm in module.modules():
        if type(norm) in GROUPED:
            norm.__class__ = GROUPED[type(norm)]
            assert isinstance(norm, GroupedStatistics)
            norm.group_size, norm.world_size = recipe.images_per_group, devices.world_size if synchronized else 1
            if synchronized:  # not a decorator, which would import the compiler
                own = torch.compiler.disable(norm.normalize_synchronized)
                norm.normalize_synchronized = own  # type: ignore[method-assign]


class GroupedStatistics(_BatchNorm):
    """A BatchNorm that normalizes each group of images of a training batch by itself.

    Each group updates a copy of the running statistics, which become the mean of the copies.
    """

    group_size: int
    world_size: int

    def forward(self, x: Tensor) -> Tensor:
        groups, rest = divmod(len(x), self.group_size)
        if not self.training or (self.world_size == 1 and (groups < 2 or rest)):  # timed steps have batches of any size
            out: Tensor = super().forward(x)
            return out
        rows = x.flatten(0, 1) if isinstance(self, TokenBatchNorm) else x
        if self.world_size > 1:
            views = max(len(x) * self.world_size // self.group_size, 1)  # several views of the images are several groups
            return self.normalize_synchronized(rows, views).view_as(x)
        parts, means, variances = [], [], []
        for part in rows.chunk(groups):
            mean, variance = self.running_mean.clone(), self.running_var.clone()  # type: ignore[union-attr]
            parts.append(F.batch_norm(part, mean, variance, self.weight, self.bias, True, self.momentum or 0.0, self.eps))
            means.append(mean)
            variances.append(variance)
        self.update_statistics(torch.stack(means).mean(0), torch.stack(variances).mean(0))
        return torch.cat(parts).view_as(x)

    def normalize_synchronized(self, x: Tensor, views: int) -> Tensor:
        """Normalize each of the views in [B, C] or [B, C, ...] by the statistics of the batches of all processes."""
        parts = [self._normalize_synchronized(part) for part in x.chunk(views)]
        self.update_statistics(*(torch.stack([part[place] for part in parts]).mean(0) for place in (1, 2)))
        return torch.cat([part[0] for part in parts])

    def _normalize_synchronized(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The normalized images, and the running statistics after them."""
        values = x.float()
        dims = [0, *range(2, x.ndim)]
        shape = [1, -1, *[1] * (x.ndim - 2)]
        mean = all_reduce_sum(values.mean(dims)) / self.world_size
        centered = values - mean.view(shape)
        variance = all_reduce_sum(centered.square().mean(dims)) / self.world_size
        count = self.world_size * x.numel() // x.shape[1]
        with torch.no_grad():
            momentum = self.momentum or 0.0
            new = torch.lerp(self.running_mean, mean, momentum)  # type: ignore[arg-type]
            unbiased = variance * (count / max(count - 1, 1))
            new_variance = torch.lerp(self.running_var, unbiased, momentum)  # type: ignore[arg-type]
        out: Tensor = centered * torch.rsqrt(variance + self.eps).view(shape) * self.weight.view(shape) + self.bias.view(shape)
        return out.to(x.dtype), new, new_variance

    @torch.no_grad()
    def update_statistics(self, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        # As `data`, whose changes autograd does not count: an earlier call of this step keeps the statistics for its backward
        # pass, which does not use them in training.
        self.running_mean.data.copy_(mean)
        self.running_var.data.copy_(variance)
        self.num_batches_tracked.add_(1)


class AllReduceSum(torch.autograd.Function):
    """The sum over all processes; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return AllReduceSum.forward(ctx, gradient)


def all_reduce_sum(x: Tensor) -> Tensor:
    out: Tensor = AllReduceSum.apply(x)  # type: ignore[no-untyped-call]
    return out


class GroupedBatchNorm1d(GroupedStatistics, nn.BatchNorm1d):
    pass


class GroupedBatchNorm2d(GroupedStatistics, nn.BatchNorm2d):
    pass


class GroupedTokenBatchNorm(GroupedStatistics, TokenBatchNorm):
    pass


GROUPED: dict[type[nn.Module], Any] = {
    nn.BatchNorm1d: GroupedBatchNorm1d,
    nn.BatchNorm2d: GroupedBatchNorm2d,
    TokenBatchNorm: GroupedTokenBatchNorm,
}


class BatchNormStatistics:
    """Updates the running statistics once per step, with the mean over its micro-batches.

    Plain BatchNorm would update the running statistics after every
    micro-batch, differently on each process, twice with activation checkpointing, and to NaN in a step that is then skipped.
    """

    def __init__(self, model: nn.Module, devices: Devices, frozen: Sequence[nn.Module] = ()) -> None:
        """`frozen` are norms whose statistics do not change."""
        self.devices = devices
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module not in frozen]
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
