"""The end of a training: evaluate the best weights once more, complete run.json, write the report."""

from typing import Any

import safetensors.torch
import torch

from vitrail.data.image_loader import ImageLoader
from vitrail.data.source import Source
from vitrail.errors import UserError
from vitrail.formatting import percent
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.runs.prepare import Prepared
from vitrail.runs.report import write_report
from vitrail.runs.request import Log
from vitrail.runs.run_directory import read_run, write_json
from vitrail.training.distributed import Devices
from vitrail.training.metrics import as_json


def finish_run(prepared: Prepared, log: Log) -> None:
    """Complete run.json and write the report; called by the main process when all weights are on disk."""
    trainer, folder, splits = prepared.trainer, prepared.trainer.folder, prepared.splits
    best, metric, run = trainer.best, trainer.task.metric, read_run(folder)
    run |= {"best": best, "seconds": trainer.seconds, "steps": trainer.total, "metric": metric._asdict()}
    write_json(folder / "run.json", run)  # what follows may be interrupted
    run |= evaluate_best(prepared, log)
    write_json(folder / "run.json", run)
    write_report(folder)
    if trainer.skipped:
        log(f"{trainer.skipped} of {trainer.total} steps were skipped: their loss or gradient was NaN or Inf.")
    unread = len(splits.validation) - best.get("images", len(splits.validation))
    if unread:
        log(f"{unread:,} of {len(splits.validation):,} validation images could not be read and were skipped.")
    if "test" in run:
        images = f" ({run['test']['images']:,} images)" if "images" in run["test"] else ""
        log(f"test {metric.title} {show(run['test'][metric.name], metric.percent)}{images}")
    weights = folder / "best.safetensors"
    missing = "" if weights.is_file() else ", which is missing"
    value = show(best[metric.name], metric.percent)
    log(f"best validation {metric.title} {value} (epoch {best['epoch']:g}); weights {weights}{missing}")


def show(value: Any, as_percent: bool) -> str:
    return percent(value, 2) if as_percent and isinstance(value, float) else f"{float(value):.4g}"


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
                test_loader = ImageLoader(test, device, prepared.workers, loader.min_side, "skip", log)
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
