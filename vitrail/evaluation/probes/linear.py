"""A linear classifier on frozen features: logistic regression by L-BFGS, its decay chosen on a part held out.

Minimized is the mean cross-entropy plus decay / 2 times the squared weights (not the bias), on standardized features. There is no
randomness but which images are held out, and that is a function of the seed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.evaluation.probes.knn import Hits, hits

DECAYS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)  # strongest first: each start is the answer of the one before
ROWS = 1 << 16  # images whose logits are held at a time
STEPS = 200
FLAT = 1e-5  # added to deviations: a feature that does not vary stays at nought


class Linear(NamedTuple):
    """Logits of features x: ((x - mean) / scale) @ weight + bias."""

    weight: Tensor  # [D, C]
    bias: Tensor  # [C]
    mean: Tensor  # [D]
    scale: Tensor  # [D]

    def logits(self, vectors: Tensor) -> Tensor:
        """[N, D] to [N, C]."""
        return (vectors - self.mean) / self.scale @ self.weight + self.bias


class Chosen(NamedTuple):
    model: Linear
    decay: float
    held_out: dict[float, float]  # decay -> top-1 on the part held out

    @property
    def at_edge(self) -> bool:
        """Whether a decay beyond those tried might have been better still."""
        return len(self.held_out) > 1 and self.decay in (min(self.held_out), max(self.held_out))


def fit(vectors: Tensor, labels: Tensor, classes: int, decay: float, start: Linear | None = None, steps: int = STEPS) -> Linear:
    """Features [N, D] and labels [N] to the classifier that minimizes the loss; `start` saves steps, not more."""
    mean, scale = (start.mean, start.scale) if start else (vectors.mean(0), vectors.std(0, correction=0) + FLAT)
    weight = start.weight.clone() if start else vectors.new_zeros(vectors.shape[1], classes)
    bias = start.bias.clone() if start else vectors.new_zeros(classes)
    weight.requires_grad_()
    bias.requires_grad_()
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=steps,
        max_eval=2 * steps,
        history_size=20,
        tolerance_grad=1e-6,
        tolerance_change=1e-10,
        line_search_fn="strong_wolfe",
    )
    whole = (vectors - mean) / scale if len(vectors) <= ROWS else None

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = decay / 2 * weight.square().sum()
        total.backward()
        total = total.detach()
        for begin in range(0, len(vectors), ROWS):
            rows = slice(begin, begin + ROWS)
            inputs = whole if whole is not None else (vectors[rows] - mean) / scale
            loss = F.cross_entropy(inputs @ weight + bias, labels[rows], reduction="sum") / len(vectors)
            loss.backward()
            total = total + loss.detach()
        return total

    with torch.enable_grad():
        optimizer.step(closure)
    return Linear(weight.detach(), bias.detach(), mean, scale)


def choose(
    vectors: Tensor, labels: Tensor, classes: int, decays: Sequence[float] = DECAYS, share: float = 0.1, seed: int = 0
) -> Chosen:
    """The classifier of all images with the decay that did best on `share` of every class held out; the stronger of equals."""
    decays = sorted(decays, reverse=True)
    held = hold_out(labels.cpu().numpy(), share, seed)
    rest, part = (torch.from_numpy(np.flatnonzero(mask)).to(vectors.device) for mask in (~held, held))
    scores: dict[float, float] = {}
    if len(decays) > 1 and len(part) and len(rest):
        model = None
        for decay in decays:
            model = fit(vectors[rest], labels[rest], classes, decay, model)
            scores[decay] = accuracy(model, vectors[part], labels[part]).top1
    best = max(scores, key=lambda decay: scores[decay]) if scores else decays[0]
    return Chosen(fit(vectors, labels, classes, best), best, scores)


def hold_out(labels: np.ndarray, share: float, seed: int) -> np.ndarray:
    """bool [N]: `share` of every class, at least one of those with two images or more; the same for the same seed."""
    rng = np.random.default_rng(seed)
    held = np.zeros(len(labels), dtype=bool)
    for value in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == value))
        held[members[: max(round(len(members) * share), 1) if len(members) > 1 and share > 0 else 0]] = True
    return held


def accuracy(model: Linear, vectors: Tensor, truth: Tensor) -> Hits:
    total = torch.zeros(2, dtype=torch.int64, device=vectors.device)
    for begin in range(0, len(vectors), ROWS):
        rows = slice(begin, begin + ROWS)
        total += hits(model.logits(vectors[rows]), truth[rows])
    top1, top5 = total.tolist()
    return Hits(top1 / len(truth), top5 / len(truth), len(truth))
