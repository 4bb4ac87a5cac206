"""Where models differ: shares of images that they answer differently, as DeiT (arXiv 2012.12877) compares a student's heads
with its teacher, agreement beyond chance, and whether they err on the same images.

Cohen's kappa is that of the answers. Error consistency (Geirhos et al., arXiv 2006.16736) is Cohen's kappa of right and wrong: 0
if two models err independently of each other, 1 if on the same images.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from vitrail.data.contact_sheet import (
    ALLEY,
    GAP,
    INK,
    LINE,
    MARGIN,
    PAPER,
    QUIET,
    SMALL,
    TILE,
    header_height,
    mount,
    write,
    write_header,
)
from vitrail.data.decode import decode
from vitrail.data.source import Source
from vitrail.errors import UserError
from vitrail.evaluation.class_matching import OTHER

TRUTH = "truth"
RIGHT, WRONG = "#1a7f5a", "#c62f39"
COLUMNS, ROWS = 8, 5  # of the sheet
INDENT = 22  # of an answer, behind the letter of its model
GAPS = 12  # classes on which models differ most


@dataclass(frozen=True)
class Disagreement:
    """M models on the same N images; NaN where a share has no meaning, as agreement beyond chance of two that never vary."""

    names: list[str]  # [M]
    images: int
    differ: np.ndarray  # [M + 1, M + 1] share answered differently; the first row and column are the truth
    kappa: np.ndarray  # [M, M]
    error_consistency: np.ndarray  # [M, M]
    pairs: list[dict[str, Any]]  # who errs where
    classes: list[dict[str, Any]]  # where their accuracies are furthest apart
    right: dict[str, int]  # images that all, some or none of them recognize

    def to_dict(self) -> dict[str, Any]:
        return {
            "names": [TRUTH, *self.names],
            "images": self.images,
            "differ": self.differ.tolist(),
            "kappa": _finite(self.kappa),
            "error_consistency": _finite(self.error_consistency),
            "pairs": self.pairs,
            "classes": self.classes,
            "right": self.right,
        }


def compare(names: Sequence[str], guesses: np.ndarray, truth: np.ndarray, classes: Sequence[str]) -> Disagreement:
    """guesses [M, N] of answers, truth [N]; classes without a place in `classes` may be guessed too."""
    if not len(truth):
        raise UserError("There is no image that every model could be asked about.")
    everyone = np.concatenate([truth[None], guesses])
    hits = guesses == truth
    count = len(names)
    agree, errors = np.ones((count, count)), np.ones((count, count))
    pairs = []
    for a in range(count):
        for b in range(count):
            agree[a, b], errors[a, b] = kappa(guesses[a], guesses[b]), kappa(hits[a], hits[b])
        for b in range(a + 1, count):
            pairs.append(
                {
                    "models": [names[a], names[b]],
                    "both_right": int((hits[a] & hits[b]).sum()),
                    "first_right": int((hits[a] & ~hits[b]).sum()),
                    "second_right": int((~hits[a] & hits[b]).sum()),
                    "both_wrong_alike": int((~hits[a] & ~hits[b] & (guesses[a] == guesses[b])).sum()),
                    "both_wrong_differently": int((~hits[a] & ~hits[b] & (guesses[a] != guesses[b])).sum()),
                }
            )
    return Disagreement(
        list(names),
        len(truth),
        np.array([[(one != other).mean() for other in everyone] for one in everyone]),
        agree,
        errors,
        pairs,
        _furthest(names, hits, truth, classes),
        {
            "all": int(hits.all(0).sum()),
            "some": int((hits.any(0) & ~hits.all(0)).sum()),
            "none": int((~hits.any(0)).sum()),
        },
    )


def kappa(one: np.ndarray, other: np.ndarray) -> float:
    """Cohen's: the agreement beyond that of chance, over what is left beyond it; NaN if chance alone agrees always."""
    kinds = np.unique(np.concatenate([one, other]))
    shares = [np.bincount(np.searchsorted(kinds, each), minlength=len(kinds)) / len(each) for each in (one, other)]
    chance = float(shares[0] @ shares[1])
    return float(((one == other).mean() - chance) / (1 - chance)) if chance < 1 else float("nan")


def _furthest(names: Sequence[str], hits: np.ndarray, truth: np.ndarray, classes: Sequence[str]) -> list[dict[str, Any]]:
    totals = np.bincount(truth, minlength=len(classes))
    shares = np.array([np.bincount(truth, hit, minlength=len(classes)) for hit in hits]) / np.maximum(totals, 1)
    spread = shares.max(0) - shares.min(0)
    order = [place for place in np.argsort(-spread, kind="stable")[:GAPS] if spread[place] > 0]
    return [
        {
            "name": classes[place],
            "images": int(totals[place]),
            "top1": {name: float(share) for name, share in zip(names, shares[:, place], strict=True)},
        }
        for place in order
    ]


def _finite(values: np.ndarray) -> list[list[float | None]]:
    return [[float(value) if np.isfinite(value) else None for value in row] for row in values]


def differing(guesses: np.ndarray, truth: np.ndarray, seed: int = 0) -> np.ndarray:
    """Places of the images on which models differ, the most kinds of answers first, as many classes as possible first."""
    kinds = (np.diff(np.sort(guesses, 0), axis=0) != 0).sum(0)
    found = np.random.default_rng(seed).permutation(np.flatnonzero(kinds))
    turn = np.zeros(len(found), dtype=np.int64)
    for value in np.unique(truth[found]):
        own = truth[found] == value
        turn[own] = np.arange(own.sum())
    return found[np.lexsort((-kinds[found], turn))]


def draw_sheet(
    source: Source,
    image: np.ndarray,
    guesses: np.ndarray,
    truth: np.ndarray,
    names: Sequence[str],
    classes: Sequence[str],
    title: str,
    seed: int = 0,
) -> Image.Image | None:
    """Some of the images that models answer differently, each with what it is and every answer; None where there are none.

    image [N] numbers in the source, guesses [M, N], truth [N].
    """
    order = differing(guesses, truth, seed)
    tiles: list[tuple[int, np.ndarray]] = []
    for place in order.tolist():
        if len(tiles) == COLUMNS * ROWS:
            break
        try:
            tiles.append((place, decode(source.encoded(int(image[place])), 2 * TILE)))
        except (OSError, ValueError):
            continue  # it could be read a moment ago; the sheet does without
    if not tiles:
        return None
    side = 3 * TILE // 2
    columns = min(COLUMNS, len(tiles))
    tall = side + LINE + len(names) * (SMALL + GAP) + ALLEY
    above = MARGIN + header_height() + len(names) * (SMALL + GAP) + ALLEY
    width = max(2 * MARGIN + columns * (side + ALLEY) - ALLEY, 6 * TILE)
    sheet = Image.new("RGB", (width, above + -(-len(tiles) // columns) * tall - ALLEY + MARGIN), PAPER)
    draw = ImageDraw.Draw(sheet)
    share = f"{len(order):,} of {len(truth):,} images are answered differently, {len(tiles)} of them here, seed {seed}"
    write_header(draw, width, title, share)
    for model, name in enumerate(names):
        top = MARGIN + header_height() + model * (SMALL + GAP)
        write(draw, (MARGIN, top), letter(model), SMALL, QUIET, INDENT)
        write(draw, (MARGIN + INDENT, top), name, SMALL, INK, width - 2 * MARGIN - INDENT)
    for number, (place, pixels) in enumerate(tiles):
        left, top = MARGIN + number % columns * (side + ALLEY), above + number // columns * tall
        mount(sheet, (left, top), pixels, (side, side))
        write(draw, (left, top + side), "is", SMALL, QUIET, INDENT)
        write(draw, (left + INDENT, top + side), classes[truth[place]], SMALL, INK, side - INDENT)
        for model, guess in enumerate(guesses[:, place].tolist()):
            words = classes[guess] if guess < len(classes) else OTHER
            color = RIGHT if guess == truth[place] else WRONG
            line = top + side + LINE - GAP + model * (SMALL + GAP)
            write(draw, (left, line), letter(model), SMALL, QUIET, INDENT)
            write(draw, (left + INDENT, line), words, SMALL, color, side - INDENT)
    return sheet


def letter(model: int) -> str:
    """A, B, …: class names are often numbers."""
    return chr(ord("A") + model) if model < 26 else str(model + 1)
