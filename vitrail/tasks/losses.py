"""The loss of class logits."""

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.recipes.schema import LossConfig


def classification_loss(logits: Tensor, targets: Tensor, config: LossConfig) -> Tensor:
    """Logits and targets [..., C] to the loss [], in at least float32.

    "cross_entropy": of soft targets, mean over the batch. "binary": logistic loss per class, where "present" sets every target
    above 0 to 1; mean over batch and classes, or over the batch of the sum over classes.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    targets = targets.to(logits.dtype)
    if config.kind == "cross_entropy":
        return -(targets * logits.log_softmax(-1)).sum(-1).mean()
    if config.binary_targets == "present":
        targets = (targets > 0).to(logits.dtype)
    losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return losses.sum(-1).mean() if config.binary_sum else losses.mean()
