"""What the tasks without labels have in common: data of any kind, validation by k-NN and feature statistics, a collapse alarm."""

import math
import shlex
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from vitrail.data.image_loader import ImageLoader
from vitrail.data.loader import Batch
from vitrail.data.rng import sample_key
from vitrail.data.source import Source
from vitrail.data.transforms.pipeline import augment
from vitrail.errors import UserError
from vitrail.evaluation.feature_health import measure_health
from vitrail.evaluation.features import POOLED, FeatureKind, compute_features
from vitrail.models.registry import lookup as find_model
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes.schema import Recipe
from vitrail.recipes.task_options import SelfSupervisedOptions, complete_options, read_options
from vitrail.tasks.neighbor_validation import Gallery, Rows, collect, collect_features, rate_levels, rate_neighbors
from vitrail.training.cuda_graphs import CapturedFunction
from vitrail.training.distributed import Devices
from vitrail.training.metrics import Metric
from vitrail.training.task import Position, Task

KNN = Metric("knn", "k-NN", percent=True)
AGREEMENT = Metric("agreement", "neighbor agreement", percent=True)
# A collapsed network gives all images nearly the same features. At initialization the spread is above 0.2 for the networks here.
MIN_SPREAD = 0.05
MIN_RANK = 1.5
MIN_RANK_IMAGES = 16  # with fewer the effective rank is low for any network
Sums = dict[str, Tensor]  # values summed over validation images and processes


class SelfSupervised(Task):
    """Learns from images alone. Labels, where there are any, are used for the k-NN accuracy of the validation.

    Subclasses set `options_kind`, implement `build_module` and `make_views`, and may add sums over the validation images
    (`measure`) that become metrics (`summarize`). With labels of
    both splits the best weights are those with the highest k-NN accuracy, otherwise the latest.
    """

    options_kind: ClassVar[type[SelfSupervisedOptions]]
    title: ClassVar[str] = "training without labels"  # for messages
    features: ClassVar[FeatureKind] = POOLED  # of the validation: a vector that the task trains
    metric = KNN
    min_rank = MIN_RANK  # effective rank below which the network has collapsed
    levels: list[str] = []  # noqa: RUF012 - set by tasks that train on labels: columns with finer ones, validated too

    def __init__(self, recipe: Recipe, source: Source, device: torch.device) -> None:
        super().__init__(recipe, source, device)
        self.options = read_options(self.options_kind, recipe)
        self.labeled = has_classes(source)
        self.metric = KNN if self.labeled else AGREEMENT  # type: ignore[misc]  # depends on the data
        self.gallery = Gallery(source, device, recipe.min_decode_side, self.options.knn_images)
        self._captured_views = CapturedFunction(self.make_views)

    @classmethod
    def resolve_recipe(cls, recipe: Recipe, explicit: frozenset[str]) -> Recipe:
        unused = {
            "mixing.mixup": recipe.mixing.mixup,
            "mixing.cutmix": recipe.mixing.cutmix,
            "distillation.teacher": recipe.distillation.teacher,
            "token_labels.store": recipe.token_labels.store,
        }
        for key, value in unused.items():
            if value:
                raise UserError(f"{key} has no effect on {cls.title}: remove it.")
        if recipe.architecture.get("pooling", find_model(recipe.model)[1].pooling) == "per_class":
            raise UserError(
                f"{cls.title} needs one vector per image, and pooling=per_class has one per class: choose another model."
            )
        return complete_options(cls.options_kind, recipe)

    @classmethod
    def describe(cls, recipe: Recipe) -> list[str]:
        return ["labels are not trained on: they are used for the k-NN accuracy alone, where there are any"]

    # Training

    def prepare_batch(self, batch: Batch, position: Position) -> tuple[Tensor, Any]:
        keys = sample_key(self.recipe.seed, position.epoch, batch.index, batch.repeat)
        # Step 0 is also that of the memory estimate and of timed steps, whose batches of many sizes would use up the graphs.
        make_views = self._captured_views if position.step else self.make_views
        out: tuple[Tensor, Any] = make_views(batch.pixels, batch.sizes, keys)
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
        if self.labeled or self.levels:
            values |= self._knn_accuracy(model, loader, rows, batch_size, devices)
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
        # The accuracy is 0 where no validation image has a label: then the latest weights are kept, as without any labels.
        return super().is_better(values, best) if self.labeled and best[self.metric.name] else True

    def diagnose(self, values: Mapping[str, Any], epoch: float) -> str:
        problem = self.find_collapse(values, epoch)
        if problem and self.options.on_collapse == "stop":
            raise UserError(f"Stopped at epoch {epoch:g}: {problem}")
        return problem

    def find_collapse(self, values: Mapping[str, Any], epoch: float) -> str:
        """What shows that the network has collapsed, and the setting to change; "" if it has not."""
        rank = float(values["effective_rank"]) if values.get("images", math.inf) >= MIN_RANK_IMAGES else math.inf
        if float(values["feature_std"]) < MIN_SPREAD or rank < self.min_rank:
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

    def _embed(self, model: VisionTransformer, loader: ImageLoader, batch_size: int, devices: Devices, sums: Sums) -> Rows:
        """Features [N, 2, D] of the readable images and of an augmented view of each; `measure` is added to `sums`."""

        def embed_both(batch: Batch) -> Tensor:
            images = model.preprocessing.apply(batch.pixels, batch.sizes)
            for name, value in self.measure(model, batch, images).items():
                sums[name] = sums[name] + value.double() if name in sums else value.double()
            keys = sample_key(0, 0, batch.index, batch.repeat)  # the same views at every validation
            view = augment(batch.pixels, batch.sizes, keys, self.recipe.augmentation).images
            return torch.stack([compute_features(model, part, self.features).float() for part in (images, view)], 1)

        return collect(embed_both, loader, batch_size, devices, self.levels)

    def _knn_accuracy(
        self, model: VisionTransformer, loader: ImageLoader, queries: Rows, batch_size: int, devices: Devices
    ) -> dict[str, float]:
        """Top-1 of the validation images, classified by their nearest neighbors among training images: `knn`.

        Of tasks that train on labels also that of finer ones, as `knn_<column>`.
        """
        memory = self.gallery.open(len(loader.source))
        own = collect_features(model, self.features, memory, batch_size, devices, self.levels)
        queries = queries._replace(features=queries.features[:, 0])
        found = {"knn": rate_neighbors(own, queries, len(self.source.classes), self.options.knn_k)} if self.labeled else {}
        return found | rate_levels(own, queries, self.source, self.levels, self.options.knn_k)


def has_classes(source: Source) -> bool:
    """Whether the images have labels of at least two classes."""
    return source.label is not None and len(np.unique(source.label.values[source.label.values >= 0])) > 1
