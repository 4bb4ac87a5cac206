"""Grafit (arXiv 2011.12982): embeddings of coarse labels whose nearest neighbors are right at a finer level.

Two losses are added: the k-NN loss of an image among the embeddings of all training images, of which a memory keeps a running
mean, and the instance loss between views of an image, predicted by the network and embedded by its EMA. With other weights of
the losses the same task is SNCA (k-NN loss alone), cross-entropy with an instance or a triplet loss, or ClusterFit (classes that
are clusters of the features of other weights).
"""

import os
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.checkpoints.hub import locate
from vitrail.checkpoints.model_io import find_weights
from vitrail.data.datasets.lookup import check_trainable, check_usable
from vitrail.data.image_loader import ImageLoader
from vitrail.data.loader import Batch
from vitrail.data.source import Source, Splits, Subset
from vitrail.data.transforms.pipeline import augment_views
from vitrail.errors import UserError
from vitrail.evaluation.features import POOLED, FeatureKind, embed
from vitrail.evaluation.model import open_model
from vitrail.formatting import pluralize
from vitrail.heads.embedding import EmbeddingConfig, EmbeddingHead, mlp
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes.schema import Recipe
from vitrail.recipes.task_options import GrafitOptions, complete_options, read_options
from vitrail.tasks.classification import check_labels
from vitrail.tasks.clusters import kmeans
from vitrail.tasks.dino import TEACHER_COST, between, copy_without_noise, pool
from vitrail.tasks.grafit_report import draw_figures, score_levels
from vitrail.tasks.losses import classification_loss
from vitrail.tasks.neighbor_losses import instance_loss, neighbor_loss, triplet_loss
from vitrail.tasks.neighbor_validation import collect_features, finer_columns
from vitrail.tasks.self_supervised import SelfSupervised, has_classes
from vitrail.tasks.targets import label_targets
from vitrail.training.compile import static_shapes
from vitrail.training.distributed import Devices
from vitrail.training.ema import ModelEma
from vitrail.training.task import Position

LOSSES = ("neighbor", "class", "instance", "triplet")


class GrafitTargets(NamedTuple):
    """What the module needs besides the view [B, 3, H, W] on which the labels are learned."""

    views: Tensor | None  # further views [n * B, 3, H, W], one view of all images after the other
    image: Tensor  # int64 [B]: indices in the training set
    slot: Tensor  # int64 [B]: their places in the global batch


class GrafitModule(nn.Module):
    """The model with its projector, the predictor, the target network, the memory, and the losses between them."""

    memory: Tensor
    labels: Tensor
    fresh: Tensor
    fresh_index: Tensor

    def __init__(self, model: VisionTransformer, options: GrafitOptions, labels: Tensor, recipe: Recipe) -> None:
        """`labels` [N] of all training images, -1: unknown."""
        super().__init__()
        self.model, self.options, self.loss, self.group_size = model, options, recipe.loss, recipe.images_per_group
        width = options.outputs if options.projector != "none" else model.architecture.width
        self.predictor = self.target = None
        if options.instance_weight:
            self.predictor = mlp(width, options.hidden, width)
            self.target = copy_without_noise(model).requires_grad_(False)
        self.register_buffer("labels", labels)
        if options.neighbor_weight:
            # Uniform, as in the code of SNCA. The values do not depend on the device.
            generator = torch.Generator().manual_seed(recipe.seed)
            memory = torch.rand(len(labels), width, generator=generator).mul_(2).sub_(1)
            self.register_buffer("memory", F.normalize(memory, dim=1))
            # The embeddings of the images of a step, which the memory is updated with.
            self.register_buffer("fresh", torch.zeros(recipe.batch_size, width), persistent=False)
            self.register_buffer("fresh_index", torch.zeros(recipe.batch_size, dtype=torch.int64), persistent=False)

    def forward(self, images: Tensor, targets: GrafitTargets) -> Tensor:
        """The loss, and those of its parts that have a weight."""
        o, size = self.options, len(images)
        views = images if targets.views is None else torch.cat([images, targets.views])
        with static_shapes(self.model):
            pooled = pool(self.model, views)
            embedded = project(self.model, pooled)
            pairs = embedded if o.shares_view or targets.views is None else embedded[size:]
            own = views if o.shares_view or targets.views is None else targets.views
            losses = {}
            if o.neighbor_weight:
                losses["neighbor"] = self._neighbor_loss(embedded[:size], targets)
            if o.class_weight:
                losses["class"] = self._class_loss(pooled[:size], targets)
            if o.instance_weight:
                assert self.target is not None
                assert self.predictor is not None
                with torch.no_grad():
                    goals = project(self.target, pool(self.target, own))
                predictions: Tensor = self.predictor(pairs)
                losses["instance"] = instance_loss(predictions.unflatten(0, (-1, size)), goals.unflatten(0, (-1, size)))
            if o.triplet_weight:
                losses["triplet"] = triplet_loss(pairs[:size], pairs[size : 2 * size], o.triplet_margin, self.group_size)
        total = sum(getattr(o, f"{name}_weight") * value for name, value in losses.items())
        return torch.stack([total, *(losses[name].detach() for name in LOSSES if name in losses)])

    def _neighbor_loss(self, embedded: Tensor, targets: GrafitTargets) -> Tensor:
        """The mean over the batch; an image without another one of its class counts as 0, as in the code of SNCA."""
        o = self.options
        with torch.no_grad():
            self.fresh.index_copy_(0, targets.slot, F.normalize(embedded.detach().to(self.fresh.dtype), dim=1))
            self.fresh_index.index_copy_(0, targets.slot, targets.image)
        return neighbor_loss(embedded, self.memory, self.labels, targets.image, o.temperature, o.margin).mean()

    def _class_loss(self, pooled: Tensor, targets: GrafitTargets) -> Tensor:
        logits = self.model.head(self.model.pre_logits(pooled))
        return classification_loss(logits, label_targets(self.labels[targets.image], logits.shape[1], self.loss), self.loss)

    @torch.no_grad()
    def update_memory(self, skipped: Tensor) -> None:
        """m <- (m + g) / 2 for the images of the step, on all processes alike; the host does not wait for the device."""
        if dist.is_initialized():
            dist.all_reduce(self.fresh)
            dist.all_reduce(self.fresh_index)
        index, share = self.fresh_index, self.options.memory_momentum
        # An image may occur several times in a batch: its first embedding is used, so that equal rows are written.
        rows = torch.arange(len(index), device=index.device)
        first = torch.where(index == index[:, None], rows, len(index)).amin(1)
        old = self.memory[index]
        new = torch.lerp(self.fresh[first], old, share)
        new = F.normalize(new, dim=1) if self.options.normalize_memory else new
        self.memory[index] = torch.where(skipped > 0, old, new)
        self.fresh.zero_()
        self.fresh_index.zero_()


def project(model: VisionTransformer, pooled: Tensor) -> Tensor:
    """The embedding: the output of the projector, or the pooled vector of a model without one."""
    out: Tensor = pooled if model.task_head is None else model.task_head(pooled)
    return out


class Grafit(SelfSupervised):
    """Losses on coarse labels and on views; see `GrafitOptions` for the settings."""

    options_kind = GrafitOptions
    title = "Grafit"
    keeps_head = True
    options: GrafitOptions
    module: GrafitModule

    def __init__(self, recipe: Recipe, source: Source, device: torch.device) -> None:
        super().__init__(recipe, source, device)
        o = self.options
        self.features = POOLED if o.projector == "none" else FeatureKind("projected")  # type: ignore[misc]
        self.logs = tuple(name for name in LOSSES if getattr(o, f"{name}_weight"))  # type: ignore[misc]
        if self.labeled and (o.neighbor_weight or o.class_weight):
            self.min_rank = 0.0  # embeddings of two classes may lie on a line
        self.levels = finer_columns(source)
        self.ema: ModelEma | None = None
        self.messages += describe_losses(o, source)

    @classmethod
    def resolve_recipe(cls, recipe: Recipe, explicit: frozenset[str]) -> Recipe:
        if recipe.mixing.mixup or recipe.mixing.cutmix:
            raise UserError("Grafit compares images one by one and does not mix them: set mixing.mixup=0 and mixing.cutmix=0.")
        recipe = super().resolve_recipe(recipe, explicit)
        options = read_options(GrafitOptions, recipe)
        if bool(options.clusters) != bool(options.clusters_from):
            raise UserError(
                "ClusterFit trains on clusters of the features of other weights: give their number, task_options.clusters, "
                "and the weights, task_options.clusters_from."
            )
        clusters_from = locate(str(find_weights(os.path.expanduser(options.clusters_from)))) if options.clusters else ""
        return complete_options(GrafitOptions, recipe, clusters_from=clusters_from)

    @classmethod
    def describe(cls, recipe: Recipe) -> list[str]:
        return []

    @classmethod
    def check_data(cls, recipe: Recipe, splits: Splits) -> None:
        super().check_data(recipe, splits)
        o, train = read_options(GrafitOptions, recipe), splits.train
        if o.clusters:
            return
        if o.class_weight:
            check_usable([train])
            check_trainable(train)
            check_labels(train)
        elif not (o.instance_weight or o.triplet_weight or has_classes(train)):
            raise UserError(
                f"{train.name} has less than two classes, and without an instance or a triplet loss nothing is learned from one: "
                "set task_options.instance_weight=1, or choose other labels with data.label."
            )

    @property
    def class_names(self) -> list[str] | None:
        if not self.options.class_weight:
            return None
        return [f"cluster {number}" for number in range(self.options.clusters)] or list(self.source.classes)

    @property
    def relative_cost(self) -> float:
        o = self.options
        views = o.views if o.instance_weight or o.triplet_weight else 0
        return 1 + views - (o.shares_view and views > 0) + TEACHER_COST * views * bool(o.instance_weight)

    def build_module(self, model: VisionTransformer) -> GrafitModule:
        o = self.options
        if model.architecture.pooling == "per_class":
            raise UserError("Grafit compares one vector per image, and this model has one per class: choose another pooling.")
        torch.manual_seed(self.recipe.seed)
        before, config = model.task_head, EmbeddingConfig(o.projector, o.outputs, o.hidden) if o.projector != "none" else None
        model.task_head = None
        if config is not None:
            head = model.set_task_head(config).task_head
            assert isinstance(head, EmbeddingHead)
            if isinstance(before, EmbeddingHead) and before.config == config:
                head.load_state_dict(before.state_dict())
                self.messages.append("the projector of the weights is trained further")
        if not o.class_weight:
            model.pre_logits.requires_grad_(False)  # not used; all trained parameters need a gradient
        values = self.source.label.values if self.source.label is not None else np.full(len(self.source), -1)
        return GrafitModule(model, o, torch.from_numpy(values.astype(np.int64)), self.recipe)

    def initialize(self, model: VisionTransformer, loader: ImageLoader, batch_size: int) -> list[str]:
        """Clusters as labels, and first embeddings of the memory."""
        o, module, messages = self.options, self.module, []
        if o.clusters:
            features = embed(open_model(o.clusters_from, str(self.device)), loader, POOLED, batch_size)
            module.labels.fill_(-1)
            module.labels[features.image] = kmeans(features.vectors, o.clusters, self.recipe.seed).to(self.device)
            messages.append(f"{o.clusters:,} clusters of {len(features.image):,} training images")
        if o.neighbor_weight and o.memory_init == "features":
            features = embed(model, loader, self.features._replace(normalize=True), batch_size)
            module.memory[features.image] = features.vectors.to(module.memory)
            messages.append(f"the memory starts with embeddings of {len(features.image):,} training images")
        if dist.is_initialized():  # rounding can differ between processes
            for name, tensor in module.named_buffers():
                if name in ("labels", "memory"):
                    dist.broadcast(tensor, 0)
        return messages

    # Training

    def prepare_batch(self, batch: Batch, position: Position) -> tuple[Tensor, GrafitTargets]:
        images, views = super().prepare_batch(batch, position)
        return images, GrafitTargets(views, batch.index, batch.position % self.recipe.batch_size)

    def make_views(self, pixels: Tensor, sizes: Tensor, keys: Tensor) -> tuple[Tensor, Tensor | None]:
        o = self.options
        count = (o.views - o.shares_view) if o.instance_weight or o.triplet_weight else 0
        views = augment_views(pixels, sizes, keys, [(self.recipe.augmentation, 1 + count)])[0].images
        return views[: len(pixels)], views[len(pixels) :] if count else None

    @torch.no_grad()
    def after_optimizer_step(self, position: Position, skipped: Tensor) -> None:
        o, module = self.options, self.module
        if module.target is not None:
            if self.ema is None:  # created here: the weights have been moved to the device since `build_module`
                self.ema = ModelEma(module.model, 0.0, into=dict(module.target.named_parameters()))
            self.ema.decay = between(o.momentum, o.momentum_end, position)
            self.ema.update(skipped)
        if o.neighbor_weight:
            module.update_memory(skipped)

    @torch.no_grad()
    def report(self, model: VisionTransformer, loader: ImageLoader, splits: Splits, batch_size: int) -> dict[str, Any]:
        """Scores at every level of labels, nearest neighbors and the features of one class."""
        gallery = self.gallery.open(len(loader.source))
        assert isinstance(gallery.source, Subset)
        memory, queries = (
            collect_features(model, self.features, each, batch_size, Devices(self.device)) for each in (gallery, loader)
        )
        parts = (memory, gallery.source, queries, splits.validation)
        return {"levels": score_levels(*parts), "figures": draw_figures(*parts)}

    def hint_for_collapse(self) -> str:
        return "lower optimizer.lr, or give a longer schedule.warmup or a lower task_options.instance_weight"

    def suggest_next(self, model: VisionTransformer, folder: Path, source: str) -> str:
        index = shlex.join(["vitrail", "index", source, "--weights", str(folder), "--out", "images.index"])
        return f"next: `{index}`, then `vitrail search images.index QUERY.jpg --out neighbors.png` finds similar images"


def describe_losses(o: GrafitOptions, source: Source) -> list[str]:
    """What is learned, and from which labels."""
    parts = [f"{name} {getattr(o, f'{name}_weight'):g}" for name in LOSSES if getattr(o, f"{name}_weight")]
    classes = len(source.classes)
    labels = f"{pluralize(o.clusters, 'cluster')}" if o.clusters else f"{source.label_name}, {pluralize(classes, 'class')}"
    messages = [f"weights of the losses: {', '.join(parts)}; labels: {labels}"]
    if o.neighbor_weight and classes < 2:
        messages.append("with fewer than two classes the k-NN loss is 0: the network learns from views alone")
    return messages
