"""Block-wise masks: their distribution is that of BEiT's code, and they are a function of the image's key."""

import json
from pathlib import Path

import pytest
import torch

from vitrail.data.rng import sample_key
from vitrail.data.transforms.masks import block_mask

IMAGES = 8_000
# Frequencies in masks of BEiT's masking_generator.py: of the number of masked patches, rows and columns, and of each patch; the
# mean numbers of pairs of masked neighbors.
REFERENCES = json.loads(Path(__file__).with_name("beit_masks.json").read_text())


def keys(count, seed=0):
    index = torch.arange(count)
    return sample_key(seed, 0, index, torch.zeros_like(index))


def frequencies(values, length):
    return torch.bincount(values, minlength=length) / len(values)


@pytest.mark.parametrize("reference", REFERENCES, ids=["14x14", "8x12"])
def test_the_statistics_are_those_of_beit(reference):
    grid = tuple(reference["grid"])
    found = block_mask(keys(IMAGES), grid, reference["count"], reference["min_block"])
    measured = {
        "patches": frequencies(found.sum((1, 2)), reference["count"] + 1),
        "rows": frequencies(found.any(2).sum(1), grid[0] + 1),
        "columns": frequencies(found.any(1).sum(1), grid[1] + 1),
        "frequency": found.float().mean(0),
    }
    for name, values in measured.items():
        theirs = torch.tensor(reference[name])
        deviation = (values - theirs).abs() / (theirs * (1 - theirs) / IMAGES).clamp(min=1e-12).sqrt()
        assert deviation[theirs * IMAGES > 20].max() < 4.5, name
        assert values[theirs == 0].sum() == 0, name
    for pairs, mean in zip(
        ((found[:, :, 1:] & found[:, :, :-1]), (found[:, 1:] & found[:, :-1])), reference["neighbors"], strict=True
    ):
        counts = pairs.sum((1, 2)).float()
        assert abs(counts.mean() - mean) < 4.5 * counts.std() / IMAGES**0.5


def test_a_mask_depends_on_its_key_alone():
    found = block_mask(keys(40), (14, 14), 75)
    assert torch.equal(found[5:9], block_mask(keys(40)[5:9], (14, 14), 75))
    assert not torch.equal(found, block_mask(keys(40, seed=1), (14, 14), 75))


def test_blocks_smaller_than_the_smallest_fill_the_rest():
    """The last missing patches are fewer than `min_block`: the area is then drawn between the two, as in BEiT's code."""
    found = block_mask(keys(500), (14, 14), 20, min_block=16).sum((1, 2))
    assert found.max() == 20
    assert (found == 20).float().mean() > 0.5
