"""Exponential moving average (EMA) of a model's weights."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.training.gradient_norm import local_tensors


class ModelEma:
    """ema <- ema + (1 - decay) * (weights - ema) after every step, for parameters and floating-point buffers.

    Other buffers are copied. Frozen parameters are left out, since their EMA equals them. The EMA starts at the current weights.
    The EMA of sharded weights (FSDP2) is sharded in the same way.
    """

    def __init__(self, model: nn.Module, decay: float, into: Mapping[str, Tensor] | None = None) -> None:
        """`into`: the tensors that hold the EMA, by the names of the model's; default: copies of all of the model's."""
        if not 0 <= decay < 1:
            raise UserError(f"The EMA decay must be in [0, 1), not {decay}.")
        self.decay = decay
        self._live = {name: tensor for name, tensor in named_tensors(model).items() if into is None or name in into}
        self._ema = {name: tensor.clone() if into is None else into[name] for name, tensor in self._live.items()}
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name, tensor in self._live.items():
            by_dtype.setdefault(tensor.dtype, []).append(name)
        self._floating = [names for dtype, names in by_dtype.items() if dtype.is_floating_point]
        self._others = [name for dtype, names in by_dtype.items() if not dtype.is_floating_point for name in names]

    @torch.no_grad()
    def update(self, skip: Tensor | None = None, steps: float = math.inf) -> None:
        """Update the EMA with the current weights. If `skip` [] is 1 nothing changes; the flag is not read back to the CPU.

        In the first `steps` the decay is min(decay, (1 + steps) / (10 + steps)), so that the initial weights are forgotten.
        """
        decay = self.decay if steps == math.inf else min(self.decay, (1.0 + steps) / (10.0 + steps))
        for names in self._floating:
            # torch's fused SGD with weight decay -1, the weights as "gradient" and lr = decay - 1 is the update above in one
            # kernel. It is the only such kernel that reads a skip flag on the device, so that a NaN cannot enter as 0 * NaN.
            torch._fused_sgd_(
                local_tensors([self._ema[name] for name in names]),
                local_tensors([self._live[name] for name in names]),
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
            live, ema = self._live[name], self._ema[name]
            ema.copy_(live if skip is None else torch.where(skip > 0, ema, live))

    @torch.no_grad()
    def reset(self) -> None:
        """Start again at the current weights."""
        copy_into(self._ema, self._live)

    def state_dict(self) -> dict[str, Tensor]:
        """The EMA under the names of the model's parameters and buffers. Not a copy."""
        return dict(self._ema)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        check_matching(self._ema, state)
        for name, ema in self._ema.items():
            ema.copy_(state[name])

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Replace the model's weights by the EMA inside the context; they are restored exactly, also after an exception.

        Values are copied, not swapped by reference, because compiled code, CUDA graphs and FSDP2 refer to the memory. A sharded
        model must be passed as its root module, whose gathered weights are freed on entry and exit.
        """
        with replaced_weights(model, self._ema):
            yield


@contextmanager
def replaced_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Context in which the trainable parameters and the buffers of a model have other values; see `ModelEma.applied`."""
    reshard(model)
    live = named_tensors(model)
    check_matching(live, weights)
    saved = {name: tensor.clone() for name, tensor in live.items()}
    try:
        copy_into(live, weights)
        yield
    finally:
        reshard(model)
        copy_into(live, saved)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Trainable parameters and buffers by name, detached; they share memory with the model."""
    trainable = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
    return {name: tensor.detach() for named in (trainable, model.named_buffers()) for name, tensor in named}


@torch.no_grad()
def copy_into(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    torch._foreach_copy_(local_tensors(list(targets.values())), local_tensors([sources[name] for name in targets]))


def reshard(model: nn.Module) -> None:
    """Free weights that FSDP2 gathered; it keeps them after a forward pass without backward, when the shards may change."""
    for module in model.modules():
        free = getattr(module, "reshard", None)
        if callable(free):
            free()


def check_matching(expected: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Raise unless both have the same names and shapes."""
    differing: Sequence[str] = sorted(expected.keys() ^ state.keys()) or sorted(
        name for name in expected if expected[name].shape != state[name].shape
    )
    if differing:
        raise UserError(f"The EMA weights belong to another model: {differing[0]} differs.")
