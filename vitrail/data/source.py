"""What every source of images looks like from outside: numbered encoded images, labels, names.

A source is one split of a data set. It is cheap to open, cheap to send to a worker process (files are opened where they are
read) and never decodes by itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

Encoded = bytes | np.ndarray  # a file's bytes, or pixels uint8 [height, width, 3] where the data set stores pixels


@dataclass(frozen=True)
class Labels:
    """One column of integer labels: values [N] (-1: unknown) and the names of the classes."""

    values: np.ndarray
    names: list[str]


class Source(ABC):
    """Images 0 ... N-1 with labels; subclasses say where the bytes are."""

    name: str  # what the user gave, for messages
    label: Labels | None  # the main label; None for data without labels
    extra: dict[str, Labels]  # further label columns by name, such as "coarse_label"
    has_masks: bool = False

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def encoded(self, index: int) -> Encoded:
        """The image, still encoded; an unreadable file raises OSError or ValueError."""

    def mask(self, index: int) -> bytes | None:
        """The encoded mask that belongs to the image, None if there is none."""
        return None

    @abstractmethod
    def where(self, index: int) -> str:
        """Where the image lies, for messages: a path, a row of a file."""

    @property
    def classes(self) -> list[str]:
        return self.label.names if self.label else []


@dataclass(eq=False)
class Subset(Source):
    """Some images of another source, in the order given."""

    source: Source
    indices: np.ndarray
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.source.name
        self.has_masks = self.source.has_masks
        self.label = pick(self.source.label, self.indices) if self.source.label else None
        self.extra = {key: pick(labels, self.indices) for key, labels in self.source.extra.items()}

    def __len__(self) -> int:
        return len(self.indices)

    def encoded(self, index: int) -> Encoded:
        return self.source.encoded(int(self.indices[index]))

    def mask(self, index: int) -> bytes | None:
        return self.source.mask(int(self.indices[index]))

    def where(self, index: int) -> str:
        return self.source.where(int(self.indices[index]))


def pick(labels: Labels, indices: np.ndarray) -> Labels:
    return Labels(labels.values[indices], labels.names)


class Splits(NamedTuple):
    train: Source
    validation: Source
    test: Source | None


def split_by_seed(source: Source, share: float, seed: int) -> tuple[Source, Source]:
    """(the rest, `share` of every class), the same for the same seed.

    Every class of two images or more gives at least one; classes of one image stay in the first part.
    """
    rng = np.random.default_rng(seed)
    values = source.label.values if source.label else np.zeros(len(source), dtype=np.int64)
    held: list[np.ndarray] = []
    for value in np.unique(values):
        members = rng.permutation(np.flatnonzero(values == value))
        held.append(members[: max(round(len(members) * share), 1) if len(members) > 1 and share > 0 else 0])
    chosen = np.sort(np.concatenate(held)) if held else np.zeros(0, dtype=np.int64)
    rest = np.setdiff1d(np.arange(len(source)), chosen)
    return Subset(source, rest), Subset(source, chosen)


def names_of(values: Sequence[str]) -> Labels:
    """Labels from class names as they stand beside the images, classes in sorted order."""
    names = sorted(set(values))
    place = {name: index for index, name in enumerate(names)}
    return Labels(np.array([place[value] for value in values], dtype=np.int64), names)
