"""Weighted k-nearest-neighbor classification: every neighbor votes for its class with exp(cosine / temperature).

The constants are those of DINO (arXiv 2104.14294) and Grafit (arXiv 2011.12982, Equation 2.6).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.errors import UserError

MAX_SIMILARITIES = 1 << 25  # in memory at a time
QUERIES = 1024  # at a time
MAX_VALIDATION = 10_000  # images of the memory that k is chosen on


class Protocol(NamedTuple):
    temperature: float
    k: int | None  # None: the best of `candidates` on the memory itself
    candidates: tuple[int, ...]


PROTOCOLS = {
    "dino": Protocol(0.07, 20, (10, 20, 100, 200)),
    "grafit": Protocol(0.05, None, (10, 15, 20, 25, 30)),
    "snca": Protocol(0.05, 30, (30,)),
}


def get_protocol(name: str) -> Protocol:
    if name not in PROTOCOLS:
        raise UserError(f"There is no protocol called {name!r}: choose from {', '.join(PROTOCOLS)}.")
    return PROTOCOLS[name]


def nearest_neighbors(memory: Tensor, queries: Tensor, k: int, exclude: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Cosines [Q, k], largest first, and indices in the memory [Q, k], for memory [N, D] and queries [Q, D], in chunks of both.

    `exclude` [Q] is an index of the memory that is not a neighbor of the query, such as the query itself; -1 for none.
    """
    k = min(k, len(memory) - (exclude is not None))
    if k < 1:
        raise UserError("The memory is too small: there is no neighbor. Give more images.")
    queries = F.normalize(queries, dim=1)
    columns = max(MAX_SIMILARITIES // min(len(queries), QUERIES) if len(queries) else 1, k)
    chunks = [_search_chunk(memory, rows, k, columns, own) for rows, own in _query_chunks(queries, exclude)]
    if not chunks:
        return queries.new_zeros(0, k), torch.zeros(0, k, dtype=torch.int64, device=queries.device)
    return torch.cat([cosine for cosine, _ in chunks]), torch.cat([index for _, index in chunks])


def _query_chunks(queries: Tensor, exclude: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    for start in range(0, len(queries), QUERIES):
        yield queries[start : start + QUERIES], None if exclude is None else exclude[start : start + QUERIES]


def _search_chunk(memory: Tensor, queries: Tensor, k: int, columns: int, exclude: Tensor | None) -> tuple[Tensor, Tensor]:
    best: Tensor | None = None
    index = torch.zeros(0, dtype=torch.int64, device=queries.device)
    for start in range(0, len(memory), columns):
        # Normalized in chunks: a normalized copy of the memory may not fit.
        cosine = inner_products(queries, F.normalize(memory[start : start + columns].to(queries.device), dim=1))
        if exclude is not None:
            column = exclude - start
            inside = (column >= 0) & (column < cosine.shape[1])
            row = torch.arange(len(queries), device=queries.device)
            # Every row writes to one column; rows whose excluded index is in another chunk write the value back.
            column = column.clamp(0, cosine.shape[1] - 1)
            cosine[row, column] = torch.where(inside, -torch.inf, cosine[row, column])
        top, position = cosine.topk(min(k, cosine.shape[1]), 1)
        position = position + start
        if best is None:
            best, index = top, position
        else:
            top, position = torch.cat([best, top], 1), torch.cat([index, position], 1)
            best, order = top.topk(min(k, top.shape[1]), 1)
            index = position.gather(1, order)
    assert best is not None
    return best, index


def inner_products(queries: Tensor, memory: Tensor) -> Tensor:
    """[Q, N] in the precision of queries [Q, D] and memory [N, D], also under autocast: in bfloat16 most cosines are equal."""
    with torch.autocast(queries.device.type, enabled=False):
        return queries @ memory.T


def vote(cosine: Tensor, labels: Tensor, classes: int, temperature: float) -> Tensor:
    """Shares of the votes [Q, C], which sum to 1, from the cosines and labels [Q, k] of the neighbors."""
    # Relative to the largest cosine: the shares are the same, and a small temperature does not overflow.
    weight = ((cosine - cosine[:, :1]) / temperature).exp()
    total = weight.new_zeros(len(cosine), classes).scatter_add_(1, labels, weight)
    return total / total.sum(1, keepdim=True)


class TopAccuracy(NamedTuple):
    top1: float
    top5: float
    images: int


def count_hits(scores: Tensor, labels: Tensor) -> Tensor:
    """[2] on the device: number of top-1 and top-5 hits of scores [Q, C]; a score of -inf is never a hit."""
    top, index = scores.topk(min(5, scores.shape[1]), 1)
    hits = (index == labels[:, None]) & (top > -torch.inf)
    return torch.stack([hits[:, 0].sum(), hits.any(1).sum()])


def vote_accuracy(cosine: Tensor, neighbors: Tensor, labels: Tensor, classes: int, k: int, temperature: float) -> TopAccuracy:
    """The accuracy of the votes of the first k neighbors; `neighbors` [Q, K] are their labels, `labels` [Q] the queries'."""
    total = torch.zeros(2, dtype=torch.int64, device=cosine.device)
    for start in range(0, len(labels), QUERIES):
        rows = slice(start, start + QUERIES)
        shares = vote(cosine[rows, :k], neighbors[rows, :k], classes, temperature)
        total += count_hits(shares.masked_fill(shares == 0, -torch.inf), labels[rows])  # classes without votes are no hits
    top1, top5 = total.tolist()
    return TopAccuracy(top1 / len(labels), top5 / len(labels), len(labels))


def knn_accuracy(
    memory: Tensor, labels: Tensor, queries: Tensor, query_labels: Tensor, classes: int, ks: Sequence[int], temperature: float
) -> dict[int, TopAccuracy]:
    """Top-1 and top-5 accuracy for each k, with one search for the largest."""
    cosine, index = nearest_neighbors(memory, queries.to(memory.device), max(ks))
    neighbors, query_labels = labels.to(memory.device)[index], query_labels.to(memory.device)
    return {k: vote_accuracy(cosine, neighbors, query_labels, classes, k, temperature) for k in ks}


def choose_k(memory: Tensor, labels: Tensor, classes: int, ks: Sequence[int], temperature: float, seed: int = 0) -> int:
    """The k with the highest leave-one-out accuracy on the memory; the smallest of equals."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.randperm(len(memory), generator=generator)[:MAX_VALIDATION].to(memory.device)
    cosine, index = nearest_neighbors(memory, memory[own], max(ks), exclude=own)
    accuracies = {k: vote_accuracy(cosine, labels[index], labels[own], classes, k, temperature) for k in sorted(ks)}
    return max(accuracies, key=lambda k: accuracies[k].top1)
