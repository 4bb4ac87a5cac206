"""The loss of class logits."""

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.recipes.schema import LossConfig


def classification_loss(logits: Tensor, targets: Tensor, objective: LossConfig) -> Tensor:
    """Logits and targets [..., C] to one number, in single precision at least.

    "cross_entropy": of soft targets, mean over the batch. "binary": logistic loss per class, for which with "present" every
    class that has any part in an image is wholly there; mean over batch and classes, or over the batch of the sum over classes.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    targets = targets.to(logits.dtype)
    if objective.kind == "cross_entropy":
        return -(targets * logits.log_softmax(-1)).sum(-1).mean()
    if objective.binary_targets == "present":
        targets = (targets > 0).to(logits.dtype)
    losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return losses.sum(-1).mean() if objective.binary_sum else losses.mean()
