"""Linear probe: logistic regression on frozen features by L-BFGS, with the weight decay chosen on a held-out part.

The loss is the mean cross-entropy plus weight decay / 2 times the squared weights (without the bias), on standardized features.
The only randomness is the choice of the held-out images, a function of the seed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.evaluation.probes.knn import TopAccuracy, count_hits

WEIGHT_DECAYS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)  # strongest first: each fit is initialized with the previous one
ROWS = 1 << 16  # images whose logits are in memory at a time
STEPS = 200
EPS = 1e-5  # added to standard deviations, for constant features


class LinearClassifier(NamedTuple):
    """Logits of features x: ((x - mean) / scale) @ weight + bias."""

    weight: Tensor  # [D, C]
    bias: Tensor  # [C]
    mean: Tensor  # [D]
    scale: Tensor  # [D]

    def logits(self, vectors: Tensor) -> Tensor:
        """[N, D] to [N, C]."""
        return (vectors - self.mean) / self.scale @ self.weight + self.bias


class SelectedClassifier(NamedTuple):
    classifier: LinearClassifier
    weight_decay: float
    held_out: dict[float, float]  # weight decay -> top-1 accuracy on the held-out part

    @property
    def at_edge(self) -> bool:
        """Whether the selected weight decay is the smallest or largest candidate."""
        return len(self.held_out) > 1 and self.weight_decay in (min(self.held_out), max(self.held_out))


def fit(
    vectors: Tensor, labels: Tensor, classes: int, weight_decay: float, init: LinearClassifier | None = None
) -> LinearClassifier:
    """The classifier of features [N, D] with labels [N] that minimizes the loss; `init` only saves steps."""
    mean, scale = (init.mean, init.scale) if init else (vectors.mean(0), vectors.std(0, correction=0) + EPS)
    weight = init.weight.clone() if init else vectors.new_zeros(vectors.shape[1], classes)
    bias = init.bias.clone() if init else vectors.new_zeros(classes)
    weight.requires_grad_()
    bias.requires_grad_()
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=STEPS,
        max_eval=2 * STEPS,
        history_size=20,
        tolerance_grad=1e-6,
        tolerance_change=1e-10,
        line_search_fn="strong_wolfe",
    )
    standardized = (vectors - mean) / scale if len(vectors) <= ROWS else None

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = weight_decay / 2 * weight.square().sum()
        total.backward()
        total = total.detach()
        for begin in range(0, len(vectors), ROWS):
            rows = slice(begin, begin + ROWS)
            inputs = standardized if standardized is not None else (vectors[rows] - mean) / scale
            loss = F.cross_entropy(inputs @ weight + bias, labels[rows], reduction="sum") / len(vectors)
            loss.backward()
            total = total + loss.detach()
        return total

    with torch.enable_grad():
        optimizer.step(closure)
    return LinearClassifier(weight.detach(), bias.detach(), mean, scale)


def select_classifier(
    vectors: Tensor,
    labels: Tensor,
    classes: int,
    weight_decays: Sequence[float] = WEIGHT_DECAYS,
    fraction: float = 0.1,
    seed: int = 0,
) -> SelectedClassifier:
    """The classifier of all images with the weight decay of the highest accuracy on a held-out `fraction` of every class.

    Of equal accuracies the stronger weight decay is selected.
    """
    weight_decays = sorted(weight_decays, reverse=True)
    held = hold_out(labels.cpu().numpy(), fraction, seed)
    train, validation = (torch.from_numpy(np.flatnonzero(mask)).to(vectors.device) for mask in (~held, held))
    scores: dict[float, float] = {}
    if len(weight_decays) > 1 and len(validation) and len(train):
        classifier = None
        for weight_decay in weight_decays:
            classifier = fit(vectors[train], labels[train], classes, weight_decay, classifier)
            scores[weight_decay] = accuracy(classifier, vectors[validation], labels[validation]).top1
    best = max(scores, key=lambda weight_decay: scores[weight_decay]) if scores else weight_decays[0]
    return SelectedClassifier(fit(vectors, labels, classes, best), best, scores)


def hold_out(labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """bool [N]: a `fraction` of every class, at least one image of classes with two or more; deterministic for a seed."""
    rng = np.random.default_rng(seed)
    held = np.zeros(len(labels), dtype=bool)
    for value in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == value))
        held[members[: max(round(len(members) * fraction), 1) if len(members) > 1 and fraction > 0 else 0]] = True
    return held


def accuracy(classifier: LinearClassifier, vectors: Tensor, labels: Tensor) -> TopAccuracy:
    total = torch.zeros(2, dtype=torch.int64, device=vectors.device)
    for begin in range(0, len(vectors), ROWS):
        rows = slice(begin, begin + ROWS)
        total += count_hits(classifier.logits(vectors[rows]), labels[rows])
    top1, top5 = total.tolist()
    return TopAccuracy(top1 / len(labels), top5 / len(labels), len(labels))
