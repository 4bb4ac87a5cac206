"""Targets of a batch: distributions over the classes."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.data.transforms.mixup import Mix, flip_groups
from vitrail.recipes.schema import LossConfig


class ClassificationTargets(NamedTuple):
    """Distributions over C classes; those that the recipe does not use are None."""

    classes: Tensor  # [B, C]
    teacher: Tensor | None = None  # [B, C]
    tokens: Tensor | None = None  # [B, N, C], one for each patch
    mixed: Tensor | None = None  # bool [groups, N]: patches that MixToken takes from the image at the mirrored index of the group


def label_targets(labels: Tensor, classes: int, config: LossConfig) -> Tensor:
    """Labels [B] to smoothed distributions [B, C].

    The smoothed probability is shared by all classes including the label (the released code), or by the others alone (DeiT's
    text).
    """
    off, on = smoothed_values(classes, config.label_smoothing, config.smoothing_over == "others")
    targets = torch.full((len(labels), classes), off, device=labels.device)
    return targets.scatter_(1, labels.long()[:, None], on)


def smoothed_values(classes: int, smoothing: float, over_others: bool = False) -> tuple[float, float]:
    """The target probabilities of a wrong class and of the label."""
    smoothing = smoothing if classes > 1 else 0.0
    if over_others:
        return smoothing / max(classes - 1, 1), 1.0 - smoothing
    return smoothing / classes, 1.0 - smoothing + smoothing / classes


def blend(targets: Tensor, mixes: Sequence[Mix]) -> Tensor:
    """lam * targets + (1 - lam) * targets of the reversed group, as `mix_images` mixes images."""
    if all(mix.lam == 1.0 for mix in mixes):
        return targets
    lam = torch.tensor([mix.lam for mix in mixes], dtype=targets.dtype).to(targets.device, non_blocking=True)
    return torch.lerp(flip_groups(targets, len(mixes)), targets, lam.repeat_interleave(len(targets) // len(mixes))[:, None])
