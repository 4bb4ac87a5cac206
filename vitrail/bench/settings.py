"""Settings of a benchmark: combinations of task, precision, mode, image size, depth and batch size; points of a curve."""

from collections.abc import Sequence
from itertools import product
from typing import Literal, NamedTuple, Protocol

from vitrail.errors import UserError
from vitrail.models.config import format_size

TASKS = ("inference", "train")
MODES = ("eager", "compiled", "fullgraph", "graph", "native")
PRECISIONS = ("bf16", "fp32")
# How a network of another library is compiled in the mode native; the fastest of them counts.
DEFAULT, REDUCE_OVERHEAD, CAPTURED = "torch.compile", "reduce-overhead", "captured step"
CONFIGURATIONS = {"cuda": (DEFAULT, REDUCE_OVERHEAD, CAPTURED), "cpu": (DEFAULT,)}
SHARES = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)  # of the model's image size or depth
BATCH_SIZES = {"cuda": (1, 4, 16, 64, 256, 1024), "cpu": (1, 2, 4, 8, 16)}
Curve = Literal["resolution", "batch", "depth"]


class HasShape(Protocol):
    """An architecture, or the shape of another network."""

    @property
    def image_size(self) -> tuple[int, int]: ...

    @property
    def patch_size(self) -> int: ...

    @property
    def depth(self) -> int: ...


class Setting(NamedTuple):
    """How to run a model. Size None and depth 0 stand for those of the model."""

    task: str = "inference"
    precision: str = "bf16"
    mode: str = "eager"
    batch_size: int = 1
    size: tuple[int, int] | None = None
    depth: int = 0

    def describe(self) -> str:
        size = format_size(self.size) if self.size else "default size"
        depth = f", depth {self.depth}" if self.depth else ""
        return f"{self.task}, {self.precision}, {self.mode}, batch size {self.batch_size}, {size}{depth}"


def make_settings(
    tasks: Sequence[str] = ("inference",),
    precisions: Sequence[str] = ("bf16",),
    modes: Sequence[str] = ("eager",),
    batch_sizes: Sequence[int] = (1,),
    sizes: Sequence[tuple[int, int] | None] = (None,),
    depths: Sequence[int] = (0,),
) -> list[Setting]:
    """Every combination; the batch size varies fastest."""
    for option, values, known in (("--task", tasks, TASKS), ("--precision", precisions, PRECISIONS), ("--mode", modes, MODES)):
        for value in values:
            if value not in known:
                raise UserError(f"unknown {option} {value}: choose from {', '.join(known)}.")
    for option, numbers, minimum in (("--batch-size", batch_sizes, 1), ("--depth", depths, 0)):
        if any(number < minimum for number in numbers):
            raise UserError(f"{option} must be at least 1.")
    combinations = product(tasks, precisions, modes, sizes, depths, batch_sizes)
    return [
        Setting(task, precision, mode, batch_size, size, depth)
        for task, precision, mode, size, depth, batch_size in dict.fromkeys(combinations)
    ]


def curve_sizes(architecture: HasShape) -> list[tuple[int, int]]:
    """Image sizes from half to twice the model's, multiples of the patch size."""
    patch, (height, width) = architecture.patch_size, architecture.image_size
    sides = [(max(round(height * share / patch), 1) * patch, max(round(width * share / patch), 1) * patch) for share in SHARES]
    return list(dict.fromkeys(sides))


def curve_depths(architecture: HasShape) -> list[int]:
    """Depths from half to twice the model's; even if the model's is even, because blocks may come in pairs."""
    step = 1 if architecture.depth % 2 else 2
    return list(dict.fromkeys(max(round(architecture.depth * share / step), 1) * step for share in SHARES))
