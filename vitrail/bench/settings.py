"""What is measured: every combination of task, precision, mode, image size, depth and batch; and the points of a curve."""

from collections.abc import Sequence
from itertools import product
from typing import Literal, NamedTuple

from vitrail.errors import UserError
from vitrail.models.config import Architecture, show_size

TASKS = ("inference", "train")
MODES = ("eager", "compiled", "whole", "graph", "own")
PRECISIONS = ("bf16", "fp32")
CURVES = ("resolution", "batch", "depth")
SHARES = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)  # of the model's own side or depth
BATCHES = {"cuda": (1, 4, 16, 64, 256, 1024), "cpu": (1, 2, 4, 8, 16)}
Curve = Literal["resolution", "batch", "depth"]


class Setting(NamedTuple):
    """One way to run a model. A size of None is the model's own, as is a depth of 0."""

    task: str = "inference"
    precision: str = "bf16"
    mode: str = "eager"
    batch: int = 1
    size: tuple[int, int] | None = None
    depth: int = 0

    def describe(self) -> str:
        size = show_size(self.size) if self.size else "own size"
        depth = f", depth {self.depth}" if self.depth else ""
        return f"{self.task}, {self.precision}, {self.mode}, batch {self.batch}, {size}{depth}"


def all_settings(
    tasks: Sequence[str] = ("inference",),
    precisions: Sequence[str] = ("bf16",),
    modes: Sequence[str] = ("eager",),
    batches: Sequence[int] = (1,),
    sizes: Sequence[tuple[int, int] | None] = (None,),
    depths: Sequence[int] = (0,),
) -> list[Setting]:
    """Every combination, the batches of one another next to each other."""
    for option, values, known in (("--task", tasks, TASKS), ("--precision", precisions, PRECISIONS), ("--mode", modes, MODES)):
        for value in values:
            if value not in known:
                raise UserError(f"{option} {value} is not known: choose among {', '.join(known)}.")
    for option, numbers, least in (("--batch", batches, 1), ("--depth", depths, 0)):
        if any(number < least for number in numbers):
            raise UserError(f"{option} takes whole numbers of at least 1.")
    found = product(tasks, precisions, modes, sizes, depths, batches)
    return [
        Setting(task, precision, mode, batch, size, depth) for task, precision, mode, size, depth, batch in dict.fromkeys(found)
    ]


def curve_sizes(architecture: Architecture) -> list[tuple[int, int]]:
    """From half to twice the model's own size, in whole patches."""
    patch, (height, width) = architecture.patch_size, architecture.image_size
    sides = [(max(round(height * share / patch), 1) * patch, max(round(width * share / patch), 1) * patch) for share in SHARES]
    return list(dict.fromkeys(sides))


def curve_depths(architecture: Architecture) -> list[int]:
    """From half to twice the model's own depth; even, where its own is, for blocks may come in pairs."""
    step = 1 if architecture.depth % 2 else 2
    return list(dict.fromkeys(max(round(architecture.depth * share / step), 1) * step for share in SHARES))
