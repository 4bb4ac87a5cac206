"""Token labels: maps transformed like the image, MixToken, the dense loss (LV-ViT, arXiv 2104.10858)."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from vitrail.data.transforms.mixup import Mix, draw_mix
from vitrail.data.transforms.pipeline import Augmented, inside_image, transform_points
from vitrail.layers.layout import Grid

POINTS = 2  # samples of the map per side of a patch
SALT = 0x70CE45  # MixToken draws other boxes than CutMix


def project(
    values: Tensor,
    classes: Tensor,
    augmented: Augmented,
    grid: Grid,
    patch_size: int,
    count: int,
    center: bool = False,
    box_order: Literal["yx", "xy"] = "yx",
) -> Tensor:
    """A teacher's maps to logits of the patches [B, N, C] after augmentation.

    values and classes [B, K, h, w] are the K largest logits of every cell and their classes (`count` and above: none of the
    student's); a map covers the whole source image, or its `center` square. The logits of a patch are the mean over `POINTS` x
    `POINTS` points in it, each transformed back to the source image and interpolated bilinearly between the four nearest cells,
    with the border replicated. Logits that are not stored, and those of points outside the image, are 0. `box_order` is that of
    the recipe's `token_labels`.
    """
    batch, kept, height, width = values.shape
    rows, columns = ((torch.arange(side * POINTS, device=values.device) + 0.5) * (patch_size / POINTS) for side in grid)
    y, x = torch.meshgrid(rows, columns, indexing="ij")
    points = torch.stack([x, y, torch.ones_like(x)], -1).expand(batch, -1, -1, -1)
    valid = torch.ones(points.shape[:-1], dtype=torch.bool, device=values.device)
    steps = augmented.steps
    crop = 0 if augmented.crop_last else len(steps) - 1
    for index, (matrix, sizes) in enumerate(steps):
        points = transform_points(matrix, points)
        if index == crop:
            points = mirror_at_edges(points, sizes)  # a crop pads by reflection, a warp by filling
            if box_order == "xy":
                points = exchange_axes(points, sizes, flipped=matrix[:, 0, 0] < 0)
        else:
            valid = valid & inside_image(points, sizes)
    whole = augmented.sizes[:, None, None].to(points)
    size = whole.amin(-1, keepdim=True).expand_as(whole) if center else whole
    points = points[..., :2] - (whole - size).flip(-1) / 2
    u = (points[..., 0] / size[..., 1] * width - 0.5).clamp(0, width - 1)
    v = (points[..., 1] / size[..., 0] * height - 0.5).clamp(0, height - 1)
    left, top = u.floor().clamp(max=max(width - 2, 0)), v.floor().clamp(max=max(height - 2, 0))
    values, classes = values.flatten(2).float(), classes.flatten(2).long().clamp(max=count)
    dense = torch.zeros(batch, grid[0] * grid[1], count + 1, device=values.device)
    for down in range(2 if height > 1 else 1):
        for right in range(2 if width > 1 else 1):
            weight = (u - left if right else 1 - (u - left)) * (v - top if down else 1 - (v - top)) * valid / POINTS**2
            cell = ((top + down) * width + left + right).long()
            for part_y in range(POINTS):
                for part_x in range(POINTS):
                    one = (slice(None), slice(part_y, None, POINTS), slice(part_x, None, POINTS))
                    cells = cell[one].flatten(1)[:, None].expand(-1, kept, -1)
                    amount = values.gather(2, cells) * weight[one].flatten(1)[:, None]
                    dense.scatter_add_(2, classes.gather(2, cells).transpose(1, 2), amount.transpose(1, 2))
    return dense[..., :count]


def mirror_at_edges(points: Tensor, sizes: Tensor) -> Tensor:
    """Points (x, y, 1) [B, h, w, 3] outside images of `sizes` [B, 2], mirrored at the edges."""
    limit = sizes.flip(1)[:, None, None].to(points)
    inside = limit - (limit - points[..., :2].abs()).abs()
    return torch.cat([inside, points[..., 2:]], -1)


def exchange_axes(points: Tensor, sizes: Tensor, flipped: Tensor) -> Tensor:
    """The points of the transposed crop: rows and columns of the box exchanged, relative to the image's height and width.

    points (x, y, 1) [B, n, n, 3] are those of a crop without rotation of images of `sizes` [B, 2], mirrored where `flipped` [B].
    The crop is that of the mirrored image, as LV-ViT's code has it.
    """
    limit = sizes.flip(1)[:, None, None].to(points)
    mirrored = torch.stack([flipped, torch.zeros_like(flipped)], -1)[:, None, None]
    place = points[..., :2] / limit
    place = torch.where(mirrored, 1 - place, place).transpose(1, 2).flip(-1)
    return torch.cat([torch.where(mirrored, 1 - place, place) * limit, points[..., 2:]], -1)


def covered(mix: Mix, grid: Grid, patch: int, device: torch.device) -> Tensor:
    """The fraction of every patch [N] that CutMix replaces; with mixup the same fraction everywhere."""
    if mix.box is None:
        return torch.full((grid[0] * grid[1],), 1.0 - mix.lam, device=device)
    top, bottom, left, right = mix.box
    sides = []
    for cells, low, high in ((grid[0], top, bottom), (grid[1], left, right)):
        start = torch.arange(cells, device=device) * patch
        sides.append(((start + patch).clamp(max=high) - start.clamp(min=low)).clamp(min=0) / patch)
    return (sides[0][:, None] * sides[1]).flatten()


def draw_token_mix(seed: int, epoch: int, step: int, group: int, grid: Grid, beta: float) -> Mix:
    """MixToken's box on the patch grid, drawn as CutMix draws one on pixels."""
    return draw_mix(seed ^ SALT, epoch, step, group, grid, 0.0, beta)


def token_mask(mixes: Sequence[Mix], grid: Grid, device: torch.device) -> Tensor:
    """bool [groups, N]: the patches inside the box of each group."""
    mask = torch.zeros(len(mixes), *grid, dtype=torch.bool)
    for group, mix in enumerate(mixes):
        if mix.box is not None:
            top, bottom, left, right = mix.box
            mask[group, top:bottom, left:right] = True
    return mask.flatten(1).to(device, non_blocking=True)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of logits [B, N, C] against distributions, mean over all patches, in at least float32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return -(targets.to(logits.dtype) * logits.log_softmax(-1)).sum(-1).mean()
