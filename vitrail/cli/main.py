"""The command `vitrail`: parse, call, print."""

from vitrail import interrupts  # first: it answers Ctrl-C while the rest is loaded

# isort: split
import contextlib
import errno
import json
import math
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from vitrail.cli import train
from vitrail.cli.annotate import annotate, store
from vitrail.cli.bench import bench
from vitrail.cli.compare import ablate, compare
from vitrail.cli.data import data
from vitrail.cli.delta import delta
from vitrail.cli.demo import demo
from vitrail.cli.embed import embed, suite
from vitrail.cli.evaluate import disagree, evaluate
from vitrail.cli.predict import predict
from vitrail.cli.probe import probe
from vitrail.errors import UserError
from vitrail.formatting import percent
from vitrail.version import __version__


class Commands(TyperGroup):
    """Keeps interrupts from typer, which would end the program without a word."""

    def make_context(self, *words: Any, **named: Any) -> Any:
        with halting():
            return super().make_context(*words, **named)

    def invoke(self, ctx: Any) -> Any:
        with halting():
            return super().invoke(ctx)


@contextlib.contextmanager
def halting() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise interrupts.Halted(str(interrupt) or "Stopped.") from None


app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False
)
app.add_typer(data, name="data")
app.add_typer(delta, name="delta")
app.add_typer(probe, name="probe")
app.add_typer(train.recipes, name="recipes")
app.add_typer(store, name="store")
for command in (
    demo,
    train.train,
    train.resume,
    train.plan,
    train.replay,
    compare,
    ablate,
    annotate,
    predict,
    embed,
    suite,
    evaluate,
    disagree,
    bench,
):
    app.command()(command)
console = Console(width=None if sys.stdout.isatty() else 120)
COLUMNS = ("model", "size", "tokens", "parameters", "mult-adds", "memory")


def show_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Train, distil, adapt, measure, look into and ship vision transformers and their kin.

    Start with [bold]vitrail demo[/bold], then with a folder of images, one folder per class: [bold]vitrail train photos/[/bold]
    """


@app.command()
def models(
    pattern: Annotated[str, typer.Argument(help="A part of a name, or a shell pattern such as 'cait_*24'.")] = "*",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List models with parameters, multiply-adds, activation memory and tokens.

    Example: [bold]vitrail models 'deit3*'[/bold]
    """
    from vitrail.checkpoints.bundled import NAMES
    from vitrail.models.flops import known_costs, row
    from vitrail.models.registry import list_models, page_of

    names = list_models(pattern)
    if not names:
        raise UserError(f"No model matches {pattern!r}; `vitrail models` lists all.")
    costs = known_costs()
    if as_json:
        rows = [
            {"name": name, "paper": paper(page_of()[name]), **costs[name].to_dict(), "bundled_weights": name in NAMES}
            for name in names
        ]
        print(json.dumps(rows, indent=1))
        return
    table = cost_table()
    previous = None
    for name in names:
        if previous is not None and page_of()[name] is not previous:
            table.add_row()
        previous = page_of()[name]
        table.add_row(*row(f"{name} *" if name in NAMES else name, costs[name]))
    console.print(table)
    console.print(
        "mult-adds: matrix products and convolutions, one image; memory: activations kept for one image's backward, float32.",
        style="dim",
    )
    for name in (name for name in names if name in NAMES):
        console.print(f"* Trained weights come with the package: `vitrail info {name}` says what they know.", style="dim")


def paper(page: Any) -> str:
    return (page.__doc__ or "").split("\n")[0].rstrip(".")


def cost_table() -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    return table


@app.command()
def info(
    name: Annotated[str, typer.Argument(help="A model's name, bundled weights (vitrail_tiny), or a checkpoint file or folder.")],
    image_size: Annotated[str | None, typer.Option(help="Another size: 384, or 192x256 (height x width).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show one model: its parts, its cost, how images are prepared for it, and what its weights know if they ship.

    Example: [bold]vitrail info cait_s24 --image-size 384[/bold]
    """
    from vitrail.checkpoints import load
    from vitrail.checkpoints.bundled import NAMES, find_bundled
    from vitrail.models.config import Architecture
    from vitrail.models.flops import cost, row
    from vitrail.models.registry import create

    size = parse_size(image_size)
    bundled = find_bundled(name) is not None
    from_file = bundled or is_file(name)
    model = load(name) if from_file else create(name, device="meta", image_size=size)
    weights = bundled_facts(model) if bundled else None
    if from_file and size:
        model.resize(*size)
    price = cost(model.architecture)
    parts = model.architecture.to_dict()
    if as_json:
        content = {
            "name": model.name,
            "format": model.notes.get("format", "vitrail") if from_file else None,
            "architecture": parts,
            "cost": price.to_dict(),
            "preprocessing": model.preprocessing.to_dict(),
            "class_names": model.class_names,
            "bundled_weights": weights,
        }
        print(json.dumps(content, indent=1))
        return
    table = cost_table()
    table.add_row(*map(escape, row(model.name or Path(name).name, price)))
    console.print(table)
    plain = Architecture().to_dict()
    console.print("\n[bold]parts[/bold] (where they differ from a plain ViT-B/16)")
    for field, value in parts.items():
        if value != plain[field]:
            say(f"  {field:20} {value}")
    assumed = " (assumed: the file does not say)" if "preprocessing" in model.notes else ""
    console.print(f"\n[bold]images[/bold]{assumed}")
    for field, value in model.preprocessing.to_dict().items():
        say(f"  {field:20} {value}")
    if weights is not None:
        show_weights(name, weights)
    elif name in NAMES:
        say(f"\nTrained weights called {name} come with the package, but something by that name lies here and comes first.")


def bundled_facts(model: Any) -> dict[str, Any]:
    """What the file of bundled weights says of them; accuracy is that of the validation in their training."""
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


def show_weights(name: str, facts: dict[str, Any]) -> None:
    height, width = facts["image_size"]
    accuracy = f"top-1 {percent(facts['top1'], 1)} of {facts['validation']:,} validation images at {height} x {width} pixels"
    console.print("\n[bold]weights[/bold] (trained, and part of the package)")
    for field, value in {
        "trained on": f"{facts['data']}: {facts['train']:,} images, {facts['classes']} classes",
        "accuracy": accuracy,
        "card": f"{facts['card']}: how they were made, what they are for, their terms",
        "use": f"vitrail train photos/ --from {name}, or vitrail.load({name!r})",
    }.items():
        say(f"  {field:20} {value}")


def is_file(name: str) -> bool:
    """A checkpoint rather than a model's name; a folder that happens to be called like a model is not meant."""
    from vitrail.checkpoints.model_io import split_path
    from vitrail.models.registry import lookup

    try:
        exists = bool(name) and (Path(name).exists() or split_path(name)[1] is not None)
    except OSError:
        return False

    if not exists or Path(name).is_file() or Path(name).name != name:
        return exists
    try:
        lookup(name)
    except UserError:
        return True
    return False


def say(text: str) -> None:
    """Print text as it stands: brackets in names are not markup."""
    console.print(text, highlight=False, markup=False)


def parse_size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    sides = text.lower().split("x")
    if not all(side.isascii() and side.isdigit() and 0 < int(side) < 1 << 16 for side in sides) or len(sides) > 2:
        raise UserError(f"{text!r} is not an image size; write 384, or 192x256 for height 192 and width 256.")
    return int(sides[0]), int(sides[-1])


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A checkpoint file or folder of any known kind.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="What to write.")],
    format: Annotated[str | None, typer.Option(help="vitrail, deit, timm, hf or npz; by OUT's ending if not given.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Read OUT again and print the largest difference of logits.")] = False,
    approximate: Annotated[bool, typer.Option("--approximate", help="Write even where the format loses numerics.")] = False,
    ema: Annotated[bool, typer.Option("--ema", help="Take the averaged weights of a training file.")] = False,
    image_size: Annotated[
        str | None, typer.Option(help="The size of IN where its position table is not square: 192x256.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what lies at OUT.")] = False,
) -> None:
    """Turn one checkpoint format into another.

    Example: [bold]vitrail convert deit_small_patch16_224.pth deit_small.safetensors --check[/bold]
    """
    from vitrail.atomic_files import check_writable
    from vitrail.checkpoints import load, save
    from vitrail.checkpoints.parity import logit_difference

    size = parse_size(image_size)
    if source.exists() and target.exists() and target.samefile(source):
        raise UserError(f"{target} is what is to be converted: give another name.")
    if (target.is_file() or (target / "config.json").is_file()) and not overwrite:
        raise UserError(f"There are weights at {target} already: give another name, or --overwrite.")
    check_writable(target)
    format = format or {".safetensors": "vitrail", ".npz": "npz", ".pth": "deit", "": "hf"}.get(target.suffix, "vitrail")
    model = load(source, image_size=size, ema=ema)
    save(model, target, format, approximate)
    say(f"{model.name or 'the model'} -> {target} ({format})")
    if format not in ("vitrail", "hf"):
        console.print(f"The {format} format does not keep class names and preprocessing.", style="dim")
    if check:
        height, width = model.architecture.image_size
        difference, largest = logit_difference(model, load(target, image_size=None if height == width else (height, width)))
        say(f"largest logit difference {difference:.3g} (largest logit {largest:.3g}) on 2 fixed inputs")
        if not math.isfinite(largest):
            raise UserError(f"The answers of {source} are no numbers: its weights are damaged.")
        if not difference <= 1e-4 * largest and not approximate:
            raise UserError(f"{target} does not give the same logits as {source}.")


def main() -> None:
    """Entry point: a `UserError` becomes one sentence on standard error and exit code 2."""
    wait_briefly()
    code = exit_code()
    interrupts.State.over = True
    if "RANK" in os.environ:
        # Threads of torch's process group outlive it now and then, and an interpreter that ends then aborts the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def wait_briefly() -> None:
    """Threads of a product that wait for each other do not keep a core from the one they wait for.

    GNU's OpenMP, which torch's processor build takes, lets them turn for milliseconds unless it knows of too few cores.
    Other programs on the machine leave as few, and steps then take thirty times as long. This is its own number for that case.
    It is read when torch is loaded, which no command has done yet.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def exit_code() -> int:
    interrupts.begin()
    try:
        code = run()
        interrupts.State.leaving = code == interrupts.CODE  # it has told itself what was kept
        return code
    except (KeyboardInterrupt, interrupts.Halted) as interrupt:
        return interrupts.say_last(str(interrupt) or "Stopped.")
    except Exception:
        if not interrupts.State.heard:
            raise
        return interrupts.say_last("Stopped.")  # what a library has made of an interrupt
    finally:
        interrupts.disarm()


def run() -> int:
    try:
        check_words(sys.argv[1:])
        app()
    except UserError as error:
        if is_teller(error.report_here):
            print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        with contextlib.suppress(OSError):
            sys.stdout.close()  # what could not be written is not tried again at the end
        print("The disk is full: make room, or write elsewhere.", file=sys.stderr)
        return 2
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def check_words(words: Sequence[str]) -> None:
    """Refuses empty ones, as scripts hand them on from variables that are not set: an empty path would be the current folder."""
    for place, word in enumerate(words):
        option, sign, value = word.partition("=") if word.startswith("--") else ("", "=", word)
        if value.strip() or not sign:
            continue
        before = option or "".join(words[place - 1 : place])
        if before.startswith("--"):
            raise UserError(f"{before} is empty: give what it should be, or leave it out.")
        typed = shlex.join(["vitrail", *words[:place]])
        raise UserError(f"What follows `{typed}` is empty: give what should stand there, or leave it out.")


def is_teller(report_here: bool | None) -> bool:
    """Whether this process speaks for all that torchrun has started; on its own where they have not agreed on one."""
    return os.environ.get("LOCAL_RANK", "0") == "0" if report_here is None else report_here


interrupts.disarm()  # somebody may have imported this for its own purposes

if __name__ == "__main__":
    main()
