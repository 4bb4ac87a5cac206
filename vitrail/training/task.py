"""The interface between the trainer and the training objective.

A task makes inputs and targets from a batch, owns the module that computes the loss, validates, and keeps state of its own in
the checkpoints. The trainer uses this interface and imports no task; `vitrail.tasks.registry` finds tasks by name.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vitrail.data.image_loader import ImageLoader
from vitrail.data.loader import Batch
from vitrail.data.source import Source, Splits
from vitrail.errors import UserError
from vitrail.formatting import pluralize
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes.schema import Recipe
from vitrail.training.distributed import Devices
from vitrail.training.metrics import Metric

Targets = tuple[Tensor | None, ...]  # a NamedTuple, so that a CUDA graph can copy its tensors


class Position(NamedTuple):
    """The progress of a training."""

    step: int
    total_steps: int
    epoch: int
    step_in_epoch: int
    groups: tuple[int, ...] = (0,)  # of the step, in this micro-batch; see `data.sampler`


class Task(ABC):
    """What a training learns. Subclasses set `metric` and implement `build_module`, `prepare_batch` and `evaluate`.

    An instance belongs to one training: `Task(recipe, source, device)`, then `attach(model)` once the model is built.
    """

    metric: ClassVar[Metric]
    logs: ClassVar[tuple[str, ...]] = ()  # names of the values that the module returns after the loss
    reads_masks: ClassVar[bool] = False  # whether batches contain segmentation masks
    reads_objects: ClassVar[bool] = False  # whether batches contain boxes and instance masks
    keeps_head: ClassVar[bool] = False  # whether it trains the `task_head` of its weights or replaces it; else it is removed
    has_best_weights = False  # set after the training, when the model has the best weights and the rest of `module` the latest
    shardable: ClassVar[bool] = False  # whether the module calls nothing of the model but `outputs`, which --shard needs
    module: nn.Module  # forward(images, targets) -> the loss [], or [1 + len(logs)] with the loss first

    def __init__(self, recipe: Recipe, source: Source, device: torch.device) -> None:
        """Open what the task needs besides the data; errors that the user can fix are raised here, before anything is decoded."""
        self.recipe, self.source, self.device = recipe, source, device
        self.messages: list[str] = []  # for the user
        self.teacher: nn.Module | None = None  # a frozen network that runs at every step, for the memory and time estimates

    # Before the data is decoded and the model is built

    @classmethod
    def resolve_recipe(cls, recipe: Recipe, explicit: frozenset[str]) -> Recipe:
        """The recipe with the fields that this task completes or checks; those that the user set (`explicit`) stay."""
        return recipe

    @classmethod
    def check_data(cls, recipe: Recipe, splits: Splits) -> None:
        """Raise UserError if the data cannot be used for this task: here, if it has fewer than two images of either split.

        A task with labels also calls `check_usable`: data is opened even if its labels have defects.
        """
        train, validation = len(splits.train), len(splits.validation)
        if min(train, validation) < 2:
            images = f"{pluralize(train, 'image')} for training and {validation:,} for validation"
            raise UserError(f"{splits.train.name} has too few images: {images}; add images until there are at least 2 of each.")

    @classmethod
    def complete_data(cls, recipe: Recipe, splits: Splits) -> None:
        """Set what the sources leave open, such as the classes of their masks; also called when a run is resumed."""

    @classmethod
    def describe(cls, recipe: Recipe) -> list[str]:
        """Messages on what is learned, beyond the recipe's name."""
        return []

    @classmethod
    def dependencies(cls, recipe: Recipe) -> dict[str, str]:
        """By path, a digest of every file besides the data that the results depend on; a resumed run checks them."""
        return {}

    @property
    def class_names(self) -> list[str] | None:
        """One output of the model's classifier each; None for a model without a classifier."""
        return None

    @property
    def relative_cost(self) -> float:
        """Cost of a training image relative to one forward and backward pass at the recipe's image size."""
        return 1.0

    # Training

    def attach(self, model: VisionTransformer) -> None:
        """Build the module around the model that is trained."""
        self.module = self.build_module(model)

    @abstractmethod
    def build_module(self, model: VisionTransformer) -> nn.Module:
        """The trainable module: the model, heads of the task, and the loss. Its submodule `model` is `model`."""

    def initialize(self, model: VisionTransformer, loader: ImageLoader, batch_size: int) -> list[str]:
        """Called once, before the first step of a new training, with the training images; returns messages for the user.

        Not called if the weights are sharded.
        """
        return []

    @abstractmethod
    def prepare_batch(self, batch: Batch, position: Position) -> tuple[Tensor, Targets]:
        """Inputs and targets of one micro-batch, on the device. A pure function of the batch and the position."""

    def run_teacher(self, images: Tensor) -> None:
        """One forward pass of `teacher`, as in a step; only called where there is one."""

    def before_optimizer_step(self, optimizer: Optimizer, position: Position) -> None:
        """After the backward pass: schedules of its own, gradients that are frozen or clipped separately."""

    def after_optimizer_step(self, position: Position, skipped: Tensor) -> None:
        """Update state such as an EMA teacher or a memory; `skipped` [] is 1 on the device where the step was not taken."""

    def state_dict(self) -> dict[str, Tensor]:
        """State besides the module's own, for the checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """The inverse of `state_dict`."""

    # Evaluation

    def evaluated_weights(self, model: VisionTransformer) -> AbstractContextManager[None]:
        """Context in which `model` has the weights to validate and save, such as those of an EMA teacher."""
        return nullcontext()

    @abstractmethod
    def evaluate(self, model: VisionTransformer, loader: ImageLoader, batch_size: int, devices: Devices) -> dict[str, Any]:
        """Metrics over all images of a split, computed by all processes together; `metric.name` is one of them."""

    def is_better(self, values: Mapping[str, Any], best: Mapping[str, Any]) -> bool:
        """Whether `values` of `evaluate` replace those of the best weights; `best` has the highest metric so far."""
        name, sign = self.metric.name, 1 if self.metric.higher_is_better else -1
        return sign * float(values[name]) > sign * float(best[name])

    def diagnose(self, values: Mapping[str, Any], epoch: float) -> str:
        """What these validation metrics after so many epochs show to be wrong, and what to change; "" if nothing.

        Raises UserError to stop the training.
        """
        return ""

    def report(self, model: VisionTransformer, loader: ImageLoader, splits: Splits, batch_size: int) -> dict[str, Any]:
        """Further facts about the best weights on the validation images, for run.json and the report."""
        return {}

    def suggest_next(self, model: VisionTransformer, folder: Path, source: str) -> str:
        """A sentence on what to do with the weights of a finished run in `folder`, trained on `source`; "" if it is obvious."""
        return ""

    def hint_for_nan(self) -> str:
        """What often helps when the loss becomes NaN or Inf."""
        return "A lower optimizer.lr or a longer warmup often helps"
