"""From a recipe's optimizer to torch's: which tensor decays, at which rate it moves, and how a step is taken or left out.

Every optimizer made here honours `optimizer.found_inf`, a tensor [] on the device that the loop sets before `step()`: where it
is 1 the step changes neither weights nor state, and nobody waits for the device to find out. `grad_scale` likewise divides the
gradients (torch's GradScaler sets both).

Which tensors decay (`decay_on`):

* "matrices", the released DeiT rule: all but vectors, scalars, biases, tables of positions, class and distillation tokens and
  the queries of a pooling. The released skip list forgets the distillation token, which is thereby decayed; it names none of
  BEiT's relative tables either. Here every token and table is spared: class and distillation token are rows of one tensor,
  and the first published weights were trained when the list had no effect at all, so no published number hangs on it.
* "kernels", Google's rule: the weights of linear layers and convolutions and nothing else.
* "all".

Clipping: LAMB clips by itself, as Apex's does, and `make_optimizer` hands it `clip`; for every other kind the loop calls
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
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes.schema import OptimizerConfig
from vitrail.training.gradient_norm import clip_divisor, count_up, local, total_norm
from vitrail.training.lamb import Lamb

TOKENS_AND_POSITIONS = re.compile(r"pos_embed\..*|stem\.position|prefix|pooling\.queries")
KERNELS = (nn.Linear, nn.modules.conv._ConvNd, PerClassHead)


def decayed(model: VisionTransformer, on: Literal["matrices", "kernels", "all"]) -> set[str]:
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


def layer_of(name: str, model: VisionTransformer) -> int:
    """0 for stem, tokens and positions, b + 1 for block b, depth + 1 for what follows the blocks.

    A table of positions that one block alone uses belongs to it. A relative table that all blocks share counts as the last
    layer, as in BEiT.
    """
    a = model.architecture
    room, *rest = name.split(".")
    if room == "blocks" or (room == "pos_embed" and a.pos_embed_place == "layers"):
        return int(rest[0]) + 1
    if room in ("stem", "prefix") or (room == "pos_embed" and a.pos_embed not in RELATIVE):
        return 0
    return a.depth + 1


def parameter_groups(model: VisionTransformer, how: OptimizerConfig) -> list[dict[str, Any]]:
    """The trainable parameters, each in one group, with `weight_decay` and `rate_factor` of the group."""
    decaying = decayed(model, how.weight_decay_on)
    last = model.architecture.depth + 1
    groups: dict[tuple[float, int], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        layer = layer_of(name, model) if how.layer_decay != 1 else last
        decay = how.weight_decay if name in decaying else 0.0
        empty = {"params": [], "weight_decay": decay, "rate_factor": how.layer_decay ** (last - layer)}
        groups.setdefault((decay, layer), empty)["params"].append(parameter)
    if not groups:
        raise UserError("There is nothing to train: every parameter of the model is frozen.")
    return list(groups.values())


def make_optimizer(model: VisionTransformer | list[dict[str, Any]], how: OptimizerConfig, rate: float) -> Optimizer:
    """The optimizer of a model (or of groups of one's own) at a learning rate; sharded parameters are welcome."""
    groups = parameter_groups(model, how) if isinstance(model, VisionTransformer) else model
    if how.weight_decay and how.weight_decay_coupled != (how.kind == "adam") and how.kind in ("adam", "adamw", "lamb"):
        raise UserError(
            "Adam adds its decay to the gradient: set optimizer.weight_decay_coupled=true, or take optimizer.kind=adamw."
            if how.kind == "adam"
            else f"The decay of {how.kind} is not part of the gradient: set optimizer.weight_decay_coupled=false."
        )
    common: dict[str, Any] = {"lr": rate, "weight_decay": how.weight_decay}
    optimizer: Optimizer
    match how.kind:
        case "adamw":
            optimizer = torch.optim.AdamW(groups, betas=how.betas, eps=how.eps, fused=True, **common)
        case "adam":
            optimizer = torch.optim.Adam(groups, betas=how.betas, eps=how.eps, fused=True, **common)
        case "lamb":
            own: dict[str, Any] = {"clip": how.clip_grad_norm, "trust": how.trust_ratio_on, "trust_limit": how.max_trust_ratio}
            optimizer = Lamb(groups, betas=how.betas, eps=how.eps, **own, **common)
        case "sgd":
            optimizer = Sgd(groups, momentum=how.momentum, nesterov=how.nesterov, coupled=how.weight_decay_coupled, **common)
        case "adagrad":
            optimizer = Adagrad(groups, eps=how.eps, coupled=how.weight_decay_coupled, **common)
    set_rate(optimizer, rate)
    return optimizer


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Give every group its share of the learning rate."""
    for group in optimizer.param_groups:
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
