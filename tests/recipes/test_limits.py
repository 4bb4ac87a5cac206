"""Numbers that make no sense are refused where they are written, not after an hour of training."""

import math

import pytest

from vitrail.errors import UserError
from vitrail.recipes import Recipe
from vitrail.recipes.limits import LIMITS

LEAVES = Recipe().leaves()


def beyond(name):
    """Values just outside of the limits of a leaf, in its own kind."""
    low, high = LIMITS[name]
    whole = isinstance(LEAVES[name], int)
    found = [low - 1 if whole else math.nextafter(low, -math.inf) or -1.0]
    if high != math.inf:
        found.append(high + 1 if whole else math.nextafter(high, math.inf))
    kind = LEAVES[name]
    return [[value] * len(kind) if isinstance(kind, tuple) else value for value in found]


@pytest.mark.parametrize("name", LIMITS)
def test_just_outside_is_refused_and_the_edge_is_not(name):
    for value in beyond(name):
        with pytest.raises(UserError, match=rf"{name} must"):
            Recipe().set({name: value})
    low = LIMITS[name][0]
    Recipe().set({name: [low] * len(LEAVES[name]) if isinstance(LEAVES[name], tuple) else low})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, ".nan", "1e999"])
def test_what_is_no_number_is_refused_everywhere(value):
    for name, usual in LEAVES.items():
        if isinstance(usual, float):
            with pytest.raises(UserError):
                Recipe().set({name: value})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"augmentation.scale": [0.9, 0.1]}, "from a lower to a higher number, not from 0.9 to 0.1"),
        ({"augmentation.mean": [0.5]}, "a number for each of red, green and blue"),
        ({"augmentation.mean": 0.5}, "should be a list of numbers"),
        ({"architecture.image_size": 32}, "augmentation.image_size is the network's size"),
        ({"architecture.classes": 10}, "follows from the data"),
        ({"seed": -1}, "seed must be a whole number from 0"),
    ],
)
def test_what_else_makes_no_sense(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        Recipe().set(changes)
