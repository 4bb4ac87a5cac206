"""What a model sees in pictures: from paths to class names with probabilities, as fast as the pictures can be read."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from vitrail.data.augment.pipeline import augment
from vitrail.data.folder import EXTENSIONS, FolderSource, Paths, listing
from vitrail.data.loader import Canvas, Problem, Reader, make_batch
from vitrail.data.opening import open_source
from vitrail.data.order import Samples
from vitrail.data.source import Source, Subset
from vitrail.data.workers import Workers, usual_workers
from vitrail.errors import UserError
from vitrail.evaluation.accuracy import test_view
from vitrail.models.model import Model

BUILT_IN = 16  # digits
FEW = 64  # pictures that are read sooner than a process that helps is started


class Guess(NamedTuple):
    number: int  # of the class
    name: str
    probability: float


class Prediction(NamedTuple):
    """One picture: where it lies, what it may be, likeliest first, and what it is, where that is known."""

    where: str
    guesses: list[Guess]
    truth: str | None


def open_pictures(paths: Sequence[str | Path]) -> tuple[Source, list[Problem]]:
    """The pictures at paths and below folders, in the order given, and what is not there; `digits` are some built-in ones."""
    if list(map(str, paths)) == ["digits"] and not os.path.exists("digits"):
        return Subset(open_source("digits", "test"), np.arange(BUILT_IN)), []
    found: list[str] = []
    problems: list[Problem] = []
    for path in map(os.path.expanduser, map(str, paths)):
        if os.path.isdir(path):
            inside = list(below(path))
            found += inside
            if not inside:
                problems.append(Problem(path, "the folder holds no pictures"))
        elif os.path.exists(path):
            found.append(path)
        else:
            problems.append(Problem(path, "there is no such file"))
    return FolderSource("", Paths(found), None), problems


def below(folder: str, above: frozenset[str] = frozenset()) -> Iterator[str]:
    """The pictures of a folder at any depth; a link back to a folder above is not followed."""
    here = os.path.realpath(folder)
    if here in above:
        return
    for entry in listing(folder):
        if os.path.isdir(entry.path):
            yield from below(entry.path, above | {here})
        elif entry.name.rpartition(".")[2].lower() in EXTENSIONS:
            yield entry.path


def predict(
    model: Model, source: Source, top: int = 5, batch: int = 32, workers: int | None = None
) -> Iterator[Prediction | Problem]:
    """One answer per picture of a source, in order: its likeliest classes, or why it cannot be read.

    The model prepares pictures as it was tested with, on the device it lies on.
    """
    if not model.architecture.classes:
        raise UserError("This model has no classifier: it cannot say what a picture is.")
    names = model.class_names or [f"class {index}" for index in range(model.architecture.classes)]
    if workers is None:
        workers = usual_workers() if len(source) > FEW else 0
    pool = Workers(Reader(source, detail(model), False).pictures, workers)
    chunks = np.split(np.arange(len(source)), range(batch, len(source), batch))
    model.eval()
    try:
        for canvas in pool.run(chunks if len(source) else []):
            yield from answers(model, source, canvas, names, top)
    finally:
        pool.close()


def answers(model: Model, source: Source, canvas: Canvas, names: Sequence[str], top: int) -> Iterator[Prediction | Problem]:
    good = np.flatnonzero(canvas.sizes[:, 0] > 0)
    found = iter(zip(*likeliest(model, source, canvas, good, min(top, len(names))), strict=True) if len(good) else ())
    problems = iter(canvas.problems)
    for row, index in enumerate(canvas.samples.index):
        if canvas.sizes[row, 0] == 0:
            yield next(problems)
            continue
        guesses = [Guess(place, names[place], chance) for chance, place in zip(*next(found), strict=True)]
        label = int(source.label.values[index]) if source.label else -1
        yield Prediction(source.where(int(index)), guesses, source.classes[label] if label >= 0 else None)


@torch.inference_mode()
def likeliest(model: Model, source: Source, canvas: Canvas, good: np.ndarray, top: int) -> tuple[list, list]:
    """Probabilities and classes of the readable pictures, a list of `top` each."""
    samples = Samples(canvas.samples.index[good], canvas.samples.repeat[good], canvas.samples.position[good])
    readable = Canvas(canvas.pixels[torch.from_numpy(good)], canvas.sizes[good], None, samples, [])
    pictures = make_batch(source, readable).to(next(model.parameters()).device)
    view = test_view(model.preprocessing)
    images = augment(pictures.pixels, pictures.sizes, torch.zeros_like(pictures.index), view).images
    chances, classes = model(images).float().softmax(1).topk(top, 1)
    return chances.tolist(), classes.tolist()


def detail(model: Model) -> int | None:
    """How large JPEGs are decoded at least: as in the training, if the weights know."""
    try:
        share = float(json.loads(model.notes["recipe"])["data"]["detail"])
    except (KeyError, TypeError, ValueError):
        share = 2.0
    return round(max(model.preprocessing.image_size) * share) or None
