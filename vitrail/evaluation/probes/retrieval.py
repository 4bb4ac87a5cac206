"""Category-level retrieval: rank a collection for each query; what has the query's label is relevant. Scores of Grafit.

cosine        cos(query, image)
conditional   the same plus the log-odds that the query has the image's coarse label (arXiv 2011.12982, Equation 2.5)
oracle        the images of the query's true coarse label first, each part by cosine: what knowing it would give
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.errors import UserError
from vitrail.evaluation.probes.knn import nearest, votes

SCORES = ("cosine", "conditional", "oracle")
ELEMENTS = 1 << 24  # scores sorted at a time
LEAST = 1e-6  # of a probability: the log-odds of nought and one are not finite


class Precision(NamedTuple):
    """Mean average precision over the queries that have something to find."""

    mean: float
    queries: int
    without: int  # queries whose label nothing in the collection has


class Conditioning(NamedTuple):
    """What is known about coarse labels: the collection's, and for each query the probability of each."""

    labels: Tensor  # int64 [N]
    chances: Tensor  # [Q, C], rows sum to one


def certain(truth: Tensor, classes: int) -> Tensor:
    """Probabilities [Q, C] of somebody who knows the coarse labels [Q]."""
    return F.one_hot(truth, classes).double()


def mean_average_precision(
    memory: Tensor,
    labels: Tensor,
    queries: Tensor,
    truth: Tensor,
    coarse: Conditioning | None = None,
    exclude: Tensor | None = None,
) -> Precision:
    """Over the whole ranking of the memory [N, D] for each query [Q, D], exact; equal scores stay in the memory's order.

    `coarse` adds the log-odds of its probabilities; certainty about them gives the oracle's ranking. `exclude` [Q] names a row
    of the memory for each query that is not ranked: itself.
    """
    if not len(memory):
        raise UserError("The collection to search in is empty.")
    device = memory.device
    found = torch.zeros(2, dtype=torch.float64, device=device)  # summed precision, queries that count
    memory = F.normalize(memory, dim=1)
    for rows in chunks(len(queries), len(memory)):
        scores = (F.normalize(queries[rows].to(device), dim=1) @ memory.T).double()
        if coarse is not None:
            # In float64: the log-odds would take from float32 the digits that order the cosines.
            odds = torch.special.logit(coarse.chances[rows].to(device).double(), LEAST)
            scores += odds.gather(1, coarse.labels.to(device)[None].expand(len(scores), -1))
        relevant = labels[None] == truth[rows].to(device)[:, None]
        if exclude is not None:
            own = exclude[rows].to(device)[:, None]
            scores.scatter_(1, own, -torch.inf)
            relevant = relevant.scatter(1, own, False)
        precision = average_precision(scores, relevant)
        counts = relevant.any(1)
        found += torch.stack([(precision * counts).sum(), counts.sum().double()])
    total, counted = found.tolist()
    if not counted:
        raise UserError("No query has a label that occurs in the collection: nothing could be found.")
    return Precision(total / counted, int(counted), len(queries) - int(counted))


def average_precision(scores: Tensor, relevant: Tensor) -> Tensor:
    """[Q]: mean over the relevant of the share of relevant ones up to each, in falling order of scores [Q, N]; 0 without any."""
    order = scores.sort(dim=1, descending=True, stable=True).indices
    sorted_ = relevant.gather(1, order)
    found = sorted_.cumsum(1)
    rank = torch.arange(1, scores.shape[1] + 1, device=scores.device)
    return ((found / rank.double()) * sorted_).sum(1) / found[:, -1].clamp(min=1)


def chunks(queries: int, columns: int) -> Iterator[slice]:
    rows = max(ELEMENTS // max(columns, 1), 1)
    for start in range(0, queries, rows):
        yield slice(start, start + rows)


def coarse_chances(
    memory: Tensor, coarse: Tensor, queries: Tensor, classes: int, temperature: float = 0.05, k: int | None = None
) -> Tensor:
    """[Q, C]: probabilities of coarse labels by the votes of the k nearest, or of the whole memory (Equations 2.6 and 2.3)."""
    if k is not None:
        cosine, index = nearest(memory, queries, k)
        return votes(cosine, coarse[index], classes, temperature)
    memory = F.normalize(memory, dim=1)
    found = []
    for rows in chunks(len(queries), len(memory)):
        weight = (F.normalize(queries[rows], dim=1) @ memory.T / temperature).softmax(1)
        found.append(weight.new_zeros(classes, len(weight)).index_add_(0, coarse, weight.T).T)
    return torch.cat(found)
