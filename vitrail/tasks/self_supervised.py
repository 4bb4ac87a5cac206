"""What the tasks without labels have in common: data of any kind, validation by k-NN and feature statistics, a collapse alarm."""

import math
import shlex
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.data.image_loader import ImageLoader
from vitrail.data.loader import Batch
from vitrail.data.rng import sample_key
from vitrail.data.source import Source, Subset
from vitrail.data.transforms.pipeline import augment
from vitrail.errors import UserError
from vitrail.evaluation.feature_health import measure_health
from vitrail.evaluation.features import POOLED, FeatureKind, compute_features
from vitrail.evaluation.probes.knn import PROTOCOLS, knn_accuracy
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes.schema import Recipe
from vitrail.recipes.task_options import SelfSupervisedOptions, complete_options, read_options
from vitrail.training.cuda_graphs import CapturedFunction
from vitrail.training.distributed import Devices
from vitrail.training.metrics import Metric
from vitrail.training.task import Position, Task

KNN = Metric("knn", "k-NN", percent=True)
AGREEMENT = Metric("agreement", "neighbor agreement", percent=True)
GALLERY = 5  # training images per validation image among which neighbors are searched, at most
# A collapsed network gives all images nearly the same features. At initialization the spread is above 0.2 for the networks here.
MIN_SPREAD = 0.05
MIN_RANK = 1.5
MIN_RANK_IMAGES = 16  # with fewer the effective rank is low for any network
Sums = dict[str, Tensor]  # values summed over validation images and processes


class SelfSupervised(Task):
    """Learns from images alone. Labels, where there are any, are used for the k-NN accuracy of the validation.

    Subclasses set `options_kind`, implement `build_module` and `make_views`, and may add sums over the validation images
    (`measure`) that become metrics (`summarize`). With labels the best weights are those with the highest k-NN accuracy, without
    labels the latest.
    """

    options_kind: ClassVar[type[SelfSupervisedOptions]]
    features: ClassVar[FeatureKind] = POOLED  # of the validation: a vector that the task trains
    metric = KNN

    def __init__(self, recipe: Recipe, source: Source, device: torch.device) -> None:
        super().__init__(recipe, source, device)
        self.options = read_options(self.options_kind, recipe)
        self.labeled = has_classes(source)
        self.metric = KNN if self.labeled else AGREEMENT  # type: ignore[misc]  # depends on the data
        self._galleries: dict[int, ImageLoader] = {}
        self._captured_views = CapturedFunction(self.make_views)

    @classmethod
    def resolve_recipe(cls, recipe: Recipe, explicit: frozenset[str]) -> Recipe:
        return complete_options(cls.options_kind, recipe)

    @classmethod
    def describe(cls, recipe: Recipe) -> list[str]:
        return ["labels are not trained on: they are used for the k-NN accuracy alone, where there are any"]

    # Training

    def prepare_batch(self, batch: Batch, position: Position) -> tuple[Tensor, Any]:
        keys = sample_key(self.recipe.seed, position.epoch, batch.index, batch.repeat)
        out: tuple[Tensor, Any] = self._captured_views(batch.pixels, batch.sizes, keys)
        return out

    @abstractmethod
    def make_views(self, pixels: Tensor, sizes: Tensor, keys: Tensor) -> tuple[Tensor, Any]:
        """Inputs and targets, or what the task makes targets of, from uint8 images of `sizes` [B, 2] with the keys [B].

        A pure function of these tensors: on a GPU it is captured as a CUDA graph, because its kernels are many and small.
        """

    # Validation

    @torch.no_grad()
    def evaluate(self, model: VisionTransformer, loader: ImageLoader, batch_size: int, devices: Devices) -> dict[str, Any]:
        sums: Sums = {}
        rows = self._embed(model, loader, batch_size, devices, sums)
        values: dict[str, Any] = {}
        if self.labeled:
            values["knn"] = self._knn_accuracy(model, loader, rows, batch_size, devices)
        values |= measure_health(*rows.features.unbind(1))._asdict()
        total: Sums = {}
        for part in devices.all_gather({name: value.cpu() for name, value in sums.items()}):  # a process may have no images
            total |= {name: total[name] + value if name in total else value for name, value in part.items()}
        if total:
            values |= self.summarize(total)
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
        rank = float(values["effective_rank"]) if values.get("images", math.inf) >= MIN_RANK_IMAGES else math.inf
        if float(values["feature_std"]) < MIN_SPREAD or rank < MIN_RANK:
            return (
                f"the features of all images are nearly equal (standard deviation {float(values['feature_std']):.3f}, effective "
                f"rank {float(values['effective_rank']):.1f}): the network has collapsed; {self.hint_for_collapse()}."
            )
        return ""

    def suggest_next(self, model: VisionTransformer, folder: Path, source: str) -> str:
        labeled = source if self.labeled else "LABELED_IMAGES"
        train, probe = ["vitrail", "train", labeled, "--from", str(folder)], ["vitrail", "probe", "knn", str(folder), labeled]
        vector = self.features.vector
        if vector not in ("pooled", model.architecture.pooling):
            probe += ["--vector", vector]
        return f"next: `{shlex.join(train)}` trains a classifier from these weights, `{shlex.join(probe)}` tests their features"

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
            return torch.stack([compute_features(model, part, self.features).float() for part in (images, view)], 1)

        return collect(embed_both, loader, batch_size, devices)

    def _knn_accuracy(
        self, model: VisionTransformer, loader: ImageLoader, queries: "Rows", batch_size: int, devices: Devices
    ) -> float:
        """Top-1 of the validation images, classified by their nearest neighbors among training images."""

        def embed(batch: Batch) -> Tensor:
            return compute_features(model, model.preprocessing.apply(batch.pixels, batch.sizes), self.features).float()

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
