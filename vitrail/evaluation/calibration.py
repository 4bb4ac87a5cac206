"""Whether a model is right as often as it says: calibration errors, reliability bins, the temperature that mends it.

Guo et al., "On Calibration of Modern Neural Networks" (arXiv 1706.04599): the expected calibration error over 15 bins of equal
width, and one temperature, fitted on images that are not tested with, by which logits are divided. The adaptive error has as
many images in every bin (Nguyen and O'Connor, arXiv 1508.05154).
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

BINS = 15
CHUNK = 1 << 22  # logits that are looked at in double precision at a time
LEAST, MOST = 1e-3, 1e3  # temperatures
ROUNDS = 200


class Bin(NamedTuple):
    """Images of about the same confidence: mean confidence and share of right answers, 0 where there are none."""

    low: float
    high: float
    images: int
    confidence: float
    right: float


class Certainty(NamedTuple):
    """Of every image: the confidence in the answer [N], whether it is right [N]; and the mean loss."""

    confidence: np.ndarray
    right: np.ndarray
    loss: float


def certainty(logits: Tensor, truth: Tensor, temperature: float | Tensor = 1.0) -> Certainty:
    """logits [N, C], truth [N]; the temperature is one for all, or [N]."""
    heat = torch.as_tensor(temperature, dtype=torch.float64).expand(len(logits))
    sure, right, losses = [], [], []
    for rows in _chunks(logits):
        chances = (logits[rows].double() / heat[rows, None]).log_softmax(1)
        best, guess = chances.max(1)
        sure.append(best.exp())
        right.append(guess == truth[rows])
        losses.append(-chances.gather(1, truth[rows, None])[:, 0])
    return Certainty(torch.cat(sure).numpy(), torch.cat(right).numpy(), float(torch.cat(losses).mean()))


def equal_bins(confidence: np.ndarray, right: np.ndarray, bins: int = BINS) -> list[Bin]:
    """Bins (0, 1/15], (1/15, 2/15], … over the confidence."""
    edges = np.linspace(0.0, 1.0, bins + 1)
    place = np.clip(np.searchsorted(edges, confidence, side="left") - 1, 0, bins - 1)
    return [_bin(edges[n], edges[n + 1], confidence[place == n], right[place == n]) for n in range(bins)]


def adaptive_bins(confidence: np.ndarray, right: np.ndarray, bins: int = BINS) -> list[Bin]:
    """Bins of as many images each, least confident first; fewer bins than images."""
    order = np.argsort(confidence, kind="stable")
    return [
        _bin(confidence[part[0]], confidence[part[-1]], confidence[part], right[part])
        for part in np.array_split(order, bins)
        if len(part)
    ]


def calibration_error(bins: list[Bin]) -> float:
    """The mean distance of confidence and share of right answers, by the number of images."""
    total = sum(each.images for each in bins)
    return sum(each.images * abs(each.confidence - each.right) for each in bins) / total if total else 0.0


def fit_temperature(logits: Tensor, truth: Tensor) -> float | None:
    """The temperature of the least mean loss; None where there is none, as when every image is recognized.

    The loss is convex in 1 / temperature: Newton's steps, kept inside a bracket that halves when a step would leave it.
    """
    low, high, cold = 1 / MOST, 1 / LEAST, 1.0
    if _slope(logits, truth, low)[0] >= 0 or _slope(logits, truth, high)[0] <= 0:
        return None
    for _ in range(ROUNDS):
        slope, bend = _slope(logits, truth, cold)
        low, high = (cold, high) if slope < 0 else (low, cold)
        step = cold - slope / bend if bend > 0 else low
        following = step if low < step < high else (low * high) ** 0.5
        if abs(following - cold) <= 1e-10 * cold:
            break
        cold = following
    return 1 / cold


def _slope(logits: Tensor, truth: Tensor, cold: float) -> tuple[float, float]:
    """First and second derivative of the mean loss in 1 / temperature: mean logit minus the right one, variance of logits."""
    slope, bend = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for rows in _chunks(logits):
        values = logits[rows].double()
        chances = (values * cold).softmax(1)
        mean = (chances * values).sum(1)
        slope += (mean - values.gather(1, truth[rows, None])[:, 0]).sum()
        bend += (chances * (values - mean[:, None]).square()).sum()
    return float(slope / len(logits)), float(bend / len(logits))


def _chunks(logits: Tensor) -> Iterator[slice]:
    rows = max(CHUNK // max(logits.shape[1], 1), 1)
    for start in range(0, len(logits), rows):
        yield slice(start, start + rows)


def _bin(low: float, high: float, confidence: np.ndarray, right: np.ndarray) -> Bin:
    if not len(confidence):
        return Bin(float(low), float(high), 0, 0.0, 0.0)
    return Bin(float(low), float(high), len(confidence), float(confidence.mean()), float(right.mean()))
