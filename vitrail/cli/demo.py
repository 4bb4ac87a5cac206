"""vitrail demo: the bundled weights fine-tuned on the built-in photographs, compared with training from scratch."""

import contextlib
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.cli.console import print_table
from vitrail.cli.options import DeviceOption
from vitrail.errors import UserError
from vitrail.formatting import percent

if TYPE_CHECKING:
    from vitrail.cli.demo_page import DemoRun

WEIGHTS, IMAGES = "vitrail_tiny", "pets"
MIN_EPOCHS, MAX_EPOCHS = 0.1, 10_000.0  # 0.1 epochs are one step
NEXT = "train photos/"
# Shared by both trainings; float32 is fast on every CPU, and few images need small batches for enough steps.
SHARED: dict[str, Any] = {
    "batch_size": 32,
    "precision": "fp32",
    "augmentation.policy": "none",
    "mixing.mixup": 0.0,
    "architecture.drop_path": 0.0,
}
ADAPTED: dict[str, Any] = {"init.weights": WEIGHTS, "init.scope": "attention", "optimizer.lr": 5e-3}
# From scratch, all layers train at the full learning rate; the image size is that of the bundled weights.
SCRATCH: dict[str, Any] = {"optimizer.lr": 1e-3, "optimizer.layer_decay": 1.0, "augmentation.image_size": [128, 128]}


def demo(
    out: Annotated[Path | None, typer.Option(help="Folder of both runs and the page; default: runs/pets-demo.")] = None,
    epochs: Annotated[float, typer.Option(help="Length of each training, from 0.1 to 10000.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of both trainings.")] = 0,
    device: DeviceOption = None,
) -> None:
    """Fine-tune the bundled weights on built-in photographs of cats and dogs, and compare with training from scratch.

    Takes minutes on a laptop, downloads nothing and writes report.html. If stopped, it continues with the same --out.

    Example: [bold]vitrail demo --out runs/demo[/bold]
    """
    if not MIN_EPOCHS <= epochs <= MAX_EPOCHS:  # also rejects NaN
        raise UserError(f"--epochs {epochs:g} is not a valid length: give a number from {MIN_EPOCHS:g} to {MAX_EPOCHS:g}.")
    # Before torch is imported: threads that spin while waiting slow a training down on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from vitrail.cli.demo_page import DemoRun, evaluate_run, write_demo_page
    from vitrail.runs.run_directory import check_empty, next_folder, write_json
    from vitrail.runs.train import resume, to_stderr, train
    from vitrail.training.trainer import Options

    for name in (WEIGHTS, IMAGES):
        if os.path.exists(name):
            raise UserError(
                f"A file or folder called {name} is in the current folder and would be used instead: run the demo elsewhere."
            )
    folder = out.expanduser() if out is not None else next_folder(IMAGES, "demo")
    if os.path.abspath(folder) in (os.path.abspath(WEIGHTS), os.path.abspath(IMAGES)):
        raise UserError(f"--out {folder} has the name of the demo's weights or images: give a folder with another name.")
    settings, mark = {"epochs": epochs, "seed": seed}, folder / "demo.json"
    if not mark.exists():
        check_empty(folder)
        write_json(mark, settings)
    elif read_settings(mark) != settings:
        raise UserError(f"{folder} holds a demo with other --epochs or --seed: give the same, or a new folder with --out.")
    again = f"`vitrail demo --out {folder} --epochs {epochs:.10g} --seed {seed}` continues."
    runs: list[DemoRun] = []
    try:
        for name, title, own in (
            ("adapted", f"adapted from {WEIGHTS}, attention only", ADAPTED),
            ("scratch", "from scratch", SCRATCH),
        ):
            to_stderr(f"{'' if not runs else chr(10)}{len(runs) + 1} of 2: {title}")
            leaves = SHARED | own | {"schedule.length": f"{epochs:.10g} epochs", "seed": seed}
            model = None if "init.weights" in own else WEIGHTS
            if (folder / name / "run.json").exists():
                done = resume(folder / name, device=device)
            else:
                done = train(IMAGES, "finetune", model=model, out=folder / name, changes=leaves, options=Options(), device=device)
            if not done.finished:
                to_stderr(again)
                sys.exit(130)
            runs.append(evaluate_run(title, done.folder, device))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"Stopped; {again}") from None
    except UserError:
        if not (folder / "adapted").exists():  # nothing has started
            mark.unlink()
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
    following = f"{own_name()} {NEXT}"
    page = write_demo_page(folder / "report.html", runs, following)
    write_json(folder / "results.json", {"next": following, "trainings": [each.to_dict() for each in runs]})
    print()
    show(runs)
    print(f"\nreport   {page}\nnumbers  {folder / 'results.json'}\nweights  {folder / 'adapted' / 'best.safetensors'}")
    print(f"\nNext, with your own images, one folder per class:\n  {following}")


def own_name() -> str:
    """The command for this program: its path if it is not on PATH, as after `make demo`."""
    script = Path(sys.executable).with_name("vitrail")
    if shutil.which("vitrail") or not script.exists():
        return "vitrail"
    return shlex.quote(os.path.relpath(script))


def read_settings(mark: Path) -> Any:
    try:
        return json.loads(mark.read_text())
    except (ValueError, OSError):
        raise UserError(f"{mark} cannot be read: give a new folder with --out.") from None


def show(runs: "list[DemoRun]") -> None:
    rows = []
    for each in runs:
        weights = f"{each.trained_parameters / 1e6:.1f} of {each.parameters / 1e6:.1f} M"
        rows.append((each.title, weights, each.time, f"{percent(each.top1, 1)} ± {100 * each.standard_error:.1f}"))
    columns = ("training", "trained weights", "time", "test accuracy")
    print_table(columns, rows, no_wrap=columns)
    first = runs[0]
    print(
        f"{first.images} test images of {len(first.names)} breeds (± standard error), seed {first.seed}; "
        f"chance level {percent(1 / len(first.names), 1)}."
    )
