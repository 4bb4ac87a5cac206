"""A few labelled images of each class and a least-squares fit in closed form: ViT's measure (arXiv 2010.11929, Section 4.1).

What the paper leaves out is as in the authors' released code: features are standardized over the few images, a constant feature
of 100 serves as a bias that the penalty hardly reaches, targets are -1 and +1, and the penalty is 1024.
"""

import statistics
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.evaluation.probes.knn import hits

PENALTY = 2.0**10
CONSTANT = 100.0
FLAT = 1e-5
SEEDS = 3  # choices of the images
ROWS = 1 << 16


class Shots(NamedTuple):
    """Top-1 over the choices of images."""

    shots: int
    top1: list[float]  # one per choice
    images: int  # that were asked

    @property
    def mean(self) -> float:
        return statistics.fmean(self.top1)

    @property
    def spread(self) -> float:
        """The standard deviation over the choices."""
        return statistics.stdev(self.top1) if len(self.top1) > 1 else 0.0


def pick_shots(labels: np.ndarray, classes: int, shots: int, seed: int) -> np.ndarray:
    """Rows of `shots` images of each class, or of all it has; more shots of one seed hold the fewer."""
    rng = np.random.default_rng(seed)
    members = [rng.permutation(np.flatnonzero(labels == number)) for number in range(classes)]
    return np.concatenate([rows[:shots] for rows in members])


def least_squares(vectors: Tensor, labels: Tensor, classes: int, penalty: float = PENALTY) -> Tensor:
    """W [D, C] that minimizes |XW - Y|² + penalty |W|², for X [N, D] and Y = ±1 [N, C]; by the smaller of the two systems."""
    x = vectors.double()
    targets = torch.full((len(x), classes), -1.0, dtype=x.dtype, device=x.device)
    targets.scatter_(1, labels[:, None], 1.0)
    count, width = x.shape
    eye = penalty * torch.eye(min(count, width), dtype=x.dtype, device=x.device)
    if count >= width:
        return torch.linalg.solve(x.T @ x + eye, x.T @ targets)
    return x.T @ torch.linalg.solve(x @ x.T + eye, targets)


def classify_by_few(few: Tensor, labels: Tensor, queries: Tensor, classes: int, penalty: float = PENALTY) -> Tensor:
    """Scores [Q, C] of the queries [Q, D], float64, from a few images [N, D] with labels [N]."""
    few = few.double()
    mean, scale = few.mean(0), few.std(0, correction=0) + FLAT

    def prepare(vectors: Tensor) -> Tensor:
        return torch.nn.functional.pad((vectors.double() - mean) / scale, (0, 1), value=CONSTANT)

    return prepare(queries) @ least_squares(prepare(few), labels, classes, penalty)


def few_shots(
    memory: Tensor,
    labels: Tensor,
    queries: Tensor,
    truth: Tensor,
    classes: int,
    shots: int = 5,
    penalty: float = PENALTY,
    seeds: int = SEEDS,
) -> Shots:
    """Top-1 on the queries with `shots` images of each class out of the memory, for several choices of them."""
    known = labels.cpu().numpy()
    shots = min(shots, int(np.unique(known, return_counts=True)[1].max(initial=1)))  # what is said is what was taken
    found = []
    for seed in range(seeds):
        rows = torch.from_numpy(pick_shots(known, classes, shots, seed)).to(memory.device)
        right = torch.zeros((), dtype=torch.int64, device=memory.device)
        for start in range(0, len(queries), ROWS):
            part = slice(start, start + ROWS)
            right += hits(classify_by_few(memory[rows], labels[rows], queries[part], classes, penalty), truth[part])[0]
        found.append(int(right) / len(truth))
    return Shots(shots, found, len(truth))
