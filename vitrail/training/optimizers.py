"""From a recipe's optimiser to torch's: which tensor decays, at which rate it moves, and how a step is taken or left out.

Every optimiser made here honours `optimiser.found_inf`, a tensor [] on the device that the loop sets before `step()`: where it
is 1 the step changes neither weights nor state, and nobody waits for the device to find out. `grad_scale` likewise divides the
gradients (torch's GradScaler sets both).

Which tensors decay (`decay_on`):

* "matrices", the released DeiT rule: all but vectors, scalars, biases, tables of positions, class and distillation tokens and
  the queries of a readout. The released skip list forgets the distillation token, which is thereby decayed; it names none of
  BEiT's relative tables either. Here every token and table is spared: class and distillation token are rows of one tensor,
  and the first published weights were trained when the list had no effect at all, so no published number hangs on it.
* "kernels", Google's rule: the weights of linear layers and convolutions and nothing else.
* "all".

Clipping: LAMB clips by itself, as Apex's does, and `make_optimiser` hands it `clip`; for every other kind the loop calls
`clip_gradients` before the step.
"""

import re
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vitrail.errors import UserError
from vitrail.layers.pooling import PerClassHead
from vitrail.layers.pos_embed import RELATIVE
from vitrail.models.vision_transformer import Model
from vitrail.recipes.schema import Optimiser
from vitrail.training.gradient_norm import clip_divisor, count_up, local, total_norm
from vitrail.training.lamb import Lamb

TOKENS_AND_POSITIONS = re.compile(r"positions\..*|stem\.position|special|readout\.queries")
KERNELS = (nn.Linear, nn.modules.conv._ConvNd, PerClassHead)


def decayed(model: Model, on: Literal["matrices", "kernels", "all"]) -> set[str]:
    """Names of the parameters that the weight decay pulls at."""
    if on == "all":
        return {name for name, _ in model.named_parameters()}
    if on == "kernels":
        return {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, KERNELS)}
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1 and not name.endswith("bias") and not TOKENS_AND_POSITIONS.fullmatch(name)
    }


def layer_of(name: str, model: Model) -> int:
    """0 for stem, tokens and positions, b + 1 for block b, depth + 1 for what follows the blocks.

    A table of positions that one block alone uses belongs to it. A relative table that all blocks share counts as the last
    layer, as in BEiT.
    """
    a = model.architecture
    room, *rest = name.split(".")
    if room == "blocks" or (room == "positions" and a.position_place == "layers"):
        return int(rest[0]) + 1
    if room in ("stem", "special") or (room == "positions" and a.positions not in RELATIVE):
        return 0
    return a.depth + 1


def parameter_groups(model: Model, how: Optimiser) -> list[dict[str, Any]]:
    """The trainable parameters, each in one group, with `weight_decay` and `rate_factor` of the group."""
    decaying = decayed(model, how.decay_on)
    last = model.architecture.depth + 1
    groups: dict[tuple[float, int], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        layer = layer_of(name, model) if how.layer_decay != 1 else last
        decay = how.decay if name in decaying else 0.0
        empty = {"params": [], "weight_decay": decay, "rate_factor": how.layer_decay ** (last - layer)}
        groups.setdefault((decay, layer), empty)["params"].append(parameter)
    if not groups:
        raise UserError("There is nothing to train: every parameter of the model is frozen.")
    return list(groups.values())


def make_optimiser(model: Model | list[dict[str, Any]], how: Optimiser, rate: float) -> Optimizer:
    """The optimiser of a model (or of groups of one's own) at a learning rate; sharded parameters are welcome."""
    groups = parameter_groups(model, how) if isinstance(model, Model) else model
    if how.decay and how.decay_coupled != (how.kind == "adam") and how.kind in ("adam", "adamw", "lamb"):
        raise UserError(
            "Adam adds its decay to the gradient: set optimiser.decay_coupled=true, or take optimiser.kind=adamw."
            if how.kind == "adam"
            else f"The decay of {how.kind} is not part of the gradient: set optimiser.decay_coupled=false."
        )
    common: dict[str, Any] = {"lr": rate, "weight_decay": how.decay}
    optimiser: Optimizer
    match how.kind:
        case "adamw":
            optimiser = torch.optim.AdamW(groups, betas=how.betas, eps=how.eps, fused=True, **common)
        case "adam":
            optimiser = torch.optim.Adam(groups, betas=how.betas, eps=how.eps, fused=True, **common)
        case "lamb":
            own: dict[str, Any] = {"clip": how.clip, "trust": how.trust, "trust_limit": how.trust_limit}
            optimiser = Lamb(groups, betas=how.betas, eps=how.eps, **own, **common)
        case "sgd":
            optimiser = Sgd(groups, momentum=how.momentum, nesterov=how.nesterov, coupled=how.decay_coupled, **common)
        case "adagrad":
            optimiser = Adagrad(groups, eps=how.eps, coupled=how.decay_coupled, **common)
    set_rate(optimiser, rate)
    return optimiser


def set_rate(optimiser: Optimizer, rate: float) -> None:
    """Give every group its share of the learning rate."""
    for group in optimiser.param_groups:
        group["lr"] = rate * group.get("rate_factor", 1.0)


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], limit: float) -> Tensor:
    """Scale the gradients down to a global norm of at most `limit` (0: leave them); the norm before, [] on the device."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    norm = total_norm(gradients)
    if limit:
        torch._foreach_div_(local(gradients), clip_divisor(norm, limit))
    return norm


def shrink(weights: list[Tensor], share: float, found: Tensor | None) -> None:
    """Decoupled decay: take a share off the weights, or nothing where `found` is 1."""
    if share:
        torch._foreach_mul_(weights, 1.0 - share if found is None else 1.0 - share * (1.0 - found))


class Sgd(torch.optim.SGD):
    """torch's fused SGD with three differences: decay may be decoupled, parameters may be sharded, and the momentum starts at
    zeros, not at the first gradient, which is the same unless the first step is skipped: torch then keeps unset memory.
    """

    def __init__(
        self, params: list[dict[str, Any]], lr: float, momentum: float, nesterov: bool, weight_decay: float, coupled: bool
    ) -> None:
        self.coupled = coupled
        # torch refuses Nesterov's rule without a momentum, where it means nothing
        super().__init__(params, lr, momentum, nesterov=nesterov and momentum > 0, weight_decay=weight_decay, fused=True)
        for parameter in (parameter for group in self.param_groups for parameter in group["params"] if momentum):
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        found: Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            whole = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not whole:
                continue
            weights = local(whole)
            shrink(weights, 0.0 if self.coupled else group["lr"] * group["weight_decay"], found)
            torch._fused_sgd_(
                weights,
                local([parameter.grad for parameter in whole]),
                local([self.state[parameter]["momentum_buffer"] for parameter in whole]) if group["momentum"] else [],
                weight_decay=group["weight_decay"] if self.coupled else 0.0,
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=0.0,
                nesterov=group["nesterov"],
                maximize=False,
                is_first_step=False,
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=found,
            )


class Adagrad(torch.optim.Adagrad):
    """torch's fused Adagrad, for sharded parameters too, with a decay that may be decoupled."""

    def __init__(self, params: list[dict[str, Any]], lr: float, eps: float, weight_decay: float, coupled: bool) -> None:
        self.coupled = coupled
        super().__init__(params, lr, eps=eps, weight_decay=weight_decay, fused=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        found: Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            whole = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not whole:
                continue
            states = [self.state[parameter] for parameter in whole]
            weights, steps = local(whole), [state["step"] for state in states]
            shrink(weights, 0.0 if self.coupled else group["lr"] * group["weight_decay"], found)
            count_up(steps, found)
            torch._fused_adagrad_(
                weights,
                local([parameter.grad for parameter in whole]),
                local([state["sum"] for state in states]),
                steps,
                lr=group["lr"],
                lr_decay=0.0,
                weight_decay=group["weight_decay"] if self.coupled else 0.0,
                eps=group["eps"],
                maximize=False,
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=found,
            )
