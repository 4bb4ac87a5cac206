"""vitrail demo: the bundled weights adapted to the built-in photographs, beside the same training from scratch."""

import contextlib
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitrail.errors import UserError
from vitrail.formatting import percent

if TYPE_CHECKING:
    from vitrail.cli.demo_page import Attempt

WEIGHTS, IMAGES = "vitrail_tiny", "pets"
SHORTEST, LONGEST = 0.1, 10_000.0  # epochs; the shortest is a step
NEXT = f"train photos/ --from {WEIGHTS} --scope attention"
# What the two trainings share; float32 is fast on every CPU, and few images need small batches to take enough steps.
SHARED: dict[str, Any] = {
    "batch_size": 32,
    "precision": "fp32",
    "augmentation.policy": "none",
    "mixing.mixup": 0.0,
    "architecture.drop_path": 0.0,
}
ADAPTED: dict[str, Any] = {"init.weights": WEIGHTS, "init.scope": "attention", "optimizer.lr": 5e-3}
# Weights that know nothing must all learn at the full rate; the size is the one that the others bring along.
SCRATCH: dict[str, Any] = {"optimizer.lr": 1e-3, "optimizer.layer_decay": 1.0, "augmentation.image_size": [64, 64]}


def demo(
    out: Annotated[Path | None, typer.Option(help="The folder for both runs and the page; runs/pets-demo if not given.")] = None,
    epochs: Annotated[float, typer.Option(help="How long either training is, from 0.1 to 10000.")] = 3,
    seed: Annotated[int, typer.Option(help="Of both trainings.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; a GPU if there is one.")] = None,
) -> None:
    """Adapt the bundled weights to built-in photographs of cats and dogs, and compare with training from scratch.

    It takes minutes on a laptop, fetches nothing and writes a page, report.html. Stopped, it goes on with the same --out.

    Example: [bold]vitrail demo --out runs/demo[/bold]
    """
    if not SHORTEST <= epochs <= LONGEST:  # nor what is not a number
        raise UserError(f"--epochs {epochs:g} is not the length of a training: give a number from {SHORTEST:g} to {LONGEST:g}.")
    # Before torch is loaded: threads that spin while they wait slow a training down many times on a machine that is busy.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from vitrail.cli.demo_page import Attempt, look_at_test, write_page
    from vitrail.runs.run_directory import check_place, next_folder, write_json
    from vitrail.runs.train import resume, to_terminal, train
    from vitrail.training.trainer import Options

    for name in (WEIGHTS, IMAGES):
        if os.path.exists(name):
            raise UserError(f"A file or folder called {name} lies here and would be taken instead: run the demo elsewhere.")
    folder = out.expanduser() if out is not None else next_folder(IMAGES, "demo")
    if os.path.abspath(folder) in (os.path.abspath(WEIGHTS), os.path.abspath(IMAGES)):
        raise UserError(f"--out {folder} would be taken for what the demo learns from: give a folder by another name.")
    settings, mark = {"epochs": epochs, "seed": seed}, folder / "demo.json"
    if not mark.exists():
        check_place(folder)
        write_json(mark, settings)
    elif read_settings(mark) != settings:
        raise UserError(f"{folder} holds a demo with other --epochs or --seed: give those, or a new folder with --out.")
    again = f"`vitrail demo --out {folder} --epochs {epochs:.10g} --seed {seed}` goes on."
    attempts: list[Attempt] = []
    try:
        for name, title, own in (
            ("adapted", f"adapted from {WEIGHTS}, attention only", ADAPTED),
            ("scratch", "from scratch", SCRATCH),
        ):
            to_terminal(f"{'' if not attempts else chr(10)}{len(attempts) + 1} of 2: {title}")
            leaves = SHARED | own | {"schedule.length": f"{epochs:.10g} epochs", "seed": seed}
            model = None if "init.weights" in own else WEIGHTS
            if (folder / name / "run.json").exists():
                done = resume(folder / name, device=device)
            else:
                done = train(IMAGES, "finetune", model, folder / name, leaves, Options(), device)
            if not done.finished:
                to_terminal(again)
                sys.exit(130)
            attempts.append(look_at_test(title, done.folder, device))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"Stopped; {again}") from None
    except UserError:
        if not (folder / "adapted").exists():  # nothing has begun
            mark.unlink()
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
    following = f"{own_name()} {NEXT}"
    page = write_page(folder / "report.html", attempts, following)
    write_json(folder / "results.json", {"next": following, "trainings": [each.to_dict() for each in attempts]})
    print()
    show(attempts)
    print(f"\nreport   {page}\nnumbers  {folder / 'results.json'}\nweights  {folder / 'adapted' / 'best.safetensors'}")
    print(f"\nNext, with your own images, one folder per class:\n  {following}")


def own_name() -> str:
    """What to type for this program: its path where the shell would not find it, as after `make demo`."""
    script = Path(sys.executable).with_name("vitrail")
    if shutil.which("vitrail") or not script.exists():
        return "vitrail"
    return shlex.quote(os.path.relpath(script))


def read_settings(mark: Path) -> Any:
    try:
        return json.loads(mark.read_text())
    except (ValueError, OSError):
        raise UserError(f"{mark} cannot be read: give a new folder with --out.") from None


def show(attempts: "list[Attempt]") -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("training", "trained weights", "time", "test accuracy"):
        table.add_column(column, justify="left" if column == "training" else "right", no_wrap=True)
    for each in attempts:
        accuracy = f"{percent(each.top1, 1)} ± {100 * each.error:.1f}"
        table.add_row(Text(each.title), f"{each.trained / 1e6:.1f} of {each.parameters / 1e6:.1f} M", each.time, accuracy)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    first = attempts[0]
    print(
        f"{first.images} test images of {len(first.names)} breeds (± standard error), seed {first.seed}; "
        f"guessing would give {percent(1 / len(first.names), 1)}."
    )
