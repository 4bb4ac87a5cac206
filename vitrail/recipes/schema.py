"""What a training is, as a tree of plain values: written into the run folder and the artifact, read back, changed by leaf."""

import dataclasses
import difflib
import math
import re
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from vitrail.aliases import IN_EPOCHS, upgrade_key, upgrade_recipe
from vitrail.data.transforms.pipeline import Augmentation
from vitrail.errors import UserError
from vitrail.models.config import check_fields
from vitrail.recipes.limits import check_limits

SPAN = re.compile(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*(epochs?|steps?|%)\s*")
SPANS = ("schedule.length", "schedule.warmup", "schedule.cooldown", "schedule.step_size", "validation.every")
SCOPES = ("full", "attention", "ffn", "head", "norm")


@dataclass(frozen=True)
class About:
    """Where a recipe comes from and what to expect of it."""

    paper: str = ""
    row: str = ""  # the table and row, or the command of the released code
    expected: str = ""  # the published (or measured) result
    hardware: str = ""
    lr_grid: tuple[float, ...] = ()  # the rates among which the paper chose
    validation_fraction: float = (
        0.0  # the share of the training images by which it chose: data.validation_fraction of such a sweep
    )


@dataclass(frozen=True)
class DataConfig:
    """The order of the images."""

    repeats: int = 1  # augmented copies of an image in a row (repeated augmentation)
    round_to: int = 1  # an epoch's samples are cut to a multiple of this
    class_balanced: bool = False  # classes take turns
    validation_fraction: float = (
        0.0  # share of every training class to validate on, instead of the data's own validation images; 0: none
    )
    decode_scale: float = 1.5  # images are decoded to at least this many times the network's size; 0: in full


@dataclass(frozen=True)
class MixingConfig:
    """Mixup and CutMix: the parameters of their Beta distributions, 0 for none; with both on, CutMix has probability `switch`."""

    mixup: float = 0.0
    cutmix: float = 0.0
    switch_prob: float = 0.5


@dataclass(frozen=True)
class LossConfig:
    """What is minimized."""

    kind: Literal["cross_entropy", "binary"] = "cross_entropy"
    label_smoothing: float = 0.0
    smoothing_over: Literal["all", "others"] = "all"  # who shares the smoothing: all classes, or all but the true one
    binary_targets: Literal["present", "soft"] = "present"  # mixed targets above zero count as one, or stay what they are
    binary_sum: bool = False  # sum over classes instead of the mean


@dataclass(frozen=True)
class DistillationConfig:
    """What a teacher says about an image, as a second thing to learn; kind "none": no teacher.

    The labels weigh 1 - `weight`. With a distillation token its head learns from the teacher and the other from the labels.
    """

    kind: Literal["none", "soft", "hard"] = "none"  # its probabilities, or its first choice
    teacher: str = ""  # a network of any known kind, asked about every augmented image, or a store of what one has said
    weight: float = 0.5
    temperature: float = 1.0  # of soft probabilities
    label_smoothing: float = 0.0  # of the first choice
    per_class: bool = False  # the released code's soft loss: divided by the number of classes, too


@dataclass(frozen=True)
class TokenLabelConfig:
    """Labels from a teacher's map of the image: of its patches (token labelling), of what is seen of it (re-labelling)."""

    store: str = ""  # the store with the maps
    weight: float = 0.0  # of the patches' loss, that of the image having 1; 0: patches have no labels
    target: Literal["labels", "relabel", "blend"] = "labels"  # the image's own label: the data's, the mean of the map, or both
    outside: Literal["spread", "zero"] = "spread"  # classes that a cell does not keep: equal parts of the rest, or a logit of 0
    mixtoken: float = 0.0  # MixToken: the parameter of the Beta distribution that the box is drawn from; 0: none
    mixtoken_on: Literal["predictions", "labels"] = (
        "predictions"  # what is mixed to agree: answers are put back, or labels follow
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """How gradients become steps."""

    kind: Literal["adamw", "adam", "sgd", "lamb", "adagrad"] = "adamw"
    lr: float = 1e-3
    lr_batch_size: int = 0  # the rate is meant for this batch and scaled linearly to the real one; 0: absolute
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 0.05
    weight_decay_coupled: bool = False  # added to the gradient (L2) instead of taken off the weights
    weight_decay_on: Literal["matrices", "kernels", "all"] = "matrices"
    clip_grad_norm: float = 0.0  # largest global gradient norm; 0: none
    trust_ratio_on: Literal["decayed", "all"] = "decayed"  # where LAMB scales by the norm of the weights
    max_trust_ratio: float = 0.0  # largest ratio; 0: none
    layer_decay: float = 1.0  # the rate's factor from one block to the one before it


@dataclass(frozen=True)
class ScheduleConfig:
    """How long, and the learning rate on the way. Spans are "300 epochs", "20000 steps" or "5%" of the length."""

    length: str = "300 epochs"
    warmup: str = "5 epochs"
    warmup_lr: float = 1e-6
    kind: Literal["cosine", "linear", "constant", "step"] = "cosine"
    min_lr: float = 0.0
    warmup_prefix: bool = True  # the curve starts at the end of the warm-up; False: at step 0, under the warm-up
    by_epoch: bool = False  # constant inside an epoch
    lag_epochs: int = 0  # epochs by which the rate runs late
    cooldown: str = "0 epochs"  # added after the length, at the floor
    step_size: str = "30 epochs"
    gamma: float = 0.1


@dataclass(frozen=True)
class EmaConfig:
    """A running mean of the weights; decay 0: none."""

    decay: float = 0.0
    evaluate: bool = False  # measured, chosen and shipped instead of the plain weights
    warmup: bool = False  # decay after n steps at most (1 + n) / (10 + n): the weights of the start are soon forgotten


@dataclass(frozen=True)
class ValidationConfig:
    """The validation view, and how often."""

    every: str = "1 epochs"
    crop_ratio: float = 0.875
    interpolation: str = "bicubic"
    resize: Literal["shorter", "square"] = "shorter"


@dataclass(frozen=True)
class InitConfig:
    """Where the weights come from."""

    weights: str = ""  # a checkpoint of any known kind; "": fresh
    mode: Literal["train", "eval"] = "train"  # eval: nothing is dropped while fine-tuning
    zero_head: bool = False  # a new classifier starts at zero
    head_bias: float = 0.0  # where the bias of a new classifier starts; -10 for sigmoids over thousands of classes
    scope: str = "full"  # what is trained: full, attention, ffn, head, norm or last:n, each with the classifier
    pretrained_recipe: str = ""  # the recipe that such weights come from: with one, `weights` must be given


@dataclass(frozen=True)
class Recipe:
    """A complete training: everything that changes a number, nothing that only changes the speed."""

    name: str = "custom"
    model: str = "deit_small_patch16"
    architecture: dict[str, Any] = field(default_factory=dict)  # fields of the model's Architecture that differ
    batch_size: int = 1024  # of all devices and accumulation steps together
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    seed: int = 0
    init: InitConfig = InitConfig()
    data: DataConfig = DataConfig()
    augmentation: Augmentation = field(default_factory=Augmentation)  # size (0, 0): chosen by the images
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
        check_fields(self.architecture)
        for owner, name in ((self.schedule, "length"), (self.schedule, "warmup"), (self.schedule, "cooldown")):
            parse_span(getattr(owner, name))
        parse_scope(self.init.scope)
        parse_span(self.schedule.step_size)
        parse_span(self.validation.every)
        if parse_span(self.schedule.length)[1] == "%":
            raise UserError("schedule.length is a share of itself: give it in epochs or steps.")
        check_limits(self.leaves())
        if self.loss.kind == "binary" and self.loss.binary_targets == "present" and self.loss.label_smoothing > 0:
            raise UserError(
                "Binary targets count every class above zero as present, so they cannot be smoothed: set loss.label_smoothing=0."
            )

    @property
    def lr(self) -> float:
        """The learning rate at this recipe's batch."""
        return self.optimizer.lr * (self.batch_size / self.optimizer.lr_batch_size if self.optimizer.lr_batch_size else 1)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Recipe":
        """The inverse of `to_dict`, also after a trip through JSON; unknown keys are errors."""
        return _build(cls, upgrade_recipe(values) if isinstance(values, dict) else values, "")

    def set(self, changes: dict[str, Any]) -> "Recipe":
        """A copy with leaves changed: {"optimizer.lr": 1e-3, "architecture.drop_path": 0.1}; text is parsed."""
        tree = self.to_dict()
        for typed, value in changes.items():
            key = upgrade_key(typed)
            if typed in IN_EPOCHS and re.fullmatch(r"\d+(\.\d+)?", str(value)):
                value = f"{value} epochs"
            *path, leaf = key.split(".")
            node = tree
            for part in path:
                node = node.get(part)  # type: ignore[assignment]
                if not isinstance(node, dict):
                    raise unknown_key(key, self)
            if isinstance(node.get(leaf), dict):
                raise UserError(f"{key} is a group of settings: set one of them, such as {key}.{example(key, self)}.")
            if leaf not in node and path != ["architecture"]:
                raise unknown_key(key, self)
            parsed = parse_value(value)
            is_text = isinstance(node.get(leaf), str) and isinstance(value, str)
            node[leaf] = value if is_text and not isinstance(parsed, str) else parsed  # "last:" is text, though YAML sees more
        return Recipe.from_dict(tree)

    def leaves(self) -> dict[str, Any]:
        """Every leaf by its dotted name."""
        return dict(_leaves(self.to_dict(), ""))


def _leaves(tree: dict[str, Any], prefix: str) -> typing.Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def parse_value(value: Any) -> Any:
    """Text as typed on the command line to a plain value; 1e-3 is a number, 192x256 a size."""
    if not isinstance(value, str):
        return value
    if re.fullmatch(r"[-+]?\d+(\.\d*)?e[-+]?\d+", value):
        return float(value)
    size = re.fullmatch(r"(\d+)x(\d+)", value)
    if size:
        return [int(size[1]), int(size[2])]
    try:
        return yaml.safe_load(value) if value else ""
    except yaml.YAMLError:
        return value


def parse_span(text: str) -> tuple[float, str]:
    """ "5 epochs" to (5.0, "epoch"); the other units are "step" and "%"."""
    found = SPAN.fullmatch(str(text))
    if not found:
        raise UserError(f"{text!r} is not a span of time: write '300 epochs', '20000 steps' or '5%'.")
    return float(found[1]), found[2].rstrip("s")


def parse_scope(text: str) -> tuple[str, int]:
    """ "attention" to ("attention", 0), "last:3" to ("last", 3)."""
    kind, _, count = text.partition(":")
    if kind == "last" and count.isascii() and count.isdigit():
        return kind, int(count)
    if text not in SCOPES:
        raise UserError(f"init.scope={text!r} is not known; choose from {', '.join(SCOPES)} or last:n.")
    return text, 0


def example(group: str, recipe: Recipe) -> str:
    """A leaf of a group of settings."""
    inside = (name.removeprefix(f"{group}.") for name in recipe.leaves() if name.startswith(f"{group}."))
    return next(inside, "drop_path")  # an architecture may be without changes


def unknown_key(key: str, recipe: Recipe) -> UserError:
    near = difflib.get_close_matches(key, recipe.leaves(), n=3, cutoff=0.3)
    leaf = [name for name in recipe.leaves() if name.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    hint = ", ".join(dict.fromkeys(leaf + near))
    return UserError(f"A recipe has no {key!r}" + (f"; the nearest are {hint}" if hint else "") + ".")


def _build(kind: type, values: Any, where: str) -> Any:
    if not isinstance(values, dict):
        raise UserError(f"{where or 'The recipe'} is a group of settings, not {values!r}.")
    hints = get_type_hints(kind)
    known: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{where}.{name}" if where else name
        if name not in hints:
            near = difflib.get_close_matches(str(name), hints, n=3, cutoff=0.3)
            raise UserError(f"A recipe has no {path!r}" + (f"; the nearest are {', '.join(near)}" if near else "") + ".")
        known[name] = _convert(hints[name], value, path)
    return kind(**known)


def _convert(hint: Any, value: Any, where: str) -> Any:
    """A plain value as the type that a field declares, or one sentence."""
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, where)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        if value not in arguments:
            raise UserError(f"{where}={value!r} is not known; choose from {', '.join(map(str, arguments))}.")
        return value
    if origin in (types.UnionType, typing.Union):
        for option in arguments:
            try:
                return None if option is type(None) and value is None else _convert(option, value, where)
            except UserError:
                continue
        raise UserError(f"{where}={value!r} is of the wrong kind.")
    if origin is tuple:
        count = len(arguments)
        if arguments[-1] is Ellipsis:
            if isinstance(value, list | tuple):
                return tuple(_convert(arguments[0], part, where) for part in value)
            raise UserError(f"{where}={value!r} should be a list of numbers, such as [1, 2].")
        value = [value] * count if isinstance(value, int | float) and not isinstance(value, bool) else value
        if isinstance(value, list | tuple) and len(value) == count:
            return tuple(_convert(part, each, where) for part, each in zip(arguments, value, strict=True))
        raise UserError(f"{where}={value!r} should be {count} numbers, such as [{', '.join(['1'] * count)}].")
    if origin is dict or hint is Any:
        return value
    if hint is float:
        value = parse_value(value)  # YAML takes 1e-3 for text
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise UserError(f"{where}={value!r} is not a finite number.")
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        text = "a span of time: write '300 epochs', '20000 steps' or '5%'" if where in SPANS else "text"
        raise UserError(f"{where}={value!r} should be {text if hint is str else f'of the kind {hint.__name__}'}.")
    return value
