"""Retrieval probe: rank the memory for each query; images with the label of the query are relevant. Scores of Grafit:

cosine        cos(query, image)
conditional   cosine plus the log-odds that the query has the coarse label of the image (arXiv 2011.12982, Equation 2.5)
oracle        the images with the true coarse label of the query first, each part ordered by cosine
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.errors import UserError
from vitrail.evaluation.probes.knn import inner_products, nearest_neighbors, vote

MAX_SCORES = 1 << 24  # sorted at a time
EPS = 1e-6  # of a probability: the log-odds of 0 and 1 are infinite


class Precision(NamedTuple):
    """Mean average precision over the queries with at least one relevant image."""

    mean: float
    queries: int
    without_match: int  # queries whose label does not occur in the memory


class CoarseLabels(NamedTuple):
    """Coarse labels of the memory, and the probability of each coarse label for each query."""

    labels: Tensor  # int64 [N]
    probabilities: Tensor  # [Q, C], rows sum to 1


def one_hot(labels: Tensor, classes: int) -> Tensor:
    """Probabilities [Q, C] of known coarse labels [Q]."""
    return F.one_hot(labels, classes).double()


def mean_average_precision(
    memory: Tensor,
    labels: Tensor,
    queries: Tensor,
    query_labels: Tensor,
    coarse: CoarseLabels | None = None,
    exclude: Tensor | None = None,
) -> Precision:
    """Exact, over the full ranking of the memory [N, D] for each query [Q, D]; equal scores keep the order of the memory.

    `coarse` adds the log-odds of its probabilities; one-hot probabilities give the ranking of the oracle. `exclude` [Q] is an
    index of the memory that is not ranked, such as the query itself.
    """
    if not len(memory):
        raise UserError("The memory contains no images.")
    device = memory.device
    totals = torch.zeros(2, dtype=torch.float64, device=device)  # summed precision, number of queries
    memory = F.normalize(memory, dim=1)
    for rows in _query_chunks(len(queries), len(memory)):
        scores = inner_products(F.normalize(queries[rows].to(device), dim=1), memory).double()
        if coarse is not None:
            # In float64: in float32 the log-odds would remove the digits that order the cosines.
            odds = torch.special.logit(coarse.probabilities[rows].to(device).double(), EPS)
            scores += odds.gather(1, coarse.labels.to(device)[None].expand(len(scores), -1))
        relevant = labels[None] == query_labels[rows].to(device)[:, None]
        if exclude is not None:
            own = exclude[rows].to(device)[:, None]
            scores.scatter_(1, own, -torch.inf)
            relevant = relevant.scatter(1, own, False)
        precision = average_precision(scores, relevant)
        counted = relevant.any(1)
        totals += torch.stack([(precision * counted).sum(), counted.sum().double()])
    total, count = totals.tolist()
    if not count:
        raise UserError("No query has a label that occurs in the memory.")
    return Precision(total / count, int(count), len(queries) - int(count))


def average_precision(scores: Tensor, relevant: Tensor) -> Tensor:
    """[Q]: the mean precision at the ranks of the relevant images, in descending order of scores [Q, N]; 0 without any."""
    order = scores.sort(dim=1, descending=True, stable=True).indices
    ranked = relevant.gather(1, order)
    hits = ranked.cumsum(1)
    rank = torch.arange(1, scores.shape[1] + 1, device=scores.device)
    return ((hits / rank.double()) * ranked).sum(1) / hits[:, -1].clamp(min=1)


def _query_chunks(queries: int, columns: int) -> Iterator[slice]:
    rows = max(MAX_SCORES // max(columns, 1), 1)
    for start in range(0, queries, rows):
        yield slice(start, start + rows)


def coarse_probabilities(
    memory: Tensor, coarse: Tensor, queries: Tensor, classes: int, temperature: float = 0.05, k: int | None = None
) -> Tensor:
    """[Q, C]: probabilities of coarse labels by the votes of the k nearest neighbors or of the memory (Equations 2.6, 2.3)."""
    if k is not None:
        cosine, index = nearest_neighbors(memory, queries, k)
        return vote(cosine, coarse[index], classes, temperature)
    memory = F.normalize(memory, dim=1)
    chunks = []
    for rows in _query_chunks(len(queries), len(memory)):
        weight = (inner_products(F.normalize(queries[rows], dim=1), memory) / temperature).softmax(1)
        chunks.append(weight.new_zeros(classes, len(weight)).index_add_(0, coarse, weight.T).T)
    return torch.cat(chunks)
