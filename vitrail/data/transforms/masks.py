"""Masks over the patch grid for masked image modeling: random patches and the blocks of BEiT."""

import math

import numpy as np
import torch
from torch import Tensor

from vitrail.data.rng import uniform


def random_mask(key: Tensor, grid: tuple[int, int], ratio: float) -> Tensor:
    """Mask exactly `ratio` of the patches of every image, bool [B, height, width]."""
    patches = grid[0] * grid[1]
    rank = uniform(key, "mask", patches).argsort(1).argsort(1)
    out: Tensor = (rank < round(ratio * patches)).unflatten(1, grid)
    return out


def block_mask(
    seed: int,
    epoch: int,
    index: np.ndarray,
    repeat: np.ndarray,
    grid: tuple[int, int],
    num_masked: int,
    min_patches: int = 16,
    aspect: float = 0.3,
) -> Tensor:
    """Block-wise masks of BEiT, bool [B, height, width]: blocks are added until `num_masked` patches are masked.

    A block has between `min_patches` and the number of missing patches, and a log-uniform aspect ratio. It is accepted if it adds
    at least one patch and at most the missing number. After ten failed tries the mask is left as it is, so at most `num_masked`
    patches are masked.
    """
    masks = np.zeros((len(index), *grid), dtype=bool)
    for image, (number, copy) in enumerate(zip(index, repeat, strict=True)):
        rng = np.random.default_rng([seed & (2**64 - 1), epoch, int(number), int(copy)])
        mask = masks[image]
        while (missing := num_masked - int(mask.sum())) > 0:
            if not _add_block(mask, rng, missing, min_patches, aspect):
                break
    return torch.from_numpy(masks)


def _add_block(mask: np.ndarray, rng: np.random.Generator, missing: int, min_patches: int, aspect: float) -> bool:
    height, width = mask.shape
    for _ in range(10):
        area = rng.uniform(min_patches, max(missing, min_patches))
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
