"""Targets and losses of distillation (DeiT, arXiv 2012.12877)."""

import torch
from torch import Tensor

from vitrail.recipes.schema import DistillationConfig
from vitrail.tasks.targets import smoothed_values


def teacher_targets(logits: Tensor, config: DistillationConfig) -> Tensor:
    """A teacher's logits [B, C] to a target distribution: its probabilities at a temperature, or its top-1 class.

    Classes with a logit of minus infinity have no prediction.
    """
    if config.kind == "soft":
        return (logits.float() / config.temperature).softmax(-1)
    off, on = smoothed_values(logits.shape[-1], config.label_smoothing)
    targets = torch.full_like(logits, off, dtype=torch.float32).scatter_(-1, logits.argmax(-1, keepdim=True), on)
    # NaN logits have an argmax too: make the targets NaN, so that the loss shows it as it does with soft targets.
    return targets.masked_fill(logits.isnan().any(-1, keepdim=True), torch.nan)


def distillation_loss(logits: Tensor, targets: Tensor, config: DistillationConfig) -> Tensor:
    """The student's logits and the teacher's distribution, both [B, C], to the loss [], in at least float32.

    "hard": cross-entropy. "soft": temperature^2 KL(teacher, student), both at the temperature; mean over the batch, or over
    batch and classes with `per_class`.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    targets = targets.to(logits.dtype)
    if config.kind == "hard":
        return -(targets * logits.log_softmax(-1)).sum(-1).mean()
    student = (logits / config.temperature).log_softmax(-1)
    divergence: Tensor = torch.special.xlogy(targets, targets) - targets * student
    total = divergence.sum(-1).mean() * config.temperature**2
    return total / logits.shape[-1] if config.per_class else total
