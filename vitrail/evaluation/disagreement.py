"""Disagreement of models: share of images with different predictions, as DeiT (arXiv 2012.12877) compares a student's heads with
its teacher, agreement beyond chance, and error consistency.

Cohen's kappa is computed on the predictions. Error consistency (Geirhos et al., arXiv 2006.16736) is Cohen's kappa of correct and
wrong: 0 if the errors of two models are independent, 1 if they are on the same images.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from vitrail.data.class_matching import OTHER
from vitrail.data.contact_sheet import (
    BACKGROUND,
    CAPTION_HEIGHT,
    CLASS_GAP,
    GAP,
    MARGIN,
    MUTED_COLOR,
    SMALL_SIZE,
    TEXT_COLOR,
    TILE,
    draw_header,
    draw_image,
    draw_text,
    header_height,
)
from vitrail.data.decode import decode
from vitrail.data.source import Source
from vitrail.errors import UserError

LABEL = "label"
CORRECT_COLOR, WRONG_COLOR = "#1a7f5a", "#c62f39"
COLUMNS, ROWS = 8, 5  # of the sheet
INDENT = 22  # of a prediction, after the letter of its model
MAX_CLASSES = 12  # classes with the largest difference in accuracy


@dataclass(frozen=True)
class Disagreement:
    """M models on the same N images; NaN where a value is undefined, as kappa of two models with constant predictions."""

    names: list[str]  # [M]
    images: int
    differ: np.ndarray  # [M + 1, M + 1] share of different predictions; the first row and column are the labels
    kappa: np.ndarray  # [M, M]
    error_consistency: np.ndarray  # [M, M]
    pairs: list[dict[str, Any]]  # counts of correct and wrong predictions for each pair of models
    classes: list[dict[str, Any]]  # classes with the largest difference in accuracy
    correct: dict[str, int]  # number of images that all, some or none of the models classify correctly

    def to_dict(self) -> dict[str, Any]:
        return {
            "names": [LABEL, *self.names],
            "images": self.images,
            "differ": self.differ.tolist(),
            "kappa": _without_nan(self.kappa),
            "error_consistency": _without_nan(self.error_consistency),
            "pairs": self.pairs,
            "classes": self.classes,
            "correct": self.correct,
        }


def compare(names: Sequence[str], predictions: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> Disagreement:
    """predictions [M, N], labels [N]; predictions may be outside `classes`."""
    if not len(labels):
        raise UserError("There is no image with a prediction of every model and a label.")
    rows = np.concatenate([labels[None], predictions])
    hits = predictions == labels
    count = len(names)
    agreement, consistency = np.ones((count, count)), np.ones((count, count))
    pairs = []
    for a in range(count):
        for b in range(count):
            agreement[a, b], consistency[a, b] = kappa(predictions[a], predictions[b]), kappa(hits[a], hits[b])
        for b in range(a + 1, count):
            both_wrong, same = ~hits[a] & ~hits[b], predictions[a] == predictions[b]
            pairs.append(
                {
                    "models": [names[a], names[b]],
                    "both_correct": int((hits[a] & hits[b]).sum()),
                    "only_first_correct": int((hits[a] & ~hits[b]).sum()),
                    "only_second_correct": int((~hits[a] & hits[b]).sum()),
                    "same_error": int((both_wrong & same).sum()),
                    "different_errors": int((both_wrong & ~same).sum()),
                }
            )
    return Disagreement(
        list(names),
        len(labels),
        np.array([[(one != other).mean() for other in rows] for one in rows]),
        agreement,
        consistency,
        pairs,
        _most_different_classes(names, hits, labels, classes),
        {
            "all": int(hits.all(0).sum()),
            "some": int((hits.any(0) & ~hits.all(0)).sum()),
            "none": int((~hits.any(0)).sum()),
        },
    )


def kappa(one: np.ndarray, other: np.ndarray) -> float:
    """Cohen's kappa: (agreement - chance) / (1 - chance); NaN if the agreement by chance is 1."""
    values = np.unique(np.concatenate([one, other]))
    shares = [np.bincount(np.searchsorted(values, each), minlength=len(values)) / len(each) for each in (one, other)]
    chance = float(shares[0] @ shares[1])
    return float(((one == other).mean() - chance) / (1 - chance)) if chance < 1 else float("nan")


def _most_different_classes(
    names: Sequence[str], hits: np.ndarray, labels: np.ndarray, classes: Sequence[str]
) -> list[dict[str, Any]]:
    totals = np.bincount(labels, minlength=len(classes))
    accuracies = np.array([np.bincount(labels, hit, minlength=len(classes)) for hit in hits]) / np.maximum(totals, 1)
    difference = accuracies.max(0) - accuracies.min(0)
    order = [index for index in np.argsort(-difference, kind="stable")[:MAX_CLASSES] if difference[index] > 0]
    return [
        {
            "name": classes[index],
            "images": int(totals[index]),
            "top1": {name: float(value) for name, value in zip(names, accuracies[:, index], strict=True)},
        }
        for index in order
    ]


def _without_nan(values: np.ndarray) -> list[list[float | None]]:
    return [[float(value) if np.isfinite(value) else None for value in row] for row in values]


def order_by_disagreement(predictions: np.ndarray, labels: np.ndarray, seed: int = 0) -> np.ndarray:
    """Indices of the images with different predictions: one image of every class first, most different predictions first."""
    distinct = (np.diff(np.sort(predictions, 0), axis=0) != 0).sum(0)
    images = np.random.default_rng(seed).permutation(np.flatnonzero(distinct))
    turn = np.zeros(len(images), dtype=np.int64)
    for value in np.unique(labels[images]):
        members = labels[images] == value
        turn[members] = np.arange(members.sum())
    return images[np.lexsort((-distinct[images], turn))]


def draw_sheet(
    source: Source,
    image: np.ndarray,
    predictions: np.ndarray,
    labels: np.ndarray,
    names: Sequence[str],
    classes: Sequence[str],
    title: str,
    seed: int = 0,
) -> Image.Image | None:
    """A sheet of images with different predictions, each with its label and all predictions; None if there are none.

    image [N] are indices in the source; predictions [M, N], labels [N].
    """
    order = order_by_disagreement(predictions, labels, seed)
    tiles: list[tuple[int, np.ndarray]] = []
    for row in order.tolist():
        if len(tiles) == COLUMNS * ROWS:
            break
        try:
            tiles.append((row, decode(source.encoded(int(image[row])), 2 * TILE)))
        except (OSError, ValueError):
            continue  # removed since it was evaluated
    if not tiles:
        return None
    side = 3 * TILE // 2
    columns = min(COLUMNS, len(tiles))
    height = side + CAPTION_HEIGHT + len(names) * (SMALL_SIZE + GAP) + CLASS_GAP
    above = MARGIN + header_height() + len(names) * (SMALL_SIZE + GAP) + CLASS_GAP
    width = max(2 * MARGIN + columns * (side + CLASS_GAP) - CLASS_GAP, 6 * TILE)
    sheet = Image.new("RGB", (width, above + -(-len(tiles) // columns) * height - CLASS_GAP + MARGIN), BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    subtitle = f"{len(order):,} of {len(labels):,} images have different predictions; {len(tiles)} of them, seed {seed}"
    draw_header(draw, width, title, subtitle)
    for model, name in enumerate(names):
        top = MARGIN + header_height() + model * (SMALL_SIZE + GAP)
        draw_text(draw, (MARGIN, top), letter(model), SMALL_SIZE, MUTED_COLOR, INDENT)
        draw_text(draw, (MARGIN + INDENT, top), name, SMALL_SIZE, TEXT_COLOR, width - 2 * MARGIN - INDENT)
    for number, (row, pixels) in enumerate(tiles):
        left, top = MARGIN + number % columns * (side + CLASS_GAP), above + number // columns * height
        draw_image(sheet, (left, top), pixels, (side, side))
        draw_text(draw, (left, top + side), "=", SMALL_SIZE, MUTED_COLOR, INDENT)
        draw_text(draw, (left + INDENT, top + side), classes[labels[row]], SMALL_SIZE, TEXT_COLOR, side - INDENT)
        for model, prediction in enumerate(predictions[:, row].tolist()):
            text = classes[prediction] if prediction < len(classes) else OTHER
            color = CORRECT_COLOR if prediction == labels[row] else WRONG_COLOR
            line = top + side + CAPTION_HEIGHT - GAP + model * (SMALL_SIZE + GAP)
            draw_text(draw, (left, line), letter(model), SMALL_SIZE, MUTED_COLOR, INDENT)
            draw_text(draw, (left + INDENT, line), text, SMALL_SIZE, color, side - INDENT)
    return sheet


def letter(model: int) -> str:
    """A, B, … for models, since class names are often numbers."""
    return chr(ord("A") + model) if model < 26 else str(model + 1)
