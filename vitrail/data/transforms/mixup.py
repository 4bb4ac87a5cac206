"""Mixing images and their labels, boxes to erase: what happens to a normalized batch [B, 3, height, width]."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitrail.data.rng import chance, uniform


@dataclass(frozen=True)
class Mix:
    """One draw for a batch: each image takes its share from the image at the mirrored place of the batch.

    `share` is what remains of the image itself. CutMix pastes the box (top, bottom, left, right); mixup blends (`box` None).
    """

    share: float
    box: tuple[int, int, int, int] | None


def draw_mix(
    seed: int, epoch: int, step: int, micro_batch: int, size: tuple[int, int], mixup: float, cutmix: float, switch: float = 0.5
) -> Mix:
    """The draw of one micro-batch, a pure function of its place; with both on, CutMix has the probability `switch`."""
    if mixup <= 0 and cutmix <= 0:
        return Mix(1.0, None)
    rng = np.random.default_rng([seed & (2**64 - 1), epoch, step, micro_batch])
    cut = cutmix > 0 and (mixup <= 0 or rng.random() < switch)
    share = float(rng.beta(cutmix, cutmix) if cut else rng.beta(mixup, mixup))
    if not cut:
        return Mix(share, None)
    height, width = size
    box_h, box_w = int(height * math.sqrt(1 - share)), int(width * math.sqrt(1 - share))
    centre_y, centre_x = int(rng.integers(height)), int(rng.integers(width))
    top, bottom = max(centre_y - box_h // 2, 0), min(centre_y + box_h // 2, height)
    left, right = max(centre_x - box_w // 2, 0), min(centre_x + box_w // 2, width)
    return Mix(1.0 - (bottom - top) * (right - left) / (height * width), (top, bottom, left, right))


def mix_images(images: Tensor, mix: Mix) -> Tensor:
    """Blend with, or paste from, the batch in reverse order."""
    if mix.share == 1.0:
        return images
    if mix.box is None:
        return torch.lerp(images.flip(0), images, mix.share)
    top, bottom, left, right = mix.box
    mixed = images.clone()
    mixed[:, :, top:bottom, left:right] = images[:, :, top:bottom, left:right].flip(0)
    return mixed


def erasing_boxes(
    key: Tensor,
    size: tuple[int, int],
    probability: float = 0.25,
    area: tuple[float, float] = (0.02, 1 / 3),
    aspect: float = 0.3,
) -> Tensor:
    """One box per image, int64 [B, 4] (top, bottom, left, right), empty where nothing is erased: random area, log-uniform
    aspect, ten tries, then none."""
    height, width = size
    share = area[0] + (area[1] - area[0]) * uniform(key, "erase.area", 10)
    shape = torch.exp(math.log(aspect) - 2 * math.log(aspect) * uniform(key, "erase.aspect", 10))
    box_h, box_w = torch.sqrt(share * height * width * shape).round(), torch.sqrt(share * height * width / shape).round()
    valid = (box_h < height) & (box_w < width)
    first = valid.to(torch.uint8).argmax(1, keepdim=True)
    box_h, box_w = box_h.gather(1, first)[:, 0].long(), box_w.gather(1, first)[:, 0].long()
    place = uniform(key, "erase.place", 2)
    top, left = (place[:, 0] * (height - box_h + 1)).long(), (place[:, 1] * (width - box_w + 1)).long()
    erased = valid.any(1) & chance(key, "erase", probability)
    return torch.stack([top, top + box_h, left, left + box_w], 1) * erased[:, None]
