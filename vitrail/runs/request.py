"""`TrainRequest`, the arguments of a run: resolve its recipe, open its data and pre-trained weights."""

import dataclasses
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from vitrail.aliases import upgrade_key
from vitrail.checkpoints.bundled import describe_bundled
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.image_formats import describe_skipped
from vitrail.data.sampler import EpochSampler
from vitrail.data.source import Source, Splits
from vitrail.errors import UserError
from vitrail.formatting import pluralize
from vitrail.models.config import format_size
from vitrail.models.registry import list_models
from vitrail.models.registry import lookup as find_model
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes import Recipe, lookup
from vitrail.recipes.data_defaults import describe_decoding, fit_to_data, has_colors, median_side
from vitrail.recipes.duration import describe_cooldown
from vitrail.runs.budget import MIN_EPOCHS, choose_image_size, choose_validation_size
from vitrail.runs.initial_model import (
    adds_token,
    is_restructured,
    locate_weights,
    needs_new_classifier,
    open_pretrained,
    with_token,
)
from vitrail.tasks.registry import find_task
from vitrail.training.precision import choose_precision
from vitrail.training.schedules import total_steps
from vitrail.training.trainer import DTYPES, Options

Log = Callable[[str], None]
CPU = torch.device("cpu")
DEFAULT_WEIGHTS = "vitrail_tiny"
DEFAULT_MINUTES = 5.0
FROM_SCRATCH = ("laptop", "small", "finetune")  # the default recipes, where there are no weights to start from
NARROW, NARROW_LAYER_DECAY = 192, 0.9  # width; small networks gain by larger steps of their first blocks
MIN_PHOTO_SIDE = 40  # pixels; smaller images are digits, letters, icons
TRAINED_SIZE = "the size the weights were trained at"  # why an image size is chosen
MAX_FINETUNED = 20_000  # training images; with more, a training from scratch on a GPU gives better results


@dataclass(frozen=True)
class TrainRequest:
    """What the user asked for."""

    source: str = "digits"
    recipe: str | Recipe | None = None  # None: finetune with weights or for photographs, else laptop, small on a GPU
    model: str | None = None  # another model than the recipe's
    changes: dict[str, Any] = field(default_factory=dict)  # recipe keys: {"optimizer.lr": 1e-3}
    out: str | Path | None = None  # the run directory
    options: Options | None = None
    device: str | None = None
    micro_batch_size: int | None = None  # images computed at a time; None: as many as fit
    workers: int | None = None  # processes that decode images
    unreadable: Literal["skip", "fatal"] = "skip"  # what an image that cannot be read is
    explicit: tuple[str, ...] = ()  # keys that the user set and that `recipe` contains already
    minutes: float | None = None  # time budget

    def __post_init__(self) -> None:
        options = self.options
        for minimum, value, message in (
            (1, self.micro_batch_size, "micro_batch_size is the number of images at a time: at least 1."),
            (sys.float_info.min, self.minutes, "minutes is a time budget: greater than 0."),
            (0, self.workers, "workers is the number of processes that decode: 0 or more."),
            (0, options.save_steps if options else None, "save_steps is a number of steps: 0 or more."),
            (0, options.log_steps if options else None, "log_steps is a number of steps: 0 or more."),
            (1, options.keep if options else None, "keep is the number of checkpoints on disk: at least 1."),
            (0, options.save_seconds if options else None, "save_seconds is a time: 0 or more."),
        ):
            if value is not None and (not isinstance(value, int | float) or value < minimum):
                raise UserError(message)
        if self.minutes and "schedule.length" in self.explicit_keys:
            raise UserError("epochs and minutes both set the length of the training: give one of them.")

    @property
    def explicit_keys(self) -> tuple[str, ...]:
        """The recipe keys that the user set; their values are not completed or replaced."""
        return tuple(dict.fromkeys((*self.explicit, *map(upgrade_key, self.changes))))


def resolve_recipe(request: TrainRequest, device_type: str) -> Recipe:
    """The requested recipe with the changes applied; without a name, the default for the device.

    `finetune` starts from the bundled weights where no others are given and the images suit them.
    """
    recipe, changes = request.recipe, request.changes
    if recipe in (None, "finetune"):
        finetunes = any(upgrade_key(key) == "init.weights" and value for key, value in changes.items())
        chosen = request.model is not None or "model" in request.explicit_keys
        if not finetunes and not chosen and suits_bundled_weights(open_splits(request.source).train, device_type):
            finetunes, changes = True, changes | {"init.weights": DEFAULT_WEIGHTS}
        recipe = recipe or ("finetune" if finetunes else "small" if device_type == "cuda" else "laptop")
    resolved = lookup(recipe) if isinstance(recipe, str) else recipe
    resolved = resolved.set(changes | ({"model": request.model} if request.model else {}))
    if resolved.lr == 0:
        raise UserError("optimizer.lr=0 never changes a weight: give a learning rate above 0.")
    if resolved.data.map:  # a run can be resumed from another directory
        path = os.path.abspath(os.path.expanduser(resolved.data.map))
        resolved = dataclasses.replace(resolved, data=dataclasses.replace(resolved.data, map=path))
    weights = locate_weights(os.path.expanduser(resolved.init.weights))
    resolved = dataclasses.replace(resolved, init=dataclasses.replace(resolved.init, weights=weights))
    if resolved.init.scope != "full" and not weights:
        raise UserError(
            f"init.scope={resolved.init.scope} would leave most of the network at its random initialization: give --from WEIGHTS."
        )
    resolved = find_task(resolved.task).resolve_recipe(resolved, frozenset(request.explicit_keys))
    if resolved.init.pretrained_recipe and not weights:
        raise UserError(
            f"{resolved.name} starts from pre-trained weights, such as those of {resolved.init.pretrained_recipe}: "
            "give --from WEIGHTS."
        )
    return resolved


def suits_bundled_weights(train: Source, device_type: str) -> bool:
    """Whether a training without further options starts from the bundled weights: photographs, and not very many on a GPU."""
    if device_type == "cuda" and len(train) > MAX_FINETUNED:
        return False
    return median_side(train) >= MIN_PHOTO_SIDE and has_colors(train)


def describe_scratch(train: Source, device_type: str, chosen: bool) -> list[str]:
    """Messages about a training from scratch, which the user has chosen or which is the default for these images."""
    if suits_bundled_weights(train, device_type):
        photographs = f"for these, --from {DEFAULT_WEIGHTS} is better"
        return [f"training from scratch is for images unlike photographs, or very many of them; {photographs}"]
    if chosen or median_side(train) < MIN_PHOTO_SIDE:
        return []
    reason = f"more than {MAX_FINETUNED:,}" if has_colors(train) else "gray"
    weights = f"--from {DEFAULT_WEIGHTS} starts from weights of color photographs, which may be better"
    return [f"training from scratch, since the images are {reason}: {weights}"]


def time_budget(request: TrainRequest, recipe: Recipe, device: torch.device) -> float | None:
    """Minutes that the training may take: as requested; without a recipe and a length, a few minutes on a CPU."""
    if request.minutes or request.recipe is not None or "schedule.length" in request.explicit_keys:
        return request.minutes
    return DEFAULT_MINUTES if recipe.init.weights and device.type == "cpu" else None


@dataclass(frozen=True)
class OpenedData:
    splits: Splits
    recipe: Recipe  # fitted to the data
    pretrained: VisionTransformer | None
    messages: list[str]


def split_arguments(recipe: Recipe) -> dict[str, Any]:
    """The arguments of `open_splits` that a recipe sets."""
    data = recipe.data
    return {"validation_fraction": data.validation_fraction, "fold": recipe.fold, "label": data.label, "label_map": data.map}


def open_data(request: TrainRequest, recipe: Recipe, device: torch.device = CPU) -> OpenedData:
    """Open the data and the pre-trained weights, check them, and fit the recipe to them and to the time on the device."""
    task = find_task(recipe.task)
    splits = open_splits(request.source, **split_arguments(recipe))
    if recipe.data.map and not recipe.data.label:  # recorded: the level that is trained on
        recipe = recipe.set({"data.label": splits.train.label_name})
    task.complete_data(recipe, splits)
    task.check_data(recipe, splits)
    if recipe.data.class_balanced and splits.train.label is None:
        raise UserError(f"{splits.train.name} has no labels, which data.class_balanced needs: set it to false.")
    for part in (splits.train, splits.validation):
        median_side(part)  # raises if no image can be read
    pretrained = open_pretrained(recipe, request.model) if recipe.init.weights else None
    if pretrained and not pretrained.architecture.convnet:  # weights that predict at a larger size than they were trained at
        pretrained.preprocessing = pretrained.preprocessing._replace(image_size=pretrained.architecture.image_size)
    if pretrained and request.model is not None:
        recipe = with_token(recipe, pretrained, find_model(request.model)[1])
    if pretrained and pretrained.name in list_models():
        recipe = dataclasses.replace(recipe, model=pretrained.name)
    reason = TRAINED_SIZE
    if pretrained and recipe.augmentation.image_size == (0, 0) and (minutes := time_budget(request, recipe, device)):
        recipe, reason = choose_sizes(request, recipe, pretrained, splits.train, device, minutes)
    recipe, messages = fit_to_data(recipe, splits.train, pretrained.preprocessing if pretrained else None, reason)
    if not task.reads_masks and not task.reads_objects:  # they belong to images at full size
        messages += describe_decoding(recipe, splits.train)
    if recipe.validation_size != recipe.augmentation.image_size:
        larger = format_size(recipe.validation_size)
        messages.append(f"validation and predictions at {larger} pixels: random crops show objects larger than whole images do")
    if is_default_finetuning(request, recipe, "optimizer.layer_decay") and pretrained and pretrained.architecture.width <= NARROW:
        recipe = recipe.set({"optimizer.layer_decay": NARROW_LAYER_DECAY})
        messages.append(f"optimizer.layer_decay set to {NARROW_LAYER_DECAY}: the network has at most {NARROW} channels")
    if recipe.name in FROM_SCRATCH and pretrained is None:
        messages += describe_scratch(splits.train, device.type, chosen=request.recipe is not None or request.model is not None)
    sampler = make_sampler(recipe, splits.train)
    if total_steps(recipe.schedule, sampler.steps) < 1:
        raise UserError(
            f"schedule.length={recipe.schedule.length!r} is less than one step, of which an epoch has {sampler.steps:,}: "
            "give more."
        )
    messages = [*describe_data(splits), *messages, *task.describe(recipe)]
    if recipe.data.repeats > 1 or recipe.data.round_to > 1:
        epoch = sampler.epoch_size()
        images = pluralize(epoch.distinct, "image")
        messages.append(f"an epoch is {pluralize(epoch.steps, 'step')}, {epoch.samples:,} samples of {images}")
    messages += describe_cooldown(recipe.schedule)
    return OpenedData(splits, recipe, pretrained, messages)


def is_default_finetuning(request: TrainRequest, recipe: Recipe, key: str) -> bool:
    """Whether `key` may be set from the data and the weights: the recipe is `finetune` and the user has not set it."""
    return recipe.name == "finetune" and key not in request.explicit_keys


def choose_sizes(
    request: TrainRequest, recipe: Recipe, pretrained: VisionTransformer, train: Source, device: torch.device, minutes: float
) -> tuple[Recipe, str]:
    """Set the image sizes of training (in `pretrained`) and prediction that fit into the time; the recipe and the reason."""
    dtype = DTYPES.get(choose_precision(recipe, device, request.explicit_keys)[0].precision)
    size = choose_image_size(pretrained, train, device, minutes, dtype)
    reason = TRAINED_SIZE
    if size != pretrained.preprocessing.image_size:
        pretrained.preprocessing = pretrained.preprocessing._replace(image_size=size)
        reason = f"the largest size at which about {MIN_EPOCHS} epochs fit into {minutes:g} minutes of an idle machine"
    if is_default_finetuning(request, recipe, "validation.image_size"):
        recipe = recipe.set({"validation.image_size": list(choose_validation_size(pretrained, size))})
    return recipe, reason


def describe_data(splits: Splits) -> list[str]:
    """The number of images, the kind of labels, the first defect and the skipped files."""
    train = splits.train
    unlabeled = ", masks" if train.has_masks else ", boxes" if train.object_classes else ", no labels"
    classes = f", {len(train.classes)} classes" if train.label is not None else unlabeled
    skipped = describe_skipped(dict.fromkeys(path for part in splits[:2] for path in part.skipped))
    counts = f"{len(train):,} training and {len(splits.validation):,} validation images"
    return [f"{train.name}: {counts}{classes}", *train.defects[:1], *([skipped] if skipped else [])]


def describe_pretrained(pretrained: VisionTransformer, recipe: Recipe, class_names: list[str] | None) -> list[str]:
    head = "with a new" if needs_new_classifier(pretrained, recipe, class_names) else "with its own"
    head = "without a" if class_names is None else head
    image_size = format_size(pretrained.architecture.image_size)
    name = pretrained.name or "a model"
    messages = [f"starting from {recipe.init.weights}: {name} at {image_size} pixels, {head} classifier"]
    if is_restructured(pretrained, recipe):
        messages.append("pooling, final norm and position tables are those of the recipe: blocks and stem are loaded")
    if adds_token(pretrained, recipe):
        frozen = "" if recipe.init.scope == "full" else f"; init.scope={recipe.init.scope} does not train the token"
        messages.append(
            "these weights have no distillation token: the token, its position and its classifier are newly initialized, "
            f"everything else is loaded{frozen}"
        )
    notice = describe_bundled(recipe.init.weights)
    return messages if notice is None else [*messages, notice]


def make_sampler(recipe: Recipe, source: Source) -> EpochSampler:
    return EpochSampler(len(source), recipe.batch_size, repeats=recipe.data.repeats, round_to=recipe.data.round_to)
