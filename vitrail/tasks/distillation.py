"""Learning from what a teacher says about an image (DeiT, arXiv 2012.12877)."""

import torch
from torch import Tensor

from vitrail.recipes.schema import DistillationConfig
from vitrail.tasks.targets import smoothed


def teacher_targets(logits: Tensor, how: DistillationConfig) -> Tensor:
    """A teacher's logits [B, C] to the distribution that is learnt: its probabilities at a temperature, or its first choice.

    Logits of minus infinity are classes that it was not asked about.
    """
    if how.kind == "soft":
        return (logits.float() / how.temperature).softmax(-1)
    off, on = smoothed(logits.shape[-1], how.label_smoothing)
    targets = torch.full_like(logits, off, dtype=torch.float32).scatter_(-1, logits.argmax(-1, keepdim=True), on)
    # A teacher that computes no numbers has a first choice too; the loss has to say so, as it does with soft ones.
    return targets.masked_fill(logits.isnan().any(-1, keepdim=True), torch.nan)


def distillation_loss(logits: Tensor, targets: Tensor, how: DistillationConfig) -> Tensor:
    """The student's logits and the teacher's distribution, both [B, C], to one number, in single precision at least.

    "hard": cross-entropy. "soft": temperature^2 KL(teacher, student), both at the temperature; mean over the batch, or over
    batch and classes with `per_class`.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    targets = targets.to(logits.dtype)
    if how.kind == "hard":
        return -(targets * logits.log_softmax(-1)).sum(-1).mean()
    student = (logits / how.temperature).log_softmax(-1)
    divergence = torch.special.xlogy(targets, targets) - targets * student
    total = divergence.sum(-1).mean() * how.temperature**2
    return total / logits.shape[-1] if how.per_class else total
