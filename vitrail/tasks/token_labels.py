"""Learning a label for every patch: maps that follow the image, MixToken, the dense loss (LV-ViT, arXiv 2104.10858)."""

import torch
from torch import Tensor

from vitrail.data.transforms.mixup import Mix, draw_mix
from vitrail.data.transforms.pipeline import Augmented, transform, within

Grid = tuple[int, int]
POINTS = 2  # per side of a patch, at which a map is looked up
SALT = 0x70CE45  # draws of MixToken are not those of CutMix


def project(values: Tensor, classes: Tensor, seen: Augmented, grid: Grid, patch: int, count: int, centre: bool = False) -> Tensor:
    """A teacher's maps to logits of the patches [B, N, C], wherever the augmentation has put them.

    values and classes [B, K, h, w] are the K best logits of every cell and whose they are (`count` and above: nobody's); a map
    covers the whole source image, or its `centre` square. Every patch gets the mean of `POINTS` x `POINTS` places in it, each
    brought back to the source by the inverse of all that was done to the image, and looked up between the four cells around it;
    cells at the rim go on beyond it. A logit that is not kept is 0, and so is every logit where the image was filled.
    """
    batch, kept, height, width = values.shape
    rows, columns = ((torch.arange(side * POINTS, device=values.device) + 0.5) * (patch / POINTS) for side in grid)
    y, x = torch.meshgrid(rows, columns, indexing="ij")
    start = torch.stack([x, y, torch.ones_like(x)], -1).expand(batch, -1, -1, -1)
    known = torch.ones(start.shape[:-1], dtype=torch.bool, device=values.device)
    places, steps = start, seen.steps
    crop = 0 if seen.crop_last else len(steps) - 1
    for number, (matrix, sizes) in enumerate(steps):
        places = transform(matrix, places)
        if number == crop:
            places = folded(places, sizes)  # a crop mirrors what lies beyond the image; warps fill it
        else:
            known = known & within(places, sizes)
    whole = seen.sizes[:, None, None].to(places)
    size = whole.amin(-1, keepdim=True).expand_as(whole) if centre else whole
    places = places[..., :2] - (whole - size).flip(-1) / 2
    u = (places[..., 0] / size[..., 1] * width - 0.5).clamp(0, width - 1)
    v = (places[..., 1] / size[..., 0] * height - 0.5).clamp(0, height - 1)
    left, top = u.floor().clamp(max=max(width - 2, 0)), v.floor().clamp(max=max(height - 2, 0))
    values, classes = values.flatten(2).float(), classes.flatten(2).long().clamp(max=count)
    dense = torch.zeros(batch, grid[0] * grid[1], count + 1, device=values.device)
    for down in range(2 if height > 1 else 1):
        for right in range(2 if width > 1 else 1):
            weight = (u - left if right else 1 - (u - left)) * (v - top if down else 1 - (v - top)) * known / POINTS**2
            cell = ((top + down) * width + left + right).long()
            for part_y in range(POINTS):
                for part_x in range(POINTS):
                    one = (slice(None), slice(part_y, None, POINTS), slice(part_x, None, POINTS))
                    index = cell[one].flatten(1)[:, None].expand(-1, kept, -1)
                    amount = values.gather(2, index) * weight[one].flatten(1)[:, None]
                    dense.scatter_add_(2, classes.gather(2, index).transpose(1, 2), amount.transpose(1, 2))
    return dense[..., :count]


def folded(places: Tensor, sizes: Tensor) -> Tensor:
    """Places (x, y, 1) [B, h, w, 3] beyond the edges of images of `sizes` [B, 2], mirrored at these edges."""
    limit = sizes.flip(1)[:, None, None].to(places)
    inside = limit - (limit - places[..., :2].abs()).abs()
    return torch.cat([inside, places[..., 2:]], -1)


def covered(mix: Mix, grid: Grid, patch: int, device: torch.device) -> Tensor:
    """The share of every patch [N] that CutMix has pasted over; mixup takes the same share everywhere."""
    if mix.box is None:
        return torch.full((grid[0] * grid[1],), 1.0 - mix.share, device=device)
    top, bottom, left, right = mix.box
    sides = []
    for cells, low, high in ((grid[0], top, bottom), (grid[1], left, right)):
        start = torch.arange(cells, device=device) * patch
        sides.append(((start + patch).clamp(max=high) - start.clamp(min=low)).clamp(min=0) / patch)
    return (sides[0][:, None] * sides[1]).flatten()


def draw_token_mix(seed: int, epoch: int, step: int, micro_batch: int, grid: Grid, beta: float) -> Mix:
    """MixToken's box on the grid of patches, drawn as CutMix draws one on pixels."""
    return draw_mix(seed ^ SALT, epoch, step, micro_batch, grid, 0.0, beta)


def token_mask(mix: Mix, grid: Grid, device: torch.device) -> Tensor:
    """bool [N]: the patches inside the box."""
    mask = torch.zeros(grid, dtype=torch.bool)
    if mix.box is not None:
        top, bottom, left, right = mix.box
        mask[top:bottom, left:right] = True
    return mask.flatten().to(device, non_blocking=True)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of logits [B, N, C] against distributions, mean over all patches, in single precision at least."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return -(targets.to(logits.dtype) * logits.log_softmax(-1)).sum(-1).mean()
