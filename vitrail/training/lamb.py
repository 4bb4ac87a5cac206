"""LAMB: Adam's direction, scaled per tensor by the norm of the weights over the norm of the update."""

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from vitrail.training.gradient_norm import clip_divisor, increment_steps, local_tensors, tensor_norms, total_norm


class Lamb(Optimizer):
    """w <- w - lr * ratio * u, with u = m / (sqrt(v) + eps) + weight_decay * w from bias-corrected Adam moments m, v.

    `ratio` is |w| / |u| of the tensor, 1 where either is zero, at most `max_trust_ratio` (0: unbounded). The defaults are those
    of Apex's FusedLAMB, with which DeiT III and ResMLP were trained:

    * the gradients of all groups together are first clipped to the norm `clip_grad_norm` (0: no clipping);
    * `trust_ratio_on="decayed"`: the ratio applies only to groups with weight decay; other groups take plain Adam steps.

    A group with `per_row=True` has one ratio per row of its tensors instead of one per tensor: a row is a parameter of its own in
    the authors' code. Sharded tensors of such a group must be sharded by rows, as FSDP does.

    `trust_ratio_on="all"` scales every tensor (Apex's NvLamb); with `clip_grad_norm=0` and weight decay on everything that is
    LAMB as first published. timm's `trust_clip` is `max_trust_ratio=1`.

    The attributes `found_inf` and `grad_scale` work as in torch's fused optimizers: where `found_inf` is 1 the step changes
    neither weights nor state, without synchronizing the device. Gradients are clipped in place. All parameters of a group must
    have the same dtype and device. Sharded ones (DTensor) are updated shard by shard; only norms are communicated.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        clip_grad_norm: float = 1.0,
        trust_ratio_on: Literal["decayed", "all"] = "decayed",
        max_trust_ratio: float = 0.0,
    ) -> None:
        # With `fused`, `load_state_dict` moves the step counts to the device, where the kernel reads them.
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": True, "per_row": False}
        super().__init__(params, defaults)
        self.clip_grad_norm, self.trust_ratio_on, self.max_trust_ratio = clip_grad_norm, trust_ratio_on, max_trust_ratio
        self._step_supports_amp_scaling = True  # GradScaler then sets `found_inf` instead of reading it back

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        self._scale_gradients(getattr(self, "grad_scale", None))
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._step_group(group, parameters, found_inf)

    def _scale_gradients(self, scale: Tensor | None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not gradients:
            return
        if self.clip_grad_norm:
            norm = total_norm(gradients)
            scale = (
                clip_divisor(norm, self.clip_grad_norm)
                if scale is None
                else scale * clip_divisor(norm / scale, self.clip_grad_norm)
            )
        if scale is not None:
            torch._foreach_div_(local_tensors(gradients), scale)

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor], found_inf: Tensor | None) -> None:
        states = [self._state(parameter) for parameter in parameters]
        weights = local_tensors(parameters)
        gradients = local_tensors([parameter.grad for parameter in parameters if parameter.grad is not None])
        steps = [state["step"] for state in states]
        increment_steps(steps, found_inf)
        # torch's fused Adam with lr=-1 adds m / (sqrt(v) + eps) to what it is given as weights. It checks `found_inf` itself,
        # before a NaN or Inf gradient can enter the moments.
        plain = self.trust_ratio_on == "decayed" and not group["weight_decay"]
        updates = weights if plain else list(torch._foreach_mul(weights, group["weight_decay"]))
        torch._fused_adam_(
            updates,
            gradients,
            local_tensors([state["exp_avg"] for state in states]),
            local_tensors([state["exp_avg_sq"] for state in states]),
            [],
            steps,
            lr=group["lr"] if plain else -1.0,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=0.0,
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            found_inf=found_inf,
        )
        if plain:
            return
        if group["per_row"]:
            pairs = [(row_norms(weight), row_norms(update)) for weight, update in zip(weights, updates, strict=True)]
            ratios = [self._trust_ratios(weight, update, found_inf) for weight, update in pairs]
        else:
            # All norms in one reduction, so that a sharded model needs one all-reduce.
            weight, update = tensor_norms([*weights, *updates], like=[*parameters, *parameters]).chunk(2)
            ratios = list(self._trust_ratios(weight, update, found_inf).unbind())
        torch._foreach_addcmul_(weights, updates, ratios, -group["lr"])

    def _trust_ratios(self, weight: Tensor, update: Tensor, found_inf: Tensor | None) -> Tensor:
        """The ratios of the norms of weights and updates; 0 where the step is skipped."""
        ratio = torch.where((weight > 0) & (update > 0), weight / update, 1.0)
        ratio = ratio.clamp(max=self.max_trust_ratio) if self.max_trust_ratio else ratio
        return ratio if found_inf is None else torch.where(found_inf > 0, 0.0, ratio)  # 0 * NaN would be NaN

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


def row_norms(tensor: Tensor) -> Tensor:
    """The 2-norms of the rows of a matrix [n, d], [n, 1]."""
    out: Tensor = torch.linalg.vector_norm(tensor, dim=-1, keepdim=True)
    return out
