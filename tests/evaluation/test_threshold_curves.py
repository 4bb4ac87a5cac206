"""Precision-recall and ROC curves and thresholds, against SciPy and their definitions."""

import numpy as np
import pytest
from scipy import stats

from vitrail.data.source import stratified_folds
from vitrail.evaluation.threshold_curves import (
    MAX_POINTS,
    choose_threshold,
    rates,
    trace_thresholds,
    tune_thresholds,
)


def draw(count=300, digits=2, seed=0):
    """Rounded probabilities, so that some are equal, and labels that follow them with noise."""
    rng = np.random.default_rng(seed)
    probability = rng.random(count).round(digits)
    return probability, rng.random(count) < probability


def test_a_small_example():
    curve = trace_thresholds(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True]))
    assert curve.thresholds.tolist() == [0.8, 0.4, 0.35, 0.1]
    assert curve.precision.tolist() == pytest.approx([1, 1 / 2, 2 / 3, 1 / 2])
    assert curve.recall.tolist() == [0.5, 0.5, 1, 1]
    assert curve.false_positive_rate.tolist() == [0, 0.5, 0.5, 1]
    assert (curve.auc, curve.average_precision) == pytest.approx((0.75, 0.5 + 0.5 * 2 / 3))


@pytest.mark.parametrize("digits", [1, 2, 9])
def test_areas_with_equal_probabilities(digits):
    probability, positive = draw(digits=digits)
    curve = trace_thresholds(probability, positive)
    pairs = stats.mannwhitneyu(probability[positive], probability[~positive]).statistic
    assert curve.auc == pytest.approx(pairs / (positive.sum() * (~positive).sum()))
    expected, before = 0.0, 0.0
    for threshold in sorted(set(probability), reverse=True):
        found = rates(probability >= threshold, positive)
        expected, before = expected + (found.recall - before) * found.precision, found.recall
    assert curve.average_precision == pytest.approx(expected)
    best = max(rates(probability >= threshold, positive).f1 for threshold in set(probability))
    assert curve.f1.max() == pytest.approx(best)


def test_long_curves_are_thinned_out_to_their_ends():
    probability, positive = draw(5000, 9)
    content = trace_thresholds(probability, positive).to_dict()
    assert len(content["thresholds"]) == len(content["recall"]) == MAX_POINTS
    assert (content["thresholds"][0], content["thresholds"][-1]) == (probability.max(), probability.min())
    assert len(trace_thresholds(*draw(20, 1)).to_dict()["recall"]) <= 11


def test_thresholds_reach_their_goals():
    probability, positive = draw(4000)
    plain, best_f1, precise = tune_thresholds(probability, positive, 0.9)
    assert plain[1:5] == (0.5, *rates(probability >= 0.5, positive))
    assert best_f1.f1 >= plain.f1 - 0.02
    assert rates(probability >= precise.threshold, positive).precision >= 0.9
    lower = probability[probability < precise.threshold].max()
    assert rates(probability >= lower, positive).precision < 0.9  # the lowest threshold that reaches it has the highest recall
    assert precise.precision == pytest.approx(0.9, abs=0.05)
    assert best_f1.held_out
    assert precise.held_out


def test_a_tuned_threshold_is_not_measured_on_the_images_that_chose_it():
    """Labels at random: the best threshold of the same images has a higher F1 than it deserves."""
    rng = np.random.default_rng(1)
    better = []
    for _ in range(20):
        probability, positive = rng.random(30), rng.random(30) < 0.3
        curve = trace_thresholds(probability, positive)
        found = choose_threshold("", lambda curve: float(curve.thresholds[curve.f1.argmax()]), probability, positive)
        better.append(curve.f1.max() - found.f1)
    assert np.mean(better) > 0.05


def test_few_images_are_measured_on_themselves_and_marked():
    probability, positive = np.array([0.9, 0.4, 0.3]), np.array([True, False, False])
    _, best_f1, _ = tune_thresholds(probability, positive, 0.9)
    assert (best_f1.threshold, best_f1.f1, best_f1.held_out) == (0.9, 1.0, False)
    assert tune_thresholds(probability, ~positive, 0.9)[2].threshold is None  # the highest probability is wrong


def test_folds_are_stratified():
    labels = np.repeat([0, 1], [50, 10])
    fold = stratified_folds(labels, 5)
    for number in range(5):
        assert np.bincount(labels[fold == number]).tolist() == [10, 2]
