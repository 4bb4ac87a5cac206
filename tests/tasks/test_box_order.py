"""LV-ViT's released code exchanges the rows and columns of the crop when it looks up labels: `token_labels.box_order`."""

import pytest
import torch

from vitrail.data.rng import sample_key
from vitrail.data.transforms.pipeline import Augmentation, augment
from vitrail.errors import UserError
from vitrail.recipes import lookup
from vitrail.tasks.token_labels import project

SIDE, PATCH, MAP = 4, 8, 18


def released_box(view, size, flip):
    """The fractions (top, left, height, width) that the released loader stores: those of the crop of the flipped image."""
    height, width = size
    top, tall = view.rows.start / height, view.rows.length / height
    left, wide = view.columns.start / width, view.columns.length / width
    return top, torch.where(flip, 1 - left - wide, left), tall, wide


def test_labels_of_the_exchanged_box():
    """Maps that are linear in x and in y; expected are the bin centers of RoI-align with the box read as (x1, y1, x2, y2)."""
    sizes = torch.tensor([[40, 60], [64, 64], [51, 33], [48, 80], [70, 50], [33, 64]])
    index = torch.arange(len(sizes))
    augmentation = Augmentation((SIDE * PATCH, SIDE * PATCH), scale=(0.2, 0.6), crop_last=True)
    pixels = torch.zeros(len(sizes), 3, 96, 96, dtype=torch.uint8)
    augmented = augment(pixels, sizes, sample_key(0, 1, index, torch.zeros_like(index)), augmentation)
    flip = augmented.view.columns.flip
    assert 0 < flip.sum() < len(flip)

    steps = (torch.arange(MAP) + 0.5) / MAP
    maps = torch.stack([steps[None].expand(MAP, -1), steps[:, None].expand(-1, MAP)])  # x and y
    maps = maps.expand(len(sizes), -1, -1, -1)
    classes = torch.arange(2)[None, :, None, None].expand_as(maps)
    found = project(maps, classes, augmented, (SIDE, SIDE), PATCH, 2, box_order="xy").unflatten(1, (SIDE, SIDE))

    top, left, tall, wide = (part[:, None] for part in released_box(augmented.view, sizes.T, flip))
    centers = (torch.arange(SIDE) + 0.5) / SIDE
    x = (top + tall * centers)[:, None, :].expand(-1, SIDE, -1)  # columns of the map from the rows of the box
    y = (left + wide * centers)[:, :, None].expand(-1, -1, SIDE)
    x = torch.where(flip[:, None, None], 1 - x, x)  # the map is flipped before it is cropped
    expected = torch.stack([x, y], -1)
    inside = ((expected > 1.5 / MAP) & (expected < 1 - 1.5 / MAP)).all(-1)
    assert inside.sum() > 40
    torch.testing.assert_close(found[inside], expected[inside], rtol=1e-4, atol=1e-4)
    straight = project(maps, classes, augmented, (SIDE, SIDE), PATCH, 2).unflatten(1, (SIDE, SIDE))
    assert (straight - found).abs().max() > 0.1


def test_it_needs_square_images_that_are_cropped_last():
    recipe = lookup("lvvit_s_tokens").set({"token_labels.box_order": "xy"})
    for changes in ({"augmentation.crop_last": False}, {"augmentation.image_size": (224, 192)}):
        with pytest.raises(UserError, match="crops last and to squares"):
            recipe.set(changes)
