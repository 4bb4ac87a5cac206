"""A classifier fitted to the features of frozen weights, with which a fine-tuning starts."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.data.image_loader import ImageLoader
from vitrail.data.source import Subset
from vitrail.evaluation.features import FeatureKind, embed
from vitrail.evaluation.probes.linear import LinearClassifier, fit, hold_out
from vitrail.models.vision_transformer import VisionTransformer

MAX_IMAGES = 10_000  # that the classifier is fitted to
WEIGHT_DECAYS = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)  # strongest first: each fit is initialized with the previous one
HELD_OUT = 0.1  # of the images of each class


def linear_heads(model: VisionTransformer) -> list[nn.Linear]:
    """The classifiers that can be fitted to features: those that are one linear layer."""
    heads = [head for head in (model.head, model.head_distillation) if isinstance(head, nn.Linear)]
    return [] if model.architecture.pooling == "per_class" else heads


@torch.no_grad()
def fit_head(model: VisionTransformer, loader: ImageLoader, batch_size: int, seed: int) -> list[str]:
    """Set a classifier of zeros to a logistic regression on the features of the training images; returns messages.

    A classifier that is not one linear layer, or not zero, is left as it is.
    """
    heads = [head for head in linear_heads(model) if not head.weight.any()]
    if not heads:
        return []
    source = loader.source
    chosen = source
    if len(source) > MAX_IMAGES:
        chosen = Subset(source, np.sort(np.random.default_rng(seed).choice(len(source), MAX_IMAGES, replace=False)))
    for head, vector in zip(heads, ("penultimate", "distillation"), strict=False):
        features = embed(model, loader if chosen is source else chosen, FeatureKind(vector), batch_size)
        assert features.labels is not None
        fitted = fit_classifier(features.vectors, features.labels, head.out_features, seed)
        weight = fitted.weight / fitted.scale[:, None]
        head.weight.copy_(weight.T)
        head.bias.copy_(fitted.bias - fitted.mean @ weight)
    return [f"the classifier is fitted to the features of {len(chosen):,} training images"]


def fit_classifier(vectors: Tensor, labels: Tensor, classes: int, seed: int) -> LinearClassifier:
    """The classifier of features [N, D] with the weight decay of the lowest loss on a held-out part.

    The highest accuracy often has a weight decay so strong that probabilities are far too low, which training corrects first, at
    the expense of the features.
    """
    held = hold_out(labels.cpu().numpy(), HELD_OUT, seed)
    train, validation = (torch.from_numpy(np.flatnonzero(mask)).to(vectors.device) for mask in (~held, held))
    losses, classifier = {}, None
    if len(train) and len(validation):
        for weight_decay in WEIGHT_DECAYS:
            classifier = fit(vectors[train], labels[train], classes, weight_decay, classifier)
            losses[weight_decay] = float(F.cross_entropy(classifier.logits(vectors[validation]), labels[validation]))
    return fit(vectors, labels, classes, min(losses, key=lambda weight_decay: losses[weight_decay], default=WEIGHT_DECAYS[0]))
