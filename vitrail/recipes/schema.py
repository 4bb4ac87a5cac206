"""The recipe: one training as a tree of plain values, written to the run directory and the artifact, changed by dotted key."""

import dataclasses
import difflib
import json
import re
import sys
import typing
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml

from vitrail.aliases import USUAL, upgrade_changes, upgrade_recipe
from vitrail.data.transforms.config import Augmentation
from vitrail.errors import UserError
from vitrail.recipes.limits import check_limits

DURATION = re.compile(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*(epochs?|steps?|%)\s*")
DURATIONS = ("schedule.length", "schedule.warmup", "schedule.cooldown", "schedule.step_size", "validation.every")
MAX_DURATION = 1e9
DURATION_FORMAT = "write '300 epochs', '20000 steps' or '5%'"
SCOPES = ("full", "attention", "ffn", "head", "norm", "last_norm")
Group = TypeVar("Group")  # a dataclass of settings
MAX_DEPTH = 16  # of lists and mappings in the values of open groups
OPEN_GROUPS = ("architecture", "task_options")  # their keys are defined by the model and by the task


@dataclass(frozen=True)
class About:
    """Source and expected result of a recipe."""

    paper: str = ""
    row: str = ""  # table and row, or the command of the released code
    expected: str = ""  # the published (or measured) result
    hardware: str = ""
    lr_grid: tuple[float, ...] = ()  # learning rates among which the paper chose
    validation_fraction: float = 0.0  # fraction of the training images on which it chose: data.validation_fraction of a sweep


@dataclass(frozen=True)
class DataConfig:
    """Sampling and decoding of the images."""

    repeats: int = 1  # augmented copies of an image in a row (repeated augmentation)
    round_to: int = 1  # an epoch's number of samples is rounded down to a multiple of this
    class_balanced: bool = False  # classes take turns
    validation_fraction: float = 0.0  # fraction of each training class to validate on instead of the validation split; 0: none
    folds: int = 0  # validate on one of so many equal parts of every training class: number seed modulo folds; 0: no folds
    label: str = ""  # the column of labels; "": the main one, "none": one class for all images
    map: str = ""  # a CSV or JSON file with a coarser class for every class, whose columns are further labels
    decode_scale: float = 0.0  # JPEGs are decoded at reduced size, at least this multiple of the input size; 0: full size


@dataclass(frozen=True)
class MixingConfig:
    """Parameters of the Beta distributions of Mixup and CutMix, 0 for none; with both on, `switch_prob` is CutMix's."""

    mixup: float = 0.0
    cutmix: float = 0.0
    switch_prob: float = 0.5
    erase_after: bool = False  # random erasing after the mixing instead of before it


@dataclass(frozen=True)
class LossConfig:
    """The classification loss."""

    kind: Literal["cross_entropy", "binary"] = "cross_entropy"
    label_smoothing: float = 0.0
    smoothing_over: Literal["all", "others"] = "all"  # classes that share the smoothing: all, or all but the label
    binary_targets: Literal["present", "soft"] = "present"  # mixed targets above zero become one, or keep their value
    binary_sum: bool = False  # sum over classes instead of the mean


@dataclass(frozen=True)
class DistillationConfig:
    """Distillation from a teacher; kind "none": no teacher.

    The loss on the labels has the weight 1 - `weight`. With a distillation token, its head is trained on the teacher's
    predictions and the class head on the labels. Without a teacher the released code trains the class head alone.
    """

    kind: Literal["none", "soft", "hard"] = "none"  # the teacher's probabilities, or its top-1 class
    teacher: str = ""  # a network, evaluated on every augmented image, or a label store of its predictions
    weight: float = 0.5
    temperature: float = 1.0  # of soft probabilities
    label_smoothing: float = 0.0  # of the top-1 class
    per_class: bool = False  # the released code's soft loss: also divided by the number of classes
    teacher_size: Literal["auto", "student"] = "auto"  # of the images for a network: its own if the student's does not suit it
    without_teacher: Literal["class", "both"] = "class"  # heads trained on the labels where no teacher trains the second

    @property
    def trains_second_head(self) -> bool:
        """Whether the head of a distillation token is trained."""
        return self.kind != "none" or self.without_teacher == "both"


@dataclass(frozen=True)
class TokenLabelConfig:
    """Labels from a teacher's map of the image: of its patches (token labeling), of the visible crop (re-labeling)."""

    store: str = ""  # the label store with the maps
    weight: float = 0.0  # of the patches' loss relative to the image's; 0: patches have no labels
    target: Literal["labels", "relabel", "blend"] = "labels"  # the image's target: its label, the mean of the map, or both
    outside: Literal["spread", "zero"] = "spread"  # classes missing in a cell share the rest, or get a logit of 0
    mixtoken: float = 0.0  # MixToken: parameter of the Beta distribution of the box; 0: none
    mixtoken_on: Literal["predictions", "labels"] = "predictions"  # what is mixed so that predictions and labels agree
    box_order: Literal["yx", "xy"] = "yx"  # xy: the released code, which reads the crop's rows as columns of the map


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its regularization."""

    kind: Literal["adamw", "adam", "sgd", "lamb", "adagrad"] = "adamw"
    lr: float = 1e-3
    lr_batch_size: int = 0  # the batch size that lr is given for; lr is scaled linearly to the actual one; 0: not scaled
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 0.05
    weight_decay_coupled: bool = False  # added to the gradient (L2) instead of subtracted from the weights
    weight_decay_on: Literal["matrices", "tensors", "kernels", "all"] = "matrices"
    clip_grad_norm: float = 0.0  # maximum global gradient norm; 0: none
    trust_ratio_on: Literal["decayed", "all"] = "decayed"  # parameters that LAMB scales by the norm of the weights
    max_trust_ratio: float = 0.0  # 0: none
    layer_decay: float = 1.0  # factor of the learning rate from one block to the block before it


@dataclass(frozen=True)
class ScheduleConfig:
    """Length of the training and the learning rate schedule. Durations are "300 epochs", "20000 steps" or "5%" of the length."""

    length: str = "300 epochs"
    warmup: str = "5 epochs"
    warmup_lr: float = 1e-6
    kind: Literal["cosine", "linear", "constant", "step"] = "cosine"
    min_lr: float = 0.0
    warmup_prefix: bool = True  # the schedule starts after the warmup; False: at step 0, with the warmup on top
    by_epoch: bool = False  # constant within an epoch
    lag_epochs: int = 0  # epochs by which the learning rate is late
    cooldown: str = "0 epochs"  # added after the length, at min_lr
    step_size: str = "30 epochs"
    milestones: tuple[float, ...] = ()  # of "step": shares of the length after which lr decays, instead of every step_size
    gamma: float = 0.1


@dataclass(frozen=True)
class EmaConfig:
    """Exponential moving average of the weights; decay 0: none."""

    decay: float = 0.0
    evaluate: bool = False  # validate, select and save the EMA instead of the trained weights
    warmup: bool = False  # decay after n steps is at most (1 + n) / (10 + n), which discounts the initial weights early


@dataclass(frozen=True)
class ValidationConfig:
    """Preprocessing and frequency of the validation."""

    every: str = "1 epochs"
    at_start: bool = False  # also before the first step
    patience: int = 0  # end the training after so many validations without better weights; 0: never
    # For the best weights. "loss" varies less by chance; "latest": the latest within one standard error of the highest accuracy
    select_by: Literal["metric", "loss", "latest"] = "metric"
    image_size: tuple[int, int] = (0, 0)  # also of predictions with the weights; (0, 0): that of the training
    crop_ratio: float = 0.875
    interpolation: str = "bicubic"
    resize: Literal["shorter", "square"] = "shorter"


@dataclass(frozen=True)
class InitConfig:
    """Initial weights."""

    weights: str = ""  # a checkpoint of any supported format; "": random initialization
    mode: Literal["train", "eval"] = "train"  # eval: no dropout or stochastic depth while fine-tuning
    zero_head: bool = False  # a new classifier is initialized to zero
    probe_head: bool = False  # a classifier of zeros is fitted to features of the frozen weights before the first step
    head_bias: float = 0.0  # initial bias of a new classifier; -10 for sigmoids over thousands of classes
    scope: str = "full"  # what is trained: full, attention, ffn, head, norm, last_norm or last:n, each with the classifier
    pretrained_recipe: str = ""  # the recipe that produces such weights; if set, `weights` is required


@dataclass(frozen=True)
class Recipe:
    """A complete training: every value that affects the result, none that affects only the speed."""

    name: str = "custom"
    task: str = "classification"
    task_options: dict[str, Any] = field(default_factory=dict)  # settings of the task, validated by the task
    model: str = "deit_small_patch16"
    architecture: dict[str, Any] = field(default_factory=dict)  # fields of the model's Architecture that differ
    batch_size: int = 1024  # over all devices and accumulation steps
    group_size: int = 0  # images that mixing, BatchNorm and skipping drop-path treat together: a GPU's share; 0: the batch
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    seed: int = 0
    init: InitConfig = InitConfig()
    data: DataConfig = DataConfig()
    augmentation: Augmentation = field(default_factory=Augmentation)  # image_size (0, 0): chosen from the images
    mixing: MixingConfig = MixingConfig()
    loss: LossConfig = LossConfig()
    distillation: DistillationConfig = DistillationConfig()
    token_labels: TokenLabelConfig = TokenLabelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    ema: EmaConfig = EmaConfig()
    validation: ValidationConfig = ValidationConfig()
    about: About = About()

    def __post_init__(self) -> None:
        if self.architecture:
            from vitrail.models.config import check_fields  # imports torch

            check_fields(self.architecture)
        schedule = self.schedule
        for duration in (schedule.length, schedule.warmup, schedule.cooldown, schedule.step_size, self.validation.every):
            parse_duration(duration)
        if parse_duration(schedule.length)[1] == "%":
            raise UserError("schedule.length cannot be a percentage: give it in epochs or steps.")
        parse_scope(self.init.scope)
        height, width = self.augmentation.image_size
        if self.token_labels.box_order == "xy" and not (self.augmentation.crop_last and height == width):
            raise UserError(
                "token_labels.box_order=xy is the released code's, which crops last and to squares: set it to yx, or set "
                "augmentation.crop_last=true and a square augmentation.image_size."
            )
        check_limits(self.leaves())
        if self.data.folds == 1:
            raise UserError("data.folds=1 would leave no images to train on: give 2 or more, or 0 for no folds.")
        if self.loss.kind == "binary" and self.loss.binary_targets == "present" and self.loss.label_smoothing > 0:
            raise UserError(
                "loss.binary_targets=present sets every class above zero to one, so label smoothing has no meaning: "
                "set loss.label_smoothing=0."
            )

    @property
    def lr(self) -> float:
        """The learning rate at this recipe's batch size."""
        return self.optimizer.lr * (self.batch_size / self.optimizer.lr_batch_size if self.optimizer.lr_batch_size else 1)

    @property
    def fold(self) -> tuple[int, int] | None:
        """The part of the training images to validate on and the number of parts; None without folds."""
        return (self.seed % self.data.folds, self.data.folds) if self.data.folds else None

    @property
    def min_decode_side(self) -> int | None:
        """The shorter side that JPEG files keep when they are decoded at reduced size; None: full size."""
        return round(max(*self.augmentation.image_size, *self.validation.image_size) * self.data.decode_scale) or None

    @property
    def validation_size(self) -> tuple[int, int]:
        """The image size of validations and of predictions with the weights."""
        return self.validation.image_size if any(self.validation.image_size) else self.augmentation.image_size

    @property
    def mixes_images(self) -> bool:
        return max(self.mixing.mixup, self.mixing.cutmix, self.token_labels.mixtoken) > 0

    @property
    def images_per_group(self) -> int:
        """The group size for this batch size: its largest divisor from 2 to `group_size`, or the batch size."""
        sizes = range(min(self.group_size, self.batch_size), 1, -1)
        return next((size for size in sizes if self.batch_size % size == 0), self.batch_size)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_yaml(self) -> str:
        plain = json.loads(json.dumps(self.to_dict()))  # tuples as lists
        text: str = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
        return text

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Recipe":
        """The inverse of `to_dict`, also of one saved as JSON or under old names; unknown keys are errors."""
        return build_group(cls, upgrade_recipe(values) if isinstance(values, dict) else values, "")

    def set(self, changes: dict[str, Any]) -> "Recipe":
        """A copy with values changed by dotted key: {"optimizer.lr": 1e-3, "architecture.drop_path": 0.1}.

        Strings are parsed. Old keys and the names of other libraries (`lr`, `epochs`) are accepted, see `vitrail.aliases`.
        """
        tree = self.to_dict()
        for typed in changes:
            ((key, value),) = upgrade_changes({typed: changes[typed]}).items()
            *path, leaf = key.split(".")
            node = tree
            for part in path:
                node = node.get(part)  # type: ignore[assignment]
                if not isinstance(node, dict):
                    raise unknown_key(typed, self)
            if isinstance(node.get(leaf), dict) and path[:1] != ["task_options"]:
                raise UserError(f"{key} is a group of settings: set one of them, such as {key}.{example(key, self)}.")
            if leaf not in node and (not path or path[0] not in OPEN_GROUPS):
                raise unknown_key(typed, self)
            parsed = parse_value(value)
            is_text = isinstance(node.get(leaf), str) and isinstance(value, str)
            node[leaf] = value if is_text and not isinstance(parsed, str) else parsed  # YAML reads "last:" as a mapping
        return Recipe.from_dict(tree)

    def leaves(self) -> dict[str, Any]:
        """Every value by its dotted key."""
        return dict(flatten(self.to_dict()))


def flatten(tree: dict[str, Any], prefix: str = "") -> typing.Iterator[tuple[str, Any]]:
    """Every value of nested dictionaries by its dotted key."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def parse_value(value: Any) -> Any:
    """A command line string as a plain value; 1e-3 is a number, 192x256 a size."""
    if not isinstance(value, str):
        return value
    if re.fullmatch(r"[-+]?\d+(\.\d*)?e[-+]?\d+", value):
        return float(value)
    size = re.fullmatch(r"(\d{1,9})x(\d{1,9})", value)
    if size:
        return [int(size[1]), int(size[2])]
    try:
        return load_yaml(value) if value else ""
    except yaml.YAMLError:
        return value


MAX_TEXT = 10_000  # characters of a value


class PlainLoader(yaml.SafeLoader):  # type: ignore[misc]
    """A safe loader without tags and aliases, with which a short text could be a recursive or exponentially large value."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) or len(getattr(event, "value", "")) > MAX_TEXT:
            message = f"aliases, tags and values of more than {MAX_TEXT:,} characters are not supported"
            raise yaml.composer.ComposerError(None, None, message, event.start_mark)
        return super().compose_node(parent, index)


def load_yaml(text: str) -> Any:
    """The value of a YAML text; YAMLError if there is none."""
    try:
        return yaml.load(text, PlainLoader)
    except (ValueError, RecursionError, OverflowError) as error:  # dates that do not exist, numbers of thousands of digits
        raise yaml.YAMLError("it is nested too deeply" if isinstance(error, RecursionError) else str(error)) from None


def check_plain(value: Any, location: str, depth: int = 0) -> None:
    """Raise UserError unless a value of an open group can be written as JSON and YAML."""
    if depth > MAX_DEPTH:
        raise UserError(f"{location} is nested more than {MAX_DEPTH} levels deep.")
    if isinstance(value, dict):
        for key, part in value.items():
            if not isinstance(key, str):
                raise UserError(f"{location} has the key {key!r}, which is not text.")
            check_plain(part, f"{location}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for part in value:
            check_plain(part, location, depth + 1)
    elif not isinstance(value, str | int | float | None):
        raise UserError(f"{location}={value!r} should be text, a number, true or false.")


def parse_duration(text: str) -> tuple[float, str]:
    """ "5 epochs" to (5.0, "epoch"); the other units are "step" and "%"."""
    match = DURATION.fullmatch(str(text))
    if not match:
        raise UserError(f"{text!r} is not a duration: {DURATION_FORMAT}.")
    if float(match[1]) > MAX_DURATION:
        raise UserError(f"{text!r} is too long for a training: give at most {MAX_DURATION:g} epochs or steps.")
    return float(match[1]), match[2].rstrip("s")


def parse_scope(text: str) -> tuple[str, int]:
    """ "attention" to ("attention", 0), "last:3" to ("last", 3)."""
    kind, _, count = text.partition(":")
    if kind == "last" and count.isascii() and count.isdigit() and len(count) < 10:
        return kind, int(count)
    if text not in SCOPES:
        raise UserError(f"init.scope={text!r} is not known; choose from {', '.join(SCOPES)} or last:n.")
    return text, 0


def example(group: str, recipe: Recipe) -> str:
    """A key of a group of settings."""
    inside = (name.removeprefix(f"{group}.") for name in recipe.leaves() if name.startswith(f"{group}."))
    return next(inside, "drop_path" if group == "architecture" else "NAME")  # open groups may be empty


def unknown_key(key: str, recipe: Recipe) -> UserError:
    leaves = recipe.leaves()
    same_leaf = [name for name in leaves if name.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    near = difflib.get_close_matches(key, [*leaves, *USUAL], n=3, cutoff=0.3)
    hint = ", ".join(dict.fromkeys(same_leaf + [USUAL.get(name, name) for name in near]))
    return UserError(f"A recipe has no {key!r}" + (f"; the nearest are {hint}" if hint else "") + ".")


def build_group(kind: type[Group], values: Any, location: str) -> Group:
    """A dataclass of settings from plain values; unknown keys and values of other types raise UserError."""
    if not isinstance(values, dict):
        raise UserError(f"{location or 'The recipe'} is a group of settings, not {values!r}.")
    hints = get_type_hints(kind)
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{location}.{name}" if location else name
        if name not in hints:
            near = difflib.get_close_matches(str(name), hints, n=3, cutoff=0.3)
            raise UserError(f"A recipe has no {path!r}" + (f"; the nearest are {', '.join(near)}" if near else "") + ".")
        arguments[name] = _convert(hints[name], value, path)
    return kind(**arguments)


KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


def _convert(hint: Any, value: Any, location: str) -> Any:
    """A plain value converted to the declared type of its field."""
    if dataclasses.is_dataclass(hint):
        return build_group(typing.cast(type, hint), value, location)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        if value not in arguments:
            raise UserError(f"{location}={value!r} is not known; choose from {', '.join(map(str, arguments))}.")
        return value
    if origin is tuple:
        count = len(arguments)
        if arguments[-1] is Ellipsis:
            if isinstance(value, list | tuple):
                return tuple(_convert(arguments[0], part, location) for part in value)
            raise UserError(f"{location}={value!r} should be a list of numbers, such as [1, 2].")
        value = [value] * count if isinstance(value, int | float) and not isinstance(value, bool) else value
        if isinstance(value, list | tuple) and len(value) == count:
            return tuple(_convert(part, each, location) for part, each in zip(arguments, value, strict=True))
        raise UserError(f"{location}={value!r} should be {count} numbers, such as [{', '.join(['1'] * count)}].")
    if origin is dict:
        if not isinstance(value, dict):
            raise UserError(f"{location} is a group of settings, not {value!r}.")
        check_plain(value, location)
        return value
    if hint is float:
        value = parse_value(value)  # YAML reads 1e-3 as text
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not abs(value) <= sys.float_info.max:  # also of integers, which math.isfinite would convert
            raise UserError(f"{location}={value!r} is not a finite number.")
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        kind = f"a duration: {DURATION_FORMAT}" if location in DURATIONS else KINDS[hint]
        raise UserError(f"{location}={value!r} should be {kind}.")
    return value
