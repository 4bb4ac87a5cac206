"""K-means of features on their device, for classes that are clusters (ClusterFit, arXiv 1912.03330)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.errors import UserError

ITERATIONS = 25
MAX_DISTANCES = 1 << 26  # in memory at a time


def kmeans(vectors: Tensor, clusters: int, seed: int = 0) -> Tensor:
    """The cluster [N] of each of the vectors [N, D], which are normalized first. No cluster is empty.

    Lloyd's iterations from random vectors, at most ITERATIONS; a cluster that loses all vectors gets the one that is farthest
    from its center. Sums are matrix products, so that the result is the same each time.
    """
    if not 2 <= clusters <= len(vectors):
        raise UserError(f"{clusters} clusters of {len(vectors)} images: give at least 2 and at most as many as there are images.")
    vectors = F.normalize(vectors.float(), dim=1)
    generator = torch.Generator().manual_seed(seed)
    centers = vectors[torch.randperm(len(vectors), generator=generator)[:clusters].to(vectors.device)]
    chosen, _ = _assign(vectors, centers)
    for _ in range(ITERATIONS):
        centers = _means(vectors, chosen, clusters)
        before, (chosen, distance) = chosen, _assign(vectors, centers)
        chosen = _fill_empty(chosen, distance, clusters)
        if torch.equal(before, chosen):
            break
    return chosen


def _rows(clusters: int) -> int:
    """How many vectors are compared with all centers at a time."""
    return max(MAX_DISTANCES // clusters, 1)


def _assign(vectors: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest center of each vector, and its squared distance."""
    squares = centers.square().sum(1)
    parts = [(squares - 2 * chunk @ centers.T).min(1) for chunk in vectors.split(_rows(len(centers)))]
    return torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts]) + vectors.square().sum(1)


def _means(vectors: Tensor, chosen: Tensor, clusters: int) -> Tensor:
    total, rows = vectors.new_zeros(clusters, vectors.shape[1]), _rows(clusters)
    for chunk, members in zip(vectors.split(rows), chosen.split(rows), strict=True):
        total += F.one_hot(members, clusters).to(chunk.dtype).T @ chunk
    return total / torch.bincount(chosen, minlength=clusters)[:, None].clamp(min=1)


def _fill_empty(chosen: Tensor, distance: Tensor, clusters: int) -> Tensor:
    """Move the farthest vectors of clusters with several into those with none."""
    counts = torch.bincount(chosen, minlength=clusters).tolist()
    empty = [cluster for cluster, count in enumerate(counts) if not count]
    if not empty:
        return chosen
    chosen = chosen.clone()
    for row in distance.argsort(descending=True, stable=True).tolist():
        before = int(chosen[row])
        if counts[before] > 1:
            counts[before] -= 1
            chosen[row] = empty.pop()
            if not empty:
                break
    return chosen
