"""Calibration errors and the temperature, against plain float64 references."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax

from vitrail.evaluation import calibration
from vitrail.evaluation.calibration import adaptive_bins, calibration_error, certainty, equal_bins, fit_temperature


def made(count=3000, classes=7, heat=2.5, seed=0):
    """Logits whose labels are drawn from softmax(logits / heat): overconfident by that factor."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 4, (count, classes))
    truth = np.array([rng.choice(classes, p=softmax(row / heat)) for row in logits])
    return torch.from_numpy(logits).float(), torch.from_numpy(truth)


def reference_error(confidence, right, bins=15):
    """Guo et al.'s, image by image."""
    total = 0.0
    for number in range(bins):
        inside = [
            (sure, hit)
            for sure, hit in zip(confidence.tolist(), right.tolist(), strict=True)
            if number / bins < sure <= (number + 1) / bins
        ]
        if inside:
            sure, hit = np.mean(np.array(inside, dtype=np.float64), 0)
            total += len(inside) / len(confidence) * abs(sure - hit)
    return total


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_expected_calibration_error(seed):
    logits, truth = made(seed=seed)
    found = certainty(logits, truth)
    chances = softmax(logits.double().numpy(), 1)
    assert np.allclose(found.confidence, chances.max(1), rtol=1e-12)
    assert (found.right == (chances.argmax(1) == truth.numpy())).all()
    bins = equal_bins(found.confidence, found.right)
    assert len(bins) == 15
    assert sum(each.images for each in bins) == len(truth)
    assert calibration_error(bins) == pytest.approx(reference_error(chances.max(1), found.right), abs=1e-12)
    assert found.loss == pytest.approx(-log_softmax(logits.double().numpy(), 1)[np.arange(len(truth)), truth].mean(), rel=1e-12)


def test_bins_are_open_below_and_closed_above():
    bins = equal_bins(np.array([1.0, 0.2, 0.200001, 1 / 15]), np.array([True, True, False, False]))
    assert [place for place, each in enumerate(bins) if each.images] == [0, 2, 3, 14]


def test_the_adaptive_error_has_as_many_images_in_every_bin():
    logits, truth = made(count=1000)
    found = certainty(logits, truth)
    bins = adaptive_bins(found.confidence, found.right)
    assert {each.images for each in bins} == {66, 67}
    order = np.argsort(found.confidence, kind="stable")
    parts = np.array_split(order, 15)
    by_hand = sum(len(part) * abs(found.confidence[part].mean() - found.right[part].mean()) for part in parts) / 1000
    assert calibration_error(bins) == pytest.approx(by_hand, abs=1e-12)
    assert len(adaptive_bins(found.confidence[:4], found.right[:4])) == 4
    assert calibration_error([]) == 0.0


@pytest.mark.parametrize("heat", [0.3, 1.0, 2.5, 20.0])
def test_the_temperature_is_that_of_the_least_loss(heat, monkeypatch):
    monkeypatch.setattr(calibration, "CHUNK", 999)  # sums over many pieces are the same
    logits, truth = made(heat=heat)
    values = logits.double().numpy()

    def loss(log_heat):
        return -log_softmax(values / np.exp(log_heat), 1)[np.arange(len(truth)), truth].mean()

    best = np.exp(minimize_scalar(loss, bounds=(-5, 6), method="bounded", options={"xatol": 1e-9}).x)
    found = fit_temperature(logits, truth)
    assert found == pytest.approx(best, rel=1e-4)
    assert found == pytest.approx(heat, rel=0.2)
    assert certainty(logits, truth, found).loss <= certainty(logits, truth).loss + 1e-12


def test_the_temperature_mends_the_calibration():
    logits, truth = made(6000, heat=3.0)
    heat = fit_temperature(logits[:3000], truth[:3000])
    before, after = (certainty(logits[3000:], truth[3000:], each) for each in (1.0, heat))
    errors = [calibration_error(equal_bins(each.confidence, each.right)) for each in (before, after)]
    assert errors[0] > 0.15
    assert errors[1] < 0.04
    assert (before.right == after.right).all()


def test_some_answers_have_no_temperature():
    logits, _ = made(50)
    assert fit_temperature(logits, logits.argmax(1)) is None  # the surer the better
    assert fit_temperature(logits, logits.argmin(1)) is None  # the less sure the better
    assert fit_temperature(torch.zeros(5, 3), torch.zeros(5, dtype=torch.int64)) is None


def test_large_logits():
    logits, truth = made(400)
    assert fit_temperature(logits * 100, truth) == pytest.approx(100 * fit_temperature(logits, truth), rel=1e-6)
