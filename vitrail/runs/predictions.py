"""Groups of finished runs, asked about the same validation images one by one.

Seeds say how a result depends on chance in the training; images say how it depends on which images it was measured with.
"""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail.checkpoints import load
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.feed import Feed
from vitrail.data.progress import progress
from vitrail.errors import UserError
from vitrail.evaluation.accuracy import test_view
from vitrail.evaluation.confusion import collect_answers
from vitrail.evaluation.statistics import bootstrap, mcnemar
from vitrail.recipes import Recipe
from vitrail.runs.comparison import Group
from vitrail.runs.run_directory import fingerprint, read_run
from vitrail.training.distributed import choose_device
from vitrail.training.trainer import DTYPES

BATCH = 64


def compare_answers(groups: Sequence[Group], device: str | None = None) -> list[dict[str, Any]]:
    """For every group after the first: the mean difference over images and its interval, and McNemar's p of two single runs."""
    if len({result.data for group in groups for result in group.results}) > 1:
        raise UserError("--images needs trainings that had the same images.")
    source = str(read_run(groups[0].results[0].folder)["source"])
    splits = open_splits(source)
    if fingerprint(splits) != groups[0].results[0].data:
        raise UserError(f"The images at {source} are not those that these trainings had.")
    chosen = choose_device(device)
    feeds: dict[int | None, Feed] = {}
    shares: list[np.ndarray] = []
    single: list[np.ndarray | None] = []

    def make(at_least: int | None) -> Feed:
        return Feed(splits.validation, chosen, None, at_least)

    with progress("asking", sum(len(group.results) for group in groups)) as done:
        for group in groups:
            rights = []
            for result in group.results:
                rights.append(right(result.folder, feeds, make))
                done(1)
            shares.append(np.mean(rights, axis=0))
            single.append(rights[0] if len(rights) == 1 else None)
    for feed in feeds.values():
        feed.close()
    found = []
    for group, share, alone in zip(groups[1:], shares[1:], single[1:], strict=True):
        gaps = share - shares[0]
        low, high = bootstrap(gaps)
        p = mcnemar(single[0], alone) if single[0] is not None and alone is not None else None
        found.append(
            {"name": group.name, "images": len(gaps), "mean": float(gaps.mean()), "low": low, "high": high, "mcnemar": p}
        )
    return found


def right(folder: Path, feeds: dict[int | None, Feed], make: Callable[[int | None], Feed]) -> np.ndarray:
    """Which of the validation images [N] the best weights of a run recognize, in the precision that it was measured with."""
    recipe = Recipe.from_dict(read_run(folder)["recipe"])
    at_least = round(max(recipe.augmentation.image_size) * recipe.data.decode_scale) or None
    feed = feeds.setdefault(at_least, feeds.get(at_least) or make(at_least))
    model = load(folder / "best.safetensors", device=feed.device).eval()
    dtype = DTYPES.get(recipe.precision)
    with torch.autocast(feed.device.type, dtype) if dtype else contextlib.nullcontext():
        answers = collect_answers(model, feed, test_view(model.preprocessing), BATCH)
    found = np.zeros(len(feed.source), dtype=bool)
    found[answers.image] = ~answers.wrong
    return found
