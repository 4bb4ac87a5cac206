"""vitrail predict."""

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, cast

import typer
from rich.console import Console

from vitrail.cli.console import make_table
from vitrail.cli.dense_prediction import ProtocolOptions
from vitrail.cli.detect import predict_objects
from vitrail.cli.options import HardwareOptions, WeightsArgument, expand_options
from vitrail.cli.segment import predict_masks
from vitrail.errors import UserError
from vitrail.formatting import escape_control, percent, pluralize, shorten_path

if TYPE_CHECKING:
    from vitrail.evaluation.predict import Prediction

FORMATS = ("table", "json", "csv")
HARDWARE = HardwareOptions(batch_size=32)
UNLIMITED = 100_000  # columns of a table that is not printed on a terminal: one line per image
BLOCK = 500  # rows of a table that are aligned with each other; longer tables are printed in blocks


@expand_options
def predict(
    weights: WeightsArgument,
    images: Annotated[
        list[str],
        typer.Argument(
            metavar="IMAGES",
            help="Image files, folders, patterns such as 'photos/**/*.jpg'; - for a list of paths on standard input; "
            "digits for built-in images.",
        ),
    ],
    top: Annotated[int, typer.Option(min=1, help="Number of classes per image.")] = 5,
    format: Annotated[
        str | None, typer.Option(help="table, json (one line per image) or csv; default: by the extension of OUT, else table.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Short for --format json.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write to this file instead of standard output; a segmentation or detection: to overlay.png, a .json file or "
            "a folder."
        ),
    ] = None,
    hardware: HardwareOptions = HARDWARE,
    threshold: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Of a detection: lowest score of the objects.", rich_help_panel="Detection")
    ] = 0.5,
    *,
    segmentation: ProtocolOptions,
) -> None:
    """Predict the most probable classes of images, of their pixels (segmentation), or their objects (detection).

    Exit code 1: some images could not be read; 2: none could.

    Example: [bold]vitrail predict runs/photos-finetune cat.jpg holidays/[/bold]
    """
    from vitrail.atomic_files import check_writable, reject_overwrite
    from vitrail.data.loader import Problem
    from vitrail.data.progress import progress
    from vitrail.evaluation.model import open_model
    from vitrail.evaluation.predict import iterate_predictions, open_images, parse_path_list
    from vitrail.heads.task_heads import CALLS
    from vitrail.models.vision_transformer import VisionTransformer

    output_format = choose_format(format, as_json, out)
    if out is not None:
        check_writable(out)
    model = open_model(weights, hardware.device)
    paths = [path for given in images for path in (parse_path_list(sys.stdin.buffer.read()) if given == "-" else [given])]
    source, problems = open_images(paths)
    if out is not None:
        reject_overwrite(out, *str(weights).split("+"), *(source.location(index) for index in range(len(source))))
    if isinstance(model, VisionTransformer) and model.task in CALLS:
        lines = output_format == "json" and (as_json or format is not None)
        if model.task == "detection":
            predict_objects(model, source, problems, segmentation, threshold, out, lines)
        else:
            predict_masks(model, source, problems, segmentation, out, lines)
        return
    unreadable = len(problems)

    def readable() -> "Iterator[Prediction]":
        nonlocal unreadable
        for result in iterate_predictions(model, source, top, hardware.batch_size, hardware.workers):
            advance(1)
            if isinstance(result, Problem):
                print_problem(result)
                unreadable += 1
            else:
                yield result

    # On a terminal the progress bar would interleave with the rows: a short table is printed after the bar, others without one.
    terminal = out is None and sys.stdout.isatty()
    collect = terminal and output_format == "table" and len(source) <= BLOCK
    bar = (collect or not terminal) and len(source) > hardware.batch_size
    labeled = source.label is not None
    write = WRITERS[output_format]
    with open_output(out) as stream:
        with progress("predicting", len(source)) if bar else nullcontext(lambda count: None) as advance:
            for problem in problems:
                print_problem(problem)
            rows = list(readable()) if collect else readable()
            written = 0 if collect else write(rows, stream, labeled, out is None)
        if collect:
            written = write(rows, stream, labeled, True)
        if not written:
            raise UserError("No image could be read.")
    if unreadable:
        if unreadable > 1:
            print_error(f"{unreadable:,} images could not be read, {written:,} were predicted.")
        sys.exit(1)


def choose_format(format: str | None, as_json: bool, out: Path | None) -> str:
    if as_json and format not in (None, "json"):
        raise UserError(f"--json and --format {format} are two formats: give one of them.")
    if as_json:
        return "json"
    if format is None and out is not None:
        return {".csv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json"}.get(out.suffix.lower(), "table")
    if format not in (None, *FORMATS):
        raise UserError(f"--format {format} is not known: choose table, json or csv.")
    return format or "table"


@contextmanager
def open_output(out: Path | None) -> Iterator[BinaryIO]:
    """Standard output, or a file that is complete or not written at all; binary, since file names may not be valid text.

    Opened before a progress bar starts, which redirects standard output.
    """
    from vitrail.atomic_files import atomic_replace, describe_error

    if out is None:
        sys.stdout.flush()
        yield cast(BinaryIO, getattr(sys.stdout, "buffer", None) or TextOutput())
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.exists() and not out.is_file():
            raise UserError(f"{out} is a folder or a device: give a file name.")
        with atomic_replace(out.resolve()) as side, side.open("wb") as stream:
            yield stream
    except OSError as error:
        raise UserError(f"{out} could not be written, {describe_error(error)}: choose another path.") from None


class TextOutput(io.RawIOBase):
    """Bytes to a standard output without a binary buffer, as in notebooks."""

    def write(self, content: bytes) -> int:  # type: ignore[override]
        return sys.stdout.write(content.decode("utf-8", "replace"))

    def flush(self) -> None:
        sys.stdout.flush()


def write_json(predictions: "Iterable[Prediction]", stream: BinaryIO, labeled: bool, live: bool) -> int:
    count = 0
    for prediction in predictions:
        count += 1
        line = {"image": prediction.image, "classes": [vars(each) for each in prediction.classes]}
        line |= {"label": prediction.label} if prediction.label is not None else {}
        try:
            content = json.dumps(line, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # a file name that is not valid UTF-8: JSON escapes can represent it
            content = json.dumps(line).encode()
        stream.write(content + b"\n")
        if live:
            stream.flush()
    return count


def csv_line(row: Sequence[str | None]) -> bytes:
    """One line of a CSV file; bytes of file names that are not valid UTF-8 are kept."""
    line = io.StringIO(newline="")
    csv.writer(line, lineterminator="\n").writerow(row)
    return line.getvalue().encode("utf-8", "surrogateescape")


def write_csv(predictions: "Iterable[Prediction]", stream: BinaryIO, labeled: bool, live: bool) -> int:
    def write_row(row: list[str | None]) -> None:
        stream.write(csv_line(row))
        if live:
            stream.flush()

    count = 0
    for count, prediction in enumerate(predictions, 1):
        if count == 1:
            header = [f"{name}_{rank}" for rank in range(1, len(prediction.classes) + 1) for name in ("class", "probability")]
            write_row(["image", *header, *(["label"] if labeled else [])])
        cells = [cell for each in prediction.classes for cell in (each.name, f"{each.probability:.6g}")]
        write_row([prediction.image, *cells, *([prediction.label] if labeled else [])])
    return count


def write_table(predictions: "Iterable[Prediction]", stream: BinaryIO, labeled: bool, live: bool) -> int:
    rows = iter(predictions)
    count = 0
    while block := list(islice(rows, BLOCK)):
        stream.write(render_table(block, labeled, live).encode("utf-8", "replace"))
        stream.flush()
        count += len(block)
    return count


WRITERS = {"json": write_json, "csv": write_csv, "table": write_table}


def render_table(predictions: "list[Prediction]", labeled: bool, live: bool) -> str:
    top = max(len(prediction.classes) for prediction in predictions)
    columns = (
        "image",
        "prediction",
        "probability",
        *([f"next {pluralize(top - 1, 'class')}"] if top > 1 else []),
        *(["label"] if labeled else []),
    )
    terminal = live and sys.stdout.isatty()
    console = Console(width=None if terminal else UNLIMITED, force_terminal=terminal, file=io.StringIO())
    rows = []
    for prediction in predictions:
        others = ", ".join(f"{each.name} {percent(each.probability, 1)}" for each in prediction.classes[1:])
        image = shorten_path(escape_control(prediction.image), console.width // 2)
        cells = [image, prediction.name, percent(prediction.probability, 1), *([others] if top > 1 else [])]
        cells += [prediction.label or ""] if labeled else []
        rows.append([escape_control(cell) for cell in cells])
    left = [column for column in columns if column != "probability"]
    console.print(make_table(columns, rows, left, no_wrap=("image",)))
    return cast(io.StringIO, console.file).getvalue()


def print_problem(problem: tuple[str, str]) -> None:
    print_error("{}: {}".format(*problem))


def print_error(message: str) -> None:
    print(escape_control(message), file=sys.stderr)
