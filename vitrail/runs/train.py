"""A run: a folder with everything that one training is, from the first command to the report.

run.json          source, recipe, versions, command, fingerprint of the data, result
recipe.yaml       the resolved recipe, to read and to use again
metrics.jsonl     every logged number; tensorboard/ holds the same
checkpoints/      the last states, to go on from
best.safetensors  the artifact with the best validation accuracy; last.safetensors the final one
report.html       curves, result, recipe; report.png the curves alone
"""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from rich.console import Console

from vitrail.atomic_files import Unwritten, write_aside
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.feed import Feed
from vitrail.data.source import Splits
from vitrail.errors import UserError
from vitrail.interrupts import State, work_begins
from vitrail.models.flops import cost
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes import Recipe
from vitrail.runs.display import Display
from vitrail.runs.finish import close_run
from vitrail.runs.memory import Plan, check_room, make_plan
from vitrail.runs.prepare import build, check_numbers, divide, forecast, look_at, rebuild, resolve, unseen
from vitrail.runs.reference_curves import find_band
from vitrail.runs.run_directory import (
    check_same_data,
    check_same_teachers,
    choose_folder,
    describe,
    fingerprint,
    has_numbers,
    missing_folders,
    read_run,
    tidied,
    write_json,
)
from vitrail.runs.step_timing import rehearse
from vitrail.tasks.supervision import Asked, Guide, check_stores, identities, open_asked
from vitrail.training.checkpointing import Checkpoints, alone, number_of
from vitrail.training.distributed import Devices, check_shardable, choose_device, connected, is_launched
from vitrail.training.metrics import Metrics
from vitrail.training.precision import suited
from vitrail.training.throughput import Speed
from vitrail.training.trainer import NonFiniteLoss, Options, Stopped, Trainer
from vitrail.training.training_state import gather, load_state, save_artifact

Say = Callable[[str], None]


@dataclass(frozen=True)
class Run:
    """A finished (or stopped) training."""

    folder: Path
    finished: bool
    best: dict[str, Any]

    @property
    def artifact(self) -> Path:
        """The weights to use: those with the best validation accuracy."""
        return self.folder / "best.safetensors"


def train(
    source: str | Path = "digits",
    recipe: str | Recipe | None = None,
    model: str | None = None,
    out: str | Path | None = None,
    changes: dict[str, Any] | None = None,
    options: Options | None = None,
    device: str | None = None,
    micro_batch_size: int | None = None,
    workers: int | None = None,
    bad: str = "skip",
) -> Run:
    """Train on a source of images.

    >>> run = vitrail.train("photos/", recipe="laptop", out="runs/photos")
    >>> model = vitrail.load(run.artifact)
    """
    source = os.fspath(source)
    with stoppable() as place, connected(device) as devices:
        say = to_terminal if devices.is_main else nobody
        options = options or Options(compile=devices.device.type == "cuda")
        with devices.sync_errors():
            check_numbers(micro_batch_size, workers, options)
            resolved = resolve(recipe, model, changes, devices.device.type)
            splits, resolved, trained, said = look_at(source, resolved, model)
            resolved, sentences = suited(resolved, devices.device, changes or ())
            said += sentences
            folder, going_on = choose_folder(out, source, resolved.name)
        # As the first process sees it, which writes there.
        folder, going_on, precision = devices.broadcast((folder, going_on, resolved.precision))
        resolved = dataclasses.replace(resolved, precision=precision)
        place.append(folder)
        if going_on:
            return _resume(folder, devices, options, workers, say)
        for sentence in said:
            say(sentence)
        with devices.sync_errors():
            # Who cannot teach is told before anything is decoded or measured.
            asked = open_asked(resolved, splits.train, devices.device)
            check_stores(resolved, splits.train)
            start = build(resolved, splits.train, trained)
            check_room(folder, start, resolved, options.keep)
            guide, plan = measured(start, resolved, splits, devices, options, asked)
        devices = divide(devices, resolved, plan, micro_batch_size)
        price = cost(start.architecture)
        said = [f"{start.name}: {price.parameters:,} parameters, {price.macs / 1e9:.2f} G multiply-adds an image; run {folder}"]
        for sentence in (*said, *unseen(start), devices.describe(resolved.batch_size)):
            say(sentence)
        pace = rehearse(start, resolved, devices, splits, options, guide, workers)
        say(forecast(plan, pace, resolved, devices, splits.train, options))
        facts = describe(source, splits, resolved, start, devices, options, bad) | {"teachers": identities(resolved)}
        check_same_data(devices, facts)
        missing = missing_folders(folder)
        work_begins()
        with alone(folder, devices.is_main), tidied(folder, missing if devices.is_main else None), resumable(folder):
            if devices.is_main:
                text = yaml.safe_dump(json.loads(json.dumps(resolved.to_dict())), sort_keys=False)
                write_aside(folder / "recipe.yaml", lambda side: side.write_text(text))
                write_json(folder / "run.json", facts)  # last: from here on it can be resumed
            devices.barrier()
            return go(folder, resolved, start, splits, devices, options, workers, facts, say, guide)


def foresee(
    source: str,
    recipe: str | Recipe | None = None,
    model: str | None = None,
    changes: dict[str, Any] | None = None,
    device: str | None = None,
    micro_batch_size: int | None = None,
    options: Options | None = None,
    workers: int | None = None,
    out: str | Path | None = None,
    seeds: int = 1,
) -> list[str]:
    """What `train` would do with these arguments: data, model, division of the batch, memory and time.

    Of several processes the first has the answer.
    """
    with connected(device) as devices:
        options = options or Options(compile=devices.device.type == "cuda")
        with devices.sync_errors():
            check_numbers(micro_batch_size, workers, options)
            resolved = resolve(recipe, model, changes, devices.device.type)
            splits, resolved, trained, said = look_at(source, resolved, model)
            resolved, sentences = suited(resolved, devices.device, changes or ())
            said += sentences
            asked = open_asked(resolved, splits.train, devices.device)
            check_stores(resolved, splits.train)
            start = build(resolved, splits.train, trained)
            price = cost(start.architecture)
            said.append(f"{start.name}: {price.parameters:,} parameters, {price.macs / 1e9:.2f} G multiply-adds an image")
            guide, plan = measured(start, resolved, splits, devices, options, asked)
            said += guide.said
            if out is not None:
                check_room(Path(out).expanduser(), start, resolved, options.keep)
        devices = divide(devices, resolved, plan, micro_batch_size)
        pace = rehearse(start, resolved, devices, splits, options, guide, workers)
        said += [*unseen(start), devices.describe(resolved.batch_size)]
        said.append(forecast(plan, pace, resolved, devices, splits.train, options, seeds))
        return said if devices.is_main else []


def measured(
    model: VisionTransformer, recipe: Recipe, splits: Splits, devices: Devices, options: Options, asked: Asked | None
) -> tuple[Guide, Plan]:
    """Who teaches, and the memory that a training will take; the model is made what the options want it to be."""
    model.recompute = options.recompute
    if options.sharding != "none":
        check_shardable(model)
    shares = devices.world_size if options.sharding != "none" else 1
    guide = Guide(recipe, model, splits.train, devices.device, asked)
    return guide, make_plan(model, recipe, devices.device, recipe.batch_size // devices.world_size, shares, guide.teacher)


def resume(
    folder: str | Path,
    options: Options | None = None,
    device: str | None = None,
    workers: int | None = None,
    on_nan: Literal["stop", "skip"] | None = None,
    keep: int | None = None,
    save_seconds: float | None = None,
) -> Run:
    """Go on with a run that was stopped, killed or cut off, with its own options unless others are given."""
    given = {"on_nan": on_nan, "keep": keep, "save_seconds": save_seconds}
    other = {name: value for name, value in given.items() if value is not None}
    with stoppable() as place, connected(device) as devices:
        place.append(Path(folder))
        return _resume(Path(folder), devices, options, workers, to_terminal if devices.is_main else nobody, other)


def _resume(
    folder: Path,
    devices: Devices,
    options: Options | None,
    workers: int | None,
    say: Say,
    other: dict[str, Any] | None = None,
) -> Run:
    """`other`: of the run's own options, those that are to be different from now on."""
    with devices.sync_errors():
        facts = read_run(folder)
        try:
            recipe, saved, data = Recipe.from_dict(facts["recipe"]), Options(**facts["options"]), facts["data"]["fingerprint"]
        except (KeyError, TypeError) as error:
            raise UserError(f"{folder / 'run.json'} does not describe a training that can be resumed: {error}.") from None
        splits = open_splits(facts["source"], held_out=recipe.data.validation_fraction)
        if fingerprint(splits) != data:
            raise UserError(f"The images at {facts['source']} are not those that {folder} was started with.")
        if facts["micro_batches"] % devices.world_size:
            raise UserError(
                f"{folder} cuts its batch into {facts['micro_batches']} parts, which {devices.world_size} processes cannot share evenly."
            )
        check_same_teachers(recipe, facts.get("teachers"), folder)
        asked = open_asked(recipe, splits.train, devices.device)
        begun = Checkpoints(folder / "checkpoints").all()
        model = rebuild(facts, recipe, splits.train) if begun else build(recipe, splits.train)
        guide = Guide(recipe, model, splits.train, devices.device, asked)
    devices = dataclasses.replace(devices, micro_batches=facts["micro_batches"])
    options = options or dataclasses.replace(
        saved,
        compile=saved.compile and devices.device.type == "cuda",
        sharding=saved.sharding if is_launched() else "none",  # one process alone holds everything itself
        **(other or {}),
    )
    check_numbers(None, workers, options)
    work_begins()
    with alone(folder, devices.is_main), resumable(folder):
        return go(folder, recipe, model, splits, devices, options, workers, facts, say, guide, resumed=True)


@contextlib.contextmanager
def stoppable() -> Iterator[list[Path]]:
    """An interrupt outside the steps of a training says what was kept in the folder that the list is given."""
    place: list[Path] = []
    State.heard = False  # what was heard before, by another training of this program, is not this one's
    try:
        yield place
    except (KeyboardInterrupt, Exception) as error:
        # A library that is loaded just then may make something else of an interrupt.
        if not isinstance(error, KeyboardInterrupt) and not State.heard:
            raise
        raise KeyboardInterrupt(what_is_kept(place[0] if place else None)) from None


@contextlib.contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """Of a file of the run that could not be written, because the disk is full, say, tells how to go on."""
    try:
        yield
    except Unwritten as error:
        saved = Checkpoints(folder / "checkpoints").all()
        if not saved and not has_numbers(folder):
            raise
        place = f"goes on from step {number_of(saved[-1])}" if saved else "starts at its first step"
        raise UserError(f"{error.problem}: make room there, then `vitrail resume {folder}` {place}.") from None


def what_is_kept(folder: Path | None) -> str:
    if folder is None or not (folder / "run.json").exists():
        return "Stopped before the first step; nothing was kept."
    if (folder / "last.safetensors").exists():
        return f"Stopped after the last step; `vitrail resume {folder}` writes the report."
    saved = Checkpoints(folder / "checkpoints").all()
    if not saved:
        return f"Stopped before anything was saved; `vitrail resume {folder}` starts at the first step."
    return f"Stopped at once; `vitrail resume {folder}` goes on from step {number_of(saved[-1])}."


def hint(recipe: Recipe) -> str:
    if recipe.distillation.kind != "none" or recipe.token_labels.store:
        return "The teacher may have answered with what is no number; else a lower optimizer.lr or a longer warm-up often helps"
    return "A lower optimizer.lr or a longer warm-up often helps"


def go(
    folder: Path,
    recipe: Recipe,
    model: VisionTransformer,
    splits: Splits,
    devices: Devices,
    options: Options,
    workers: int | None,
    facts: dict[str, Any],
    say: Say,
    guide: Guide,
    resumed: bool = False,
) -> Run:
    """The training itself, from its newest checkpoint if there is one, to the report."""
    at_least = round(max(recipe.augmentation.image_size) * recipe.data.decode_scale) or None
    for sentence in guide.said:
        say(sentence)
    with devices.sync_errors():
        feeds = [
            Feed(part, devices.device, workers, at_least, facts["unreadable"], say) for part in (splits.train, splits.validation)
        ]
    for feed in feeds:
        say(feed.sentence)
    training = Trainer(recipe, model, devices, feeds[0], feeds[1], folder, options, guide)
    loaded = load_state(training, say)
    ended = training.step == training.total
    if loaded:
        say(
            "This run is finished; its report is written again."
            if ended
            else f"going on at step {training.step} of {training.total}"
        )
    elif resumed:
        say(f"There is no checkpoint in {folder} yet: starting at its first step.")
    metrics = Metrics(folder, training.step) if devices.is_main and not ended else None
    console = None if devices.is_main else Console(quiet=True)
    band = find_band(recipe.to_dict(), facts["data"])
    display = Display(training.total, training.order.steps, recipe.batch_size, training.step, console, band=band)
    try:
        with display, metrics or contextlib.nullcontext():
            if options.compile:
                display.doing("compiling")
            if not ended:
                training.run(display, metrics, Speed(model, devices.device, devices.world_size))
                display.finish()
    except Stopped:
        if training.step == training.total:
            say(f"Stopped after the last step; `vitrail resume {folder}` writes the report.")
        else:
            say(f"Stopped at step {training.step} of {training.total}; `vitrail resume {folder}` goes on.")
        return Run(folder, False, training.best)
    except NonFiniteLoss as error:
        from vitrail.runs.nan_recorder import record

        bundle = record(training, error.step, facts)
        raise UserError(
            f"The loss or a gradient was not a number at step {error.step}; the state before it is in {bundle}: "
            f"`vitrail replay {bundle}` shows where it began. {hint(recipe)}; "
            f"`vitrail resume {folder} --on-nan skip` leaves such steps out."
        ) from None
    finally:
        for feed in feeds:
            feed.close()
    with training.reported():
        weights = gather(model, options.sharding)
        if devices.is_main:
            save_artifact(folder / "last.safetensors", model, recipe, {"step": training.step}, weights)
    try:
        if devices.is_main:
            close_run(training, folder, splits, workers, say)
    finally:
        feeds[1].close()
    devices.barrier()
    return Run(folder, True, training.best)


def to_terminal(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def nobody(sentence: str) -> None:
    """What the other processes say to."""


__all__ = ["Options", "Run", "choose_device", "resume", "train"]
