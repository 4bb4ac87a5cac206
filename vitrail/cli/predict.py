"""vitrail predict."""

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, cast

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitrail.errors import UserError
from vitrail.formatting import percent

if TYPE_CHECKING:
    from vitrail.evaluation.predict import Prediction

FORMATS = ("table", "json", "csv")
BLOCK = 500  # rows of a table that are aligned with each other; a longer one is printed in several


def predict(
    weights: Annotated[Path, typer.Argument(metavar="WEIGHTS", help="A checkpoint of any known kind, or the folder of a run.")],
    images: Annotated[
        list[str],
        typer.Argument(
            metavar="IMAGES",
            help="Image files, folders of them, patterns such as 'photos/**/*.jpg'; - for a list of paths on standard input; "
            "digits for some of the built-in ones.",
        ),
    ],
    top: Annotated[int, typer.Option(min=1, help="How many classes to name.")] = 5,
    format: Annotated[
        str | None, typer.Option(help="table, json (a line per image) or csv; by OUT's ending if not given.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write into this file instead of printing.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; a GPU if there is one.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images computed at a time.")] = 32,
    workers: Annotated[int | None, typer.Option(min=0, help="Processes that decode images; as useful if not given.")] = None,
) -> None:
    """Say what is in images: the likeliest classes of each. Exit code 1: some could not be read; 2: none could.

    Example: [bold]vitrail predict runs/photos-laptop cat.jpg holidays/[/bold]
    """
    from vitrail.atomic_files import check_writable, refuse_overwriting
    from vitrail.checkpoints import load
    from vitrail.data.loader import Problem
    from vitrail.data.progress import progress
    from vitrail.evaluation.predict import open_images, read_list
    from vitrail.evaluation.predict import predict as answers
    from vitrail.training.distributed import choose_device

    kind = choose_format(format, as_json, out)
    check_writable(out)
    model = load(weights_file(weights), device=choose_device(device))
    paths = [path for word in images for path in (read_list(sys.stdin.buffer.read()) if word == "-" else [word])]
    source, problems = open_images(paths)
    if out is not None:
        refuse_overwriting(out, *str(weights).split("+"), *(source.where(index) for index in range(len(source))))
    bad = 0

    def good() -> "Iterator[Prediction]":
        nonlocal bad
        for answer in answers(model, source, top, batch, workers):
            advance(1)
            if isinstance(answer, Problem):
                complain(answer)
                bad += 1
            else:
                yield answer

    # On a terminal a bar would be written into the rows: few wait until it is gone, many show by themselves how far it is.
    terminal = out is None and sys.stdout.isatty()
    waiting = terminal and kind == "table" and len(source) <= BLOCK
    known = source.label is not None
    with opened(out) as stream:
        with nullcontext(lambda count: None) if terminal and not waiting else progress("predicting", len(source)) as advance:
            for problem in problems:
                complain(problem)
            rows = list(good()) if waiting else good()
            shown = 0 if waiting else WRITERS[kind](rows, stream, known, out is None)
        if waiting:
            shown = WRITERS[kind](rows, stream, known, True)
        if not shown:
            raise UserError("No image could be read.")
    if bad or problems:
        if bad + len(problems) > 1:
            complain_of(f"{bad + len(problems):,} could not be read, {shown:,} could.")
        sys.exit(1)


def weights_file(weights: Path) -> Path:
    return weights / "best.safetensors" if (weights / "run.json").is_file() else weights


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
def opened(out: Path | None) -> Iterator[BinaryIO]:
    """Standard output, or the file, which is whole or not there; bytes, for file names need not be text.

    Taken before a progress bar stands: the bar turns prints away to its own place above it.
    """
    from vitrail.atomic_files import aside, reason

    if out is None:
        sys.stdout.flush()
        yield cast(BinaryIO, getattr(sys.stdout, "buffer", None) or Encoded())
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.exists() and not out.is_file():
            raise UserError(f"{out} is a folder or a device; give a file name.")
        with aside(out.resolve()) as side, side.open("wb") as stream:
            yield stream
    except OSError as error:
        raise UserError(f"{out} could not be written, {reason(error)}: choose another place.") from None


class Encoded(io.RawIOBase):
    """Standard output that has no bytes below it, as in notebooks."""

    def write(self, content: bytes) -> int:  # type: ignore[override]
        return sys.stdout.write(content.decode("utf-8", "replace"))

    def flush(self) -> None:
        sys.stdout.flush()


def write_json(predictions: "Iterable[Prediction]", stream: BinaryIO, known: bool, live: bool) -> int:
    count = 0
    for each in predictions:
        count += 1
        classes = [guess._asdict() for guess in each.guesses]
        line = {"image": each.where, "classes": classes} | ({"truth": each.truth} if each.truth is not None else {})
        try:
            content = json.dumps(line, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # a file name that is no text: JSON's own escapes hold it
            content = json.dumps(line).encode()
        stream.write(content + b"\n")
        if live:
            stream.flush()
    return count


def write_csv(predictions: "Iterable[Prediction]", stream: BinaryIO, known: bool, live: bool) -> int:
    def put(row: list[str | float | None]) -> None:
        line = io.StringIO(newline="")
        csv.writer(line, lineterminator="\n").writerow(row)
        stream.write(line.getvalue().encode("utf-8", "surrogateescape"))
        if live:
            stream.flush()

    count = 0
    for count, each in enumerate(predictions, 1):
        if count == 1:
            head = [f"{name}_{place}" for place in range(1, len(each.guesses) + 1) for name in ("class", "probability")]
            put(["image", *head, *(["truth"] if known else [])])
        cells = [cell for guess in each.guesses for cell in (guess.name, f"{guess.probability:.6g}")]
        put([each.where, *cells, *([each.truth] if known else [])])
    return count


def write_table(predictions: "Iterable[Prediction]", stream: BinaryIO, known: bool, live: bool) -> int:
    rows = iter(predictions)
    count = 0
    while block := list(islice(rows, BLOCK)):
        stream.write(rendered(block, known, live).encode("utf-8", "replace"))
        stream.flush()
        count += len(block)
    return count


WRITERS = {"json": write_json, "csv": write_csv, "table": write_table}


def rendered(predictions: "list[Prediction]", known: bool, live: bool) -> str:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("image", "looks like", "", "or", *(["is"] if known else [])):
        table.add_column(column, justify="left" if column else "right", overflow="fold")
    for each in predictions:
        first, *others = each.guesses
        rest = ", ".join(f"{guess.name} {percent(guess.probability, 1)}" for guess in others)
        cells = (each.where, first.name, percent(first.probability, 1), rest, *([each.truth or ""] if known else []))
        table.add_row(*(Text(one_line(cell)) for cell in cells))  # as text: brackets in names are not markup
    terminal = live and sys.stdout.isatty()
    console = Console(width=None if terminal else 120, force_terminal=terminal, file=io.StringIO())
    console.print(table)
    return cast(io.StringIO, console.file).getvalue()


def one_line(text: str) -> str:
    """Line ends, tabs and other letters that a terminal would obey, written out; names that are no text, too."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def complain(problem: tuple[str, str]) -> None:
    complain_of("{}: {}".format(*problem))


def complain_of(sentence: str) -> None:
    print(one_line(sentence), file=sys.stderr)
