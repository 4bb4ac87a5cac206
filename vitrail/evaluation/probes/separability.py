"""Separability of the images of one class: random halves of every class, predicted by a linear classifier.

Grafit's metric (arXiv 2011.12982, Section 2.2.1): each class is split at random into two halves, a linear classifier is trained
to predict the half of each image and evaluated on the same images. With the class alone its accuracy is 50 %.
"""

import statistics
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.evaluation.probes.linear import LinearClassifier, fit

SPLITS = 10
WEIGHT_DECAY = 1e-4
ROWS = 1 << 16


class Separability(NamedTuple):
    """Top-1 accuracy on the training images, one per split: of the halves, and of the halves given the predicted class."""

    plain: list[float]
    conditioned: list[float]
    images: int
    classes: int


def mean_and_sd(values: list[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def random_halves(labels: np.ndarray, seed: int) -> np.ndarray:
    """[N]: 2 * label or 2 * label + 1 at random, evenly in every class; the first half of an odd class has one more image."""
    rng = np.random.default_rng(seed)
    fine = 2 * labels
    for value in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == value))
        fine[members[(len(members) + 1) // 2 :]] += 1
    return fine


def measure_separability(
    vectors: Tensor,
    labels: Tensor,
    splits: int = SPLITS,
    weight_decay: float = WEIGHT_DECAY,
    advance: Callable[[int], None] = lambda count: None,
) -> Separability:
    """The separability of features [N, D] with labels [N]."""
    values, coarse = np.unique(labels.cpu().numpy(), return_inverse=True)
    classes = len(values)
    groups = torch.from_numpy(coarse).to(vectors.device)
    parent = fit(vectors, groups, classes, weight_decay) if classes > 1 else None
    plain, conditioned = [], []
    for seed in range(splits):
        halves = torch.from_numpy(random_halves(coarse, seed)).to(vectors.device)
        classifier = fit(vectors, halves, 2 * classes, weight_decay)
        correct = torch.zeros(2, dtype=torch.int64, device=vectors.device)
        for start in range(0, len(vectors), ROWS):
            rows = slice(start, start + ROWS)
            predictions = predict_halves(classifier, parent, vectors[rows])
            correct += torch.stack([(prediction == halves[rows]).sum() for prediction in predictions])
        first, second = correct.tolist()
        plain.append(first / len(vectors))
        conditioned.append(second / len(vectors))
        advance(1)
    return Separability(plain, conditioned, len(vectors), classes)


def predict_halves(classifier: LinearClassifier, parent: LinearClassifier | None, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """[N] each: the most probable half, and the most probable by p(class) p(half | class) with the classes of `parent`."""
    logits = classifier.logits(vectors)
    conditional = logits.unflatten(1, (-1, 2)).log_softmax(2)
    if parent is not None:
        conditional = conditional + parent.logits(vectors).log_softmax(1)[:, :, None]
    return logits.argmax(1), conditional.flatten(1).argmax(1)
