"""Masks move exactly as the pixels of their images: compared with Pillow's nearest-neighbor interpolation."""

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.data.mask_classes import IGNORE
from vitrail.data.rng import GOLDEN, hash32, sample_key
from vitrail.data.transforms.mask_geometry import crop_masks, largest_share, redraw_keys, transform_masks, warp_masks
from vitrail.data.transforms.pipeline import Augmentation, augment, sample_view

SIZES = torch.tensor([[90, 120], [60, 120], [90, 40], [33, 77], [12, 120], [64, 64]])
RNG = np.random.default_rng(0)
MASKS = torch.from_numpy(RNG.integers(0, 11, (len(SIZES), 90, 120), dtype=np.uint8))
KEYS = sample_key(1, 2, torch.arange(len(SIZES)), torch.zeros(len(SIZES), dtype=torch.int64))
PLAIN = {"interpolation": "nearest", "mean": (0.0, 0.0, 0.0), "std": (1 / 255, 1 / 255, 1 / 255)}


@pytest.mark.parametrize("crop", ["scaled", "random_resized", "simple", "squash"])
@pytest.mark.parametrize("crop_last", [False, True])
def test_masks_equal_the_pixels_of_an_image_with_the_same_values(crop, crop_last):
    augmentation = Augmentation((48, 64), crop=crop, crop_last=crop_last, **PLAIN)
    augmented = augment(MASKS[:, None].expand(-1, 3, -1, -1).contiguous(), SIZES, KEYS, augmentation)
    moved = transform_masks(MASKS, augmented)
    inside = moved != IGNORE
    assert inside.float().mean() > 0.5
    assert torch.equal(augmented.images[:, 0].round().to(torch.uint8)[inside], moved[inside])


def test_a_resized_crop_is_that_of_pillow():
    """But for centers exactly between two pixels, where the rounding errors that Pillow accumulates along a line decide."""
    augmentation = Augmentation((32, 32), crop="scaled", factors=(0.4, 2.5), hflip=0.5)
    view = sample_view(SIZES, KEYS, augmentation)
    moved = transform_masks(MASKS, augment(MASKS[:, None].expand(-1, 3, -1, -1).contiguous(), SIZES, KEYS, augmentation))
    compared = 0
    for row, (height, width) in enumerate(SIZES.tolist()):
        rows, columns = (type(axis)(*(each[row].item() if torch.is_tensor(each) else each for each in axis)) for axis in view)
        image = Image.fromarray(MASKS[row, :height, :width].numpy())
        resized = np.asarray(image.resize((columns.resized, rows.resized), Image.Resampling.NEAREST))
        canvas = np.full((1000, 1000), IGNORE, dtype=np.uint8)
        canvas[300 : 300 + rows.resized, 300 : 300 + columns.resized] = resized
        expected = canvas[300 + rows.offset : 332 + rows.offset, 300 + columns.offset : 332 + columns.offset]
        y, x = ((2 * (np.arange(32) + axis.offset) + 1) * axis.length % (2 * axis.resized) != 0 for axis in (rows, columns))
        expected, x = (expected[:, ::-1], x[::-1]) if columns.flip else (expected, x)
        clear = y[:, None] & x
        assert np.array_equal(moved[row].numpy()[clear], expected[clear]), row
        compared += int(clear.sum())
    assert compared > 0.9 * moved.numel()


def test_exact_factors_of_two():
    for size in ((60, 60), (15, 15), (30, 30)):
        mask = torch.from_numpy(RNG.integers(0, 9, (1, *size), dtype=np.uint8))
        augmentation = Augmentation((30, 30), crop="squash")
        moved = transform_masks(
            mask, augment(mask[:, None].expand(-1, 3, -1, -1).contiguous(), torch.tensor([size]), KEYS[:1], augmentation)
        )
        expected = Image.fromarray(mask[0].numpy()).resize((30, 30), Image.Resampling.NEAREST)
        assert np.array_equal(moved[0].numpy(), np.asarray(expected))


def test_warps_are_those_of_pillow():
    matrix = torch.tensor([[0.9, 0.2, -3.0], [-0.1, 1.1, 4.5]], dtype=torch.float64)
    image = Image.fromarray(MASKS[0].numpy())
    expected = image.transform(
        image.size, Image.Transform.AFFINE, matrix.flatten().tolist(), Image.Resampling.NEAREST, fillcolor=IGNORE
    )
    warped = warp_masks(MASKS[:1], matrix[None], SIZES[:1])[0]
    assert (warped == IGNORE).any()
    assert np.array_equal(warped.numpy(), np.asarray(expected))


def test_policies_with_warps_keep_pixels_and_masks_together():
    """An image whose colors are its classes: where nothing was interpolated or recolored, color and class agree."""
    stripes = torch.zeros(4, 64, 64, dtype=torch.uint8)
    stripes[:, :, 32:] = 1
    pixels = (stripes[:, None] * 200 + 20).expand(-1, 3, -1, -1).contiguous()
    sizes, keys = torch.tensor([[64, 64]] * 4), sample_key(3, 0, torch.arange(4), torch.zeros(4, dtype=torch.int64))
    augmentation = Augmentation((64, 64), crop="squash", policy="rand", magnitude=9.0, **PLAIN | {"interpolation": "bilinear"})
    augmented = augment(pixels, sizes, keys, augmentation)
    moved = transform_masks(stripes, augmented)
    assert (moved == IGNORE).any()  # something was rotated, sheared or shifted
    for image, mask in zip(augmented.images[:, 0], moved, strict=True):
        bright, dark = image[mask == 1].median(), image[mask == 0].median()
        if bright != dark:  # an equalized or posterized image may have one color
            middle = (bright + dark) / 2
            agree = ((image > middle) == (bright > dark) * (mask == 1) + (bright < dark) * (mask == 0))[mask != IGNORE]
            assert agree.float().mean() > 0.97


def test_crops_of_one_class_are_drawn_again():
    mask = torch.zeros(8, 200, 200, dtype=torch.uint8)
    mask[:, 100:] = 1
    sizes, keys = torch.tensor([[200, 200]] * 8), sample_key(0, 0, torch.arange(8), torch.zeros(8, dtype=torch.int64))
    augmentation = Augmentation((32, 32), crop="scaled", factors=(1.5, 3.0))
    pixels = mask[:, None].expand(-1, 3, -1, -1).contiguous()

    def shares(keys):
        moved = transform_masks(mask, augment(pixels, sizes, keys, augmentation))
        return torch.stack([(moved == label).float().mean((1, 2)) for label in (0, 1)]).amax(0)

    again = redraw_keys(mask, sizes, keys, augmentation, 0.75)
    assert torch.equal(redraw_keys(mask, sizes, keys, augmentation, 1.0), keys)
    assert (shares(again) < 0.8).sum() > (shares(keys) < 0.8).sum()
    kept = shares(keys) < 0.7
    assert torch.equal(again[kept], keys[kept])
    assert torch.equal(redraw_keys(mask[:2], sizes[:2], keys[:2], augmentation, 0.75), again[:2])  # each image by itself


def test_the_first_draw_without_a_frequent_class_is_taken():
    stripes = (torch.arange(120) // 20).to(torch.uint8).expand(len(SIZES), 90, -1).contiguous()
    augmentation, expected = Augmentation((32, 32), crop="scaled", factors=(1.5, 3.0)), KEYS.clone()
    draws = []
    for row in range(len(SIZES)):
        one = slice(row, row + 1)
        for draw in range(10):
            key = hash32(KEYS[one] + GOLDEN * draw) if draw else KEYS[one]
            if largest_share(crop_masks(stripes[one], sample_view(SIZES[one], key, augmentation), 8)) < 0.6:
                expected[one] = key
                draws.append(draw)
                break
    assert len(set(draws)) > 1
    assert torch.equal(redraw_keys(stripes, SIZES, KEYS, augmentation, 0.6), expected)
