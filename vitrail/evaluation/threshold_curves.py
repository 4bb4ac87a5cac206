"""One class against all others: precision-recall and ROC curves, and thresholds for the probability of the class.

An image is predicted to be of the class if its probability is at least the threshold.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.source import stratified_folds

FOLDS = 5
MAX_POINTS = 200  # of a curve in JSON


class Rates(NamedTuple):
    """Precision, recall and F1 of one class; 0 where the denominator is 0, as in scikit-learn."""

    precision: float
    recall: float
    f1: float


@dataclass(frozen=True)
class ThresholdCurve:
    """Counts at every distinct probability as the threshold, highest first."""

    thresholds: np.ndarray  # [K]
    true_positives: np.ndarray  # [K]
    false_positives: np.ndarray  # [K]

    @property
    def recall(self) -> np.ndarray:
        return divide(self.true_positives, max(self.true_positives[-1], 1))

    @property
    def precision(self) -> np.ndarray:
        return divide(self.true_positives, self.true_positives + self.false_positives)

    @property
    def false_positive_rate(self) -> np.ndarray:
        return divide(self.false_positives, max(self.false_positives[-1], 1))

    @property
    def f1(self) -> np.ndarray:
        return divide(2 * self.true_positives, self.true_positives + self.false_positives + self.true_positives[-1])

    @property
    def average_precision(self) -> float:
        """The mean of the precision over recall, without interpolation."""
        return float((np.diff(self.recall, prepend=0.0) * self.precision).sum())

    @property
    def auc(self) -> float:
        """The area under the ROC curve: the probability that an image of the class has a higher probability than another."""
        recall = np.append(0.0, self.recall)
        return float((np.diff(self.false_positive_rate, prepend=0.0) * (recall[1:] + recall[:-1]) / 2).sum())

    def to_dict(self) -> dict[str, Any]:
        """Average precision, AUC, and at most 200 points of the curves."""
        rows = np.unique(np.linspace(0, len(self.thresholds) - 1, MAX_POINTS).round().astype(int))
        names = ("thresholds", "precision", "recall", "false_positive_rate")
        points = {name: getattr(self, name)[rows].tolist() for name in names}
        return {"average_precision": self.average_precision, "auc": self.auc, **points}


class Threshold(NamedTuple):
    """A threshold that reaches a goal, and what it gives on images that it was not chosen on, if there are enough."""

    goal: str
    threshold: float | None  # chosen on all images; None if no threshold reaches the goal
    precision: float
    recall: float
    f1: float
    held_out: bool  # False: measured on the images that the threshold was chosen on


def trace_thresholds(probability: np.ndarray, positive: np.ndarray) -> ThresholdCurve:
    """The curve of probabilities [N] and whether each image is of the class [N]; both kinds of images must be present."""
    order = np.argsort(-probability, kind="stable")
    probability, positive = probability[order], positive[order]
    last = np.flatnonzero(np.append(np.diff(probability) != 0, True))  # equal probabilities have one threshold
    true_positives = positive.cumsum()[last]
    return ThresholdCurve(probability[last], true_positives, last + 1 - true_positives)


def rates(predicted: np.ndarray, positive: np.ndarray) -> Rates:
    """Precision, recall and F1 of predictions [N] bool."""
    return rates_from_counts(int((predicted & positive).sum()), int(predicted.sum()), int(positive.sum()))


def rates_from_counts(correct: int, predicted: int, positives: int) -> Rates:
    total = predicted + positives
    return Rates(
        correct / predicted if predicted else 0.0, correct / positives if positives else 0.0, 2 * correct / max(total, 1)
    )


def tune_thresholds(probability: np.ndarray, positive: np.ndarray, precision: float) -> list[Threshold]:
    """Thresholds for the highest F1, and for the highest recall with at least this precision, after the usual 0.5."""

    def best_f1(curve: ThresholdCurve) -> float | None:
        return float(curve.thresholds[curve.f1.argmax()])

    def precise(curve: ThresholdCurve) -> float | None:
        reached = np.flatnonzero(curve.precision >= precision)
        return float(curve.thresholds[reached[-1]]) if len(reached) else None

    goal = f"precision of at least {100 * precision:g} %"
    return [
        Threshold("the more probable class", 0.5, *rates(probability >= 0.5, positive), held_out=True),
        choose_threshold("highest F1", best_f1, probability, positive),
        choose_threshold(goal, precise, probability, positive),
    ]


def choose_threshold(
    goal: str, choose: Callable[[ThresholdCurve], float | None], probability: np.ndarray, positive: np.ndarray
) -> Threshold:
    """The threshold of all images, measured by cross-fitting: each fold with the threshold chosen on the other folds."""
    threshold = choose(trace_thresholds(probability, positive))
    folds = min(FOLDS, int(positive.sum()), int((~positive).sum()))
    if folds < 2:
        return Threshold(goal, threshold, *rates(reaches(probability, threshold), positive), held_out=False)
    fold, predicted = stratified_folds(positive, folds), np.zeros(len(positive), dtype=bool)
    for number in range(folds):
        held_out = fold == number
        chosen = choose(trace_thresholds(probability[~held_out], positive[~held_out]))
        predicted[held_out] = reaches(probability[held_out], chosen)
    return Threshold(goal, threshold, *rates(predicted, positive), held_out=True)


def divide(numerator: np.ndarray, denominator: Any) -> np.ndarray:
    quotient: np.ndarray = numerator / denominator
    return quotient


def reaches(probability: np.ndarray, threshold: float | None) -> np.ndarray:
    return probability >= (np.inf if threshold is None else threshold)
