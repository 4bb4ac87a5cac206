"""Sources of pixels in memory, and the built-in set of handwritten digits."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.datasets.folder import SourceDict
from vitrail.data.source import Labels, Source

DIGITS = Path(__file__).with_name("digits.npz")
# In file order: neighbors may be by the same writer, so a shuffled split would leak writers into the test split.
TRAINING_DIGITS = 1437


class PixelSource(Source):
    """Pixels uint8 [N, height, width, 3], or [N, height, width] for grayscale. Each process reads its own copy."""

    def __init__(
        self, name: str, label: Labels, read: Callable[[], np.ndarray], extra: dict[str, Labels] | None = None, split: str = ""
    ) -> None:
        """`read` returns the pixels. It must be picklable: it is sent to worker processes instead of the pixels.

        `split` is needed where several splits have the same name: two images have different locations.
        """
        self.name, self.split = name, split
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

    def location(self, index: int) -> str:
        return f"{self.split} image {index} of {self.name}".lstrip()


def open_digits() -> SourceDict:
    """Open the built-in digits: 1,797 grayscale images of 8 x 8 pixels, 1,437 for training and 360 for testing."""
    with np.load(DIGITS) as file:
        values = file["labels"].astype(np.int64)
    names = [str(digit) for digit in range(10)]
    return {
        split: PixelSource("digits", Labels(values[start:stop], names), partial(_read_digits, start, stop), split=split)
        for split, start, stop in (("train", 0, TRAINING_DIGITS), ("test", TRAINING_DIGITS, len(values)))
    }


def _read_digits(start: int, stop: int) -> np.ndarray:
    with np.load(DIGITS) as file:
        pixels: np.ndarray = file["pixels"][start:stop]
        return pixels
