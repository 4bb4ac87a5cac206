"""Masks over the patch grid for masked image modeling: the blocks of BEiT."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.data.rng import uniform

TRIES = 10  # to place a block, before the mask is left as it is
ATTEMPTS = 48  # to place all blocks; of 200,000 of BEiT's masks none needs more than 40


class MaskedPatches(NamedTuple):
    """A fixed number of patches of each image, so that shapes do not depend on the masks."""

    mask: Tensor  # bool [B, N]
    positions: Tensor  # int64 [B, M]: the masked patches of each image, then any others
    masked: Tensor  # float [B, M]: 1 where the patch is masked, else 0


def locate_masked(mask: Tensor, count: int) -> MaskedPatches:
    """The positions of at most `count` masked patches of each image, of a mask [B, N]."""
    masked, positions = mask.to(torch.uint8).sort(dim=1, descending=True, stable=True)
    return MaskedPatches(mask, positions[:, :count], masked[:, :count].float())


def block_mask(key: Tensor, grid: tuple[int, int], count: int, min_block: int = 16, aspect: float = 0.3) -> Tensor:
    """Block-wise masks of BEiT with the random keys [B], bool [B, height, width]; does not synchronize with the GPU.

    Blocks are added until `count` patches are masked. The area of a block is uniform between `min_block` and the number of
    missing patches, its aspect ratio log-uniform between `aspect` and the inverse, its place uniform. It is accepted if it is
    smaller than the grid and adds at least one patch and at most the missing number. After ten failed tries in a row the mask is
    left as it is, so at most `count` patches are masked.
    """
    height, width = grid
    rows, columns = torch.arange(height, device=key.device)[:, None], torch.arange(width, device=key.device)
    draws = uniform(key, "block_mask", 4 * ATTEMPTS).unflatten(1, (ATTEMPTS, 4))[..., None, None]
    mask = torch.zeros(len(key), height, width, dtype=torch.bool, device=key.device)
    missing = torch.full((len(key), 1, 1), count, device=key.device)
    failed = torch.zeros_like(missing)
    # Every image takes part in every attempt: a loop that ends when all masks are done would have to wait for the device.
    for area, shape, y, x in (attempt.unbind(1) for attempt in draws.unbind(1)):
        area, shape = min_block + (missing - min_block) * area, torch.exp((1.0 - 2.0 * shape) * math.log(aspect))
        box_height, box_width = (area * shape).sqrt().round(), (area / shape).sqrt().round()
        top, left = (y * (height - box_height + 1)).floor(), (x * (width - box_width + 1)).floor()
        inside = (rows >= top) & (rows < top + box_height) & (columns >= left) & (columns < left + box_width)
        new = inside & ~mask
        added = new.sum((1, 2), keepdim=True)
        fits = (box_height < height) & (box_width < width) & (added > 0) & (added <= missing) & (failed < TRIES)
        mask |= new & fits
        missing = missing - added * fits
        failed = torch.where(fits, 0, failed + 1)
    return mask
