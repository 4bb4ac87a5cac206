"""The interface of image sources: encoded images by index, labels and class names.

A source is one split of a data set. Opening it and sending it to a worker process are cheap: files are opened by the process
that reads them. A source does not decode images.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from vitrail.data.mask_classes import MaskClasses
from vitrail.data.objects import Objects

Encoded = bytes | np.ndarray  # the bytes of an image file, or pixels uint8 [height, width, 3] if the data set stores pixels


@dataclass(frozen=True)
class Labels:
    """One column of integer labels: `values` [N] (-1: unknown) and the class names."""

    values: np.ndarray
    names: list[str]


class Source(ABC):
    """N images with labels. Subclasses implement the storage."""

    name: str  # the path or name that the user gave, for messages
    label: Labels | None  # the main label, None for unlabeled data
    label_name: str = "label"  # of its column
    extra: dict[str, Labels]  # extra label columns by name, such as "coarse_label"
    has_masks: bool = False
    mask_classes: MaskClasses | None = None  # None: no masks, or ids whose classes are not known
    unmasked: int = 0  # images that were left out because they have no mask
    object_classes: tuple[str, ...] = ()  # of boxes; (): the images have no boxes
    has_instances: bool = False  # whether objects have masks
    object_notes: tuple[str, ...] = ()  # what is wrong with the lists of objects
    draws_masks: bool = False  # whether the masks of objects are the segmentation mask; set for a segmentation
    skipped: tuple[str, ...] = ()  # files at the path that are not images or cannot be read
    defects: tuple[str, ...] = ()  # reasons why its labels cannot be trained on, such as a class without images

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def encoded(self, index: int) -> Encoded:
        """Return the encoded image. An unreadable file raises OSError or ValueError."""

    def mask(self, index: int) -> bytes | None:
        """Return the encoded segmentation mask of the image, or None."""
        return None

    def objects(self, index: int) -> Objects | None:
        """Return the objects of the image, or None if it is not annotated. A damaged file raises OSError or ValueError."""
        return None

    @abstractmethod
    def location(self, index: int) -> str:
        """Return the location of the image for messages: a path, or a row of a file."""

    @property
    def classes(self) -> list[str]:
        return self.label.names if self.label else []

    def spread(self, count: int) -> np.ndarray:
        """Return the indices of at most `count` images evenly spread over the source, int64."""
        return np.unique(np.linspace(0, len(self) - 1, min(count, len(self))).astype(np.int64))


@dataclass(eq=False)
class Subset(Source):
    """The images of another source at `indices`, in that order."""

    source: Source
    indices: np.ndarray
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.source.name
        self.has_masks, self.mask_classes = self.source.has_masks, self.source.mask_classes
        self.draws_masks = self.source.draws_masks
        self.unmasked = self.source.unmasked
        self.object_classes, self.has_instances = self.source.object_classes, self.source.has_instances
        self.object_notes = self.source.object_notes
        self.skipped, self.defects, self.label_name = self.source.skipped, self.source.defects, self.source.label_name
        self.label = select_labels(self.source.label, self.indices) if self.source.label else None
        self.extra = {key: select_labels(labels, self.indices) for key, labels in self.source.extra.items()}

    def __len__(self) -> int:
        return len(self.indices)

    def encoded(self, index: int) -> Encoded:
        return self.source.encoded(int(self.indices[index]))

    def mask(self, index: int) -> bytes | None:
        return self.source.mask(int(self.indices[index]))

    def objects(self, index: int) -> Objects | None:
        return self.source.objects(int(self.indices[index]))

    def location(self, index: int) -> str:
        return self.source.location(int(self.indices[index]))


def subsample(source: Source, max_images: int | None, seed: int = 0) -> Source:
    """A random subset of at most so many images, in their order."""
    if max_images is None or len(source) <= max_images:
        return source
    return Subset(source, np.sort(np.random.default_rng(seed).permutation(len(source))[:max_images]))


def select_labels(labels: Labels, indices: np.ndarray) -> Labels:
    return Labels(labels.values[indices], labels.names)


def reorder_classes(labels: Labels, names: Sequence[str]) -> Labels:
    """The same labels with the classes in the order of `names`; unchanged if these are not the same classes."""
    names = [str(name) for name in names]
    if labels.names == names or sorted(labels.names) != sorted(names):
        return labels
    position = {name: index for index, name in enumerate(names)}
    index = np.array([position[name] for name in labels.names] + [-1])  # the last entry is for unknown labels, -1
    return Labels(index[labels.values], names)


class Splits(NamedTuple):
    train: Source
    validation: Source
    test: Source | None


def stratified_folds(labels: np.ndarray, folds: int) -> np.ndarray:
    """The fold of each image [N], with the images of every label spread evenly; always the same for the same labels."""
    fold = np.zeros(len(labels), dtype=np.int64)
    shuffled = np.random.default_rng(0).permutation(len(labels))
    order = shuffled[np.argsort(labels[shuffled], kind="stable")]
    fold[order] = np.arange(len(labels)) % folds
    return fold


def split_fold(source: Source, fold: int, folds: int) -> tuple[Source, Source]:
    """Split a source into (training, validation): validation gets part `fold` of `folds` equal parts of every class.

    Every image is in the validation part of exactly one fold.
    """
    values = source.label.values if source.label else np.zeros(len(source), dtype=np.int64)
    validates = stratified_folds(values, folds) == fold
    return Subset(source, np.flatnonzero(~validates)), Subset(source, np.flatnonzero(validates))


def split_by_seed(source: Source, fraction: float, seed: int) -> tuple[Source, Source]:
    """Split a source into (training, validation), stratified by class: validation gets `fraction` of every class.

    The same seed gives the same split. Every class with at least two images has at least one in each part; the image of a class
    with a single image stays in the training part. Of four images or more, validation has at least two: if the classes do not
    give them, as of few images without labels, any two images of the largest classes.
    """
    rng = np.random.default_rng(seed)
    values = source.label.values if source.label else np.zeros(len(source), dtype=np.int64)
    per_class: list[np.ndarray] = []
    for value in np.unique(values):
        members = rng.permutation(np.flatnonzero(values == value))
        count = min(max(round(len(members) * fraction), 1), len(members) - 1) if fraction > 0 else 0
        per_class.append(members[:count])
    validation = np.sort(np.concatenate(per_class)) if per_class else np.zeros(0, dtype=np.int64)
    if len(validation) < 2 and len(source) >= 4 and fraction > 0:
        _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
        order = rng.permutation(len(source))
        validation = np.sort(order[np.argsort(-counts[group[order]], kind="stable")][:2])
    training = np.setdiff1d(np.arange(len(source)), validation)
    return Subset(source, training), Subset(source, validation)
