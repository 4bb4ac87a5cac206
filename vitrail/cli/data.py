"""vitrail data inspect, data pack."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from vitrail.errors import UserError

if TYPE_CHECKING:
    from vitrail.data.source import Source

data = typer.Typer(no_args_is_help=True, help="Look into a data set, or pack it into Parquet shards.")

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A folder of class folders, Parquet, tar, CIFAR or IDX files, a table, hf://owner/name, pets or digits.",
    ),
]
WorkersOption = Annotated[int | None, typer.Option(min=0, help="Processes that decode images; one per core if not given.")]
NAMED = 10  # of the images that were left out; the manifest has all


@data.command()
def inspect(
    source: SourceArgument,
    out: Annotated[Path | None, typer.Option(help="Draw a contact sheet of the classes, too: sheet.png.")] = None,
    recipe: Annotated[
        list[str] | None, typer.Option(help="Draw beside it what a network sees with this recipe: sheet-NAME.png.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every broken file and every duplicate.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Which images the sheet shows.")] = 0,
    workers: WorkersOption = None,
) -> None:
    """Say what a data set holds: classes, sizes, formats, broken files, duplicates, leaks from split to split.

    Example: [bold]vitrail data inspect photos/ --out sheet.png --recipe deit_small[/bold]
    """
    from vitrail.atomic_files import check_writable
    from vitrail.data.contact_sheet import base_name, contact_sheet
    from vitrail.data.datasets.lookup import open_parts
    from vitrail.data.inspection import inspect as look
    from vitrail.data.inspection_report import findings, print_report
    from vitrail.data.progress import progress

    if out is not None and out.suffix != ".png":
        raise UserError(f"A contact sheet is a PNG image: call it sheet.png, not {out.name!r}.")
    check_writable(out)
    if recipe and out is None:
        raise UserError("--recipe draws an image beside the contact sheet: say where with --out sheet.png.")
    parts = open_parts(source)
    if out is not None:
        train = parts.get("train") or next(iter(parts.values()))
        draw(out, contact_sheet(train, base_name(source), seed))
        for name in recipe or []:
            draw_views(out.with_stem(f"{out.stem}-{name}"), train, base_name(source), name, seed)
    with progress("looking", sum(map(len, parts.values()))) as advance:
        report = look(source, parts, workers, advance)
    if as_json:
        print(json.dumps(report.to_dict() | {"findings": list(findings(report))}, indent=1))
        return
    print_report(report, Console(width=None if sys.stdout.isatty() else 80))
    if out is not None:
        print(f"\nThe contact sheet is {out}.")
        for name in recipe or []:
            print(f"What the network sees with {name} is {out.with_stem(f'{out.stem}-{name}')}.")


def draw_views(path: Path, train: "Source", title: str, name: str, seed: int) -> None:
    from vitrail.data.contact_sheet import augmented_views
    from vitrail.recipes import lookup
    from vitrail.recipes.data_defaults import fit

    recipe, _ = fit(lookup(name), train)
    mixing = dataclasses.asdict(recipe.mixing)
    draw(path, augmented_views(train, recipe.augmentation, f"{title} as {name} sees it", seed, **mixing))


@data.command()
def pack(
    source: SourceArgument,
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The folder to write: OUT/data/train-00000-of-00007.parquet and so on.")
    ],
    shard_size: Annotated[str, typer.Option(help="The most that the images of a shard weigh: 500MB, 1GB, 64MiB.")] = "500MB",
    resize: Annotated[int | None, typer.Option(help="Scale larger images down to this shorter side.")] = None,
    format: Annotated[str, typer.Option(help="What scaled images are written as: jpeg or png.")] = "jpeg",
    quality: Annotated[int, typer.Option(help="Of the JPEGs, 1 to 100.")] = 92,
    split: Annotated[list[str] | None, typer.Option(help="Only this split; again for another.")] = None,
    bad: Annotated[str, typer.Option(help="skip or fatal: what an unreadable image is.")] = "skip",
    workers: WorkersOption = None,
) -> None:
    """Write a data set as Parquet shards in the Hugging Face convention. Stopped and run again, it goes on where it was.

    Example: [bold]vitrail data pack photos/ packed/ --resize 256[/bold]
    """
    from vitrail.data.datasets.lookup import open_parts
    from vitrail.data.inspection_report import bytes_text, counted
    from vitrail.data.parquet_export import choose, is_begun, parse_bytes
    from vitrail.data.parquet_export import pack as write
    from vitrail.data.progress import progress
    from vitrail.data.reencoding import Recoding

    if bad not in ("skip", "fatal"):
        raise UserError(f"--bad {bad} is not known: choose skip or fatal.")
    how, most = Recoding(resize, format, quality), parse_bytes(shard_size)
    parts = choose(source, open_parts(source), split or [])
    try:
        with progress("packing", sum(map(len, parts.values()))) as advance:
            result = write(source, parts, out, how, most, bad == "fatal", workers, advance, complain)
    except KeyboardInterrupt:
        kept = "the same command goes on where this one was" if is_begun(out) else "nothing was kept"
        complain(f"Stopped; {kept}.")
        sys.exit(130)
    kept = f" ({result.kept:,} of them from an earlier run)" if result.kept else ""
    shards = f"{counted(len(result.shards), 'shard')}{kept}, {bytes_text(result.bytes)}"
    print(f"{source} -> {out}: {counted(result.rows, 'image')} in {shards}")
    if result.skipped:
        complain(f"Left out, because unreadable: {counted(len(result.skipped), 'image')}.")
        for problem in result.skipped[:NAMED]:
            complain(f"  {problem.where}: {problem.reason}")
        if len(result.skipped) > NAMED:
            complain(f"  and {len(result.skipped) - NAMED:,} more; {out / 'data' / '_pack.json'} lists all")


def draw(path: Path, sheet: Any) -> None:
    from vitrail.atomic_files import write_aside

    write_aside(path, lambda side: sheet.save(side, "PNG"))


def complain(sentence: str) -> None:
    print(sentence.encode("utf-8", "replace").decode(), file=sys.stderr)  # file names that are no text could not be printed
