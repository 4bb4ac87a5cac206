"""vitrail delta make, apply, info."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from vitrail.cli.console import make_console, print_json, print_table
from vitrail.cli.options import JsonOption
from vitrail.formatting import format_bytes, percent

delta = typer.Typer(
    no_args_is_help=True,
    help="Store a fine-tuned model as the tensors that changed: [bold]make[/bold], [bold]apply[/bold], [bold]info[/bold].",
)
BaseArgument = Annotated[
    str, typer.Argument(metavar="BASE", help="The weights that the training started from, in any supported format.")
]
DeltaArgument = Annotated[str, typer.Argument(metavar="DELTA", help="A file written by `vitrail delta make`.")]


@delta.command()
def make(
    base: BaseArgument,
    tuned: Annotated[str, typer.Argument(metavar="TUNED", help="The trained weights, or their run directory.")],
    out: Annotated[Path, typer.Option(help="The delta to write, a .safetensors file.")],
) -> None:
    """Write the tensors of TUNED that differ from BASE.

    Example: [bold]vitrail delta make deit3_small.pth runs/pets-finetune --out pets.safetensors[/bold]
    """
    from vitrail.atomic_files import check_writable, reject_overwrite
    from vitrail.checkpoints import load
    from vitrail.checkpoints.delta import make_delta, save_delta

    check_writable(out)
    reject_overwrite(out, *base.split("+"), *tuned.split("+"))
    made = make_delta(load(base), load(tuned))
    save_delta(made, out)
    size = out.stat().st_size
    print(
        f"{out}: {len(made.tensors)} tensors, {format_bytes(size)}, {percent(size / made.base_bytes, 1)} of the "
        f"{format_bytes(made.base_bytes)} of its base {made.base[:12]}"
    )


@delta.command()
def apply(
    base: BaseArgument,
    changed: DeltaArgument,
    out: Annotated[Path, typer.Option(help="The model to write, a .safetensors file.")],
) -> None:
    """Write the model of BASE and DELTA as one file; `vitrail.load("BASE+DELTA")` returns it without a file.

    Example: [bold]vitrail delta apply deit3_small.pth pets.safetensors --out full.safetensors[/bold]
    """
    from vitrail.atomic_files import check_writable, reject_overwrite
    from vitrail.checkpoints import load, save

    check_writable(out)
    reject_overwrite(out, *base.split("+"), changed)
    model = load(base, delta=changed)
    save(model, out)
    print(f"{model.name or 'the model'} -> {out}")


@delta.command()
def info(
    changed: DeltaArgument,
    as_json: JsonOption = False,
) -> None:
    """Show the content of a delta, and the weights that it was made from.

    Example: [bold]vitrail delta info pets.safetensors[/bold]
    """
    from vitrail.checkpoints.delta import read_delta, summarize
    from vitrail.models.config import format_size

    summary = summarize(read_delta(changed))
    if as_json:
        print_json(summary)
        return
    base, names, recipe = summary["base"], summary["class_names"], summary["recipe"]
    rows = {
        "model": f"{summary['name']} at {format_size(tuple(summary['image_size']))} pixels",
        "base": f"{base['name'] or 'without a name'}, sha256 {base['sha256']}",
        "size": f"{summary['parameters']:,} parameters, {format_bytes(summary['bytes'])}, "
        f"{percent(summary['bytes'] / max(base['bytes'], 1), 1)} of the base",
        "classes": ", ".join(names[:8]) + (f", … ({len(names)})" if len(names) > 8 else "") if names else "without names",
    }
    if recipe:
        rows["recipe"] = f"{recipe.get('name')}, scope {recipe.get('init', {}).get('scope')}"
    console = make_console()
    for title, text in rows.items():
        console.print(Text(f"{title:8}", "bold") + Text(text.replace("\n", " ")), highlight=False)
    console.print()
    parts = summary["parts"].items()
    print_table(("part", "tensors", "kB"), [(name, str(part["tensors"]), f"{part['bytes'] / 1e3:,.1f}") for name, part in parts])
