"""Few-shot probe: a least-squares fit in closed form on a few labeled images of each class (ViT, arXiv 2010.11929, Section 4.1).

Details that the paper does not give follow the authors' released code: features are standardized over the few images, a constant
feature of 100 serves as a bias with almost no penalty, targets are -1 and +1, and the penalty is 1024.
"""

import statistics
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.evaluation.probes.knn import count_hits

PENALTY = 2.0**10
CONSTANT = 100.0
EPS = 1e-5
SEEDS = 3  # draws of the images
ROWS = 1 << 16  # queries at a time


class FewShotAccuracy(NamedTuple):
    """Top-1 accuracy over several draws of the labeled images."""

    shots: int
    top1: list[float]  # one per draw
    images: int  # number of queries

    @property
    def mean(self) -> float:
        return statistics.fmean(self.top1)

    @property
    def sd(self) -> float:
        """The standard deviation over the draws."""
        return statistics.stdev(self.top1) if len(self.top1) > 1 else 0.0


def draw_shots(labels: np.ndarray, classes: int, shots: int, seed: int) -> np.ndarray:
    """Indices of `shots` images of each class, or all of a smaller class; fewer shots of a seed are a subset of more."""
    rng = np.random.default_rng(seed)
    members = [rng.permutation(np.flatnonzero(labels == number)) for number in range(classes)]
    return np.concatenate([rows[:shots] for rows in members])


def least_squares(vectors: Tensor, labels: Tensor, classes: int, penalty: float = PENALTY) -> Tensor:
    """W [D, C] that minimizes |XW - Y|² + penalty |W|² for X [N, D] and Y = ±1 [N, C], by the smaller of the two systems."""
    x = vectors.double()
    targets = torch.full((len(x), classes), -1.0, dtype=x.dtype, device=x.device)
    targets.scatter_(1, labels[:, None], 1.0)
    count, width = x.shape
    ridge = penalty * torch.eye(min(count, width), dtype=x.dtype, device=x.device)
    if count >= width:
        weights: Tensor = torch.linalg.solve(x.T @ x + ridge, x.T @ targets)
    else:
        weights = x.T @ torch.linalg.solve(x @ x.T + ridge, targets)
    return weights


def fewshot_scores(shots: Tensor, labels: Tensor, queries: Tensor, classes: int, penalty: float = PENALTY) -> Tensor:
    """float64 scores [Q, C] of queries [Q, D], fitted on labeled images [N, D] with labels [N]."""
    shots = shots.double()
    mean, scale = shots.mean(0), shots.std(0, correction=0) + EPS

    def standardize(vectors: Tensor) -> Tensor:
        return torch.nn.functional.pad((vectors.double() - mean) / scale, (0, 1), value=CONSTANT)

    return standardize(queries) @ least_squares(standardize(shots), labels, classes, penalty)


def fewshot_accuracy(
    memory: Tensor,
    labels: Tensor,
    queries: Tensor,
    query_labels: Tensor,
    classes: int,
    shots: int = 5,
    penalty: float = PENALTY,
    seeds: int = SEEDS,
) -> FewShotAccuracy:
    """Top-1 accuracy on the queries with `shots` images of each class of the memory, for several draws of them."""
    known = labels.cpu().numpy()
    shots = min(shots, int(np.unique(known, return_counts=True)[1].max(initial=1)))  # report the number that was used
    accuracies = []
    for seed in range(seeds):
        rows = torch.from_numpy(draw_shots(known, classes, shots, seed)).to(memory.device)
        correct = torch.zeros((), dtype=torch.int64, device=memory.device)
        for start in range(0, len(queries), ROWS):
            part = slice(start, start + ROWS)
            scores = fewshot_scores(memory[rows], labels[rows], queries[part], classes, penalty)
            correct += count_hits(scores, query_labels[part])[0]
        accuracies.append(int(correct) / len(query_labels))
    return FewShotAccuracy(shots, accuracies, len(query_labels))
