import pytest

from vitrail.bench.settings import Setting, curve_depths, curve_sizes, make_settings
from vitrail.errors import UserError
from vitrail.models.registry import lookup


def test_every_combination_once():
    found = make_settings(["train", "inference"], ["fp32"], ["eager", "graph"], [1, 8, 8], [None, (32, 48)])
    assert len(found) == len(set(found)) == 2 * 2 * 2 * 2
    assert found[:2] == [Setting("train", "fp32", "eager", 1, None, 0), Setting("train", "fp32", "eager", 8, None, 0)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tasks": ["sleep"]}, "unknown --task sleep: choose from inference, train."),
        ({"modes": ["fast"]}, "--mode fast"),
        ({"precisions": ["fp8"]}, "--precision fp8"),
        ({"batch_sizes": [0]}, "--batch-size must be at least 1"),
        ({"depths": [-1]}, "--depth must be at least 1"),
    ],
)
def test_invalid_settings_are_rejected(changes, reason):
    with pytest.raises(UserError, match=reason):
        make_settings(**changes)


def test_curves_run_through_whole_patches_and_even_depths():
    base = lookup("deit_base_patch16")[1]
    sizes = curve_sizes(base)
    assert sizes[0] == (112, 112)
    assert sizes[-1] == (448, 448)
    assert all(side % 16 == 0 for size in sizes for side in size)
    assert curve_depths(base) == [6, 8, 12, 16, 18, 24]  # 9 and 15 are made even
    assert curve_depths(base.replace(depth=1)) == [1, 2]
