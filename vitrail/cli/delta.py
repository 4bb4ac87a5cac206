"""vitrail delta: what a training has changed, as a small file beside the weights it started from."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitrail.formatting import percent

delta = typer.Typer(
    no_args_is_help=True,
    help="Keep a fine-tuning as what it has changed: [bold]make[/bold], [bold]apply[/bold], [bold]info[/bold].",
)
BaseArgument = Annotated[
    str, typer.Argument(metavar="BASE", help="The weights that the training started from, of any known kind.")
]


@delta.command()
def make(
    base: BaseArgument,
    tuned: Annotated[str, typer.Argument(metavar="TUNED", help="The trained weights, or the folder of their run.")],
    out: Annotated[Path, typer.Option(help="The delta to write, a .safetensors file.")],
) -> None:
    """Write the tensors in which TUNED differs from BASE.

    Example: [bold]vitrail delta make deit3_small.pth runs/pets-finetune --out pets.safetensors[/bold]
    """
    from vitrail.atomic_files import check_writable, refuse_overwriting
    from vitrail.checkpoints import load
    from vitrail.checkpoints.delta import make_delta, save_delta

    check_writable(out)
    refuse_overwriting(out, *base.split("+"), *tuned.split("+"))
    found = make_delta(load(base), load(tuned))
    save_delta(found, out)
    size = out.stat().st_size
    print(
        f"{out}: {len(found.tensors)} tensors, {size / 1e6:.2f} MB, {percent(size / found.base_bytes, 1)} of the "
        f"{found.base_bytes / 1e6:.1f} MB of its base {found.base[:12]}"
    )


@delta.command()
def apply(
    base: BaseArgument,
    changed: Annotated[str, typer.Argument(metavar="DELTA", help="What `vitrail delta make` wrote.")],
    out: Annotated[Path, typer.Option(help="The whole model to write, a .safetensors file.")],
) -> None:
    """Write the whole model that BASE and DELTA make; `vitrail.load("BASE+DELTA")` gives the same without a file.

    Example: [bold]vitrail delta apply deit3_small.pth pets.safetensors --out whole.safetensors[/bold]
    """
    from vitrail.atomic_files import check_writable, refuse_overwriting
    from vitrail.checkpoints import load, save

    check_writable(out)
    refuse_overwriting(out, *base.split("+"), changed)
    model = load(base, delta=changed)
    save(model, out)
    print(f"{model.name or 'the model'} -> {out}")


@delta.command()
def info(
    changed: Annotated[str, typer.Argument(metavar="DELTA", help="What `vitrail delta make` wrote.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show what a delta holds, and for which weights it was made.

    Example: [bold]vitrail delta info pets.safetensors[/bold]
    """
    from vitrail.checkpoints.delta import read_delta, summary
    from vitrail.models.config import show_size

    facts = summary(read_delta(changed))
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    base, names, recipe = facts["base"], facts["class_names"], facts["recipe"]
    rows = {
        "model": f"{facts['name']} at {show_size(tuple(facts['image_size']))} pixels",
        "base": f"{base['name'] or 'without a name'}, sha256 {base['sha256']}",
        "size": f"{facts['parameters']:,} parameters, {facts['bytes'] / 1e6:.1f} MB, "
        f"{percent(facts['bytes'] / max(base['bytes'], 1), 1)} of the base's",
        "classes": ", ".join(names[:8]) + (f", … ({len(names)})" if len(names) > 8 else "") if names else "without names",
    }
    if recipe:
        rows["recipe"] = f"{recipe.get('name')}, scope {recipe.get('start', {}).get('scope')}"
    console = Console(width=None if sys.stdout.isatty() else 120)
    for title, text in rows.items():
        console.print(Text(f"{title:8}", "bold") + Text(text.replace("\n", " ")), highlight=False)
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("part", overflow="fold")
    table.add_column("tensors", justify="right")
    table.add_column("kB", justify="right")
    for name, part in facts["parts"].items():
        table.add_row(Text(name), str(part["tensors"]), f"{part['bytes'] / 1e3:,.1f}")
    console.print()
    console.print(table)
