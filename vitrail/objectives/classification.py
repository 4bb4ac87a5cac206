"""Learning classes: from labels to targets, from logits to a loss."""

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.augment.mixing import Mix
from vitrail.recipes.recipe import Objective


def make_targets(labels: Tensor, classes: int, mix: Mix, objective: Objective) -> Tensor:
    """Labels [B] to what the network should say [B, C], each row a distribution: smoothed first, mixed second.

    The share that smoothing takes from the true class goes to all classes, the true one among them (the released code), or to
    the others alone (DeiT's text). Mixing takes its part from the batch in reverse order, as `mix_pictures` does.
    """
    smoothing = objective.smoothing if classes > 1 else 0.0
    if objective.smooth_over == "others":
        off, on = smoothing / max(classes - 1, 1), 1.0 - smoothing
    else:
        off = smoothing / classes
        on = 1.0 - smoothing + off
    targets = torch.full((len(labels), classes), off, device=labels.device)
    targets.scatter_(1, labels.long()[:, None], on)
    return targets if mix.share == 1.0 else torch.lerp(targets.flip(0), targets, mix.share)


def classification_loss(logits: Tensor, targets: Tensor, objective: Objective) -> Tensor:
    """Logits and targets [..., C] to one number, in single precision at least.

    "cross_entropy": of soft targets, mean over the batch. "binary": logistic loss per class, for which with "present" every
    class that has any part in a picture is wholly there; mean over batch and classes, or over the batch of the sum over classes.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    targets = targets.to(logits.dtype)
    if objective.loss == "cross_entropy":
        return -(targets * logits.log_softmax(-1)).sum(-1).mean()
    if objective.binary_targets == "present":
        targets = (targets > 0).to(logits.dtype)
    losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return losses.sum(-1).mean() if objective.binary_sum else losses.mean()
