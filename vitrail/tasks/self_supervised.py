"""What the tasks without labels have in common: data of any kind, validation by k-NN and feature statistics, a collapse alarm."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.data.image_loader import ImageLoader
from vitrail.data.loader import Batch
from vitrail.data.rng import sample_key
from vitrail.data.source import Source, Splits, Subset
from vitrail.data.transforms.pipeline import augment
from vitrail.errors import UserError
from vitrail.evaluation.feature_health import measure_health
from vitrail.evaluation.features import POOLED, compute_features
from vitrail.evaluation.probes.knn import PROTOCOLS, knn_accuracy
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes.schema import Recipe
from vitrail.recipes.task_options import SelfSupervisedOptions, complete_options, read_options
from vitrail.training.distributed import Devices
from vitrail.training.metrics import Metric
from vitrail.training.task import Task

KNN = Metric("knn", "k-NN", percent=True)
AGREEMENT = Metric("agreement", "neighbor agreement", percent=True)
GALLERY = 5  # training images per validation image among which neighbors are searched, at most
MIN_IMAGES = 2  # of each split
# A collapsed network gives all images nearly the same features. At initialization the spread is above 0.2 for the networks here.
MIN_SPREAD = 0.05
MIN_RANK = 1.5
Sums = dict[str, Tensor]  # values summed over validation images and processes


class SelfSupervised(Task):
    """Learns from images alone. Labels, where there are any, are used for the k-NN accuracy of the validation.

    Subclasses set `options_kind`, implement `build_module` and `prepare_batch`, and may add sums over the validation images
    (`measure`) that become metrics (`summarize`). With labels the best weights are those with the highest k-NN accuracy, without
    labels the latest.
    """

    options_kind: ClassVar[type[SelfSupervisedOptions]]
    metric = KNN
    feature_kind = POOLED  # of the validation

    def __init__(self, recipe: Recipe, source: Source, device: torch.device) -> None:
        super().__init__(recipe, source, device)
        self.options = read_options(self.options_kind, recipe)
        self.labeled = has_classes(source)
        self.metric = KNN if self.labeled else AGREEMENT  # type: ignore[misc]  # depends on the data
        self._galleries: dict[int, ImageLoader] = {}

    @classmethod
    def resolve_recipe(cls, recipe: Recipe, explicit: frozenset[str]) -> Recipe:
        return complete_options(cls.options_kind, recipe)

    @classmethod
    def check_data(cls, recipe: Recipe, splits: Splits) -> None:
        for part, use in ((splits.train, "train on"), (splits.validation, "validate with")):
            if len(part) < MIN_IMAGES:
                raise UserError(f"{part.name} has too few images to {use} ({len(part)}): add some, at least {2 * MIN_IMAGES}.")

    @classmethod
    def describe(cls, recipe: Recipe) -> list[str]:
        return ["labels are not trained on: they are used for the k-NN accuracy alone, where there are any"]

    # Validation

    @torch.no_grad()
    def evaluate(self, model: VisionTransformer, loader: ImageLoader, batch_size: int, devices: Devices) -> dict[str, Any]:
        sums: Sums = {}
        rows = self._embed(model, loader, batch_size, devices, sums)
        values: dict[str, Any] = {}
        if self.labeled:
            values["knn"] = self._knn_accuracy(model, loader, rows, batch_size, devices)
        values |= measure_health(*rows.features.unbind(1))._asdict()
        if sums:
            names = sorted(sums)
            values |= self.summarize({name: devices.all_reduce_sum(sums[name]) for name in names})
        return values | {"images": len(rows.images)}

    def measure(self, model: VisionTransformer, batch: Batch, images: Tensor) -> Sums:
        """Further sums over a batch of validation images, preprocessed as `images`."""
        return {}

    def summarize(self, sums: Sums) -> dict[str, float]:
        """Metrics from the sums of `measure` over all validation images."""
        return {}

    def is_better(self, values: Mapping[str, Any], best: Mapping[str, Any]) -> bool:
        return super().is_better(values, best) if self.labeled else True

    def diagnose(self, values: Mapping[str, Any], epoch: float) -> str:
        problem = self.find_collapse(values, epoch)
        if problem and self.options.on_collapse == "stop":
            raise UserError(f"Stopped at epoch {epoch:g}: {problem}")
        return problem

    def find_collapse(self, values: Mapping[str, Any], epoch: float) -> str:
        """What shows that the network has collapsed, and the setting to change; "" if it has not."""
        if float(values["feature_std"]) < MIN_SPREAD or float(values["effective_rank"]) < MIN_RANK:
            return (
                f"the features of all images are nearly equal (standard deviation {float(values['feature_std']):.3f}, effective "
                f"rank {float(values['effective_rank']):.1f}): the network has collapsed; {self.hint_for_collapse()}."
            )
        return ""

    def hint_for_collapse(self) -> str:
        return "lower optimizer.lr or give a longer schedule.warmup"

    def _embed(self, model: VisionTransformer, loader: ImageLoader, batch_size: int, devices: Devices, sums: Sums) -> "Rows":
        """Features [N, 2, D] of the readable images and of an augmented view of each; `measure` is added to `sums`."""

        def embed_both(batch: Batch) -> Tensor:
            images = model.preprocessing.apply(batch.pixels, batch.sizes)
            for name, value in self.measure(model, batch, images).items():
                sums[name] = sums[name] + value.double() if name in sums else value.double()
            keys = sample_key(0, 0, batch.index, batch.repeat)  # the same views at every validation
            view = augment(batch.pixels, batch.sizes, keys, self.recipe.augmentation).images
            return torch.stack([compute_features(model, part, self.feature_kind).float() for part in (images, view)], 1)

        return collect(embed_both, loader, batch_size, devices)

    def _knn_accuracy(
        self, model: VisionTransformer, loader: ImageLoader, queries: "Rows", batch_size: int, devices: Devices
    ) -> float:
        """Top-1 of the validation images, classified by their nearest neighbors among training images."""

        def embed(batch: Batch) -> Tensor:
            return compute_features(model, model.preprocessing.apply(batch.pixels, batch.sizes), self.feature_kind).float()

        own = collect(embed, self._open_gallery(len(loader.source)), batch_size, devices)
        known, asked = own.labels >= 0, queries.labels >= 0
        if not known.any() or not asked.any():
            return 0.0
        memory, labels = own.features[known], own.labels[known]
        k, classes = min(self.options.knn_k, len(memory)), len(self.source.classes)
        features, targets = queries.features[asked, 0], queries.labels[asked]
        return knn_accuracy(memory, labels, features, targets, classes, [k], PROTOCOLS["dino"].temperature)[k].top1

    def _open_gallery(self, queries: int) -> ImageLoader:
        """A loader of the training images among which neighbors of so many images are searched: a fixed sample."""
        if queries not in self._galleries:
            count = min(len(self.source), GALLERY * queries, self.options.knn_images)
            chosen = np.sort(np.random.default_rng(0).permutation(len(self.source))[:count])
            self._galleries[queries] = ImageLoader(Subset(self.source, chosen), self.device, None, self.recipe.min_decode_side)
        return self._galleries[queries]


class Rows(NamedTuple):
    """Features of the readable images of a split, in the order of the split."""

    images: Tensor  # int64 [N]: indices in the split
    labels: Tensor  # int64 [N], -1: unknown
    features: Tensor  # [N, ...]


def collect(function: Callable[[Batch], Tensor], loader: ImageLoader, batch_size: int, devices: Devices) -> Rows:
    """`function` of all images of a split, computed by all processes together."""
    own = [
        Rows(batch.index, torch.full_like(batch.index, -1) if batch.labels is None else batch.labels, function(batch))
        for batch in loader.iterate(batch_size, devices.rank, devices.world_size)
    ]
    if devices.world_size > 1:
        gathered = devices.all_gather([[tensor.cpu() for tensor in rows] for rows in own])
        own = [Rows(*(tensor.to(devices.device) for tensor in rows)) for part in gathered for rows in part]
    if not own:
        raise UserError(f"No image of {loader.source.name} could be read.")
    rows = Rows(*(torch.cat(parts) for parts in zip(*own, strict=True)))
    order = rows.images.argsort(stable=True)
    return Rows(*(tensor[order] for tensor in rows))


def has_classes(source: Source) -> bool:
    """Whether the images have labels of at least two classes."""
    return source.label is not None and len(np.unique(source.label.values[source.label.values >= 0])) > 1
