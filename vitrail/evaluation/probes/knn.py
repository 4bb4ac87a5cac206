"""Weighted nearest-neighbour classification: every neighbour votes for its class with exp(cosine / temperature).

The constants are those of DINO (arXiv 2104.14294) and Grafit (arXiv 2011.12982, Equation 2.6).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.errors import UserError

ELEMENTS = 1 << 25  # similarities held at a time
QUERIES = 1024  # at a time
CHOSEN_ON = 10_000  # images of the memory that k is chosen on


class Protocol(NamedTuple):
    temperature: float
    k: int | None  # None: the best of `candidates` on the memory itself
    candidates: tuple[int, ...]


PROTOCOLS = {
    "dino": Protocol(0.07, 20, (10, 20, 100, 200)),
    "grafit": Protocol(0.05, None, (10, 15, 20, 25, 30)),
    "snca": Protocol(0.05, 30, (30,)),
}


def protocol_named(name: str) -> Protocol:
    if name not in PROTOCOLS:
        raise UserError(f"There is no protocol called {name!r}: choose from {', '.join(PROTOCOLS)}.")
    return PROTOCOLS[name]


def nearest(memory: Tensor, queries: Tensor, k: int, exclude: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Cosines [Q, k], largest first, and rows of the memory [Q, k]. Takes [N, D], [Q, D] of any length; N and Q are cut.

    `exclude` [Q] names one row of the memory for each query that is no neighbour: itself, where it is there; -1 for none.
    """
    k = min(k, len(memory) - (exclude is not None))
    if k < 1:
        raise UserError("There is no image to be a neighbour: give more to remember.")
    queries = F.normalize(queries, dim=1)
    columns = max(ELEMENTS // min(len(queries), QUERIES) if len(queries) else 1, k)
    found = [part(memory, rows, k, columns, own) for rows, own in in_chunks(queries, exclude)]
    if not found:
        return queries.new_zeros(0, k), torch.zeros(0, k, dtype=torch.int64, device=queries.device)
    return torch.cat([cosine for cosine, _ in found]), torch.cat([index for _, index in found])


def in_chunks(queries: Tensor, exclude: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    for start in range(0, len(queries), QUERIES):
        yield queries[start : start + QUERIES], None if exclude is None else exclude[start : start + QUERIES]


def part(memory: Tensor, queries: Tensor, k: int, columns: int, exclude: Tensor | None) -> tuple[Tensor, Tensor]:
    best: Tensor | None = None
    index = torch.zeros(0, dtype=torch.int64, device=queries.device)
    for start in range(0, len(memory), columns):
        # Normalized here, part by part: a copy of the whole memory may not fit beside it.
        cosine = queries @ F.normalize(memory[start : start + columns].to(queries.device), dim=1).T
        if exclude is not None:
            column = exclude - start
            here = (column >= 0) & (column < cosine.shape[1])
            row = torch.arange(len(queries), device=queries.device)
            # Every row gets a column to write to; those whose own row is elsewhere write back what is there.
            column = column.clamp(0, cosine.shape[1] - 1)
            cosine[row, column] = torch.where(here, -torch.inf, cosine[row, column])
        top, place = cosine.topk(min(k, cosine.shape[1]), 1)
        place = place + start
        if best is None:
            best, index = top, place
        else:
            top, place = torch.cat([best, top], 1), torch.cat([index, place], 1)
            best, order = top.topk(min(k, top.shape[1]), 1)
            index = place.gather(1, order)
    assert best is not None
    return best, index


def votes(cosine: Tensor, labels: Tensor, classes: int, temperature: float) -> Tensor:
    """Shares of the votes [Q, C], which sum to one, from the neighbours' cosines and labels [Q, k]."""
    # The largest is taken out: shares do not change, and a small temperature does not overflow.
    weight = ((cosine - cosine[:, :1]) / temperature).exp()
    total = weight.new_zeros(len(cosine), classes).scatter_add_(1, labels, weight)
    return total / total.sum(1, keepdim=True)


class Hits(NamedTuple):
    top1: float
    top5: float
    images: int


def hits(scores: Tensor, truth: Tensor) -> Tensor:
    """[2] on the device: how many of the answers [Q, C] are right, and right among the first five; -inf is no answer."""
    top, place = scores.topk(min(5, scores.shape[1]), 1)
    best = (place == truth[:, None]) & (top > -torch.inf)
    return torch.stack([best[:, 0].sum(), best.any(1).sum()])


def accuracy_of_votes(cosine: Tensor, labels: Tensor, truth: Tensor, classes: int, k: int, temperature: float) -> Hits:
    """Of neighbours [Q, K] the first k vote; `labels` [Q, K] are theirs, `truth` [Q] the queries'."""
    total = torch.zeros(2, dtype=torch.int64, device=cosine.device)
    for start in range(0, len(truth), QUERIES):
        rows = slice(start, start + QUERIES)
        shares = votes(cosine[rows, :k], labels[rows, :k], classes, temperature)
        total += hits(shares.masked_fill(shares == 0, -torch.inf), truth[rows])  # classes without a vote are no guess
    top1, top5 = total.tolist()
    return Hits(top1 / len(truth), top5 / len(truth), len(truth))


def classify_by_neighbours(
    memory: Tensor, labels: Tensor, queries: Tensor, truth: Tensor, classes: int, ks: Sequence[int], temperature: float
) -> dict[int, Hits]:
    """Top-1 and top-5 for each k; neighbours are looked for once, for the largest."""
    cosine, index = nearest(memory, queries.to(memory.device), max(ks))
    near, truth = labels.to(memory.device)[index], truth.to(memory.device)
    return {k: accuracy_of_votes(cosine, near, truth, classes, k, temperature) for k in ks}


def choose_k(memory: Tensor, labels: Tensor, classes: int, ks: Sequence[int], temperature: float, seed: int = 0) -> int:
    """The k that classifies images of the memory best by the rest of it; the smallest of several equals."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.randperm(len(memory), generator=generator)[:CHOSEN_ON].to(memory.device)
    cosine, index = nearest(memory, memory[own], max(ks), exclude=own)
    found = {k: accuracy_of_votes(cosine, labels[index], labels[own], classes, k, temperature) for k in sorted(ks)}
    return max(found, key=lambda k: found[k].top1)
