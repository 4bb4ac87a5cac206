"""Cells of a benchmark: who takes turns with whom, what a cell says, and what happens to one that cannot run."""

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from vitrail.bench.candidates import Contender, price
from vitrail.bench.peak import Ceiling
from vitrail.bench.settings import Setting
from vitrail.bench.timing import Run, Summary, enough_repeats, in_turns, summarize, timed
from vitrail.bench.workloads import UNCAPTURED, CannotRun, make_run
from vitrail.data.loader import free_memory
from vitrail.errors import UserError
from vitrail.models.flops import Cost

UNFIT = "does not fit"
FAILED = "failed"
PATIENCE = 1.0  # seconds; a run that takes longer is warm after two
FREE = 0.9  # share of the free memory that a CPU run may plan with
STATE = 16  # bytes of a parameter in training: itself, its gradient, two means
LIMIT = 4096  # graphs of one function: every model of a heat has its own


@dataclass
class Cell:
    """One contender in one setting. What was not measured is None."""

    model: str
    project: str
    network: str  # the name in its own project
    task: str
    precision: str
    mode: str
    batch: int
    size: tuple[int, int]
    depth: int
    parameters: int
    macs: int  # of one image, forward
    trouble: str = ""  # why there are no numbers
    turns: int = 0  # contenders that took turns, itself among them
    repeats: int = 0  # runs in a round
    seconds: list[float] = field(default_factory=list)  # of one run, round by round
    memory: int | None = None  # bytes at the peak, weights included; GPUs only
    compile_seconds: float | None = None  # by how much the first run took longer
    ceiling: float | None = None  # operations per second of the measured matrix product
    bandwidth: float | None = None  # bytes per second of the measured copy

    @property
    def n(self) -> int:
        return len(self.seconds)

    @property
    def median(self) -> float:
        return summarize(self.seconds).median if self.seconds else math.nan

    @property
    def spread(self) -> float:
        return summarize(self.seconds).spread if self.seconds else math.nan

    @property
    def rate(self) -> float:
        """Images per second."""
        return self.batch / self.median

    @property
    def operations(self) -> float:
        """Per second: two for each multiply-add, forward once and, in training, backward twice."""
        return self.rate * self.macs * (6 if self.task == "train" else 2)

    @property
    def share(self) -> float | None:
        """Of the matrix product's operations per second."""
        return self.operations / self.ceiling if self.ceiling and self.seconds else None

    @property
    def floors(self) -> dict[str, float]:
        """Seconds that one run cannot go below: its products at the ceiling's pace, and in training its activations (the peak
        less weights, gradients and means), each byte written and read once."""
        found = {}
        if self.ceiling and self.seconds:
            found["products"] = self.operations * self.median / self.ceiling
        if self.bandwidth and self.memory and self.task == "train":
            found["memory"] = 2 * max(self.memory - STATE * self.parameters, 0) / self.bandwidth
        return found

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self)
        if self.seconds:
            found |= {
                "floor_milliseconds": {name: 1e3 * value for name, value in self.floors.items()},
                "n": self.n,
                "milliseconds": 1e3 * self.median,
                "spread": self.spread,
                "images_per_second": self.rate,
                "tflops": self.operations / 1e12,
                "mfu": self.share,
            }
        return found


def beside(cell: Cell, cells: Sequence[Cell]) -> Cell | None:
    """timm's cell in the same setting as one of ours, if both have numbers."""
    if cell.project != "vitrail" or not cell.seconds:
        return None
    same = ("model", "task", "precision", "mode", "batch", "size", "depth")
    for other in cells:
        if other.project == "timm" and other.seconds and all(getattr(other, name) == getattr(cell, name) for name in same):
            return other
    return None


def times_as_fast(cell: Cell, other: Cell) -> Summary:
    """How many times as fast as the other, round by round: what slowed a round down slowed both."""
    return summarize([theirs / ours for ours, theirs in zip(cell.seconds, other.seconds, strict=False)])


class Entry(NamedTuple):
    contender: Contender
    setting: Setting
    price: Cost

    def cell(self, ceiling: Ceiling | None) -> Cell:
        name, architecture = self.contender, self.contender.at(self.setting)
        return Cell(
            model=name.name,
            project=name.project,
            network=name.foreign or name.name,
            task=self.setting.task,
            precision=self.setting.precision,
            mode=self.setting.mode,
            batch=self.setting.batch,
            size=architecture.image_size,
            depth=architecture.depth,
            parameters=self.price.parameters,
            macs=self.price.macs,
            ceiling=ceiling.operations.get(self.setting.precision) if ceiling else None,
            bandwidth=ceiling.bandwidth if ceiling else None,
        )


Heat = list[Entry]  # those that take turns


def make_heats(ours: Sequence[Contender], others: Sequence[Contender], settings: Sequence[Setting]) -> list[Heat]:
    """With opponents, each model takes turns with its own; without, all models of a setting take turns.

    Complains about sizes and depths that cannot be before anything is measured.
    """
    heats = []
    for setting in settings:
        entries = [Entry(contender, setting, price(contender, setting)) for contender in ours]
        if not others:
            heats.append(entries)
            continue
        for entry in entries:
            theirs = [Entry(other, setting, entry.price) for other in others if other.name == entry.contender.name]
            heats.append([entry, *theirs])
    return heats


def run_heats(
    heats: Sequence[Heat],
    rounds: int,
    device: torch.device,
    ceiling: Ceiling | None,
    advance: Callable[[int], None] = lambda count: None,
) -> Iterator[list[Cell]]:
    """The cells of each heat as soon as it is over. One that is interrupted gives what it has before it goes on to raise."""
    # Shapes are what they are: a second batch size must not make torch compile for all sizes, which is slower.
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False, recompile_limit=LIMIT, accumulated_recompile_limit=LIMIT):
        for heat in heats:
            cells = [entry.cell(ceiling) for entry in heat]
            try:
                run_heat(heat, cells, rounds, device, advance)
            except KeyboardInterrupt:
                yield [cell for cell in cells if cell.seconds or cell.trouble]
                raise
            yield cells


def run_heat(heat: Heat, cells: Sequence[Cell], rounds: int, device: torch.device, advance: Callable[[int], None]) -> None:
    """All in turns where their memory allows it; each alone where it does not. Fills the cells."""
    runs: list[Run] = []
    taking: list[Cell] = []
    crowded = False
    try:
        for entry, cell in zip(heat, cells, strict=True):
            cell.trouble = prepare(entry, cell, runs, device)
            if not cell.trouble:
                taking.append(cell)
            elif cell.trouble in (UNFIT, UNCAPTURED) and runs:
                crowded = True
                break
        if not crowded:
            for cell in taking:
                cell.turns = len(taking)
            repeats, times = [cell.repeats for cell in taking], [cell.seconds for cell in taking]
            trouble = guarded(lambda: in_turns(runs, repeats, times, rounds, device, advance))
            crowded = trouble == UNFIT and len(runs) > 1
            for cell in taking if trouble else ():
                cell.trouble = trouble
                cell.seconds.clear()
    finally:
        runs.clear()
        clear(device)
    if crowded:
        for entry, cell in zip(heat, cells, strict=True):
            run_heat([entry], [cell], rounds, device, advance)


def prepare(entry: Entry, cell: Cell, runs: list[Run], device: torch.device) -> str:
    """Make the run, warm it up and append it; fill in what that tells. The reason if it cannot be."""
    cuda = device.type == "cuda"
    if not cuda and needed(entry) > FREE * (free_memory() or math.inf):
        return UNFIT  # said here, for the system would end the process

    def warm() -> None:
        before = torch.cuda.memory_allocated(device) if cuda else 0
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        run = make_run(entry.contender, entry.setting, device)
        first = timed(run, device)
        usual = timed(run, device)
        if usual < PATIENCE:
            usual = timed(run, device, 2)
        cell.compile_seconds = max(first - usual, 0.0) if entry.setting.mode != "eager" else None
        cell.memory = torch.cuda.max_memory_allocated(device) - before if cuda else None
        cell.repeats = enough_repeats(usual)
        runs.append(run)

    trouble = guarded(warm)
    if trouble:
        clear(device)
    return trouble


def guarded(work: Callable[[], None]) -> str:
    """Do it; in a few words why that was not possible. What the user asked for wrongly, and Ctrl-C, are not caught."""
    try:
        work()
    except (UserError, KeyboardInterrupt):
        raise
    except CannotRun as reason:
        return str(reason)
    except (torch.OutOfMemoryError, MemoryError):
        return UNFIT
    except Exception as error:  # of any compiler, kernel or foreign model: the other cells go on
        text = str(error).strip()
        if "allocate memory" in text or "out of memory" in text:
            return UNFIT
        return f"{FAILED}: {text.splitlines()[0] if text else type(error).__name__}"
    return ""


def clear(device: torch.device) -> None:
    """Networks of the last heat must leave neither memory nor compiled code behind."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def needed(entry: Entry) -> float:
    """Bytes, roughly: weights, with gradients and moments in training, and what is kept of each image."""
    copies, kept = (4, 1.0) if entry.setting.task == "train" else (1, 2.0 / max(entry.contender.at(entry.setting).depth, 2))
    return 4.0 * copies * entry.price.parameters + kept * entry.price.activation_bytes * entry.setting.batch
