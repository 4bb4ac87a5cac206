"""Ranges of eight bits: chosen from what was seen, so that rounding and cutting cost least."""

import pytest
import torch
from torch import nn

from vitrail.deploy.quantize import Seen, Steps, learn_steps, round_weights


def seen(*values):
    found = Seen()
    for look in (found.look, found.count):
        for each in values:
            look(each)
    return found


def error(steps, x):
    back = (steps.encode(x).float() - steps.zero) * steps.size
    return float((back - x).square().mean())


def test_codes_are_rounded_and_cut_off():
    steps = Steps(0.5, 10)
    x = torch.tensor([-100.0, -5.0, -0.3, 0.0, 0.2, 0.3, 122.4, 1e6])
    assert steps.encode(x).tolist() == [0, 0, 9, 10, 10, 11, 255, 255]


@pytest.mark.parametrize("shift", [0.0, 3.0, -40.0])
def test_the_range_is_near_the_best(shift):
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) + shift
    chosen = seen(*x.split(30_000)).steps()
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    whole = Steps((high - low) / 255, round(-low * 255 / (high - low)))
    assert error(chosen, x) <= error(whole, x) * 1.001


def test_one_far_outlier_is_cut_off():
    """Squared errors decide: a single number pays less than all others would."""
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    x[0] = 20.0
    assert seen(x).steps().size * 255 < 0.9 * float(x.max() - x.min())


def test_numbers_that_are_all_the_same():
    assert error(seen(torch.zeros(100)).steps(), torch.zeros(5)) == 0
    steps = seen(torch.full((100,), 2.0)).steps()
    assert error(steps, torch.full((5,), 2.0)) < 1e-4


def test_layers_are_watched_and_left():
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    first, last = learn_steps(network, [network[0], network[2]], torch.randn(40, 4))
    assert first.zero > 50  # both signs
    assert last.zero == 0  # behind a ReLU
    assert not any(module._forward_pre_hooks for module in network)


def test_weights_by_channel():
    weight = torch.randn(6, 40) * torch.tensor([1e-3, 1.0, 5.0, 100.0, 0.0, 1.0])[:, None]
    whole, factors = round_weights(weight)
    assert whole.dtype == torch.int8
    assert ((whole * factors[:, None] - weight).abs() <= 0.5001 * factors[:, None]).all()
    assert whole.abs().amax(1).tolist() == [127, 127, 127, 127, 0, 127]
