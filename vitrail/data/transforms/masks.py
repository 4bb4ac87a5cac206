"""Masks over the patch grid, for masked pre-training: random patches, and BEiT's blocks."""

import math

import numpy as np
import torch
from torch import Tensor

from vitrail.data.rng import uniform


def random_mask(key: Tensor, grid: tuple[int, int], share: float) -> Tensor:
    """Exactly `share` of the patches of every image, bool [B, height, width]."""
    patches = grid[0] * grid[1]
    rank = uniform(key, "mask", patches).argsort(1).argsort(1)
    return (rank < round(share * patches)).unflatten(1, grid)


def block_mask(
    seed: int,
    epoch: int,
    index: np.ndarray,
    repeat: np.ndarray,
    grid: tuple[int, int],
    target: int,
    least: int = 16,
    aspect: float = 0.3,
) -> Tensor:
    """BEiT's masks, bool [B, height, width]: blocks are added until `target` patches are covered or a block finds no place.

    A block has between `least` and the missing number of patches and a log-uniform aspect; it is accepted if it adds at least one
    new patch and not more than are missing; ten tries per block. So at most `target` patches are masked.
    """
    masks = np.zeros((len(index), *grid), dtype=bool)
    for image, (which, copy) in enumerate(zip(index, repeat, strict=True)):
        rng = np.random.default_rng([seed & (2**64 - 1), epoch, int(which), int(copy)])
        mask = masks[image]
        while (missing := target - int(mask.sum())) > 0:
            if not _add_block(mask, rng, missing, least, aspect):
                break
    return torch.from_numpy(masks)


def _add_block(mask: np.ndarray, rng: np.random.Generator, missing: int, least: int, aspect: float) -> bool:
    height, width = mask.shape
    for _ in range(10):
        area = rng.uniform(least, max(missing, least))
        shape = math.exp(rng.uniform(math.log(aspect), -math.log(aspect)))
        box_h, box_w = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if not (0 < box_h < height and 0 < box_w < width):
            continue
        top, left = rng.integers(height - box_h + 1), rng.integers(width - box_w + 1)
        box = mask[top : top + box_h, left : left + box_w]
        new = box.size - int(box.sum())
        if 0 < new <= missing:
            box[:] = True
            return True
    return False
