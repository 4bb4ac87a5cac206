"""Int8 ranges: chosen from observed inputs with the least error of rounding and clipping."""

import pytest
import torch
from torch import nn

from vitrail.deploy.quantize import QuantParams, RangeObserver, calibrate, quantize_weights


def observe(*values):
    observer = RangeObserver()
    for update in (observer.observe_range, observer.observe_histogram):
        for each in values:
            update(each)
    return observer


def error(params, x):
    dequantized = (params.quantize(x).float() - params.zero_point) * params.scale
    return float((dequantized - x).square().mean())


def test_values_are_rounded_and_clipped():
    params = QuantParams(0.5, 10)
    x = torch.tensor([-100.0, -5.0, -0.3, 0.0, 0.2, 0.3, 122.4, 1e6])
    assert params.quantize(x).tolist() == [0, 0, 9, 10, 10, 11, 255, 255]


@pytest.mark.parametrize("shift", [0.0, 3.0, -40.0])
def test_the_range_is_near_the_best(shift):
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) + shift
    chosen = observe(*x.split(30_000)).params()
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    quantized = QuantParams((high - low) / 255, round(-low * 255 / (high - low)))
    assert error(chosen, x) <= error(quantized, x) * 1.001


def test_an_outlier_is_clipped():
    """The squared error of one clipped value is less than the rounding error of all others in a larger range."""
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    x[0] = 20.0
    assert observe(x).params().scale * 255 < 0.9 * float(x.max() - x.min())


def test_constant_inputs():
    assert error(observe(torch.zeros(100)).params(), torch.zeros(5)) == 0
    params = observe(torch.full((100,), 2.0)).params()
    assert error(params, torch.full((5,), 2.0)) < 1e-4


def test_hooks_are_removed_after_calibration():
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    first, last = calibrate(network, [network[0], network[2]], torch.randn(40, 4))
    assert first.zero_point > 50  # both signs
    assert last.zero_point == 0  # after a ReLU
    assert not any(module._forward_pre_hooks for module in network)


def test_weights_by_channel():
    weight = torch.randn(6, 40) * torch.tensor([1e-3, 1.0, 5.0, 100.0, 0.0, 1.0])[:, None]
    quantized, scales = quantize_weights(weight)
    assert quantized.dtype == torch.int8
    assert ((quantized * scales[:, None] - weight).abs() <= 0.5001 * scales[:, None]).all()
    assert quantized.abs().amax(1).tolist() == [127, 127, 127, 127, 0, 127]
