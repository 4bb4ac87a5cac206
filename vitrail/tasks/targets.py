"""What a network should say about a batch."""

from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.recipes.schema import LossConfig


class Targets(NamedTuple):
    """Distributions over C classes; what a training does not learn from is None."""

    classes: Tensor  # [B, C]
    teacher: Tensor | None = None  # [B, C]
    tokens: Tensor | None = None  # [B, N, C], one for each patch
    mixed: Tensor | None = None  # bool [N]: the patches that MixToken takes from the image at the mirrored place

    def clone(self) -> "Targets":
        return Targets(self.classes.clone(), *(None if each is None else each.clone() for each in self[1:]))


def label_targets(labels: Tensor, classes: int, objective: LossConfig) -> Tensor:
    """Labels [B] to smoothed distributions [B, C].

    The share that smoothing takes from the true class goes to all classes, the true one among them (the released code), or to
    the others alone (DeiT's text).
    """
    off, on = smoothed(classes, objective.label_smoothing, objective.smoothing_over == "others")
    targets = torch.full((len(labels), classes), off, device=labels.device)
    return targets.scatter_(1, labels.long()[:, None], on)


def smoothed(classes: int, smoothing: float, over_others: bool = False) -> tuple[float, float]:
    """What a wrong and what the right class get."""
    smoothing = smoothing if classes > 1 else 0.0
    if over_others:
        return smoothing / max(classes - 1, 1), 1.0 - smoothing
    return smoothing / classes, 1.0 - smoothing + smoothing / classes


def blend(targets: Tensor, share: float) -> Tensor:
    """Mixing takes its part from the batch in reverse order, as `mix_images` does; `share` remains of one's own."""
    return targets if share == 1.0 else torch.lerp(targets.flip(0), targets, share)
