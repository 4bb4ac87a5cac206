"""Both conventions of label smoothing, mixing of distributions, copies of targets."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from tests.tasks.labels import make_targets
from vitrail.data.transforms.mixup import Mix, draw_mix, mix_images
from vitrail.recipes.schema import LossConfig
from vitrail.tasks.targets import blend, label_targets, smoothed_values


def defined(label, classes, smoothing, over):
    """The released code's e / C for all and 1 - e more for the true class; the text's e / (C - 1) for all but the true one."""
    if over == "all":
        return [smoothing / classes + (1 - smoothing) * (place == label) for place in range(classes)]
    return [1 - smoothing if place == label else smoothing / (classes - 1) for place in range(classes)]


@pytest.mark.parametrize("over", ["all", "others"])
@pytest.mark.parametrize(("classes", "smoothing"), [(2, 0.1), (10, 0.1), (1000, 0.1), (7, 0.0), (3, 0.9)])
def test_both_conventions_of_smoothing(over, classes, smoothing):
    labels = [0, classes - 1, classes // 2]
    found = label_targets(torch.tensor(labels), classes, LossConfig(label_smoothing=smoothing, smoothing_over=over))
    expected = torch.tensor([defined(label, classes, smoothing, over) for label in labels], dtype=torch.float64)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found.sum(1), torch.ones(3))


def test_one_tenth_of_ten_classes():
    """0.9 on the true class is the text's reading, 0.91 the code's."""
    assert smoothed_values(10, 0.1) == pytest.approx((0.01, 0.91))
    assert smoothed_values(10, 0.1, over_others=True) == pytest.approx((0.1 / 9, 0.9))


@pytest.mark.parametrize("over", ["all", "others"])
def test_a_single_class_is_never_smoothed(over):
    assert label_targets(torch.zeros(3), 1, LossConfig(label_smoothing=0.3, smoothing_over=over)).tolist() == [[1.0]] * 3


@settings(deadline=None, derandomize=True, max_examples=40)
@given(some.integers(0, 2**31), some.integers(1, 6), some.floats(0, 1))
def test_blending_keeps_the_mass_and_takes_the_mirrored_row(seed, batch, share):
    targets = torch.rand(batch, 4, generator=torch.Generator().manual_seed(seed)).softmax(1)
    mixed = blend(targets, [Mix(share, None)])
    torch.testing.assert_close(mixed.sum(1), torch.ones(batch))
    for row in range(batch):
        expected = share * targets[row].double() + (1 - share) * targets[batch - 1 - row].double()
        torch.testing.assert_close(mixed[row].double(), expected, rtol=1e-5, atol=1e-7)


def test_the_images_are_mixed_with_the_same_partner():
    """Constant images whose label is their value: after mixing, the mean of an image is still its label."""
    numbers = torch.tensor([0.0, 1.0, 5.0, 9.0])
    for step in range(20):
        mix = draw_mix(3, 0, step, 0, (8, 12), 0.8, 1.0)
        images = mix_images(numbers[:, None, None, None].expand(-1, 3, 8, 12), [mix])
        torch.testing.assert_close(images.mean((1, 2, 3)), blend(numbers[:, None], [mix])[:, 0], rtol=1e-5, atol=1e-5)


def test_smoothing_comes_before_mixing():
    objective = LossConfig(label_smoothing=0.2, smoothing_over="others")
    mixed = make_targets(torch.tensor([0, 1]), 3, Mix(0.75, None), objective)
    torch.testing.assert_close(mixed[0], torch.tensor([0.75 * 0.8 + 0.25 * 0.1, 0.75 * 0.1 + 0.25 * 0.8, 0.1]))
