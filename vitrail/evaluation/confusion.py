"""What a model takes for what: its answer to every image of a source, and what follows from the wrong ones."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from vitrail.data.feed import Feed
from vitrail.data.transforms.pipeline import Augmentation, augment

MATRIX_LIMIT = 40  # classes up to which all counts are worth keeping
PAIRS = 24


class Answers(NamedTuple):
    """One entry per image that could be read and has a label."""

    image: np.ndarray  # its number in the source
    truth: np.ndarray
    guess: np.ndarray
    confidence: np.ndarray  # of the guess, in [0, 1]

    @property
    def wrong(self) -> np.ndarray:
        return self.guess != self.truth


@torch.inference_mode()
def collect_answers(model: nn.Module, feed: Feed, view: Augmentation, batch: int) -> Answers:
    """The model's first guess for every image; nothing waits for the device before the end."""
    found = []
    for raw in feed.sweep(batch):
        assert raw.labels is not None
        images = augment(raw.pixels, raw.sizes, torch.zeros_like(raw.index), view).images
        confidence, guess = model(images).float().nan_to_num().softmax(1).max(1)
        found.append((raw.index, raw.labels, guess, confidence))
    if not found:
        return Answers(*(np.zeros(0, dtype=kind) for kind in (np.int64, np.int64, np.int64, np.float32)))
    columns = [torch.cat(column).cpu().numpy() for column in zip(*found, strict=True)]
    known = columns[1] >= 0
    return Answers(*(column[known] for column in columns))


def confusion(answers: Answers, names: Sequence[str]) -> dict[str, Any]:
    """{"names", "matrix"} with a row per true class where the classes are few, {"pairs"} of the most frequent mistakes else."""
    if len(names) <= MATRIX_LIMIT:
        matrix = np.zeros((len(names), len(names)), dtype=np.int64)
        np.add.at(matrix, (answers.truth, answers.guess), 1)
        return {"names": list(names), "matrix": matrix.tolist()}
    totals = np.bincount(answers.truth, minlength=len(names))
    keys, counts = np.unique(answers.truth[answers.wrong] * len(names) + answers.guess[answers.wrong], return_counts=True)
    pairs = [(*divmod(int(keys[place]), len(names)), int(counts[place])) for place in np.argsort(-counts, kind="stable")[:PAIRS]]
    return {
        "pairs": [
            {"truth": names[truth], "guess": names[guess], "count": count, "of": int(totals[truth])}
            for truth, guess, count in pairs
        ]
    }


def class_accuracies(answers: Answers, names: Sequence[str]) -> list[dict[str, Any]]:
    """Of every class that has images: its name, the share of them that is recognized, how many they are."""
    totals = np.bincount(answers.truth, minlength=len(names))
    right = np.bincount(answers.truth[~answers.wrong], minlength=len(names))
    return [
        {"name": name, "top1": int(right[place]) / int(totals[place]), "images": int(totals[place])}
        for place, name in enumerate(names)
        if totals[place]
    ]


def worst_mistakes(answers: Answers, count: int = 16) -> Answers:
    """The wrong answers that the model was surest of, surest first."""
    wrong = np.flatnonzero(answers.wrong)
    chosen = wrong[np.argsort(-answers.confidence[wrong], kind="stable")[:count]]
    return Answers(*(column[chosen] for column in answers))
