"""Calibration errors and the temperature, against plain float64 references."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax

from vitrail.evaluation import calibration
from vitrail.evaluation.calibration import adaptive_bins, calibration_error, equal_bins, fit_temperature, measure_confidence


def made(count=3000, classes=7, temperature=2.5, seed=0):
    """Logits whose labels are drawn from softmax(logits / heat): overconfident by that factor."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 4, (count, classes))
    labels = np.array([rng.choice(classes, p=softmax(row / temperature)) for row in logits])
    return torch.from_numpy(logits).float(), torch.from_numpy(labels)


def reference_error(confidence, correct, bins=15):
    """Guo et al.'s, image by image."""
    total = 0.0
    for number in range(bins):
        inside = [
            (sure, hit)
            for sure, hit in zip(confidence.tolist(), correct.tolist(), strict=True)
            if number / bins < sure <= (number + 1) / bins
        ]
        if inside:
            sure, hit = np.mean(np.array(inside, dtype=np.float64), 0)
            total += len(inside) / len(confidence) * abs(sure - hit)
    return total


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_expected_calibration_error(seed):
    logits, labels = made(seed=seed)
    found = measure_confidence(logits, labels)
    chances = softmax(logits.double().numpy(), 1)
    assert np.allclose(found.confidence, chances.max(1), rtol=1e-12)
    assert (found.correct == (chances.argmax(1) == labels.numpy())).all()
    bins = equal_bins(found.confidence, found.correct)
    assert len(bins) == 15
    assert sum(each.images for each in bins) == len(labels)
    assert calibration_error(bins) == pytest.approx(reference_error(chances.max(1), found.correct), abs=1e-12)
    assert found.loss == pytest.approx(-log_softmax(logits.double().numpy(), 1)[np.arange(len(labels)), labels].mean(), rel=1e-12)


def test_bins_are_open_below_and_closed_above():
    bins = equal_bins(np.array([1.0, 0.2, 0.200001, 1 / 15]), np.array([True, True, False, False]))
    assert [place for place, each in enumerate(bins) if each.images] == [0, 2, 3, 14]


def test_adaptive_bins_have_equal_numbers_of_images():
    logits, labels = made(count=1000)
    found = measure_confidence(logits, labels)
    bins = adaptive_bins(found.confidence, found.correct)
    assert {each.images for each in bins} == {66, 67}
    order = np.argsort(found.confidence, kind="stable")
    parts = np.array_split(order, 15)
    by_hand = sum(len(part) * abs(found.confidence[part].mean() - found.correct[part].mean()) for part in parts) / 1000
    assert calibration_error(bins) == pytest.approx(by_hand, abs=1e-12)
    assert len(adaptive_bins(found.confidence[:4], found.correct[:4])) == 4
    assert calibration_error([]) == 0.0


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5, 20.0])
def test_the_temperature_is_that_of_the_least_loss(temperature, monkeypatch):
    monkeypatch.setattr(calibration, "CHUNK", 999)  # sums over many pieces are the same
    logits, labels = made(temperature=temperature)
    values = logits.double().numpy()

    def loss(log_heat):
        return -log_softmax(values / np.exp(log_heat), 1)[np.arange(len(labels)), labels].mean()

    best = np.exp(minimize_scalar(loss, bounds=(-5, 6), method="bounded", options={"xatol": 1e-9}).x)
    found = fit_temperature(logits, labels)
    assert found == pytest.approx(best, rel=1e-4)
    assert found == pytest.approx(temperature, rel=0.2)
    assert measure_confidence(logits, labels, found).loss <= measure_confidence(logits, labels).loss + 1e-12


def test_the_temperature_improves_the_calibration():
    logits, labels = made(6000, temperature=3.0)
    temperature = fit_temperature(logits[:3000], labels[:3000])
    before, after = (measure_confidence(logits[3000:], labels[3000:], each) for each in (1.0, temperature))
    errors = [calibration_error(equal_bins(each.confidence, each.correct)) for each in (before, after)]
    assert errors[0] > 0.15
    assert errors[1] < 0.04
    assert (before.correct == after.correct).all()


def test_logits_without_a_best_temperature():
    logits, _ = made(50)
    assert fit_temperature(logits, logits.argmax(1)) is None  # the surer the better
    assert fit_temperature(logits, logits.argmin(1)) is None  # the less sure the better
    assert fit_temperature(torch.zeros(5, 3), torch.zeros(5, dtype=torch.int64)) is None


def test_large_logits():
    logits, labels = made(400)
    assert fit_temperature(logits * 100, labels) == pytest.approx(100 * fit_temperature(logits, labels), rel=1e-6)
