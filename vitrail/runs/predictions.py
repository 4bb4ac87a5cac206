"""Compare groups of finished runs image by image, on the validation images.

Seeds show how a result varies with the randomness of training; images show how it varies with the choice of validation images.
"""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail.checkpoints import load
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.image_loader import ImageLoader
from vitrail.data.progress import progress
from vitrail.devices import choose_device
from vitrail.errors import UserError
from vitrail.evaluation.confusion import collect_predictions
from vitrail.evaluation.statistics import bootstrap, mcnemar
from vitrail.recipes import Recipe
from vitrail.runs.comparison import Group
from vitrail.runs.request import split_arguments
from vitrail.runs.run_directory import fingerprint, read_run
from vitrail.training.trainer import DTYPES

BATCH = 64


def compare_predictions(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """For every group after the first: mean difference over images with its interval, and McNemar's p for two single runs."""
    if len({result.data for group in groups for result in group.results}) > 1:
        raise UserError("--images needs runs on the same data.")
    first_run = read_run(groups[0].results[0].folder)
    if (first_run.get("metric") or {}).get("name", "top1") != "top1":
        raise UserError("--images compares predicted classes, which these runs do not have: remove it.")
    source = str(first_run["source"])
    arguments = split_arguments(Recipe.from_dict(first_run["recipe"]))
    splits = open_splits(source, class_order=first_run["data"].get("classes"), **arguments)
    if fingerprint(splits) != groups[0].results[0].data:
        raise UserError(f"The images at {source} are not those that these runs were trained on.")
    device = choose_device(None)
    loaders: dict[int | None, ImageLoader] = {}
    accuracies: list[np.ndarray] = []  # per group: mean over runs, [images]
    single_runs: list[np.ndarray | None] = []

    def open_loader(min_side: int | None) -> ImageLoader:
        return ImageLoader(splits.validation, device, None, min_side)

    with progress("predicting", sum(len(group.results) for group in groups)) as advance:
        for group in groups:
            correct = []
            for result in group.results:
                correct.append(correct_predictions(result.folder, loaders, open_loader))
                advance(1)
            accuracies.append(np.mean(correct, axis=0))
            single_runs.append(correct[0] if len(correct) == 1 else None)
    for loader in loaders.values():
        loader.close()
    first, comparisons = single_runs[0], []
    for group, accuracy, run in zip(groups[1:], accuracies[1:], single_runs[1:], strict=True):
        differences = accuracy - accuracies[0]
        low, high = bootstrap(differences)
        p = mcnemar(first, run) if first is not None and run is not None else None
        mean = float(differences.mean())
        comparisons.append({"name": group.name, "images": len(differences), "mean": mean, "low": low, "high": high, "mcnemar": p})
    return comparisons


def correct_predictions(
    folder: Path, loaders: dict[int | None, ImageLoader], open_loader: Callable[[int | None], ImageLoader]
) -> np.ndarray:
    """Which validation images the best weights of a run classify correctly, [N] bool, in the precision of its validation."""
    recipe = Recipe.from_dict(read_run(folder)["recipe"])
    min_side = recipe.min_decode_side
    loader = loaders.setdefault(min_side, loaders.get(min_side) or open_loader(min_side))
    model = load(folder / "best.safetensors", device=loader.device).eval()
    dtype = DTYPES.get(recipe.precision)
    with torch.autocast(loader.device.type, dtype) if dtype else contextlib.nullcontext():
        predictions = collect_predictions(model, loader, model.preprocessing, BATCH)
    correct = np.zeros(len(loader.source), dtype=bool)
    correct[predictions.image] = ~predictions.wrong
    return correct
