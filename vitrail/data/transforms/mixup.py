"""Mixup, CutMix and the boxes of random erasing, for a normalized batch [B, 3, height, width]."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitrail.data.rng import bernoulli, uniform


@dataclass(frozen=True)
class Mix:
    """The mixing parameters of a group of images: each is mixed with the image at its position in the reversed group.

    `lam` is the weight of the image itself. CutMix pastes the box (top, bottom, left, right); mixup blends (`box` is None).
    """

    lam: float
    box: tuple[int, int, int, int] | None


def draw_mix(
    seed: int,
    epoch: int,
    step: int,
    group: int,
    size: tuple[int, int],
    mixup: float,
    cutmix: float,
    switch_prob: float = 0.5,
) -> Mix:
    """Draw the mixing of one group of a step; if both are enabled, CutMix has the probability `switch_prob`."""
    if mixup <= 0 and cutmix <= 0:
        return Mix(1.0, None)
    rng = np.random.default_rng([seed & (2**64 - 1), epoch, step, group])
    cut = cutmix > 0 and (mixup <= 0 or rng.random() < switch_prob)
    lam = float(rng.beta(cutmix, cutmix) if cut else rng.beta(mixup, mixup))
    if not cut:
        return Mix(lam, None)
    height, width = size
    box_h, box_w = int(height * math.sqrt(1 - lam)), int(width * math.sqrt(1 - lam))
    center_y, center_x = int(rng.integers(height)), int(rng.integers(width))
    top, bottom = max(center_y - box_h // 2, 0), min(center_y + box_h // 2, height)
    left, right = max(center_x - box_w // 2, 0), min(center_x + box_w // 2, width)
    return Mix(1.0 - (bottom - top) * (right - left) / (height * width), (top, bottom, left, right))


def mix_images(images: Tensor, mixes: Sequence[Mix]) -> Tensor:
    """Blend each group of the batch with, or paste into it from, the reversed group; `mixes` has one element per group."""
    if all(mix.lam == 1.0 for mix in mixes):
        return images
    mixed = torch.empty_like(images)
    for source, target, mix in zip(images.chunk(len(mixes)), mixed.chunk(len(mixes)), mixes, strict=True):
        if mix.box is None and mix.lam < 1.0:
            torch.lerp(source.flip(0), source, mix.lam, out=target)
            continue
        target.copy_(source)
        if mix.box is not None:
            top, bottom, left, right = mix.box
            target[:, :, top:bottom, left:right] = source[:, :, top:bottom, left:right].flip(0)
    return mixed


def flip_groups(batch: Tensor, groups: int) -> Tensor:
    """A batch [B, ...] of equal groups with the order within each group reversed."""
    return batch.view(groups, -1, *batch.shape[1:]).flip(1).flatten(0, 1)


def erasing_boxes(
    key: Tensor,
    size: tuple[int, int],
    probability: float = 0.25,
    area: tuple[float, float] = (0.02, 1 / 3),
    aspect: float = 0.3,
) -> Tensor:
    """Draw one box per image, int64 [B, 4] (top, bottom, left, right): random area and log-uniform aspect, up to ten tries.

    The box is empty if all tries fail, and with probability 1 - `probability`.
    """
    height, width = size
    fraction = area[0] + (area[1] - area[0]) * uniform(key, "erase.area", 10)
    shape = torch.exp(math.log(aspect) - 2 * math.log(aspect) * uniform(key, "erase.aspect", 10))
    box_h, box_w = torch.sqrt(fraction * height * width * shape).round(), torch.sqrt(fraction * height * width / shape).round()
    valid = (box_h < height) & (box_w < width)
    first = valid.to(torch.uint8).argmax(1, keepdim=True)
    box_h, box_w = box_h.gather(1, first)[:, 0].long(), box_w.gather(1, first)[:, 0].long()
    offset = uniform(key, "erase.place", 2)
    top, left = (offset[:, 0] * (height - box_h + 1)).long(), (offset[:, 1] * (width - box_w + 1)).long()
    erased = valid.any(1) & bernoulli(key, "erase", probability)
    return torch.stack([top, top + box_h, left, left + box_w], 1) * erased[:, None]
