"""The end of a training: one more look at the best weights, the report, the last sentences."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vitrail.checkpoints import load
from vitrail.data.decode import decode
from vitrail.data.feed import Feed
from vitrail.data.source import Source, Splits
from vitrail.errors import UserError
from vitrail.evaluation.accuracy import count_hits, summarize, test_view
from vitrail.evaluation.confusion import class_accuracies, collect_answers, confusion, worst_mistakes
from vitrail.formatting import percent
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.runs.report import thumbnail, write_report
from vitrail.runs.run_directory import read_run, write_json
from vitrail.training.metrics import as_json
from vitrail.training.trainer import Trainer

LOOKED_AT = 50_000  # validation images beyond which looking for mistakes takes too long


def close_run(training: Trainer, folder: Path, splits: Splits, workers: int | None, say: Callable[[str], None]) -> None:
    """Complete run.json and write the report; for the first process alone, when all weights are on the disk."""
    best, facts = training.best, read_run(folder)
    facts |= {"best": best, "seconds": training.seconds, "steps": training.total}
    write_json(folder / "run.json", facts)  # what follows may be interrupted
    facts |= look_again(training, folder / "best.safetensors", splits, workers, say)
    write_json(folder / "run.json", facts)
    write_report(folder)
    if training.skipped:
        say(f"{training.skipped} of {training.total} steps were left out: their loss or gradient was not a number.")
    unread = len(splits.validation) - best["images"]
    if unread:
        say(f"{unread:,} of {len(splits.validation):,} validation images could not be read and were left out.")
    if "test" in facts:
        say(f"test accuracy {percent(facts['test']['top1'], 2)} ({facts['test']['images']:,} images)")
    weights = folder / "best.safetensors"
    missing = "" if weights.is_file() else ", which is not there any more"
    say(f"best validation accuracy {percent(best['top1'], 2)} (epoch {best['epoch']:g}); weights {weights}{missing}")


def look_again(
    training: Trainer, weights: Path, splits: Splits, workers: int | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """Mistakes on the validation images and accuracy on the test images, of the best weights."""
    found: dict[str, Any] = {}
    device, feed = training.devices.device, training.validation
    look, test = len(splits.validation) <= LOOKED_AT, splits.test
    reason = why_not(test, splits.train) if test is not None else ""
    if reason:
        say(f"The test images are not looked at: {reason}.")
    if not look and (test is None or reason):
        return found
    try:
        model = load(weights, device=device)
        if look:
            found |= mistakes(training, model, feed, splits.validation)
        if test is not None and not reason:
            found["test"] = accuracy(training, model, Feed(test, device, workers, feed.at_least, "skip", say))
    except torch.OutOfMemoryError:  # sharded weights may be too large for one device
        say("The best weights do not fit on one device beside the training: their mistakes are not looked at.")
    except UserError as error:
        say(f"The best weights were not looked at again: {error}")  # no reason to lose a training
    return found


def accuracy(training: Trainer, model: VisionTransformer, feed: Feed) -> dict[str, Any]:
    try:
        with training.autocast():
            hits = count_hits(model, feed, test_view(model.preprocessing), batch_of(training))
    finally:
        feed.close()
    return {name: as_json(value) for name, value in summarize(hits, model.architecture.classes)._asdict().items()}


def batch_of(training: Trainer) -> int:
    return max(training.recipe.batch_size // training.devices.micro_batches, 1)


def mistakes(training: Trainer, model: VisionTransformer, feed: Feed, source: Source) -> dict[str, Any]:
    """What run.json has about single images and classes; `vitrail.runs.report` shows it."""
    names = source.classes
    with training.autocast():
        answers = collect_answers(model, feed, test_view(model.preprocessing), batch_of(training))
    shown = []
    for index, truth, guess, confidence in zip(*worst_mistakes(answers), strict=True):
        pixels = decode(source.encoded(int(index)), feed.at_least)
        shown.append(
            {
                "image": thumbnail(pixels),
                "where": source.where(int(index)),
                "truth": names[truth],
                "guess": names[guess],
                "confidence": round(float(confidence), 6),
            }
        )
    return {"confusion": confusion(answers, names), "per_class": class_accuracies(answers, names), "mistakes": shown}


def why_not(test: Source, train: Source) -> str:
    """Why a test split cannot be used, "" if it can."""
    if not len(test):
        return "there are none"
    if test.label is None or not (test.label.values >= 0).any():
        return "they have no labels"
    if test.classes != train.classes:
        return "they have other classes"
    if int(test.label.values.max()) >= len(train.classes):
        return f"one has the label {int(test.label.values.max())}, for {len(train.classes)} classes"
    return ""
