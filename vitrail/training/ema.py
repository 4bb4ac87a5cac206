"""A running mean of a model's weights."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.training.gradient_norm import local


class ModelEma:
    """mean <- mean + (1 - decay) * (weights - mean) after every step, over parameters and floating buffers; others are copied.

    Frozen parameters are their own mean, and none is kept of them. The mean starts at the weights of the moment. Sharded weights
    (FSDP2) have a mean that is sharded alike.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0 <= decay < 1:
            raise UserError(f"A running mean needs a decay in [0, 1), not {decay}.")
        self.decay = decay
        self._live = tensors_of(model)
        self._mean = {name: tensor.clone() for name, tensor in self._live.items()}
        kinds: dict[torch.dtype, list[str]] = {}
        for name, tensor in self._live.items():
            kinds.setdefault(tensor.dtype, []).append(name)
        self._floating = [names for dtype, names in kinds.items() if dtype.is_floating_point]
        self._others = [name for dtype, names in kinds.items() if not dtype.is_floating_point for name in names]

    @torch.no_grad()
    def update(self, skip: Tensor | None = None, steps: float = math.inf) -> None:
        """Take the weights of this step in; where `skip` [] is 1 the mean stays as it is, without anybody asking the device.

        After few `steps` the decay is lower, so that the mean is over a part of what has been, not over the start.
        """
        decay = self.decay if steps == math.inf else min(self.decay, (1.0 + steps) / (10.0 + steps))
        for names in self._floating:
            # torch's fused SGD with decay -1 on the "gradient" w and rate -(1 - decay) is the rule above in one pass, and the
            # one such kernel that reads a flag on the device: a buffer that is no number does not get in by way of 0 * nan.
            torch._fused_sgd_(
                local([self._mean[name] for name in names]),
                local([self._live[name] for name in names]),
                [],
                weight_decay=-1.0,
                momentum=0.0,
                lr=decay - 1.0,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
                found_inf=skip,
            )
        for name in self._others:
            live, mean = self._live[name], self._mean[name]
            mean.copy_(live if skip is None else torch.where(skip > 0, mean, live))

    def state_dict(self) -> dict[str, Tensor]:
        """The mean under the names of the model's parameters and buffers; not a copy."""
        return dict(self._mean)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        check(self._mean, state, "the saved mean")
        for name, mean in self._mean.items():
            mean.copy_(state[name])

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """The mean in the model's place; its own weights come back to the last bit, also after an exception.

        Values are copied, not swapped by reference: compiled code, CUDA graphs and FSDP2 hold on to the memory. Of a sharded
        model this must be the root, whose gathered weights are dropped on the way in and out.
        """
        reshard(model)
        live = tensors_of(model)
        check(live, self._mean, "the running mean")
        saved = {name: tensor.clone() for name, tensor in live.items()}
        try:
            copy_into(live, self._mean)
            yield
        finally:
            reshard(model)
            copy_into(live, saved)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters that are trained and buffers by name, detached: changing one in place changes the model."""
    trained = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
    return {name: tensor.detach() for named in (trained, model.named_buffers()) for name, tensor in named}


@torch.no_grad()
def copy_into(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    torch._foreach_copy_(local(list(targets.values())), local([sources[name] for name in targets]))


def reshard(model: nn.Module) -> None:
    """FSDP2 keeps gathered weights after a forward without a backward; they would outlive a change of the shards."""
    for module in model.modules():
        forget = getattr(module, "reshard", None)
        if callable(forget):
            forget()


def check(expected: Mapping[str, Tensor], given: Mapping[str, Tensor], what: str) -> None:
    differing: Sequence[str] = sorted(
        name for name in expected.keys() | given.keys() if name not in expected or name not in given
    ) or sorted(name for name in expected if expected[name].shape != given[name].shape)
    if differing:
        raise UserError(f"{what.capitalize()} belongs to another model: {differing[0]} differs.")
