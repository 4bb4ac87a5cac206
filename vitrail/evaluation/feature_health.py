"""Measures of features that need no labels and show whether a self-supervised training works or collapses."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.errors import UserError
from vitrail.evaluation.probes.knn import nearest_neighbors
from vitrail.evaluation.probes.spectrum import compute_spectrum

NEIGHBORS = 10  # of which two views of an image should have most in common; of small sets a tenth of the images


class FeatureHealth(NamedTuple):
    agreement: float  # share of the nearest neighbors that two views of an image have in common
    effective_rank: float  # exp of the entropy of the covariance's eigenvalues: 1 if all features lie on a line
    feature_std: float  # of normalized features, over images: 1 if they are spread evenly, 0 if all are equal
    view_std: float  # the same of augmented views


def measure_health(features: Tensor, views: Tensor) -> FeatureHealth:
    """Features [N, D] of N images, and of an augmented view of each of them."""
    return FeatureHealth(neighbor_agreement(features, views), effective_rank(features), spread(features), spread(views))


def neighbor_agreement(features: Tensor, views: Tensor) -> float:
    """The mean share of the nearest neighbors [N, D] that an image and its augmented view have in common."""
    if len(features) < 2:
        return 1.0  # no neighbors: one image, as in the timed validation of a training with batches of one
    own, k = torch.arange(len(features), device=features.device), min(NEIGHBORS, max(len(features) // 10, 1))
    found = [nearest_neighbors(features, queries, k, exclude=own)[1] for queries in (features, views)]
    common = (found[0][:, :, None] == found[1][:, None]).any(2)
    return float(common.float().mean())


def effective_rank(features: Tensor) -> float:
    """The effective number of directions of features [N, D]; 1 where all are equal."""
    try:
        return compute_spectrum(features).effective
    except UserError:  # no variance
        return 1.0


def spread(features: Tensor) -> float:
    """The standard deviation over images of L2-normalized features [N, D], times the root of D."""
    return float(F.normalize(features.float(), dim=1).std(0, correction=0).mean()) * math.sqrt(features.shape[1])


class OutputEntropy(NamedTuple):
    """Entropies of a network's output distributions in nats."""

    mean: float  # of the distributions
    of_mean: float  # of their mean
    outputs: int

    @property
    def information(self) -> float:
        """What an output says about the image: 0 where all images have the same distribution."""
        return max(self.of_mean - self.mean, 0.0)

    @property
    def limit(self) -> float:
        """The entropy of the uniform distribution."""
        return math.log(self.outputs)


def entropy_of_sums(entropy: Tensor, probabilities: Tensor, count: float) -> OutputEntropy:
    """From sums over `count` distributions: of their entropies [] and of their probabilities [K]."""
    mean = probabilities.double() / count
    return OutputEntropy(float(entropy) / count, float(torch.special.entr(mean).sum()), len(mean))
