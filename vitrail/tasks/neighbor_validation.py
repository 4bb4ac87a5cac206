"""Validation by nearest neighbors: validation images are classified by training images, at one or several levels of labels."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.data.image_loader import ImageLoader
from vitrail.data.loader import Batch
from vitrail.data.source import Source, Subset
from vitrail.errors import UserError
from vitrail.evaluation.features import FeatureKind, compute_features
from vitrail.evaluation.probes.knn import PROTOCOLS, knn_accuracy
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.training.distributed import Devices

PER_QUERY = 5  # training images per validation image among which neighbors are searched, at most


class Rows(NamedTuple):
    """Features of the readable images of a split, in the order of the split."""

    images: Tensor  # int64 [N]: indices in the split
    labels: Tensor  # int64 [N], -1: unknown
    features: Tensor  # [N, ...]
    levels: Tensor  # int64 [N, columns]: labels of further columns


def collect(
    function: Callable[[Batch], Tensor], loader: ImageLoader, batch_size: int, devices: Devices, columns: Sequence[str] = ()
) -> Rows:
    """`function` of all images of a split, computed by all processes together."""
    own = []
    for batch in loader.iterate(batch_size, devices.rank, devices.world_size):
        unknown = torch.full_like(batch.index, -1)
        labels = unknown if batch.labels is None else batch.labels
        levels = [batch.extra.get(name, unknown) for name in columns]
        own.append(Rows(batch.index, labels, function(batch), torch.stack(levels, 1) if levels else unknown[:, None]))
    if devices.world_size > 1:
        gathered = devices.all_gather([[tensor.cpu() for tensor in rows] for rows in own])
        own = [Rows(*(tensor.to(devices.device) for tensor in rows)) for part in gathered for rows in part]
    if not own:
        raise UserError(f"No image of {loader.source.name} could be read.")
    rows = Rows(*(torch.cat(parts) for parts in zip(*own, strict=True)))
    order = rows.images.argsort(stable=True)
    return Rows(*(tensor[order] for tensor in rows))


def collect_features(
    model: VisionTransformer,
    kind: FeatureKind,
    loader: ImageLoader,
    batch_size: int,
    devices: Devices,
    columns: Sequence[str] = (),
) -> Rows:
    """The features of all images of a split, computed by all processes together."""

    def embed(batch: Batch) -> Tensor:
        return compute_features(model, model.preprocessing.apply(batch.pixels, batch.sizes), kind).float()

    return collect(embed, loader, batch_size, devices, columns)


def rate_neighbors(memory: Rows, queries: Rows, classes: int, k: int) -> float:
    """Top-1 of labeled queries among labeled images of the memory; 0 without any."""
    known, labeled = memory.labels >= 0, queries.labels >= 0
    if not known.any() or not labeled.any():
        return 0.0
    features, labels = memory.features[known], memory.labels[known]
    k, temperature = min(k, len(features)), PROTOCOLS["dino"].temperature
    return knn_accuracy(features, labels, queries.features[labeled], queries.labels[labeled], classes, [k], temperature)[k].top1


def finer_columns(source: Source) -> list[str]:
    """The label columns with more classes than the labels that are trained on."""
    return [name for name, labels in source.extra.items() if len(labels.names) > len(source.classes)]


def rate_levels(memory: Rows, queries: Rows, source: Source, columns: Sequence[str], k: int) -> dict[str, float]:
    """Top-1 at further columns of labels of the training images, as `knn_<column>`; `columns` are those of `levels`.

    A column is left out where no image of the memory or no query has a label.
    """
    found = {}
    for number, name in enumerate(columns):
        own, others = (rows._replace(labels=rows.levels[:, number]) for rows in (memory, queries))
        if (own.labels >= 0).any() and (others.labels >= 0).any():
            found[f"knn_{name}"] = rate_neighbors(own, others, len(source.extra[name].names), k)
    return found


class Gallery:
    """A loader of the training images among which neighbors are searched: fixed samples."""

    def __init__(self, source: Source, device: torch.device, min_side: int | None, max_images: int) -> None:
        self.source, self.device, self.min_side, self.max_images = source, device, min_side, max_images
        self.loader: ImageLoader | None = None  # the latest: timed steps and tests have other numbers of queries

    def open(self, queries: int) -> ImageLoader:
        """A loader of training images for so many queries."""
        count = min(len(self.source), PER_QUERY * queries, self.max_images)
        if self.loader is None or len(self.loader.source) != count:
            if self.loader is not None:
                self.loader.close()
                self.loader = None  # frees its decoded images before others are decoded
            chosen = np.sort(np.random.default_rng(0).permutation(len(self.source))[:count])
            self.loader = ImageLoader(Subset(self.source, chosen), self.device, None, self.min_side)
        return self.loader
