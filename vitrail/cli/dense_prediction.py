"""What predict and evaluate do alike with weights of a segmentation and of a detection."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from vitrail.cli.console import print_problems
from vitrail.errors import UserError
from vitrail.formatting import pluralize

if TYPE_CHECKING:
    from vitrail.data.loader import Problem
    from vitrail.data.source import Source

PANEL = "Segmentation"
JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")


class ProtocolOptions(NamedTuple):
    """How weights of a segmentation are applied to images."""

    scales: Annotated[str, typer.Option(help="Factors of the image size to average over: 0.5,1,1.5.", rich_help_panel=PANEL)] = (
        "1"
    )
    multi_scale: Annotated[
        bool, typer.Option("--multi-scale", help="The papers' six scales from 0.5 to 1.75, with flips.", rich_help_panel=PANEL)
    ] = False
    flip: Annotated[bool, typer.Option("--flip", help="Average with the mirrored image.", rich_help_panel=PANEL)] = False
    window: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Side of the sliding window, or of the tiles of a detection; 0: whole images; default: as trained.",
            rich_help_panel=PANEL,
        ),
    ] = None


def check_out(out: Path | None, images: int, as_json: bool) -> str:
    """The suffix of `--out`: of an overlay, of a JSON file, or "" of a folder; UserError for others."""
    suffix = out.suffix.lower() if out is not None else ""
    if out is not None and suffix not in ("", ".png", *JSON_SUFFIXES) and not as_json:
        raise UserError(f"--out {out.name} is neither an overlay (.png) nor a .json file nor a folder.")
    if suffix == ".png" and images > 1:
        raise UserError(f"{pluralize(images, 'image')} cannot be drawn in one file: give a folder as --out.")
    return suffix


def iterate_readable(title: str, source: "Source", problems: "Sequence[Problem]", results: Iterable[Any]) -> Iterator[Any]:
    """The results of the images that can be read, with a progress bar; problems are printed. UserError if there are none."""
    from vitrail.data.loader import Problem
    from vitrail.data.progress import progress

    print_problems(problems)
    readable = 0
    with progress(title, len(source)) as advance:
        for result in results:
            advance(1)
            if isinstance(result, Problem):
                print_problems([result])
            else:
                readable += 1
                yield result
    if not readable:
        raise UserError("No image could be read.")


def write_overlay(result: Any, path: Path) -> None:
    from vitrail.atomic_files import atomic_write

    atomic_write(path, lambda file: result.overlay().save(file, "PNG"))


def unique_stem(stem: str, taken: set[str]) -> str:
    """The stem, with a number if another image has it."""
    found, number = stem, 2
    while found in taken:
        found, number = f"{stem}-{number}", number + 1
    taken.add(found)
    return found


def json_lines(results: Iterable[Any]) -> str:
    """One line of JSON per image."""
    return "".join(json.dumps(result.to_dict(), ensure_ascii=False) + "\n" for result in results)


class Measured(NamedTuple):
    """The evaluation of one split."""

    content: dict[str, Any]
    draw_examples: Callable[[], Sequence[Mapping[str, Any]]]  # images of the report
    write_report: Callable[..., list[Path]]
    print_tables: Callable[[dict[str, Any]], None]
