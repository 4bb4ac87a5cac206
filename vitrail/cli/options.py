"""Arguments and options that several commands share, each defined once, and the parsers of their values."""

import functools
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from vitrail.errors import UserError

if TYPE_CHECKING:
    from vitrail.evaluation.features import FeatureKind

# Panels of `vitrail COMMAND --help`.
everyday_option = partial(typer.Option, rich_help_panel="Everyday")
recipe_option = partial(typer.Option, rich_help_panel="Recipe")
run_option = partial(typer.Option, rich_help_panel="Run directory")
feature_option = partial(typer.Option, rich_help_panel="Features")
hardware_option = partial(typer.Option, rich_help_panel="Hardware")

# Arguments.
SOURCE = (
    "A folder with one subfolder per class (or with images/ and masks/, or with COCO, VOC or YOLO boxes), Parquet, tar, CIFAR or "
    "IDX files, a CSV table, hf://owner/name, pets or digits."
)
WEIGHTS = "A checkpoint in any supported format, a run directory, or a name such as vitrail_tiny, deit3_small or hf://owner/name."
SourceArgument = Annotated[str, typer.Argument(metavar="SOURCE", help=SOURCE)]
WeightsArgument = Annotated[Path, typer.Argument(metavar="WEIGHTS", help=WEIGHTS)]
RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="The name of a recipe, or a recipe.yaml of an earlier run.")
]

# Output.
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
PlotOption = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Write a plot as a PNG file.")]

# Hardware.
DeviceOption = Annotated[str | None, hardware_option("--device", help="cpu, cuda or cuda:1; default: a GPU if available.")]
WorkersOption = Annotated[
    int | None, hardware_option("--workers", min=0, help="Processes that decode images; default: chosen by CPU cores.")
]
MicroBatchSizeOption = Annotated[
    int | None,
    hardware_option("--micro-batch-size", min=1, help="Images per forward and backward pass; default: what fits in memory."),
]

# The recipe of a training.
ModelOption = Annotated[str | None, recipe_option("--model", help="Replace the recipe's model (see `vitrail models`).")]
SetOption = Annotated[
    list[str] | None, recipe_option("--set", metavar="KEY=VALUE", help="Change any value of the recipe; repeatable.")
]
FromOption = Annotated[
    str | None,
    everyday_option(
        "--from",
        help="Initialize from these weights: a checkpoint in any supported format, vitrail_tiny (bundled), or weights to "
        "download: deit3_small, timm:NAME, hf://owner/name.",
    ),
]
EpochsOption = Annotated[
    float | None,
    everyday_option("--epochs", help="Total number of epochs, including the recipe's cooldown; not together with --minutes."),
]
ImageSizeOption = Annotated[
    str | None,
    everyday_option(
        "--image-size",
        metavar="SIZE",
        help="Image size: 96, or 96x128 (height x width); default: from weights, images and time budget.",
    ),
]
MinutesOption = Annotated[
    float | None,
    everyday_option(
        "--minutes",
        metavar="MINUTES",
        help="Time budget: the number of epochs and, with initial weights, the image size are chosen for it; default: 5 for "
        "fine-tuning on a CPU without --recipe and --epochs.",
    ),
]

# The run directory of a training.
SaveEveryOption = Annotated[
    float | None, run_option("--save-every", min=0, metavar="MINUTES", help="Minutes between checkpoints; default: 2.")
]
KeepOption = Annotated[int | None, run_option("--keep", min=1, help="Number of checkpoints to keep; default: 2.")]
MetricOption = Annotated[
    str,
    typer.Option(
        "--metric",
        help="primary (that of the task), top1, top5, knn, knn_COLUMN, agreement or loss on the validation split, or test.",
    ),
]
AtOption = Annotated[
    str, typer.Option("--at", help="best: weights with the best validation metric; last: weights of the last step.")
]

# Data.
BadImagesOption = Annotated[
    str, typer.Option("--unreadable", "--bad", help="Unreadable images: skip them, or fatal (stop with an error).")
]
SplitOption = Annotated[str | None, typer.Option("--split", help="train, validation or test; default: train.")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Random seed.")]

# Features and probes.
LabelColumnOption = Annotated[str, feature_option("--labels", help="Label column: label, or another one such as coarse_label.")]
ImagesOption = Annotated[
    int | None, feature_option("--images", min=2, help="Maximum number of images per split, drawn by the seed.")
]
NormalizeOption = Annotated[bool, feature_option("--normalize", help="L2-normalize each feature vector.")]


CacheOption = Annotated[
    bool, feature_option("--cache/--no-cache", help="Keep features on disk, and use those of the same weights and images.")
]


class HardwareOptions(NamedTuple):
    """Options of the commands that run a model on many images."""

    device: DeviceOption = None
    batch_size: Annotated[int, hardware_option(min=1, help="Images per forward pass.")] = 64
    workers: WorkersOption = None


class FeatureOptions(NamedTuple):
    """Options of the commands that compute features."""

    vector: Annotated[
        str | None,
        feature_option(
            help="pooled, class, mean, class_mean, distillation, penultimate, logits or projected; default: the model's pooling."
        ),
    ] = None
    before_norm: Annotated[
        bool,
        feature_option("--before-norm", help="Take features before the final norm of the backbone."),
    ] = False
    bf16: Annotated[bool, hardware_option("--bf16", help="Compute features in bfloat16.")] = False
    cache: CacheOption = True

    def kind(self, default_vector: str = "pooled", normalize: bool = False) -> "FeatureKind":
        from vitrail.evaluation.features import FeatureKind

        return FeatureKind(self.vector or default_vector, self.before_norm, normalize, self.bf16)


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each option group among its parameters (a NamedTuple of options) replaced by the fields of the group."""
    signature = inspect.signature(command)
    parameters = [each for parameter in signature.parameters.values() for each in expand(parameter)]
    parameters.sort(key=lambda each: (each.kind, each.default is not each.empty))  # required ones first
    expanded = signature.replace(parameters=parameters)

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        bound = expanded.bind(*args, **kwargs)
        bound.apply_defaults()
        command(**{name: collect(parameter, bound.arguments) for name, parameter in signature.parameters.items()})

    run.__signature__ = expanded  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def group_fields(parameter: inspect.Parameter) -> dict[str, inspect.Parameter]:
    """The fields of an option group; {} of another parameter."""
    is_group = hasattr(parameter.annotation, "_fields")
    return dict(inspect.signature(parameter.annotation).parameters) if is_group else {}


def expand(parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    """The parameter, or the fields of an option group; the default of a group replaces those of its fields."""
    fields = group_fields(parameter)
    if not fields:
        yield parameter
    for name, field in fields.items():
        default = field.default if parameter.default is parameter.empty else getattr(parameter.default, name)
        yield from expand(field.replace(kind=parameter.kind, default=default))


def collect(parameter: inspect.Parameter, values: dict[str, Any]) -> Any:
    """The value of a parameter or, of an option group, the group with the values of its fields."""
    fields = group_fields(parameter)
    if not fields:
        return values[parameter.name]
    return parameter.annotation(**{name: collect(field, values) for name, field in fields.items()})


def check_choice(option: str, value: str, choices: tuple[str, ...]) -> str:
    """Return `value`, which must be one of the choices of the option."""
    if value not in choices:
        raise UserError(f"{option} {value} is not known: choose {', '.join(choices[:-1])} or {choices[-1]}.")
    return value


def parse_size(text: str | None) -> tuple[int, int] | None:
    """Parse "384" or "192x256" into (height, width)."""
    if text is None:
        return None
    sides = text.lower().split("x")
    if (
        not all(side.isascii() and side.isdigit() and len(side) < 10 and 0 < int(side) < 1 << 16 for side in sides)
        or len(sides) > 2
    ):
        raise UserError(f"{text!r} is not an image size; write 384, or 192x256 for height 192 and width 256.")
    return int(sides[0]), int(sides[-1])


def parse_sizes(text: str | None) -> list[tuple[int, int]]:
    """Parse "160,192x256" into distinct (height, width) pairs."""
    sizes = [parse_size(part.strip()) for part in text.split(",")] if text is not None else []
    return list(dict.fromkeys(size for size in sizes if size is not None))
