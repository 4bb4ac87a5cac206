"""How well features tell images of one class apart: random halves of every class, found again by a linear classifier.

Grafit's measure (arXiv 2011.12982, Section 2.2.1): each class is cut at random into two equal halves, a linear classifier learns
which half each image is in, and is asked about the images it learned from. Who knows the class and nothing finer is right
half of the time.
"""

import statistics
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.evaluation.probes.linear import Linear, fit

SPLITS = 10
DECAY = 1e-4
ROWS = 1 << 16


class Separability(NamedTuple):
    """Top-1 on the images learned from, one per split: of the classifier alone, and within the class a coarse one says."""

    plain: list[float]
    conditioned: list[float]
    images: int
    classes: int


def summary(values: list[float]) -> tuple[float, float]:
    """Mean and standard deviation."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def halves(labels: np.ndarray, seed: int) -> np.ndarray:
    """[N]: 2 * label or 2 * label + 1, at random and evenly in every class; of an odd class the first half has one more."""
    rng = np.random.default_rng(seed)
    fine = 2 * labels
    for value in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == value))
        fine[members[(len(members) + 1) // 2 :]] += 1
    return fine


def separability(
    vectors: Tensor,
    labels: Tensor,
    splits: int = SPLITS,
    decay: float = DECAY,
    advance: Callable[[int], None] = lambda count: None,
) -> Separability:
    """Of features [N, D] with labels [N]."""
    known, coarse = np.unique(labels.cpu().numpy(), return_inverse=True)
    classes = len(known)
    groups = torch.from_numpy(coarse).to(vectors.device)
    parent = fit(vectors, groups, classes, decay) if classes > 1 else None
    plain, conditioned = [], []
    for seed in range(splits):
        truth = torch.from_numpy(halves(coarse, seed)).to(vectors.device)
        model = fit(vectors, truth, 2 * classes, decay)
        right = torch.zeros(2, dtype=torch.int64, device=vectors.device)
        for start in range(0, len(vectors), ROWS):
            rows = slice(start, start + ROWS)
            right += torch.stack([(answer == truth[rows]).sum() for answer in answers(model, parent, vectors[rows])])
        first, second = right.tolist()
        plain.append(first / len(vectors))
        conditioned.append(second / len(vectors))
        advance(1)
    return Separability(plain, conditioned, len(vectors), classes)


def answers(model: Linear, parent: Linear | None, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """[N] each: the likeliest half of all, and the likeliest by p(class) p(half | class), the class by `parent`."""
    logits = model.logits(vectors)
    siblings = logits.unflatten(1, (-1, 2)).log_softmax(2)
    if parent is not None:
        siblings = siblings + parent.logits(vectors).log_softmax(1)[:, :, None]
    return logits.argmax(1), siblings.flatten(1).argmax(1)
