"""Accuracy with several valid labels per image, as in ReaL ("Are we done with ImageNet?", arXiv 2006.07159).

The labels are a JSON file: a list with the valid classes of every image, or an object from file names to such lists. A class is
given by index or name. A list is in the order of the data or, as ReaL's own, of ILSVRC2012_val_00000001, …_00050000. Images with
an empty list are not counted.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.source import Source
from vitrail.errors import UserError
from vitrail.json_files import read_json

NUMBERED = re.compile(r"ILSVRC2012_val_(\d{8})\.\w+$")


class MultilabelAccuracy(NamedTuple):
    """The share of images whose prediction is one of the valid labels, the number of images, and of images without labels."""

    top1: float
    images: int
    unlabeled: int


def read_valid_labels(path: str | Path, source: Source) -> list[frozenset[int]]:
    """The indices of the valid classes of every image of the source."""
    content = read_json(path)
    indices = {name: index for index, name in enumerate(source.classes)}
    return [_class_indices(entry, indices, path) for entry in _entries(content, source, path)]


def _entries(content: Any, source: Source, path: str | Path) -> list[Any]:
    if isinstance(content, Mapping):
        return [_entry_of(content, source.location(index), path) for index in range(len(source))]
    if not isinstance(content, list):
        raise UserError(f"{path} contains neither a list of labels per image nor an object from file names to such lists.")
    numbers = [NUMBERED.search(source.location(index)) for index in range(len(source))]
    if all(numbers) and numbers:
        order = [int(number[1]) - 1 for number in numbers if number]
        if max(order) >= len(content) or min(order) < 0:
            raise UserError(f"{path} has {len(content):,} lists of labels, and {source.name} an image number {max(order) + 1:,}.")
        return [content[index] for index in order]
    if len(content) != len(source):
        raise UserError(f"{path} has {len(content):,} lists of labels for the {len(source):,} images of {source.name}.")
    return content


def _entry_of(content: Mapping[str, Any], location: str, path: str | Path) -> Any:
    """The entry of an image by the shortest end of its path that the file contains: cat.jpg, cats/cat.jpg, …"""
    parts = location.split(os.sep)
    for start in range(len(parts) - 1, -1, -1):
        name = "/".join(parts[start:])
        if name in content:
            return content[name]
    raise UserError(f"{path} has no labels for {location}; give every image a list, an empty one to exclude it.")


def _class_indices(entry: Any, indices: Mapping[str, int], path: str | Path) -> frozenset[int]:
    if not isinstance(entry, list):
        raise UserError(f"{path} has {entry!r} where a list of labels should be: write [3] or [3, 5].")
    labels = set()
    for label in entry:
        index = indices.get(label) if isinstance(label, str) else label if type(label) is int else None
        if index is None or not 0 <= index < len(indices):
            raise UserError(
                f"{path} has the label {label!r}, which is no class: give names, or indices from 0 to {len(indices) - 1}."
            )
        labels.add(index)
    return frozenset(labels)


def multilabel_accuracy(
    image: np.ndarray, prediction: np.ndarray, labels: Sequence[frozenset[int]], targets: np.ndarray
) -> MultilabelAccuracy:
    """The accuracy of predictions [N] for the images with indices [N]; `targets` maps each class to its target (-1: none)."""
    correct = counted = 0
    for index, predicted in zip(image.tolist(), prediction.tolist(), strict=True):
        valid = {int(targets[label]) for label in labels[index]} - {-1}
        counted += bool(valid)
        correct += predicted in valid
    return MultilabelAccuracy(correct / counted if counted else float("nan"), counted, len(image) - counted)
