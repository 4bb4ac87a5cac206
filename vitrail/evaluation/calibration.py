"""Calibration: expected calibration errors, reliability bins, temperature scaling.

Guo et al., "On Calibration of Modern Neural Networks" (arXiv 1706.04599): the expected calibration error over 15 bins of equal
width, and one temperature that divides the logits, fitted on images that are not evaluated. The adaptive error has the same
number of images in every bin (Nguyen and O'Connor, arXiv 1508.05154).
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

BINS = 15
CHUNK = 1 << 22  # logits converted to double precision at a time
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3
MAX_STEPS = 200


class Bin(NamedTuple):
    """Images of similar confidence: mean confidence and accuracy, 0 for an empty bin."""

    low: float
    high: float
    images: int
    confidence: float
    accuracy: float


class Confidences(NamedTuple):
    """Per image the confidence of the prediction [N] and whether it is correct [N]; and the mean loss."""

    confidence: np.ndarray
    correct: np.ndarray
    loss: float


def measure_confidence(logits: Tensor, labels: Tensor, temperature: float | Tensor = 1.0) -> Confidences:
    """logits [N, C], labels [N]; one temperature for all images, or one per image [N]."""
    temperatures = torch.as_tensor(temperature, dtype=torch.float64).expand(len(logits))
    confidences, correct, losses = [], [], []
    for rows in _chunks(logits):
        log_probabilities = (logits[rows].double() / temperatures[rows, None]).log_softmax(1)
        highest, prediction = log_probabilities.max(1)
        confidences.append(highest.exp())
        correct.append(prediction == labels[rows])
        losses.append(-log_probabilities.gather(1, labels[rows, None])[:, 0])
    return Confidences(torch.cat(confidences).numpy(), torch.cat(correct).numpy(), float(torch.cat(losses).mean()))


def equal_bins(confidence: np.ndarray, correct: np.ndarray) -> list[Bin]:
    """Bins (0, 1/15], (1/15, 2/15], … of the confidence."""
    edges = np.linspace(0.0, 1.0, BINS + 1)
    index = np.clip(np.searchsorted(edges, confidence, side="left") - 1, 0, BINS - 1)
    return [_make_bin(edges[n], edges[n + 1], confidence[index == n], correct[index == n]) for n in range(BINS)]


def adaptive_bins(confidence: np.ndarray, correct: np.ndarray) -> list[Bin]:
    """Bins with the same number of images each, lowest confidence first; at most one bin per image."""
    order = np.argsort(confidence, kind="stable")
    return [
        _make_bin(confidence[part[0]], confidence[part[-1]], confidence[part], correct[part])
        for part in np.array_split(order, BINS)
        if len(part)
    ]


def calibration_error(bins: list[Bin]) -> float:
    """The mean distance of confidence and accuracy, weighted by the number of images."""
    total = sum(each.images for each in bins)
    return sum(each.images * abs(each.confidence - each.accuracy) for each in bins) / total if total else 0.0


def fit_temperature(logits: Tensor, labels: Tensor) -> float | None:
    """The temperature with the lowest mean loss; None if there is no minimum, as when every prediction is correct.

    The loss is convex in 1 / temperature: Newton's method inside a bracket, with bisection when a step would leave it.
    """
    low, high, inverse = 1 / MAX_TEMPERATURE, 1 / MIN_TEMPERATURE, 1.0
    if _derivatives(logits, labels, low)[0] >= 0 or _derivatives(logits, labels, high)[0] <= 0:
        return None
    for _ in range(MAX_STEPS):
        first, second = _derivatives(logits, labels, inverse)
        low, high = (inverse, high) if first < 0 else (low, inverse)
        newton = inverse - first / second if second > 0 else low
        following = newton if low < newton < high else (low * high) ** 0.5
        if abs(following - inverse) <= 1e-10 * inverse:
            break
        inverse = following
    return 1 / inverse


def _derivatives(logits: Tensor, labels: Tensor, inverse: float) -> tuple[float, float]:
    """First and second derivative of the mean loss in 1 / temperature: mean logit minus the label's, variance of the logits."""
    first, second = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for rows in _chunks(logits):
        values = logits[rows].double()
        probabilities = (values * inverse).softmax(1)
        mean = (probabilities * values).sum(1)
        first += (mean - values.gather(1, labels[rows, None])[:, 0]).sum()
        second += (probabilities * (values - mean[:, None]).square()).sum()
    return float(first / len(logits)), float(second / len(logits))


def _chunks(logits: Tensor) -> Iterator[slice]:
    rows = max(CHUNK // max(logits.shape[1], 1), 1)
    for start in range(0, len(logits), rows):
        yield slice(start, start + rows)


def _make_bin(low: float, high: float, confidence: np.ndarray, correct: np.ndarray) -> Bin:
    if not len(confidence):
        return Bin(float(low), float(high), 0, 0.0, 0.0)
    return Bin(float(low), float(high), len(confidence), float(confidence.mean()), float(correct.mean()))
