"""Commands `vitrail data inspect` and `vitrail data pack`."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console

from vitrail.cli.console import print_message, print_skipped, print_text
from vitrail.cli.options import BadImagesOption, SourceArgument, WorkersOption, check_choice, expand_options
from vitrail.errors import UserError
from vitrail.formatting import format_bytes, pluralize

if TYPE_CHECKING:
    from vitrail.data.datasets.folder import SourceDict
    from vitrail.data.source import Source

data = typer.Typer(no_args_is_help=True, help="Inspect a data set, or write it as Parquet shards.")


@data.command()
def inspect(
    source: SourceArgument,
    out: Annotated[Path | None, typer.Option(help="Draw a contact sheet of the classes to this PNG file.")] = None,
    recipe: Annotated[
        list[str] | None, typer.Option(help="Also draw the augmented images of this recipe, to sheet-RECIPE.png; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with all unreadable files and duplicates.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the images on the sheet.")] = 0,
    workers: WorkersOption = None,
) -> None:
    """Report classes, image sizes, formats, masks, objects, unreadable files, duplicates and leaks between splits.

    Example: [bold]vitrail data inspect photos/ --out sheet.png --recipe deit_small[/bold]
    """
    from vitrail.atomic_files import check_writable
    from vitrail.data import inspection
    from vitrail.data.contact_sheet import base_name, contact_sheet, overlay_sheet
    from vitrail.data.datasets.lookup import open_sources
    from vitrail.data.inspection_report import findings, print_report
    from vitrail.data.object_drawing import object_sheet
    from vitrail.data.progress import progress

    if out is not None and out.suffix != ".png":
        raise UserError(f"The contact sheet must be a PNG file: write --out sheet.png instead of {out.name!r}.")
    check_writable(out)
    if recipe and out is None:
        raise UserError("--recipe draws a second sheet next to the contact sheet: add --out sheet.png.")
    sources = open_sources(source)
    with progress("inspecting", sum(map(len, sources.values()))) as advance:
        report = inspection.inspect(source, sources, workers, advance)
    if as_json:
        print(json.dumps(report.to_dict() | {"findings": list(findings(report))}, indent=1))
    else:
        print_report(report, Console(width=None if sys.stdout.isatty() else 80))
    if out is None:
        return
    train = sources.get("train") or next(iter(sources.values()))
    lines = [f"\nContact sheet: {out}"]
    save_sheet(out, contact_sheet(train, base_name(source), seed))
    for name in recipe or []:
        path = out.with_stem(f"{out.stem}-{name}")
        draw_augmented(path, train, base_name(source), name, seed)
        lines.append(f"Augmented images of {name}: {path}")
    if train.has_masks:
        path = out.with_stem(f"{out.stem}-masks")
        save_sheet(path, overlay_sheet(train, base_name(source), seed))
        lines.append(f"Images with their masks: {path}")
    if train.object_classes:
        path = out.with_stem(f"{out.stem}-objects")
        save_sheet(path, object_sheet(train, base_name(source), seed))
        lines.append(f"Images with their objects: {path}")
    if not as_json:
        print("\n".join(lines))


def draw_augmented(path: Path, train: "Source", title: str, name: str, seed: int) -> None:
    from vitrail.data.contact_sheet import augmented_views
    from vitrail.recipes import lookup
    from vitrail.recipes.data_defaults import fit_to_data

    recipe, _ = fit_to_data(lookup(name), train)
    mixing = recipe.mixing
    strength = (mixing.mixup, mixing.cutmix, mixing.switch_prob)
    save_sheet(path, augmented_views(train, recipe.augmentation, f"{title}, augmented by {name}", seed, *strength))


class ReductionOptions(NamedTuple):
    """The size and the format of larger images."""

    resize: Annotated[int | None, typer.Option(help="Reduce larger images to this shorter side.")] = None
    format: Annotated[str, typer.Option(help="Format of reduced images: jpeg, png or webp.")] = "jpeg"
    quality: Annotated[int, typer.Option(help="Quality of JPEG and WebP, 1 to 100.")] = 92


@data.command()
@expand_options
def pack(
    source: SourceArgument,
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The folder to write: OUT/data/train-00000-of-00007.parquet and so on.")
    ],
    shard_size: Annotated[str, typer.Option(help="Maximum size of the images of a shard: 500MB, 1GB, 64MiB.")] = "500MB",
    split: Annotated[list[str] | None, typer.Option(help="Pack only this split; repeatable.")] = None,
    images: Annotated[int | None, typer.Option(min=1, help="Pack a random sample of at most so many images per split.")] = None,
    bad: BadImagesOption = "skip",
    *,
    reduced: ReductionOptions,
    workers: WorkersOption = None,
) -> None:
    """Write a data set as Parquet shards in the Hugging Face convention. Run the same command again to resume.

    Example: [bold]vitrail data pack photos/ packed/ --resize 256[/bold]
    """
    from vitrail.data import parquet_export
    from vitrail.data.datasets.lookup import open_sources
    from vitrail.data.progress import progress
    from vitrail.data.reencoding import Reencoding
    from vitrail.data.source import subsample

    check_choice("--bad", bad, ("skip", "fatal"))
    reencoding, max_bytes = Reencoding(*reduced), parquet_export.parse_bytes(shard_size)
    selected = parquet_export.select_splits(source, open_sources(source), split or [])
    sources = {name: subsample(each, images) for name, each in selected.items()}
    if any(each.object_classes for each in sources.values()):
        print_message("boxes and masks of objects are not written: images, labels and masks of classes are")
    try:
        with progress("packing", sum(map(len, sources.values()))) as advance:
            result = parquet_export.pack(
                source, sources, out, reencoding, max_bytes, bad == "fatal", workers, advance, print_message
            )
    except KeyboardInterrupt:
        hint = "run the same command again to resume" if parquet_export.has_partial_output(out) else "nothing was written"
        print_message(f"Interrupted; {hint}.")
        sys.exit(130)
    kept = f" ({result.kept:,} of them from an earlier run)" if result.kept else ""
    save_mask_classes(out, sources)
    shards = f"{pluralize(len(result.shards), 'shard')}{kept}, {format_bytes(result.bytes)}"
    print_text(f"{source} -> {out}: {pluralize(result.rows, 'image')} in {shards}")
    print_skipped(result.skipped, f"; {out / 'data' / '_pack.json'} lists all")


def save_mask_classes(out: Path, sources: "SourceDict") -> None:
    """Write the names of the classes of masks beside the shards, which do not contain them."""
    from vitrail.atomic_files import atomic_write_text
    from vitrail.data.mask_classes import write_json

    classes = next((source.mask_classes for source in sources.values() if source.mask_classes is not None), None)
    if classes is not None:
        atomic_write_text(out / "classes.json", write_json(classes))


def save_sheet(path: Path, sheet: Any) -> None:
    from vitrail.atomic_files import atomic_write

    atomic_write(path, lambda temporary: sheet.save(temporary, "PNG"))
