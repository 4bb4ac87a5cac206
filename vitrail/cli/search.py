"""vitrail index and search: find similar images, and classify images by their neighbors."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitrail.cli.console import print_json, print_problems, print_table, print_text
from vitrail.cli.options import WEIGHTS, HardwareOptions, JsonOption, SplitOption, expand_options
from vitrail.errors import UserError
from vitrail.formatting import percent, pluralize

if TYPE_CHECKING:
    from PIL import Image

    from vitrail.evaluation.image_index import ImageIndex
    from vitrail.evaluation.image_search import Search

MAX_ROWS = 50  # queries that are drawn
WeightsOption = Annotated[Path | None, typer.Option("--weights", help=WEIGHTS)]


@expand_options
def index(
    source: Annotated[list[str], typer.Argument(metavar="SOURCE", help="A data set, or image files and folders.")],
    weights: WeightsOption = None,
    out: Annotated[Path | None, typer.Option(help="The index to write, such as photos.index.")] = None,
    add: Annotated[Path | None, typer.Option(help="Add the images to this index, with its weights, without training.")] = None,
    class_name: Annotated[str | None, typer.Option("--class", help="The label of all these images, such as a new class.")] = None,
    vector: Annotated[
        str | None, typer.Option(help="Vector to search by; default: projected if there is one, else pooled.")
    ] = None,
    split: SplitOption = None,
    *,
    hardware: HardwareOptions,
) -> None:
    """Embed images into an index, in which `vitrail search` finds similar ones; or add images to one.

    Exit code 1: some images could not be read; 2: none could.

    Example: [bold]vitrail index photos/ --weights runs/photos-grafit_small --out photos.index[/bold]

    More images or classes: [bold]vitrail index more/ --add photos.index[/bold]
    """
    from vitrail.atomic_files import check_writable, reject_overwrite
    from vitrail.data.progress import progress
    from vitrail.evaluation.image_search import index_images

    if add is None and (weights is None or out is None):
        raise UserError("Give --weights WEIGHTS and --out FILE for a new index, or --add INDEX.")
    target = out or add
    assert target is not None
    check_writable(target)
    reject_overwrite(target, *([str(weights)] if weights else []), *source)
    found, problems = index_images(
        source,
        weights,
        out,
        add,
        class_name=class_name,
        split=split,
        vector=vector,
        device=hardware.device,
        batch_size=hardware.batch_size,
        workers=hardware.workers,
        progress=progress,
    )
    print_problems(problems)
    classes = ", ".join(f"{pluralize(len(labels.names), 'class')} of {name}" for name, labels in found.columns.items())
    size = f"{found.vectors.shape[1]} numbers each ({found.kind.vector})"
    print_text(f"{', '.join(filter(None, [pluralize(len(found), 'image'), size, classes]))} -> {target}")
    if problems:
        sys.exit(1)


@expand_options
def search(
    index: Annotated[Path, typer.Argument(metavar="INDEX", help="An index made by `vitrail index`.")],
    images: Annotated[list[str], typer.Argument(metavar="IMAGE", help="Query images: files, folders or a data set.")],
    k: Annotated[int, typer.Option(min=1, max=1000, help="Neighbors to show.")] = 10,
    voters: Annotated[int, typer.Option(min=1, max=10_000, help="Neighbors that vote for the class of an image.")] = 20,
    weights: WeightsOption = None,
    out: Annotated[Path | None, typer.Option(help="Draw queries and neighbors: neighbors.png.")] = None,
    split: SplitOption = None,
    max_images: Annotated[int, typer.Option(min=1, help="The largest number of queries.")] = 1000,
    *,
    hardware: HardwareOptions,
    as_json: JsonOption = False,
) -> None:
    """Find the images of an index that are most similar to others, and classify these by the votes of their neighbors.

    Example: [bold]vitrail search photos.index query.jpg --out neighbors.png[/bold]
    """
    from vitrail.atomic_files import atomic_write, check_writable, reject_overwrite
    from vitrail.evaluation.image_search import search_images
    from vitrail.evaluation.index_file import load_index

    if out is not None:
        if out.suffix.lower() != ".png":
            raise UserError(f"Neighbors are drawn into a .png file, not {out.name!r}.")
        check_writable(out)
        reject_overwrite(out, str(index), *images)
    collection = load_index(index)
    found = search_images(
        collection,
        images,
        k,
        weights=weights,
        voters=voters,
        split=split,
        max_images=max_images,
        device=hardware.device,
        batch_size=hardware.batch_size,
        workers=hardware.workers,
    )
    print_problems(found.problems)
    if out is not None:
        sheet = draw_search(collection, found, f"Neighbors in {index.name}")
        atomic_write(out, lambda file: sheet.save(file, "PNG"))
    if as_json:
        print_json([{**match._asdict(), "neighbors": [each._asdict() for each in match.neighbors]} for match in found.matches])
    else:
        print_search(found)
        if out is not None:
            print(f"wrote {out}")
    if found.problems:
        sys.exit(1)


def print_search(found: "Search") -> None:
    for match in found.matches:
        for column, classes in match.classes.items():
            shares = ", ".join(f"{name} {percent(share)}" for name, share in classes[:3])
            print_text(f"{match.query}: {column} {shares or 'unknown'}")
        names = list(match.classes)
        rows = [
            (str(rank), f"{each.cosine:.3f}", *(each.labels.get(name, "") for name in names), each.location)
            for rank, each in enumerate(match.neighbors, 1)
        ]
        print_table(("", "cosine", *names, "image"), rows, left=(*names, "image"))


def draw_search(index: "ImageIndex", found: "Search", title: str) -> "Image.Image":
    from vitrail.evaluation.image_index import read_thumbnail
    from vitrail.evaluation.neighbor_sheet import Tile, neighbor_sheet

    levels = sorted(index.columns, key=lambda name: len(index.columns[name].names))
    rows = []
    for match, pixels, labels in list(zip(found.matches, found.queries, found.labels, strict=True))[:MAX_ROWS]:
        best = [classes[0][0] for classes in match.classes.values() if classes]
        caption = labels.get(levels[-1], Path(match.query).name) if levels else Path(match.query).name
        neighbors = [
            Tile(
                read_thumbnail(index, each.image),
                f"{each.cosine:.2f} {each.labels.get(levels[-1], '') if levels else ''}",
                each.labels,
            )
            for each in match.neighbors
        ]
        rows.append((Tile(pixels, caption if labels or not best else f"{caption}: {best[0]}", labels), neighbors))
    return neighbor_sheet(rows, levels, title)
