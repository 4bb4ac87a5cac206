"""Values out of range are rejected when the recipe is made, not after an hour of training."""

import math

import pytest

from vitrail.errors import UserError
from vitrail.recipes import Recipe
from vitrail.recipes.limits import LIMITS

LEAVES = Recipe().leaves()


def beyond(name):
    """Values just outside of the limits of a key, of its type."""
    low, high = LIMITS[name]
    integer = isinstance(LEAVES[name], int)
    values = [low - 1 if integer else math.nextafter(low, -math.inf) or -1.0]
    if high != math.inf:
        values.append(high + 1 if integer else math.nextafter(high, math.inf))
    default = LEAVES[name]
    return [[value] * max(len(default), 1) if isinstance(default, tuple) else value for value in values]


@pytest.mark.parametrize("name", LIMITS)
def test_values_outside_the_limits_are_rejected(name):
    for value in beyond(name):
        with pytest.raises(UserError, match=rf"{name} must"):
            Recipe().set({name: value})
    low = LIMITS[name][0]
    Recipe().set({name: [low] * len(LEAVES[name]) if isinstance(LEAVES[name], tuple) else low})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, ".nan", "1e999"])
def test_nan_and_inf_are_rejected(value):
    for name, default in LEAVES.items():
        if isinstance(default, float):
            with pytest.raises(UserError):
                Recipe().set({name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"augmentation.scale": [0.9, 0.1]}, r"must be \[minimum, maximum\], not \[0.9, 0.1\]"),
        ({"augmentation.mean": [0.5]}, "must each have three numbers"),
        ({"augmentation.mean": 0.5}, "should be a list of numbers"),
        ({"architecture.image_size": 32}, "set augmentation.image_size instead"),
        ({"architecture.classes": 10}, "follows from the data"),
        ({"seed": -1}, "seed must be an integer from 0"),
    ],
)
def test_inconsistent_values_are_rejected(changes, message):
    with pytest.raises(UserError, match=message):
        Recipe().set(changes)
