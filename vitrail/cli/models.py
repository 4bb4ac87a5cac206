"""vitrail models, info, convert."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from vitrail.cli.console import make_console, print_json, print_table, print_text
from vitrail.cli.options import JsonOption, parse_size
from vitrail.errors import UserError
from vitrail.formatting import percent

COLUMNS = ("model", "size", "tokens", "parameters", "mult-adds", "memory")


def models(
    pattern: Annotated[str, typer.Argument(help="A part of a name, or a shell pattern such as 'cait_*24'.")] = "*",
    as_json: JsonOption = False,
) -> None:
    """List models with parameters, multiply-adds and activation memory.

    Example: [bold]vitrail models 'deit3*'[/bold]
    """
    from vitrail.checkpoints.bundled import NAMES
    from vitrail.models.flops import known_costs, row
    from vitrail.models.registry import list_models, model_pages

    names, pages = list_models(pattern), model_pages()
    if not names:
        raise UserError(f"No model matches {pattern!r}: `vitrail models` lists all.")
    costs = known_costs()
    if as_json:
        print_json(
            [
                {"name": name, "paper": paper_title(pages[name]), **costs[name].to_dict(), "bundled_weights": name in NAMES}
                for name in names
            ]
        )
        return
    rows: list[Sequence[str]] = []
    for previous, name in zip([names[0], *names], names, strict=False):
        if pages[name] is not pages[previous]:
            rows.append([])
        rows.append(row(f"{name} *" if name in NAMES else name, costs[name]))
    print_table(COLUMNS, rows)
    print_text(
        "mult-adds: matrix products and convolutions of one image; memory: activations of one image for backward, float32",
        "dim",
    )
    for name in (name for name in names if name in NAMES):
        print_text(f"* trained weights are bundled, see `vitrail info {name}`", "dim")


def paper_title(page: Any) -> str:
    return (page.__doc__ or "").split("\n")[0].rstrip(".")


def info(
    name: Annotated[
        str,
        typer.Argument(
            help="A model name, weights by name (vitrail_tiny, timm:NAME, hf://owner/name), a checkpoint or a run directory."
        ),
    ],
    image_size: Annotated[str | None, typer.Option(help="Another size: 384, or 192x256 (height x width).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the architecture, cost and preprocessing of a model, and the training data of bundled weights.

    Example: [bold]vitrail info cait_s24 --image-size 384[/bold]
    """
    from vitrail.checkpoints import load
    from vitrail.checkpoints.bundled import NAMES, find_bundled
    from vitrail.checkpoints.hub import is_address
    from vitrail.models.config import Architecture
    from vitrail.models.flops import cost_of, row
    from vitrail.models.registry import create

    size = parse_size(image_size)
    is_bundled = find_bundled(name) is not None
    from_file = is_bundled or is_address(name) or is_checkpoint(name)
    model = load(name) if from_file else create(name, device="meta", image_size=size)
    weights = bundled_metadata(model) if is_bundled else None
    if from_file and size:
        model.resize(*size)
    model_cost, architecture = cost_of(model), model.architecture.to_dict()
    if as_json:
        print_json(
            {
                "name": model.name,
                "format": model.notes.get("format", "vitrail") if from_file else None,
                "architecture": architecture,
                "cost": model_cost.to_dict(),
                "preprocessing": model.preprocessing.to_dict(),
                "class_names": model.class_names,
                "bundled_weights": weights,
            }
        )
        return
    console = make_console()
    print_table(COLUMNS, [row(model.name or Path(name).name, model_cost)])
    if model.task_head is not None:
        print_text("parameters: with the head of the task; mult-adds and memory: without", "dim")
    default, convnet = Architecture().to_dict(), architecture.pop("convnet", None)
    if convnet and not architecture["depth"]:
        console.print("\n[bold]architecture[/bold] (a convnet)")
        print_fields(convnet | {field: architecture[field] for field in ("classes", "drop_path")})
    else:
        console.print("\n[bold]architecture[/bold] (differences from ViT-B/16)")
        print_fields({field: value for field, value in architecture.items() if value != default[field]} | (convnet or {}))
    assumed = " (assumed: not recorded in the file)" if "preprocessing" in model.notes else ""
    console.print(f"\n[bold]preprocessing[/bold]{assumed}")
    print_fields(model.preprocessing.to_dict())
    if weights is not None:
        print_bundled(name, weights)
    elif name in NAMES:
        print_text(f"\nBundled weights named {name} exist, but the file or folder {name} in this folder is used instead.")


def print_fields(fields: dict[str, Any]) -> None:
    for field, value in fields.items():
        print_text(f"  {field:20} {value}")


def bundled_metadata(model: Any) -> dict[str, Any]:
    """Return the data and the validation accuracy that are recorded in a file of bundled weights."""
    data, metrics = json.loads(model.notes["data"]), json.loads(model.notes["metrics"])
    return {
        "data": data["name"],
        "train": data["train"],
        "classes": model.architecture.classes,
        "image_size": list(model.architecture.image_size),
        "validation": metrics["images"],
        "top1": metrics["top1"],
        "top5": metrics["top5"],
        "card": "docs/weights.md",
    }


def print_bundled(name: str, metadata: dict[str, Any]) -> None:
    height, width = metadata["image_size"]
    accuracy = f"top-1 {percent(metadata['top1'], 1)} of {metadata['validation']:,} validation images"
    make_console().print("\n[bold]weights[/bold] (bundled)")
    print_fields(
        {
            "trained on": f"{metadata['data']}: {metadata['train']:,} images, {metadata['classes']} classes",
            "accuracy": f"{accuracy} at {height} x {width} pixels",
            "card": f"{metadata['card']}: training, intended use, license",
            "use": f"vitrail train photos/ --from {name}, or vitrail.load({name!r})",
        }
    )


def is_checkpoint(name: str) -> bool:
    """Whether `name` is a checkpoint path; a folder named like a model is not."""
    from vitrail.checkpoints.model_io import split_delta_path
    from vitrail.models.registry import lookup

    try:
        exists = bool(name) and (Path(name).exists() or split_delta_path(name)[1] is not None)
    except OSError:
        return False
    if not exists or Path(name).is_file() or Path(name).name != name:
        return exists
    try:
        lookup(name)
    except UserError:
        return True
    return False


def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A checkpoint in any supported format.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The file or folder to write.")],
    format: Annotated[
        str | None, typer.Option(help="vitrail, deit, timm, torchvision, hf or npz; default: by the suffix of OUT.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Load OUT and print the largest difference of the logits.")] = False,
    approximate: Annotated[bool, typer.Option("--approximate", help="Write even if the format changes the logits.")] = False,
    ema: Annotated[bool, typer.Option("--ema", help="Use the EMA weights of a training checkpoint.")] = False,
    trunk: Annotated[bool, typer.Option("--trunk", help="Without the head of a task, such as the projector of Grafit.")] = False,
    image_size: Annotated[
        str | None, typer.Option(help="Image size of IN if its position embedding is not square: 192x256.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing OUT.")] = False,
) -> None:
    """Convert a checkpoint to another format.

    Example: [bold]vitrail convert deit_small_patch16_224.pth deit_small.safetensors --check[/bold]
    """
    from vitrail.atomic_files import check_writable
    from vitrail.checkpoints import load, save
    from vitrail.checkpoints.model_io import logit_difference

    size = parse_size(image_size)
    if source.exists() and target.exists() and target.samefile(source):
        raise UserError(f"{target} is also the input: give another name.")
    if (target.is_file() or (target / "config.json").is_file()) and not overwrite:
        raise UserError(f"{target} exists: give another name, or --overwrite.")
    check_writable(target)
    model = load(source, image_size=size, ema=ema)
    if trunk:
        model.task_head = None
    torch_format = "timm" if model.architecture.convnet else "deit"
    format = format or {".npz": "npz", ".pth": torch_format, "": "hf"}.get(target.suffix, "vitrail")
    save(model, target, format, approximate)
    print_text(f"{model.name or 'model'} -> {target} ({format})")
    if format not in ("vitrail", "hf"):
        print_text(f"The {format} format does not store class names and preprocessing.", "dim")
    if check:
        height, width = model.architecture.image_size
        difference, largest = logit_difference(model, load(target, image_size=None if height == width else (height, width)))
        print_text(f"largest logit difference {difference:.3g} (largest logit {largest:.3g}) on 2 fixed inputs")
        if not math.isfinite(largest):
            raise UserError(f"The logits of {source} are NaN or Inf: its weights are damaged.")
        if not difference <= 1e-4 * largest and not approximate:
            raise UserError(f"{target} does not give the same logits as {source}.")
