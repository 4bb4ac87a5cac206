"""vitrail bench: speed and memory of models, compared with each other, with timm and with the peak of the device."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import typer
from rich.console import Console

from vitrail.cli.console import make_console, make_table
from vitrail.cli.options import DeviceOption, PlotOption, check_choice, expand_options, parse_sizes
from vitrail.errors import UserError
from vitrail.formatting import format_bytes, percent

if TYPE_CHECKING:
    from vitrail.bench.candidates import Candidate
    from vitrail.bench.measurement import Measurement
    from vitrail.bench.peak import Peak
    from vitrail.bench.settings import Curve, HasShape, Setting

TEXT_COLUMNS = ("model", "project", "configuration", "task", "precision", "mode")
SEPARATE = " *"  # after a ratio of two models that were not timed in turns
MAX_ERROR = 60  # characters of an error in the table; the JSON file has all
STDOUT = "-"  # --json to standard output


class GridOptions(NamedTuple):
    """The settings to measure the models with: all combinations of these."""

    task: Annotated[str, typer.Option(help="inference, train, or both, separated by a comma.")] = "inference"
    batch_size: Annotated[str | None, typer.Option(help="Batch sizes, such as 1,256; default: 256 on a GPU, 8 on a CPU.")] = None
    size: Annotated[
        str | None,
        typer.Option(help="Image sizes: 224,384 or 192x256 (height x width); default: the model's."),
    ] = None
    depth: Annotated[str | None, typer.Option(help="Numbers of blocks, such as 6,12; default: the model's.")] = None
    mode: Annotated[
        str,
        typer.Option(
            help="eager, compiled (block by block), fullgraph (compiled as one graph), graph (a CUDA graph), native (ours as "
            "`vitrail train` and `vitrail.optimize` do, timm in the fastest of several configurations)."
        ),
    ] = "eager"
    precision: Annotated[str | None, typer.Option(help="bf16, fp32 or both; default: bf16 on a GPU, fp32 on a CPU.")] = None
    curve: Annotated[str | None, typer.Option(help="Measure over a range of: resolution, batch or depth.")] = None

    def check_curve(self) -> "Curve | None":
        curve = self.curve if self.curve is None else check_choice("--curve", self.curve, ("resolution", "batch", "depth"))
        return cast("Curve | None", curve)

    def settings(self, architecture: "HasShape", device_type: str) -> "list[Setting]":
        """By default one batch size, and the size and depth of the model; a curve has the points of `vitrail.bench.settings`."""
        from vitrail.bench.settings import BATCH_SIZES, curve_depths, curve_sizes, make_settings

        batch_sizes, depths = parse_numbers("--batch-size", self.batch_size), parse_numbers("--depth", self.depth)
        sizes: Sequence[tuple[int, int] | None] = parse_sizes(self.size)
        if self.curve == "resolution":
            sizes = sizes or curve_sizes(architecture)
        elif self.curve == "batch":
            batch_sizes = batch_sizes or list(BATCH_SIZES[device_type])
        elif self.curve == "depth":
            depths = depths or curve_depths(architecture)
        gpu = device_type == "cuda"
        precisions = split(self.precision or ("bf16" if gpu else "fp32"))
        points = (batch_sizes or [256 if gpu else 8], sizes or [None], depths or [0])
        return make_settings(split(self.task), precisions, split(self.mode), *points)


@expand_options
def bench(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="Names of models, checkpoints, run directories, timm:NAME.")
    ],
    against: Annotated[str | None, typer.Option(help="timm: compare each model with timm's, where it has the same.")] = None,
    *,
    grid: GridOptions,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; in each, all models are timed once.")] = 7,
    device: DeviceOption = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write all measurements as JSON; - for standard output.")
    ] = None,
    plot: PlotOption = None,
) -> None:
    """Measure speed and memory of models.

    Prints images per second and the fraction of the device's peak; models are timed in turns.

    Exit code 1: a measurement failed. Running out of memory is reported in the table and is not a failure.

    Example: [bold]vitrail bench deit_small_patch16 --against timm --task train,inference --mode eager,compiled[/bold]
    """
    from vitrail.bench.candidates import import_timm, timm_candidates
    from vitrail.bench.measurement import FAILED, fastest_configurations, make_groups, measure_groups
    from vitrail.bench.output import describe_machine, make_document, write_json
    from vitrail.bench.peak import measure_peak
    from vitrail.bench.timing import machine
    from vitrail.data.progress import progress
    from vitrail.devices import choose_device, use_device

    along = grid.check_curve()
    check_outputs(json_file, plot)
    if against is not None and against != "timm":
        raise UserError(f"unknown --against {against}: the only choice is timm.")
    target = use_device(choose_device(device))
    ours = open_all(models)
    others, messages = timm_candidates(ours) if against else ([], [])
    settings = grid.settings(ours[0].architecture, target.type)
    groups = make_groups(ours, others, settings, target.type)
    info = machine(target) | ({"timm": str(import_timm().__version__)} if against else {})
    out = make_console(stderr=json_file == STDOUT)
    for message in messages:
        print(message, file=sys.stderr)
    measurements: list[Measurement] = []
    peak: Peak | None = None

    def save(complete: bool) -> dict[str, Any]:
        document = make_document(info, peak, measurements, rounds, complete)
        if json_file not in (None, STDOUT):
            write_json(Path(str(json_file)), document)
        return document

    document = save(False)
    interrupted = False
    try:
        peak = measure_peak(target, list(dict.fromkeys(setting.precision for setting in settings)))
        with progress("measuring", rounds * sum(map(len, groups))) as advance:
            for finished in measure_groups(groups, rounds, target, peak, advance):
                measurements += finished
                document = save(False)
        document = save(True)
    except KeyboardInterrupt:
        interrupted = True
    if json_file == STDOUT:
        print(json.dumps(document, indent=1))
    shown = fastest_configurations(measurements)
    show(out, shown, peak, describe_machine(info))
    if plot is not None and any(measurement.seconds for measurement in shown):
        write_plot(plot, shown, along, describe_machine(info))
        out.print(f"wrote {plot}", markup=False, highlight=False)
    if interrupted:
        print("Interrupted: these are the measurements so far.", file=sys.stderr)
        sys.exit(130)
    if any(measurement.error.startswith(FAILED) for measurement in measurements):
        sys.exit(1)


def open_all(models: Sequence[str]) -> "list[Candidate]":
    from vitrail.bench.candidates import open_candidate
    from vitrail.cli.models import is_checkpoint

    return [open_candidate(name, is_checkpoint(name) or name.startswith("timm:")) for name in dict.fromkeys(models)]


def split(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",")))


def parse_numbers(option: str, text: str | None) -> list[int]:
    parts = split(text) if text is not None else []
    for part in parts:
        if not (part.isascii() and part.isdigit() and len(part) < 10 and 0 < int(part) < 1 << 24):
            raise UserError(f"{option} {text} is not a list of positive integers such as 1,256.")
    return [int(part) for part in parts]


def check_outputs(json_file: str | None, plot: Path | None) -> None:
    """Reject outputs that could not be written, before anything is measured."""
    from vitrail.atomic_files import check_writable

    if plot is not None and plot.suffix != ".png":
        raise UserError(f"The plot is a PNG image: use a name such as bench.png, not {plot.name!r}.")
    for path in (plot, Path(json_file) if json_file not in (None, STDOUT) else None):
        if path is not None and path.is_dir():
            raise UserError(f"{path} is a directory; pass the name of a file.")
        if path is not None and path.suffix in (".safetensors", ".pth", ".pt", ".npz"):
            raise UserError(f"{path} has the suffix of a checkpoint; the output is JSON: use a name such as bench.json.")
        check_writable(path)


def write_plot(path: Path, measurements: "Sequence[Measurement]", curve: "Curve | None", machine: str) -> None:
    from vitrail.atomic_files import atomic_write
    from vitrail.bench.plots import draw

    image = draw(measurements, curve, machine)
    atomic_write(path, lambda side: side.write_bytes(image))


def show(out: Console, measurements: "Sequence[Measurement]", peak: "Peak | None", machine: str) -> None:
    """Print the machine, its peak and a table of the measurements."""

    def line(text: str) -> None:
        out.print(text, markup=False, highlight=False, style="dim")

    line(machine)
    if peak is not None:
        products = ", ".join(
            f"{rate / 1e12:,.4g} TFLOP/s {name} ±{percent(peak.flops_spread[name], 1)}" for name, rate in peak.flops.items()
        )
        line(
            f"peak: {products} (product of {peak.matrix_size} x {peak.matrix_size} matrices), "
            f"{peak.bandwidth / 1e9:,.4g} GB/s ±{percent(peak.bandwidth_spread, 1)} (copy, reads plus writes)"
        )
    if not measurements:
        return
    shared, columns = split_columns(measurements)
    if shared:
        line(", ".join(shared))
    out.print(make_table(columns, (row(measurement, measurements, columns) for measurement in measurements), left=TEXT_COLUMNS))
    rounds = sorted({measurement.n for measurement in measurements if measurement.seconds})
    if rounds:
        counts = f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else str(rounds[0])
        if any(row(measurement, measurements, ["vs timm"])[0].endswith(SEPARATE) for measurement in measurements):
            line("* timed one after the other: both together do not fit in memory")
        counted = "multiply-adds" + (
            ", three times in training" if any(measurement.task == "train" for measurement in measurements) else ""
        )
        line(f"median of n = {counts} interleaved rounds, ± half the interquartile range; TFLOP/s count {counted}")


def split_columns(measurements: "Sequence[Measurement]") -> tuple[list[str], list[str]]:
    """Values that all measurements share, as text; and the columns of the table."""
    from vitrail.models.config import format_size

    shared, columns = [], ["model"]
    for name, attribute, describe in (
        ("project", "project", lambda value: ""),
        ("configuration", "configuration", lambda value: ""),
        ("task", "task", str),
        ("precision", "precision", str),
        ("mode", "mode", str),
        ("batch size", "batch_size", lambda value: f"batch size {value}"),
        ("size", "size", lambda value: f"{format_size(value)} pixels"),
        ("depth", "depth", lambda value: f"{value} blocks" if value else ""),
    ):
        values = {getattr(measurement, attribute) for measurement in measurements}
        per_model = {(measurement.model, getattr(measurement, attribute)) for measurement in measurements}
        default_depth = name == "depth" and len(per_model) == len({measurement.model for measurement in measurements})
        if len(values) > 1 and default_depth:
            continue  # each model has its default depth
        if len(values) > 1:
            columns.append(name)
        elif text := describe(values.pop()):
            shared.append(text)
    columns += ["images/s", "±", "ms", "TFLOP/s", "of peak"]
    if any(measurement.memory is not None for measurement in measurements):
        columns.append("memory")
    if any(measurement.compile_seconds is not None for measurement in measurements):
        columns.append("compile")
    if any(measurement.project == "timm" for measurement in measurements):
        columns.append("vs timm")
    return shared, columns


def row(measurement: "Measurement", measurements: "Sequence[Measurement]", columns: Sequence[str]) -> list[str]:
    from vitrail.models.config import format_size

    values = {
        "model": short(measurement.model),
        "project": measurement.project,
        "configuration": measurement.configuration,
        "task": measurement.task,
        "precision": measurement.precision,
        "mode": measurement.mode,
        "batch size": f"{measurement.batch_size:,}",
        "size": format_size(measurement.size),
        "depth": str(measurement.depth),
        "memory": format_bytes(measurement.memory) if measurement.memory is not None else "",
        "compile": f"{measurement.compile_seconds:.1f} s" if measurement.compile_seconds is not None else "",
    }
    if measurement.seconds:
        rate = measurement.images_per_second
        values |= {
            "images/s": f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}",
            "±": percent(measurement.spread, 1) if measurement.n > 1 else "",
            "ms": f"{1e3 * measurement.median:,.4g}",
            "TFLOP/s": f"{measurement.flops / 1e12:.4g}",
            "of peak": percent(measurement.mfu, 1) if measurement.mfu is not None else "",
            "vs timm": ratio(measurement, measurements),
        }
    else:
        values["images/s"] = shorten(measurement.error, MAX_ERROR, placeholder=" …")
    return [values.get(name, "") for name in columns]


def short(name: str) -> str:
    """The last two parts of a path, which identify a run."""
    path = Path(name)
    return str(Path(*path.parts[-2:])) if len(path.parts) > 2 else name


def ratio(measurement: "Measurement", measurements: "Sequence[Measurement]") -> str:
    """Speedup over timm's model, with a star if the two were not timed in turns."""
    from vitrail.bench.measurement import speedup, timm_counterpart

    other = timm_counterpart(measurement, measurements)
    if other is None:
        return ""
    summary = speedup(measurement, other)
    return f"{summary.median:.3f} ±{percent(summary.spread, 1)}" + ("" if measurement.interleaved > 1 else SEPARATE)
