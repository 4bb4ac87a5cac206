"""Data sets that are small enough to lie in memory as pixels; and the one that comes with the package: handwritten digits."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.datasets.folder import Parts
from vitrail.data.source import Labels, Source

DIGITS = Path(__file__).with_name("digits.npz")
TRAINING_DIGITS = 1437  # in the order of the file: neighbours may be from one hand, and mixing would test on seen hands


class PixelSource(Source):
    """Pixels uint8 [N, height, width, 3], or [N, height, width] for grey, that each process reads for itself."""

    def __init__(self, name: str, label: Labels, read: Callable[[], np.ndarray], extra: dict[str, Labels] | None = None) -> None:
        """`read` gives the pixels; it must be picklable, because it is sent to the worker instead of them."""
        self.name = name
        self.label: Labels = label
        self.extra = extra or {}
        self._read = read
        self._pixels: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.label.values)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pixels": None}

    def encoded(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(index)
        if self._pixels is None:
            self._pixels = self._read()
        image = self._pixels[index]
        return image if image.ndim == 3 else np.repeat(image[..., None], 3, axis=2)

    def where(self, index: int) -> str:
        return f"image {index} of {self.name}"


def open_digits() -> Parts:
    """1,797 grey images of 8 x 8 pixels: 1,437 to train and 360 to test, always the same."""
    with np.load(DIGITS) as file:
        values = file["labels"].astype(np.int64)
    names = [str(digit) for digit in range(10)]
    return {
        split: PixelSource("digits", Labels(values[start:stop], names), partial(_read_digits, start, stop))
        for split, start, stop in (("train", 0, TRAINING_DIGITS), ("test", TRAINING_DIGITS, len(values)))
    }


def _read_digits(start: int, stop: int) -> np.ndarray:
    with np.load(DIGITS) as file:
        return file["pixels"][start:stop]
