"""Optimizers of a recipe: parameter groups, weight decay, layer-wise learning rates, gradient clipping.

Every optimizer built here honors `optimizer.found_inf`, a tensor [] on the device that the training loop sets before `step()`:
where it is 1 the step changes neither weights nor state, without synchronizing the device. `grad_scale` divides the gradients in
the same way (torch's GradScaler sets both).

Parameters with weight decay (`weight_decay_on`):

* "matrices", the rule of the released DeiT code: all but vectors, scalars, biases, position embeddings, class and distillation
  tokens and pooling queries. The released code omits the distillation token and BEiT's relative position tables from its list of
  exceptions, so they are decayed there. Here no token or table is decayed: class and distillation token are rows of one tensor,
  and the first published weights were trained when that list had no effect, so no published result depends on it.
* "tensors", the rule of the released DINO code: all but vectors, scalars and biases, so tokens and position embeddings too.
* "kernels", the rule of Google's code: the weights of linear layers and convolutions only.
* "all".

LAMB clips gradients itself, as in Apex; for all other optimizers the training loop calls `clip_gradients` before the step.
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
from vitrail.training.gradient_norm import clip_divisor, increment_steps, local_tensors, total_norm
from vitrail.training.lamb import Lamb

TOKENS_AND_POSITIONS = re.compile(r"pos_embed\..*|stem\.position|prefix|pooling\.queries")
KERNELS = (nn.Linear, nn.modules.conv._ConvNd, PerClassHead)


def decayed_parameters(model: VisionTransformer, on: Literal["matrices", "tensors", "kernels", "all"]) -> set[str]:
    """Names of the parameters with weight decay."""
    if on == "all":
        return {name for name, _ in model.named_parameters()}
    if on == "kernels":
        return {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, KERNELS)}
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1 and not name.endswith("bias") and (on == "tensors" or not TOKENS_AND_POSITIONS.fullmatch(name))
    }


def layer_index(name: str, model: VisionTransformer) -> int:
    """Index for layer-wise lr decay: 0 for stem, tokens and position embedding, b + 1 for block b, depth + 1 after the blocks.

    A position table of a single block belongs to that block. A relative position table shared by all blocks belongs to the last
    layer, as in BEiT. The blocks of a convnet are blocks too, and come first.
    """
    a = model.architecture
    part, *rest = name.split(".")
    if name.startswith("stem.blocks.") and a.convnet:
        return int(rest[1]) + 1
    if part == "blocks" or (part == "pos_embed" and a.pos_embed_place == "layers"):
        return len(model.layers) - a.depth + int(rest[0]) + 1
    if part in ("stem", "prefix") or (part == "pos_embed" and a.pos_embed not in RELATIVE):
        return 0
    return len(model.layers) + 1


def parameter_groups(model: VisionTransformer, config: OptimizerConfig) -> list[dict[str, Any]]:
    """The trainable parameters in groups with the same `weight_decay` and `lr_scale`.

    For LAMB the weight of a per-class head is a group of its own: its rows are separate layers in PatchConvNet's code.
    """
    decayed = decayed_parameters(model, config.weight_decay_on)
    last = len(model.layers) + 1
    rows = model.head.weight if config.kind == "lamb" and isinstance(model.head, PerClassHead) else None
    groups: dict[tuple[float, int, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        layer = layer_index(name, model) if config.layer_decay != 1 else last
        decay = config.weight_decay if name in decayed else 0.0
        empty = {"params": [], "weight_decay": decay, "lr_scale": config.layer_decay ** (last - layer)}
        if parameter is rows:
            empty["per_row"] = True
        groups.setdefault((decay, layer, parameter is rows), empty)["params"].append(parameter)
    if not groups:
        raise UserError("There is nothing to train: every parameter of the model is frozen.")
    return list(groups.values())


def make_optimizer(model: VisionTransformer | list[dict[str, Any]], config: OptimizerConfig, lr: float) -> Optimizer:
    """The optimizer of a recipe for a model, or for parameter groups; parameters may be sharded."""
    groups = parameter_groups(model, config) if isinstance(model, VisionTransformer) else model
    if (
        config.weight_decay
        and config.weight_decay_coupled != (config.kind == "adam")
        and config.kind in ("adam", "adamw", "lamb")
    ):
        raise UserError(
            "Adam adds weight decay to the gradient: set optimizer.weight_decay_coupled=true, or use optimizer.kind=adamw."
            if config.kind == "adam"
            else f"Weight decay in {config.kind} is decoupled from the gradient: set optimizer.weight_decay_coupled=false."
        )
    common: dict[str, Any] = {"lr": lr, "weight_decay": config.weight_decay}
    optimizer: Optimizer
    match config.kind:
        case "adamw":
            optimizer = torch.optim.AdamW(groups, betas=config.betas, eps=config.eps, fused=True, **common)
        case "adam":
            optimizer = torch.optim.Adam(groups, betas=config.betas, eps=config.eps, fused=True, **common)
        case "lamb":
            optimizer = Lamb(
                groups,
                betas=config.betas,
                eps=config.eps,
                clip_grad_norm=config.clip_grad_norm,
                trust_ratio_on=config.trust_ratio_on,
                max_trust_ratio=config.max_trust_ratio,
                **common,
            )
        case "sgd":
            optimizer = Sgd(
                groups, momentum=config.momentum, nesterov=config.nesterov, coupled=config.weight_decay_coupled, **common
            )
        case "adagrad":
            optimizer = Adagrad(groups, eps=config.eps, coupled=config.weight_decay_coupled, **common)
    set_lr(optimizer, lr)
    return optimizer


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of every group to `lr` times its `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Clip the gradients to a global norm of `max_norm` (0: no clipping); returns the norm before, [] on the device."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    norm = total_norm(gradients)
    if max_norm:
        torch._foreach_div_(local_tensors(gradients), clip_divisor(norm, max_norm))
    return norm


def apply_weight_decay(weights: list[Tensor], factor: float, found_inf: Tensor | None) -> None:
    """Decoupled weight decay: w <- w * (1 - factor), or unchanged where `found_inf` is 1."""
    if factor:
        torch._foreach_mul_(weights, 1.0 - factor if found_inf is None else 1.0 - factor * (1.0 - found_inf))


class Sgd(torch.optim.SGD):
    """torch's fused SGD with optional decoupled weight decay and support for sharded parameters.

    The momentum is initialized with zeros. That equals torch's initialization with the first gradient, except when the first step
    is skipped: torch would then keep uninitialized memory.
    """

    def __init__(
        self, params: list[dict[str, Any]], lr: float, momentum: float, nesterov: bool, weight_decay: float, coupled: bool
    ) -> None:
        self.coupled = coupled
        # torch rejects nesterov=True without momentum, where it has no effect
        super().__init__(params, lr, momentum, nesterov=nesterov and momentum > 0, weight_decay=weight_decay, fused=True)
        for parameter in (parameter for group in self.param_groups for parameter in group["params"] if momentum):
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            weights = local_tensors(parameters)
            apply_weight_decay(weights, 0.0 if self.coupled else group["lr"] * group["weight_decay"], found_inf)
            torch._fused_sgd_(
                weights,
                local_tensors([parameter.grad for parameter in parameters]),
                local_tensors([self.state[parameter]["momentum_buffer"] for parameter in parameters])
                if group["momentum"]
                else [],
                weight_decay=group["weight_decay"] if self.coupled else 0.0,
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=0.0,
                nesterov=group["nesterov"],
                maximize=False,
                is_first_step=False,
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=found_inf,
            )


class Adagrad(torch.optim.Adagrad):
    """torch's fused Adagrad with optional decoupled weight decay and support for sharded parameters."""

    def __init__(self, params: list[dict[str, Any]], lr: float, eps: float, weight_decay: float, coupled: bool) -> None:
        self.coupled = coupled
        super().__init__(params, lr, eps=eps, weight_decay=weight_decay, fused=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            states = [self.state[parameter] for parameter in parameters]
            weights, steps = local_tensors(parameters), [state["step"] for state in states]
            apply_weight_decay(weights, 0.0 if self.coupled else group["lr"] * group["weight_decay"], found_inf)
            increment_steps(steps, found_inf)
            torch._fused_adagrad_(
                weights,
                local_tensors([parameter.grad for parameter in parameters]),
                local_tensors([state["sum"] for state in states]),
                steps,
                lr=group["lr"],
                lr_decay=0.0,
                weight_decay=group["weight_decay"] if self.coupled else 0.0,
                eps=group["eps"],
                maximize=False,
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=found_inf,
            )
