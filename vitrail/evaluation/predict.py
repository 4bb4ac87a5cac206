"""What a model sees in images: from paths to class names with probabilities, as fast as the images can be read."""

import glob
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from vitrail.data.datasets.folder import EXTENSIONS, FolderSource, Paths, listing
from vitrail.data.datasets.lookup import open_source
from vitrail.data.loader import Canvas, Problem, Reader, make_batch
from vitrail.data.sampler import Samples
from vitrail.data.source import Source, Subset
from vitrail.data.transforms.pipeline import augment
from vitrail.data.workers import Workers, usual_workers
from vitrail.errors import UserError
from vitrail.evaluation.accuracy import test_view
from vitrail.models.vision_transformer import VisionTransformer

BUILT_IN = 16  # digits
FEW = 64  # images that are read sooner than a process that helps is started


class Guess(NamedTuple):
    number: int  # of the class
    name: str
    probability: float


class Prediction(NamedTuple):
    """One image: where it lies, what it may be, likeliest first, and what it is, where that is known."""

    where: str
    guesses: list[Guess]
    truth: str | None


def open_images(paths: Iterable[str | Path]) -> tuple[Source, list[Problem]]:
    """The images at paths, below folders and of patterns, in the order given, and what is not there.

    `digits` are some built-in ones. A pattern (`photos/**/*.jpg`) is one that no file is called by.
    """
    wanted = list(map(str, paths))
    if "" in wanted:
        raise UserError("The path to an image is empty: give files, folders or patterns such as 'photos/**/*.jpg'.")
    if wanted == ["digits"] and not os.path.exists("digits"):
        return Subset(open_source("digits", "test"), np.arange(BUILT_IN)), []
    found: list[str] = []
    problems: list[Problem] = []
    for path in map(os.path.expanduser, wanted):
        places = expand(path)
        for place in places:
            if not os.path.isdir(place):
                take(place, found, problems)
            elif "**" in path and places != [path]:  # the pattern finds by itself what lies in the folder
                if not below(place, []):
                    problems.append(Problem(place, "a folder by the name of an image"))
            else:
                before = len(problems)
                inside = below(place, problems)
                found += inside
                if not inside and len(problems) == before:
                    problems.append(Problem(place, "the folder holds no images"))
    return FolderSource("", Paths(found), None), problems


def expand(path: str) -> list[str]:
    """What a pattern stands for, in byte order; a path that exists, or that matches nothing, stands for itself.

    `**` goes into every folder, so of what it finds only what is called like an image is meant.
    """
    if os.path.lexists(path) or not glob.has_magic(path):
        return [path]
    found = sorted(glob.iglob(path, recursive=True), key=os.fsencode)
    if "**" in path:
        found = [place for place in found if place.rpartition(".")[2].lower() in EXTENSIONS]
    return found or [path]


def take(path: str, found: list[str], problems: list[Problem]) -> None:
    """To the images if it is a file; reading a pipe that nobody writes to would wait for ever."""
    if os.path.isfile(path) or (os.path.exists(path) and path.startswith(("/dev/fd/", "/dev/stdin"))):
        found.append(path)
    elif os.path.exists(path):
        problems.append(Problem(path, "not a file"))
    else:
        problems.append(Problem(path, "the link leads nowhere" if os.path.islink(path) else "there is no such file"))


def read_list(content: bytes) -> list[str]:
    """Paths, one a line, or with a zero byte after each, as `find -print0` writes them."""
    lines = content.split(b"\0") if b"\0" in content else content.splitlines()
    return [os.fsdecode(line) for line in lines if line]


def below(folder: str, problems: list[Problem], above: frozenset[str] = frozenset()) -> list[str]:
    """The images of a folder at any depth; a link back to a folder above is not followed. What cannot be one is noted."""
    here = os.path.realpath(folder)
    if here in above:
        return []
    try:
        entries = listing(folder)
    except UserError as error:
        problems.append(Problem(folder, str(error)))
        return []
    found: list[str] = []
    for entry in entries:
        like_a_image = entry.name.rpartition(".")[2].lower() in EXTENSIONS
        if os.path.isdir(entry.path):
            before = len(problems)
            inside = below(entry.path, problems, above | {here})
            found += inside
            if like_a_image and not inside and len(problems) == before:
                problems.append(Problem(entry.path, "a folder by the name of an image"))
        elif like_a_image:
            take(entry.path, found, problems)
    return found


def predict(
    model: VisionTransformer, source: Source, top: int = 5, batch: int = 32, workers: int | None = None
) -> Iterator[Prediction | Problem]:
    """One answer per image of a source, in order: its likeliest classes, or why it cannot be read.

    The model prepares images as it was tested with, on the device it lies on.
    """
    if not model.architecture.classes:
        raise UserError("This model has no classifier: it cannot say what an image is.")
    names = model.class_names or [f"class {index}" for index in range(model.architecture.classes)]
    if workers is None:
        workers = usual_workers() if len(source) > FEW else 0
    chunks = np.split(np.arange(len(source)), range(batch, len(source), batch))
    pool = Workers(Reader(source, detail(model), False).images, min(workers, len(chunks)))
    model.eval()
    try:
        for canvas in pool.run(chunks if len(source) else []):
            yield from answers(model, source, canvas, names, top)
    except torch.OutOfMemoryError:
        raise UserError(f"The device's memory is too small for {batch} images at a time: give a smaller --batch.") from None
    finally:
        pool.close()


def answers(
    model: VisionTransformer, source: Source, canvas: Canvas, names: Sequence[str], top: int
) -> Iterator[Prediction | Problem]:
    good = np.flatnonzero(canvas.sizes[:, 0] > 0)
    found = iter(zip(*likeliest(model, source, canvas, good, min(top, len(names))), strict=True) if len(good) else ())
    problems = iter(canvas.problems)
    for row, index in enumerate(canvas.samples.index):
        if canvas.sizes[row, 0] == 0:
            yield in_words(next(problems))
            continue
        guesses = [Guess(place, names[place], chance) for chance, place in zip(*next(found), strict=True)]
        label = int(source.label.values[index]) if source.label else -1
        yield Prediction(source.where(int(index)), guesses, source.classes[label] if label >= 0 else None)


def in_words(problem: Problem) -> Problem:
    """The system's reasons without their numbers and without the path, which stands before them already."""
    plain = re.fullmatch(r"\[Errno \d+\] ([^:]+): .*", problem.reason, re.DOTALL)
    return Problem(problem.where, plain[1].lower()) if plain else problem


@torch.inference_mode()
def likeliest(model: VisionTransformer, source: Source, canvas: Canvas, good: np.ndarray, top: int) -> tuple[list, list]:
    """Probabilities and classes of the readable images, a list of `top` each."""
    samples = Samples(canvas.samples.index[good], canvas.samples.repeat[good], canvas.samples.position[good])
    readable = Canvas(canvas.pixels[torch.from_numpy(good)], canvas.sizes[good], None, samples, [])
    raw = make_batch(source, readable).to(next(model.parameters()).device)
    view = test_view(model.preprocessing)
    images = augment(raw.pixels, raw.sizes, torch.zeros_like(raw.index), view).images
    logits = model(images).float()
    if not logits.isfinite().all():
        raise UserError("The model's answers are no numbers: its weights are damaged.")
    chances, classes = logits.softmax(1).topk(top, 1)
    return chances.tolist(), classes.tolist()


def detail(model: VisionTransformer) -> int | None:
    """How large JPEGs are decoded at least: as in the training, if the weights know."""
    try:
        share = float(json.loads(model.notes["recipe"])["data"]["decode_scale"])
    except (KeyError, TypeError, ValueError):
        share = 2.0
    return round(max(model.preprocessing.image_size) * share) or None
