"""Masks moved as augmented images are: the same crop, flip and warps, by nearest-neighbor interpolation as in Pillow."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vitrail.data.mask_classes import IGNORE
from vitrail.data.rng import GOLDEN, hash32
from vitrail.data.transforms.affine import full_sizes
from vitrail.data.transforms.crops import Axis, View
from vitrail.data.transforms.pipeline import Augmentation, Augmented, sample_view
from vitrail.data.transforms.resize import axis_centers

DRAWS = 10  # of a crop, until no class fills most of it


def transform_masks(masks: Tensor, augmented: Augmented) -> Tensor:
    """Masks uint8 [B, H, W] of the source images to those of the augmented images, uint8 [B, height, width].

    Pixels outside of the source image are `IGNORE`; the augmented images are reflected or gray there.
    """
    if augmented.crop_last:
        for layer in augmented.layers:
            masks = warp_masks(masks, layer.matrix(augmented.sizes), augmented.sizes)
        return crop_masks(masks, augmented.view)
    masks = crop_masks(masks, augmented.view)
    for layer in augmented.layers:
        sizes = full_sizes(masks[:, None])
        masks = warp_masks(masks, layer.matrix(sizes), sizes)
    return masks


def crop_masks(masks: Tensor, view: View, every: int = 1) -> Tensor:
    """The crop of masks [B, H, W], or every n-th pixel of it; `IGNORE` outside of the source image.

    A view of a multiple of B images is of several crops of each mask: one crop of all masks after the other.
    """
    return crop_planes(masks[:, None], view, IGNORE, every)[:, 0]


def crop_planes(planes: Tensor, view: View, outside: int, every: int = 1) -> Tensor:
    """As `crop_masks`, of P planes of each image [B, P, H, W] with the value `outside` around it."""
    (rows, inside_rows), (columns, inside_columns) = (
        [indices[:, every // 2 :: every] for indices in (nearest_pixels(axis), inside_pixels(axis))] for axis in view
    )
    image = torch.arange(len(rows), device=planes.device)[:, None, None, None] % len(planes)
    plane = torch.arange(planes.shape[1], device=planes.device)[:, None, None]
    cropped = planes[image, plane, rows[:, None, :, None], columns[:, None, None]]
    return torch.where(inside_rows[:, None, :, None] & inside_columns[:, None, None], cropped, outside)


def nearest_pixels(axis: Axis) -> Tensor:
    """The source pixel of each output pixel of an axis, int64 [B, out]."""
    last = (axis.start + axis.length - 1)[:, None]
    return torch.minimum(axis_centers(axis)[0].floor().long(), last)


def inside_pixels(axis: Axis) -> Tensor:
    """Which output pixels of an axis are inside of the resized image, bool [B, out]; the others are reflected."""
    position = torch.arange(axis.out, device=axis.start.device) + axis.offset[:, None]
    inside = (position >= 0) & (position < axis.resized[:, None])
    return torch.where(axis.flip[:, None], inside.flip(1), inside)


def warp_masks(masks: Tensor, matrix: Tensor, sizes: Tensor) -> Tensor:
    """Masks [B, H, W] of `sizes` [B, 2] warped by `matrix` [B, 2, 3] from output to input pixels.

    As Pillow does, coordinates are integers in units of 2**-16 pixels, except those of shifts.
    """
    y, x = (torch.arange(side, device=masks.device) for side in masks.shape[-2:])
    y = y[:, None]
    rows, columns = (source_pixels(line[:, :, None, None].unbind(1), x, y) for line in matrix.double().flip(1).unbind(1))
    height, width = sizes[:, 0, None, None], sizes[:, 1, None, None]
    inside = (columns >= 0) & (columns < width) & (rows >= 0) & (rows < height)
    batch = torch.arange(len(masks), device=masks.device)[:, None, None]
    rows, columns = (torch.where(inside, index, 0) for index in (rows, columns))
    return torch.where(inside, masks[batch, rows, columns], IGNORE)


def source_pixels(line: Sequence[Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The input pixel along one axis of the output pixels (x, y): floor(a * (x + 0.5) + b * (y + 0.5) + c), int64."""
    a, b, c = line
    a_fixed, b_fixed, start = ((value * 65536.0 + 0.5).floor().long() for value in (a, b, c + 0.5 * a + 0.5 * b))
    shifted = ((a == 1) & (b == 0)) | ((a == 0) & (b == 1))
    exact = (a * (x + 0.5) + b * (y + 0.5) + c).floor().long()
    return torch.where(shifted, exact, (start + a_fixed * x + b_fixed * y) >> 16)


def redraw_keys(masks: Tensor, sizes: Tensor, key: Tensor, augmentation: Augmentation, max_share: float) -> Tensor:
    """Keys [B] of crops in which no class has more than `max_share` of the labeled pixels: the first of ten draws, if any."""
    if max_share >= 1:
        return key
    draws = torch.arange(1, DRAWS, device=key.device)[:, None]
    drawn = torch.cat([key[None], hash32(key + GOLDEN * draws)])
    view = sample_view(sizes.repeat(DRAWS, 1), drawn.flatten(), augmentation)
    shares = largest_share(crop_masks(masks, view, 8))
    first = (shares.view_as(drawn) < max_share).to(torch.uint8).argmax(0)  # the first draw if there is none
    return drawn.gather(0, first[None])[0]


def largest_share(masks: Tensor) -> Tensor:
    """The share of the most frequent class among the labeled pixels of masks [B, H, W], [B]; 1 without labeled pixels."""
    flat = masks.flatten(1).long()
    counts = torch.zeros(len(masks), 256, device=masks.device).scatter_add_(1, flat, torch.ones_like(flat, dtype=torch.float32))
    counts[:, IGNORE] = 0
    total = counts.sum(1)
    return torch.where(total > 0, counts.amax(1) / total.clamp(min=1), 1.0)
