"""Images for which several answers are right, as in ReaL ("Are we done with ImageNet?", arXiv 2006.07159).

The labels are a JSON file: a list with the right classes of every image, or an object from file names to such lists. A class is
its number or its name. A list is in the order of the data, or, as ReaL's own, in that of ILSVRC2012_val_00000001, …_00050000.
Images whose list is empty do not count.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.source import Source
from vitrail.errors import UserError

NUMBERED = re.compile(r"ILSVRC2012_val_(\d{8})\.\w+$")


class Agreement(NamedTuple):
    """The share of images whose first answer is one of the right ones, over how many, and how many had none."""

    top1: float
    images: int
    without: int


def read_labels(path: str | Path, source: Source) -> list[frozenset[int]]:
    """The right classes of every image of the source, by their numbers in it."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"There is no file {path}.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}.") from None
    numbers = {name: place for place, name in enumerate(source.classes)}
    return [_classes(entry, numbers, path) for entry in _entries(content, source, path)]


def _entries(content: Any, source: Source, path: str | Path) -> list[Any]:
    if isinstance(content, Mapping):
        return [_named(content, source.where(index), path) for index in range(len(source))]
    if not isinstance(content, list):
        raise UserError(f"{path} holds neither a list of labels per image nor an object from file names to such lists.")
    places = [NUMBERED.search(source.where(index)) for index in range(len(source))]
    if all(places) and places:
        order = [int(found[1]) - 1 for found in places if found]
        if max(order) >= len(content) or min(order) < 0:
            raise UserError(f"{path} has {len(content):,} lists of labels, and {source.name} an image number {max(order) + 1:,}.")
        return [content[place] for place in order]
    if len(content) != len(source):
        raise UserError(f"{path} has {len(content):,} lists of labels for the {len(source):,} images of {source.name}.")
    return content


def _named(content: Mapping[str, Any], where: str, path: str | Path) -> Any:
    """By the shortest end of the path that the file has: cat.jpg, cats/cat.jpg, …"""
    parts = where.split(os.sep)
    for start in range(len(parts) - 1, -1, -1):
        name = "/".join(parts[start:])
        if name in content:
            return content[name]
    raise UserError(f"{path} has no labels for {where}; give every image a list, an empty one to leave it out.")


def _classes(entry: Any, numbers: Mapping[str, int], path: str | Path) -> frozenset[int]:
    if not isinstance(entry, list):
        raise UserError(f"{path} has {entry!r} where a list of labels should be: write [3] or [3, 5].")
    found = set()
    for label in entry:
        number = numbers.get(label) if isinstance(label, str) else label if type(label) is int else None
        if number is None or not 0 <= number < len(numbers):
            raise UserError(
                f"{path} has the label {label!r}, which is no class: give names, or numbers from 0 to {len(numbers) - 1}."
            )
        found.add(number)
    return frozenset(found)


def agreement(image: np.ndarray, guess: np.ndarray, labels: Sequence[frozenset[int]], answer: np.ndarray) -> Agreement:
    """Of guesses [N] for the images with these numbers [N]; `answer` [classes] says which answer each class is (-1: none)."""
    right = counted = 0
    for index, made in zip(image.tolist(), guess.tolist(), strict=True):
        valid = {int(answer[label]) for label in labels[index]} - {-1}
        counted += bool(valid)
        right += made in valid
    return Agreement(right / counted if counted else float("nan"), counted, len(image) - counted)
