"""The end of a training: evaluate the best weights once more, complete run.json, write the report."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import safetensors
import safetensors.torch
import torch

from vitrail.data.image_loader import ImageLoader
from vitrail.data.source import Source
from vitrail.errors import UserError
from vitrail.evaluation.verdict import judge_run, majority_share
from vitrail.formatting import format_epochs, pluralize
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.runs.prepare import Prepared
from vitrail.runs.report import describe_warning, format_test, write_report
from vitrail.runs.request import Log
from vitrail.runs.run_directory import read_run, write_json
from vitrail.tasks.probe_head import linear_heads
from vitrail.training.distributed import Devices
from vitrail.training.metrics import TOP1, as_json, read_metrics
from vitrail.training.task import Task

NUMBER = re.compile(r"\d+(\.\d+)?")


def finish_run(prepared: Prepared, log: Log) -> None:
    """Complete run.json and write the report; called by the main process when all weights are on disk."""
    trainer, folder, splits = prepared.trainer, prepared.trainer.folder, prepared.splits
    best, metric, run = read_best(prepared), trainer.task.metric, read_run(folder)
    run |= {"best": best, "seconds": trainer.seconds, "steps": trainer.step, "metric": metric._asdict()}
    run["stopped_early"] = trainer.stopped_early
    write_json(folder / "run.json", run)  # what follows may be interrupted
    run |= evaluate_best(prepared, log)
    lines = read_metrics(folder)
    if trainer.task.class_names is not None:
        run["baselines"] = measure_baselines(prepared, lines) | (run.get("baselines") or {})
    verdict = judge_run(run, lines)
    if verdict is not None:
        run["verdict"] = verdict.to_dict()
    run["warnings"] = list_warnings(trainer.task, lines)
    write_json(folder / "run.json", run)
    write_report(folder)
    if trainer.stopped_early:
        epochs = " of ".join(format_epochs(steps / trainer.sampler.steps) for steps in (trainer.step, trainer.total))
        validations = pluralize(trainer.recipe.validation.patience, "validation")
        better = "lower loss" if trainer.recipe.validation.select_by == "loss" else f"better {metric.title}"
        log(f"stopped at epoch {epochs}: {validations} in a row without a {better}")
    if trainer.skipped:
        log(f"{trainer.skipped} of {trainer.step} steps were skipped: their loss or gradient was NaN or Inf.")
    unread = len(splits.validation) - best.get("images", len(splits.validation))
    if unread:
        skipped = "was skipped" if unread == 1 else "were skipped"
        log(f"{unread:,} of {len(splits.validation):,} validation images could not be read and {skipped}.")
    if "test" in run:
        log(f"test {metric.title} {format_test(run['test'], metric)}")
    for warning in run["warnings"]:
        log(describe_warning(warning))
    if verdict is not None:
        log(f"best validation {metric.title} {verdict.plus_minus} (epoch {format_epochs(best['epoch'])})")
        for sentence in verdict.describe():
            log(sentence)
    else:
        log(f"best weights of epoch {format_epochs(best['epoch'])}: validation {metric.title} {metric.format(best[metric.name])}")
    weights = folder / "best.safetensors"
    missing = "" if weights.is_file() else ", which is missing"
    log(f"report {folder / 'report.html'}; weights {weights}{missing}")
    if suggestion := trainer.task.suggest_next(trainer.model, folder, run["source"]):
        log(suggestion)


def report_stopped(prepared: Prepared) -> None:
    """Write the report of a training that its task has stopped, with the reason; nothing if it was stopped by something else."""
    folder = prepared.trainer.folder
    warnings = list_warnings(prepared.trainer.task, read_metrics(folder))
    if warnings:
        write_json(folder / "run.json", read_run(folder) | {"warnings": warnings})
        write_report(folder)


def read_best(prepared: Prepared) -> dict[str, Any]:
    """The metrics of best.safetensors: usually those of the trainer.

    A run that was killed after a checkpoint may have written better weights than it reaches again where it is resumed, if that
    is another device.
    """
    try:
        with safetensors.safe_open(prepared.trainer.folder / "best.safetensors", "pt") as file:
            metrics = json.loads(json.loads(file.metadata()["vitrail"])["notes"]["metrics"])
        best: dict[str, Any] = prepared.trainer.best | metrics
        return best
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError):  # missing: reported below
        return prepared.trainer.best


def list_warnings(task: Task, lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the task found wrong in the validations; the same problem in several in a row is one entry, with its last numbers."""
    found: list[dict[str, Any]] = []
    before = ""
    for line in lines:
        if line["kind"] != "validation":
            continue
        try:
            message = task.diagnose(line, line["epoch"])
        except UserError as error:
            message = str(error)
        problem = NUMBER.sub("", message)
        if message and problem == before:
            found[-1] |= {"last_epoch": line["epoch"], "message": message}
        elif message:
            found.append({"epoch": line["epoch"], "last_epoch": line["epoch"], "message": message})
        before = problem
    return found


def measure_baselines(prepared: Prepared, lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Accuracies on the validation images: of always predicting the most frequent class ("majority"), and of the classifier on
    the frozen features with which the training started ("probe"), if it was validated. {} for a metric other than accuracy."""
    if prepared.trainer.task.metric != TOP1:
        return {}
    train, validation = prepared.splits.train.label, prepared.splits.validation.label
    found = {}
    if train is not None and validation is not None:
        found["majority"] = majority_share(train.values, validation.values)
    first = next((line for line in lines if line["kind"] == "validation"), {})
    trainer, init = prepared.trainer, prepared.trainer.recipe.init
    fitted = init.weights and init.probe_head and init.zero_head and trainer.options.sharding == "none"
    if fitted and linear_heads(trainer.model) and first.get("step") == 0 and "top1" in first:
        found["probe"] = first["top1"]
    return found


def evaluate_best(prepared: Prepared, log: Log) -> dict[str, Any]:
    """The task's report on the validation images and its metrics on the test images, of the best weights."""
    trainer, splits = prepared.trainer, prepared.splits
    found: dict[str, Any] = {}
    device, loader, test = trainer.devices.device, trainer.validation, splits.test
    assert loader is not None
    batch_size = max(trainer.recipe.batch_size // trainer.devices.micro_batches, 1)
    reason = why_not_tested(test, splits.train, trainer.task.class_names is not None) if test is not None else ""
    if reason:
        log(f"The test images are not evaluated: {reason}.")
    try:
        model = load_best(prepared)
        with trainer.autocast():
            found |= trainer.task.report(model, loader, splits, batch_size)
            if test is not None and not reason:
                targets = trainer.task.reads_masks, trainer.task.reads_objects
                test_loader = ImageLoader(test, device, prepared.workers, loader.min_side, "skip", log, *targets)
                try:
                    values = trainer.task.evaluate(model, test_loader, batch_size, Devices(device))
                finally:
                    test_loader.close()
                found["test"] = {name: as_json(value) for name, value in values.items()}
    except torch.OutOfMemoryError:  # sharded weights may not fit on one device
        log("The best weights do not fit on one device besides the training: they are not evaluated again.")
    except (UserError, OSError, RuntimeError, safetensors.SafetensorError) as error:
        log(f"The best weights were not evaluated again: {error}")  # no reason to lose a training
    return found


def load_best(prepared: Prepared) -> VisionTransformer:
    """The model with the best weights: the trained one, or a new one where its weights are sharded."""
    trainer = prepared.trainer
    trainer.task.has_best_weights = True
    path = trainer.folder / "best.safetensors"
    if trainer.options.sharding != "none":
        from vitrail.checkpoints import load

        return load(path, device=trainer.devices.device)
    trainer.model.load_state_dict(safetensors.torch.load_file(path, device=str(trainer.devices.device)))
    return trainer.model.eval()


def why_not_tested(test: Source, train: Source, labeled: bool) -> str:
    """Why a test split cannot be evaluated, "" if it can; `labeled`: the task needs class labels."""
    if not len(test):
        return "there are none"
    if not labeled:
        return ""
    if test.label is None or not (test.label.values >= 0).any():
        return "they have no labels"
    if test.classes != train.classes:
        return "they have other classes"
    if int(test.label.values.max()) >= len(train.classes):
        return f"one has the label {int(test.label.values.max())}, for {len(train.classes)} classes"
    return ""
