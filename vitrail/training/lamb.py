"""LAMB: Adam's direction, scaled per tensor by the norm of the weights over the norm of the update."""

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from vitrail.training.gradient_norm import clip_divisor, count_up, local, tensor_norms, total_norm


class Lamb(Optimizer):
    """w <- w - lr * ratio * u, with u = m / (sqrt(v) + eps) + weight_decay * w from bias-corrected Adam moments m, v.

    `ratio` is |w| / |u| of the tensor, 1 where either is zero, at most `trust_limit` (0: no bound). The defaults are the rule
    of Apex's FusedLAMB, with which DeiT III and ResMLP were trained:

    * the gradients of all groups together are first clipped to the norm `clip` (0: not at all);
    * `trust="decayed"`: only groups with a weight decay are scaled, the others take plain Adam steps at the full rate.

    `trust="all"` scales every tensor (Apex's NvLamb); with `clip=0` and a decay on everything that is LAMB as first published.
    timm's `trust_clip` is `trust_limit=1`.

    `found_inf` and `grad_scale`, set as attributes, mean what they mean to torch's fused optimizers: where `found_inf` is 1 the
    step changes neither weights nor state, without anybody asking the device. Gradients are clipped in place. The parameters of
    a group share dtype and device; sharded ones (DTensor) are updated where they lie, only norms travel.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        clip: float = 1.0,
        trust: Literal["decayed", "all"] = "decayed",
        trust_limit: float = 0.0,
    ) -> None:
        # `fused` makes torch put a loaded step count on the device, where the kernel reads it.
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": True})
        self.clip, self.trust, self.trust_limit = clip, trust, trust_limit
        self._step_supports_amp_scaling = True  # GradScaler then hands over its flag instead of reading it back

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        found: Tensor | None = getattr(self, "found_inf", None)
        self._scale_gradients(getattr(self, "grad_scale", None))
        for group in self.param_groups:
            whole = [parameter for parameter in group["params"] if parameter.grad is not None]
            if whole:
                self._step_group(group, whole, found)

    def _scale_gradients(self, scale: Tensor | None) -> None:
        whole = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not whole:
            return
        if self.clip:
            norm = total_norm(whole)
            scale = clip_divisor(norm, self.clip) if scale is None else scale * clip_divisor(norm / scale, self.clip)
        if scale is not None:
            torch._foreach_div_(local(whole), scale)

    def _step_group(self, group: dict[str, Any], whole: list[Tensor], found: Tensor | None) -> None:
        states = [self._state(parameter) for parameter in whole]
        weights = local(whole)
        gradients = local([parameter.grad for parameter in whole if parameter.grad is not None])
        steps = [state["step"] for state in states]
        count_up(steps, found)
        # torch's fused Adam with the rate -1 adds m / (sqrt(v) + eps) to what it takes for weights. It reads `found_inf` itself,
        # before a gradient that is no number can spoil a moment.
        plain = self.trust == "decayed" and not group["weight_decay"]
        updates = weights if plain else list(torch._foreach_mul(weights, group["weight_decay"]))
        torch._fused_adam_(
            updates,
            gradients,
            local([state["exp_avg"] for state in states]),
            local([state["exp_avg_sq"] for state in states]),
            [],
            steps,
            lr=group["lr"] if plain else -1.0,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=0.0,
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            found_inf=found,
        )
        if plain:
            return
        ratios = self._ratios(whole, updates)
        ratios = ratios if found is None else torch.where(found > 0, 0.0, ratios)  # a product would let a NaN through
        torch._foreach_addcmul_(weights, updates, ratios.unbind(), -group["lr"])

    def _ratios(self, whole: list[Tensor], updates: list[Tensor]) -> Tensor:
        """[n] for n tensors; all norms in one reduction, which for a sharded model is one message."""
        weight, update = tensor_norms([*local(whole), *updates], like=[*whole, *whole]).chunk(2)
        ratio = torch.where((weight > 0) & (update > 0), weight / update, 1.0)
        return ratio.clamp(max=self.trust_limit) if self.trust_limit else ratio

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state
