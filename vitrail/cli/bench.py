"""vitrail bench: how fast models are, beside each other, beside timm, beside what the device could do."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitrail.cli.embed import DeviceOption
from vitrail.cli.evaluate import one_of, parse_sizes
from vitrail.errors import UserError
from vitrail.formatting import percent

if TYPE_CHECKING:
    import torch

    from vitrail.bench.candidates import Contender
    from vitrail.bench.measurement import Cell
    from vitrail.bench.peak import Ceiling
    from vitrail.bench.settings import Curve, Setting

WORDS = ("model", "by", "task", "precision", "mode")  # columns that are no numbers
ALONE = " *"  # behind a ratio of two that were measured one after the other
LONGEST = 60  # letters of a reason in the table; the file has all
STANDARD = "-"  # --json to standard output


def bench(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Names of models, checkpoints, or folders of runs.")],
    against: Annotated[str | None, typer.Option(help="timm: its model beside each of ours, where it has the same.")] = None,
    task: Annotated[str, typer.Option(help="inference, train, or both with a comma between.")] = "inference",
    batch: Annotated[str | None, typer.Option(help="Images at a time, such as 1,256; 256 on a GPU, 8 on a CPU.")] = None,
    size: Annotated[str | None, typer.Option(help="Image sizes: 224,384 or 192x256 (height x width); the model's own.")] = None,
    depth: Annotated[str | None, typer.Option(help="Numbers of blocks: 6,12; the model's own.")] = None,
    mode: Annotated[
        str,
        typer.Option(
            help="eager, compiled (block by block), whole (as one graph), graph (a CUDA graph), own (as each project trains and "
            "ships: ours as `vitrail train` and `vitrail.optimize` do it, timm compiled)."
        ),
    ] = "eager",
    precision: Annotated[str | None, typer.Option(help="bf16, fp32 or both; bf16 on a GPU, fp32 on a CPU.")] = None,
    curve: Annotated[str | None, typer.Option(help="resolution, batch or depth: measure from small to large.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which all take turns.")] = 7,
    device: DeviceOption = None,
    json_file: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Keep all numbers; - prints them.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw a PNG image.")] = None,
) -> None:
    """Measure speed and memory: images per second, share of what the device can do, side by side and in turns.

    Exit code 1: something failed that should have run. What does not fit into the memory is said in its place.

    Example: [bold]vitrail bench deit_small_patch16 --against timm --task train,inference --mode eager,compiled[/bold]
    """
    from vitrail.bench.candidates import import_timm, opponents
    from vitrail.bench.measurement import FAILED, make_heats, run_heats
    from vitrail.bench.output import content, headline, write_json
    from vitrail.bench.peak import measure_ceiling
    from vitrail.bench.timing import machine
    from vitrail.data.progress import progress
    from vitrail.training.distributed import begin, choose_device

    along = cast("Curve | None", one_of("--curve", curve, ("resolution", "batch", "depth")) if curve is not None else None)
    check_outputs(json_file, plot)
    if against is not None and against != "timm":
        raise UserError(f"--against {against} is not known: the opponent is timm.")
    where = begin(choose_device(device))
    ours = open_all(models)
    others, said = opponents(ours) if against else ([], [])
    settings = ask_for(ours[0], where, task, batch, size, depth, mode, precision, along)
    heats = make_heats(ours, others, settings)
    facts = machine(where) | ({"timm": str(import_timm().__version__)} if against else {})
    out = Console(width=None if sys.stdout.isatty() else 120, stderr=json_file == STANDARD)
    for sentence in said:
        print(sentence, file=sys.stderr)
    cells: list[Cell] = []
    ceiling: Ceiling | None = None

    def keep(ended: bool) -> dict[str, Any]:
        found = content(facts, ceiling, cells, rounds, ended)
        if json_file not in (None, STANDARD):
            write_json(Path(str(json_file)), found)
        return found

    found = keep(False)
    stopped = False
    try:
        ceiling = measure_ceiling(where, list(dict.fromkeys(setting.precision for setting in settings)))
        with progress("measuring", rounds * sum(map(len, heats))) as advance:
            for finished in run_heats(heats, rounds, where, ceiling, advance):
                cells += finished
                found = keep(False)
        found = keep(True)
    except KeyboardInterrupt:
        stopped = True
    if json_file == STANDARD:
        print(json.dumps(found, indent=1))
    show(out, cells, ceiling, headline(facts))
    if plot is not None and any(cell.seconds for cell in cells):
        write_plot(plot, cells, along, headline(facts))
        out.print(f"wrote {plot}", markup=False, highlight=False)
    if stopped:
        print("Stopped: this is what was measured so far.", file=sys.stderr)
        sys.exit(130)
    if any(cell.trouble.startswith(FAILED) for cell in cells):
        sys.exit(1)


def open_all(models: Sequence[str]) -> "list[Contender]":
    from vitrail.bench.candidates import open_contender
    from vitrail.cli.main import is_file

    return [open_contender(name, is_file(name)) for name in dict.fromkeys(models)]


def ask_for(
    first: "Contender",
    device: "torch.device",
    task: str,
    batch: str | None,
    size: str | None,
    depth: str | None,
    mode: str,
    precision: str | None,
    curve: "Curve | None",
) -> "list[Setting]":
    """Every combination that the options name; what they leave open is the device's usual, or the points of the curve."""
    from vitrail.bench.settings import BATCHES, all_settings, curve_depths, curve_sizes

    gpu = device.type == "cuda"
    batches, sizes, depths = parse_numbers("--batch", batch), parse_sizes(size), parse_numbers("--depth", depth)
    if curve == "resolution":
        sizes = sizes or curve_sizes(first.architecture)
    elif curve == "batch":
        batches = batches or list(BATCHES[device.type])
    elif curve == "depth":
        depths = depths or curve_depths(first.architecture)
    return all_settings(
        words(task),
        words(precision or ("bf16" if gpu else "fp32")),
        words(mode),
        batches or [256 if gpu else 8],
        sizes or [None],
        depths or [0],
    )


def words(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",")))


def parse_numbers(option: str, text: str | None) -> list[int]:
    parts = words(text) if text is not None else []
    for part in parts:
        if not (part.isascii() and part.isdigit() and 0 < int(part) < 1 << 24):
            raise UserError(f"{option} {text} is not a list of whole numbers of at least 1: write 1,256.")
    return [int(part) for part in parts]


def check_outputs(json_file: str | None, plot: Path | None) -> None:
    """Before anything is measured that could then not be written."""
    from vitrail.atomic_files import check_writable

    if plot is not None and plot.suffix != ".png":
        raise UserError(f"The plot is a PNG image: call it bench.png, not {plot.name!r}.")
    for path in (plot, Path(json_file) if json_file not in (None, STANDARD) else None):
        if path is not None and path.is_dir():
            raise UserError(f"{path} is a folder; give a file name.")
        if path is not None and path.suffix in (".safetensors", ".pth", ".pt", ".npz"):
            raise UserError(f"{path} looks like a checkpoint; the numbers are JSON: call the file bench.json.")
        check_writable(path)


def write_plot(path: Path, cells: "Sequence[Cell]", curve: "Curve | None", machine: str) -> None:
    from vitrail.atomic_files import write_aside
    from vitrail.bench.plots import draw

    image = draw(cells, curve, machine)
    write_aside(path, lambda side: side.write_bytes(image))


def show(out: Console, cells: "Sequence[Cell]", ceiling: "Ceiling | None", machine: str) -> None:
    """The machine, its ceiling, the cells."""

    def line(text: str) -> None:
        out.print(text, markup=False, highlight=False, style="dim")

    line(machine)
    if ceiling is not None:
        products = ", ".join(
            f"{rate / 1e12:,.4g} TFLOP/s {name} ±{percent(ceiling.operations_spread[name], 1)}"
            for name, rate in ceiling.operations.items()
        )
        line(
            f"ceiling: {products} (product of {ceiling.side} x {ceiling.side} matrices), "
            f"{ceiling.bandwidth / 1e9:,.4g} GB/s ±{percent(ceiling.bandwidth_spread, 1)} (copy, read and written)"
        )
    if not cells:
        return
    shared, columns = split_columns(cells)
    if shared:
        line(", ".join(shared))
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in WORDS else "right", overflow="fold")
    for cell in cells:
        table.add_row(*(Text(text) for text in row(cell, cells, columns)))
    out.print(table)
    rounds = sorted({cell.n for cell in cells if cell.seconds})
    if rounds:
        counts = f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else str(rounds[0])
        if any(row(cell, cells, ["to timm"])[0].endswith(ALONE) for cell in cells):
            line("* measured one after the other: there is no room for both")
        counted = "multiply-adds" + (", in training three times" if any(cell.task == "train" for cell in cells) else "")
        line(f"median of n = {counts} rounds in turns, ± half the interquartile range; TFLOP/s: {counted}")


def split_columns(cells: "Sequence[Cell]") -> tuple[list[str], list[str]]:
    """What all cells have in common, to be said once; and the columns of the table."""
    from vitrail.models.config import show_size

    shared, columns = [], ["model"]
    for name, attribute, say in (
        ("by", "project", lambda value: ""),
        ("task", "task", str),
        ("precision", "precision", str),
        ("mode", "mode", str),
        ("batch", "batch", lambda value: f"batch {value}"),
        ("size", "size", lambda value: f"{show_size(value)} pixels"),
        ("depth", "depth", lambda value: f"{value} blocks"),
    ):
        values = {getattr(cell, attribute) for cell in cells}
        per_model = {(cell.model, getattr(cell, attribute)) for cell in cells}
        own = name == "depth" and len(per_model) == len({cell.model for cell in cells})
        if len(values) > 1 and own:
            continue  # every model has the one it is known for
        if len(values) > 1:
            columns.append(name)
        elif say(values.copy().pop()):
            shared.append(say(values.pop()))
    columns += ["images/s", "±", "ms", "TFLOP/s", "of ceiling"]
    if any(cell.memory is not None for cell in cells):
        columns.append("memory")
    if any(cell.compile_seconds is not None for cell in cells):
        columns.append("compiling")
    if any(cell.project == "timm" for cell in cells):
        columns.append("to timm")
    return shared, columns


def row(cell: "Cell", cells: "Sequence[Cell]", columns: Sequence[str]) -> list[str]:
    from vitrail.models.config import show_size

    known = {
        "model": short(cell.model),
        "by": cell.project,
        "task": cell.task,
        "precision": cell.precision,
        "mode": cell.mode,
        "batch": f"{cell.batch:,}",
        "size": show_size(cell.size),
        "depth": str(cell.depth),
        "memory": f"{cell.memory / 1e9:.2f} GB" if cell.memory is not None else "",
        "compiling": f"{cell.compile_seconds:.1f} s" if cell.compile_seconds is not None else "",
    }
    if cell.seconds:
        share = cell.share
        known |= {
            "images/s": f"{cell.rate:,.0f}" if cell.rate >= 100 else f"{cell.rate:.3g}",
            "±": percent(cell.spread, 1) if cell.n > 1 else "",
            "ms": f"{1e3 * cell.median:,.4g}",
            "TFLOP/s": f"{cell.operations / 1e12:.4g}",
            "of ceiling": percent(share, 1) if share is not None else "",
            "to timm": ratio(cell, cells),
        }
    else:
        known["images/s"] = shorten(cell.trouble, LONGEST, placeholder=" …")
    return [known.get(name, "") for name in columns]


def short(name: str) -> str:
    """Of a file, the last two parts of its path, which tell runs apart."""
    path = Path(name)
    return str(Path(*path.parts[-2:])) if len(path.parts) > 2 else name


def ratio(cell: "Cell", cells: "Sequence[Cell]") -> str:
    """How many times as fast as timm's model, with a star where the two did not take turns."""
    from vitrail.bench.measurement import beside, times_as_fast

    other = beside(cell, cells)
    if other is None:
        return ""
    found = times_as_fast(cell, other)
    return f"{found.median:.3f} ±{percent(found.spread, 1)}" + ("" if cell.turns > 1 else ALONE)
