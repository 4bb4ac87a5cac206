"""vitrail explore."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitrail.cli.console import print_message, print_text
from vitrail.cli.options import HardwareOptions, expand_options
from vitrail.errors import UserError
from vitrail.formatting import format_bytes, pluralize

if TYPE_CHECKING:
    from vitrail.explore.collection import Collection
    from vitrail.explore.explored_model import ExploredModel

SCANNED, STORED = 500, 16  # images of the folder that are predicted, and those in a static page
DATA_SUFFIXES = (".parquet", ".tar", ".csv", ".tsv")
HARDWARE = HardwareOptions(batch_size=32)
MODEL_FILES = ("run.json", "config.json", ".metadata")  # of folders that are weights


@expand_options
def explore(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="WEIGHTS [WEIGHTS] [FOLDER]",
            help="A checkpoint or run directory, or two to compare; then, if wanted, images to browse: a folder or data set.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="HTML", help="Write one static page, which needs no server, instead of starting one.")
    ] = None,
    images: Annotated[
        int | None,
        typer.Option(min=1, help=f"Images of FOLDER to predict; default: {SCANNED}. With --out: to store; default: {STORED}."),
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="train, validation or test; default: test, else validation, else all images.")
    ] = None,
    evaluation: Annotated[
        Path | None,
        typer.Option(metavar="JSON", help="Browse the wrong images of evaluation.json, which `vitrail evaluate --out` writes."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; default: a free one.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")] = True,
    hardware: HardwareOptions = HARDWARE,
) -> None:
    """Explore what a model attends to, in the browser: drop an image, point at a patch, compare two checkpoints, find errors.

    The page is served on this machine only, until Ctrl-C.

    Example: [bold]vitrail explore runs/photos-finetune photos/[/bold]
    """
    from vitrail.web.server import bind, make_app, serve  # first: without the extra `serve` nothing is computed

    # isort: split
    from vitrail.atomic_files import check_writable
    from vitrail.data.progress import progress
    from vitrail.explore.explorer import Explorer
    from vitrail.explore.routes import make_routes
    from vitrail.explore.static_page import write_static_page

    weights, folder = split_paths(paths)
    if folder is None and (out is not None or evaluation is not None):
        option = "--out" if out is not None else "--evaluation"
        raise UserError(
            f"{option} needs images: give a folder after the weights, as in vitrail explore weights.safetensors photos/"
        )
    if out is not None and out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--out writes a page: call it page.html, not {out.name!r}.")
    check_writable(out)
    listener = bind(port=port) if out is None else None
    models = open_models(weights, hardware.device)
    collection = None
    if folder is not None:
        limit = max(SCANNED, images or 0) if out is not None else images or SCANNED
        collection = open_collection(models, folder, split, limit, evaluation, hardware)
    explorer = Explorer(models, collection)
    title = " and ".join(model.title for model in models)
    if listener is None:
        assert out is not None
        assert collection is not None
        count = min(images or STORED, len(collection.index))
        with progress("storing", count) as advance:
            size = write_static_page(out, title, explorer, count, advance)
        print_text(f"wrote {out}: {pluralize(count, 'image')}, {format_bytes(size)}")
        return

    def announce(address: str) -> None:
        print(f"Explorer at {address} (Ctrl-C stops it)", flush=True)
        if browser and has_display():
            import webbrowser

            webbrowser.open(address)

    serve(make_app(make_routes(explorer, title)), listener, announce)
    print_message("Stopped.")


def split_paths(paths: list[str]) -> tuple[list[str], str | None]:
    """One or two weights, and the images after them, if any."""
    weights, folder = (paths[:-1], paths[-1]) if len(paths) > 1 and is_data(paths[-1]) else (paths, None)
    if len(weights) > 2:
        raise UserError(f"{len(weights)} models were given: one can be explored, or two compared. {weights[-1]} is no data set.")
    if is_data(weights[0]):
        raise UserError(f"{weights[0]} is no model: give a checkpoint or a run directory first, then the images.")
    return weights, folder


def is_data(path: str) -> bool:
    from vitrail.data.datasets.lookup import is_built_in

    if os.path.isdir(path) and not is_built_in(path):
        return not any((Path(path) / name).is_file() for name in MODEL_FILES)
    return is_built_in(path) or path.lower().endswith(DATA_SUFFIXES)


def open_models(weights: list[str], device: str | None) -> "list[ExploredModel]":
    from vitrail.cli.evaluate import shorten_paths
    from vitrail.evaluation.model import open_model
    from vitrail.explore.explored_model import ExploredModel
    from vitrail.models.vision_transformer import VisionTransformer

    models = []
    for path, title in zip(weights, shorten_paths(weights), strict=True):
        model = open_model(path, device)
        if not isinstance(model, VisionTransformer):
            raise UserError(f"{path} is not a Vitrail model, so its attention cannot be shown: convert its weights.")
        models.append(ExploredModel(model, title))
    return models


def open_collection(
    models: "list[ExploredModel]", folder: str, split: str | None, limit: int, evaluation: Path | None, hardware: HardwareOptions
) -> "Collection":
    from vitrail.data.progress import progress
    from vitrail.evaluation.evaluate import open_evaluation_data
    from vitrail.explore.collection import choose_images, scan

    data = open_evaluation_data(folder, split)
    root = folder if os.path.isdir(folder) else ""
    source, notes = choose_images(data.source, root, limit, evaluation)
    title = os.path.basename(folder.rstrip("/")) or folder
    title = title if data.split == "everything" else f"{title}, {data.split}"
    with progress("predicting", len(source)) as advance:
        return scan(models, source, root, title, notes, hardware.batch_size, hardware.workers, advance)


def has_display() -> bool:
    """Whether a browser with windows can be opened; one in the terminal would hide the address."""
    return sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
