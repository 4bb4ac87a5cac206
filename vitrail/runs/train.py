"""Run a training in its run directory, from the first command to the report.

run.json          source, recipe, versions, command, fingerprint of the data, result
recipe.yaml       the resolved recipe
metrics.jsonl     every logged number; tensorboard/ holds the same
checkpoints/      the last checkpoints, to resume from
best.safetensors  the artifact with the best validation metric; last.safetensors the final one
report.html       curves, result, recipe; report.png the curves alone
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from vitrail.atomic_files import WriteError
from vitrail.data.image_loader import ImageLoader
from vitrail.errors import UserError
from vitrail.formatting import escape_control
from vitrail.interrupts import State, require_cleanup
from vitrail.recipes import Recipe
from vitrail.recipes.arguments import RECIPE_KEYS, open_recipe, recipe_changes
from vitrail.runs.display import Display
from vitrail.runs.finish import finish_run, report_stopped
from vitrail.runs.prepare import Prepared, prepare, prepare_resumed
from vitrail.runs.reference_curves import find_reference_band
from vitrail.runs.request import Log, TrainRequest, resolve_recipe
from vitrail.runs.run_directory import (
    check_same_data,
    choose_folder,
    has_metrics,
    missing_folders,
    removed_on_failure,
    write_json,
    write_recipe,
)
from vitrail.training.checkpointing import (
    CheckpointManager,
    gather_weights,
    load_checkpoint,
    lock_run_directory,
    save_artifact,
    step_of,
)
from vitrail.training.distributed import Devices, init_distributed
from vitrail.training.metrics import MetricsWriter
from vitrail.training.throughput import Throughput
from vitrail.training.trainer import NonFiniteLoss, Options, Stopped


@dataclass(frozen=True)
class Run:
    """A finished (or stopped) training."""

    folder: Path
    finished: bool
    best: dict[str, Any]

    @property
    def artifact(self) -> Path:
        """The weights with the best validation metric."""
        return self.folder / "best.safetensors"


def train(
    source: str | Path = "digits",
    recipe: str | Recipe | None = None,
    *,
    from_: str | Path | None = None,
    model: str | None = None,
    epochs: float | None = None,
    minutes: float | None = None,
    scope: str | None = None,
    seed: int | None = None,
    teacher: str | Path | None = None,
    labels: str | Path | None = None,
    label: str | None = None,
    map: str | Path | None = None,
    tokenizer: str | Path | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    weight_decay: float | None = None,
    patience: int | None = None,
    changes: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    device: str | None = None,
    micro_batch_size: int | None = None,
    workers: int | None = None,
    unreadable: Literal["skip", "fatal"] = "skip",
    options: Options | None = None,
) -> Run:
    """Train on a source of images and return the finished run.

    >>> run = vitrail.train("photos/", from_="vitrail_tiny", epochs=10, lr=1e-3, out="runs/photos")
    >>> model = vitrail.load(run.artifact)

    The arguments are the options of `vitrail train`; None leaves the value of the recipe.

    Args:
        source: a folder with one subfolder per class, Parquet, tar, CIFAR or IDX files, a CSV table, hf://owner/name, "pets"
            or "digits" (built in).
        recipe: a name (see `vitrail recipes`), a Recipe, or a recipe.yaml of an earlier run; default: "finetune" with `from_` and
            for photographs, otherwise "laptop" on a CPU and "small" on a GPU.
        from_: initial weights: a checkpoint in any supported format, a run directory, or a name such as "vitrail_tiny" (bundled),
            "deit3_small", "timm:NAME" or "hf://owner/name".
        model: another model than the recipe's (see `vitrail models`).
        epochs: total number of epochs, including the recipe's cooldown.
        minutes: time budget, instead of `epochs`: the number of epochs and, with initial weights, the image size are chosen for
            it; default: 5 for fine-tuning on a CPU without `recipe` and `epochs`.
        scope: what is trained: "full", "attention", "ffn", "head", "norm", "last_norm" or "last:N".
        seed: seed of all random numbers.
        teacher: a network or label store to distill from.
        labels: a label store with token labels.
        label: the column of labels, such as "coarse_label"; "none": one class for all images.
        map: a CSV or JSON file with a coarser class for every class, which are trained on unless `label` is given.
        tokenizer: the tokenizer whose codes BEiT predicts, made by `vitrail tokenizer train`.
        lr: learning rate; recipes with `optimizer.lr_batch_size` scale it with the batch size.
        batch_size: images per optimizer step, over all devices.
        image_size: image size in pixels: 96, or (height, width); default: from weights, images and time budget.
        weight_decay: weight decay of the optimizer.
        patience: stop after this many validations without better weights (`validation.select_by`); 0: never.
        changes: any other value of the recipe by its key: {"mixing.mixup": 0.8}. The arguments above take precedence.
        out: run directory; default: a new one under runs/.
        device: "cpu", "cuda" or "cuda:1"; default: a GPU if available.
        micro_batch_size: images per forward and backward pass; default: as many as fit in memory.
        workers: processes that decode images; default: chosen by CPU cores.
        unreadable: "skip" images that cannot be read, or stop with an error ("fatal").
        options: compilation, sharding, checkpoints and logging: `vitrail.Options(keep=5)`.
    """
    everyday = {name: value for name, value in locals().items() if name in RECIPE_KEYS}
    recipe = open_recipe(recipe)
    return run_request(
        TrainRequest(
            os.fspath(source),
            recipe,
            model,
            recipe_changes(recipe, changes or {}, everyday),
            out,
            options,
            device,
            micro_batch_size,
            workers,
            unreadable,
            minutes=minutes,
        )
    )


def run_request(request: TrainRequest, others: Sequence[float] = ()) -> Run:
    """Prepare and run a training; `others` are those that follow, as multiples of its time, for the forecast."""
    with interruptible() as folders, init_distributed(request.device) as devices:
        log = to_stderr if devices.is_main else discard
        with devices.sync_errors():
            recipe = resolve_recipe(request, devices.device.type)
            folder, restarted = choose_folder(request.out, request.source, recipe.name)
        folder, restarted = devices.broadcast((folder, restarted))  # those of the main process, which writes there
        folders.append(folder)
        if restarted:  # torchrun has started the processes of this run again
            return resume_in(folder, devices, request.options, request.workers, log)
        prepared = prepare(request, recipe, devices, log, folder, others)
        devices = prepared.trainer.devices
        check_same_data(devices, prepared.run)
        created = missing_folders(folder)
        require_cleanup()
        with (
            lock_run_directory(folder, devices.is_main),
            removed_on_failure(folder, created if devices.is_main else None),
            explained(folder),
        ):
            if devices.is_main:
                write_recipe(folder / "recipe.yaml", prepared.trainer.recipe)
                write_json(folder / "run.json", prepared.run)  # last: from here on the run can be resumed
            devices.barrier()
            return run_prepared(prepared, log)


def resume(
    folder: str | Path,
    options: Options | None = None,
    device: str | None = None,
    workers: int | None = None,
    on_nan: Literal["stop", "skip"] | None = None,
    keep: int | None = None,
    save_seconds: float | None = None,
) -> Run:
    """Continue a run that was stopped or killed, with its own options unless others are given."""
    given = {"on_nan": on_nan, "keep": keep, "save_seconds": save_seconds}
    changed = {name: value for name, value in given.items() if value is not None}
    with interruptible() as folders, init_distributed(device) as devices:
        folders.append(Path(folder))
        return resume_in(Path(folder), devices, options, workers, to_stderr if devices.is_main else discard, changed)


def resume_in(
    folder: Path, devices: Devices, options: Options | None, workers: int | None, log: Log, changed: dict[str, Any] | None = None
) -> Run:
    prepared = prepare_resumed(folder, devices, options, workers, changed or {})
    require_cleanup()
    with lock_run_directory(folder, devices.is_main), explained(folder):
        return run_prepared(prepared, log)


def run_prepared(prepared: Prepared, log: Log) -> Run:
    """Train from the newest checkpoint, if there is one, to the report."""
    trainer, run = prepared.trainer, prepared.run
    folder, devices, recipe, options = trainer.folder, trainer.devices, trainer.recipe, trainer.options
    min_side = recipe.min_decode_side
    if prepared.resumed:
        for message in trainer.task.messages:
            log(message)
    with devices.sync_errors():
        parts = (prepared.splits.train, prepared.splits.validation)
        task = trainer.task
        reading = (devices.device, prepared.workers, min_side, run["unreadable"], log, task.reads_masks, task.reads_objects)
        loaders = [ImageLoader(part, *reading) for part in parts]
    for loader in loaders:
        log(loader.message)
    trainer.validation = loaders[1]
    loaded = load_checkpoint(trainer, log)
    finished = trainer.finished
    if finished:
        log("This run is finished; its report is written again.")
    elif loaded:
        log(f"resuming at step {trainer.step} of {trainer.total}")
    elif prepared.resumed:
        log(f"There is no checkpoint in {folder} yet: starting at the first step.")
    if not loaded and options.sharding == "none":  # a task cannot set sharded weights
        batch_size = max(recipe.batch_size // devices.micro_batches, 1)
        for message in trainer.task.initialize(trainer.model, loaders[0], batch_size):
            log(message)
        devices.broadcast_weights(trainer.model)  # rounding can differ between processes
        if trainer.ema:
            trainer.ema.reset()
    metrics = MetricsWriter(folder, trainer.step) if devices.is_main and not finished else None
    console = None if devices.is_main else Console(quiet=True)
    band = find_reference_band(run["recipe"], run["data"])
    metric = trainer.task.metric
    display = Display(trainer.total, trainer.sampler.steps, recipe.batch_size, trainer.step, console, band=band, metric=metric)
    try:
        with display, metrics or contextlib.nullcontext():
            if options.compile:
                display.show_activity("compiling")
            if not finished:
                speed = Throughput(trainer.model, devices.device, devices.world_size, trainer.task.relative_cost)
                trainer.run(loaders[0], display, metrics, speed)
                display.finish()
    except Stopped:
        if trainer.finished:
            log(f"Stopped after the last step; `vitrail resume {folder}` writes the report.")
        else:
            log(f"Stopped at step {trainer.step} of {trainer.total}; `vitrail resume {folder}` continues.")
        return Run(folder, False, trainer.best)
    except NonFiniteLoss as error:
        from vitrail.runs.nan_recorder import record_step

        bundle = record_step(trainer, loaders[0], error.step, run)
        raise UserError(
            f"The loss or a gradient was NaN or Inf at step {error.step}; the state before it is in {bundle}: "
            f"`vitrail replay {bundle}` shows where it started. {trainer.task.hint_for_nan()}; "
            f"`vitrail resume {folder} --on-nan skip` skips such steps."
        ) from None
    except UserError:
        if devices.is_main:
            with contextlib.suppress(UserError, OSError):
                report_stopped(prepared)
        raise
    finally:
        loaders[0].close()
    try:
        with trainer.evaluated_weights():
            weights = gather_weights(trainer.model, options.sharding)
            if devices.is_main:
                save_artifact(folder / "last.safetensors", trainer.model, recipe, {"step": trainer.step}, weights)
        if devices.is_main:
            finish_run(prepared, log)
    finally:
        loaders[1].close()
    devices.barrier()
    return Run(folder, True, trainer.best)


@contextlib.contextmanager
def interruptible() -> Iterator[list[Path]]:
    """An interrupt outside the training loop reports what is kept in the folder that is appended to the list."""
    folders: list[Path] = []
    State.interrupted = False  # of an earlier training of this process
    try:
        yield folders
    except (KeyboardInterrupt, Exception) as error:
        # A library that is being loaded may turn an interrupt into another exception.
        if not isinstance(error, KeyboardInterrupt) and not State.interrupted:
            raise
        raise KeyboardInterrupt(what_is_kept(folders[0] if folders else None)) from None


@contextlib.contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Add how to continue to the error of a file of the run that could not be written, such as on a full disk."""
    try:
        yield
    except WriteError as error:
        saved = CheckpointManager(folder / "checkpoints").all()
        if not saved and not has_metrics(folder):
            raise
        start = f"continues from step {step_of(saved[-1])}" if saved else "starts at the first step"
        raise UserError(f"{error.problem}: free some space there, then `vitrail resume {folder}` {start}.") from None


def what_is_kept(folder: Path | None) -> str:
    if folder is None or not (folder / "run.json").exists():
        return "Stopped before the first step; nothing was kept."
    if (folder / "last.safetensors").exists():
        return f"Stopped after the last step; `vitrail resume {folder}` writes the report."
    saved = CheckpointManager(folder / "checkpoints").all()
    if not saved:
        return f"Stopped before a checkpoint was saved; `vitrail resume {folder}` starts at the first step."
    return f"Stopped at once; `vitrail resume {folder}` continues from step {step_of(saved[-1])}."


def to_stderr(message: str) -> None:
    print(escape_control(message, "\n"), file=sys.stderr, flush=True)


def discard(message: str) -> None:
    """The log of processes other than the main one."""
