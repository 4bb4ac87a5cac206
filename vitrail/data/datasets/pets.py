"""The photographs that come with the package: twelve breeds of cats and dogs. `pets.md` says whose they are."""

from pathlib import Path

import numpy as np

from vitrail.data.datasets.folder import Parts
from vitrail.data.datasets.parquet import open_parquet
from vitrail.data.source import Source, Subset

PETS = Path(__file__).with_name("pets.parquet")
BREEDS = 12
EACH = {"train": 50, "validation": 10, "test": 25}  # images of each breed; `tools/make_pets.py` writes them in this order


class Photographs(Subset):
    """Some of them, under the name by which they are asked for rather than by the place where the package lies."""

    def where(self, index: int) -> str:
        return f"image {int(self.indices[index])} of {self.name}"


def open_pets() -> Parts:
    """1,020 photographs of 128 x 128 pixels: 50 of each breed to train, 10 to validate and 25 to test, always the same."""
    whole: Source = open_parquet(str(PETS))["train"]
    whole.name = "pets"
    ends = np.cumsum([BREEDS * each for each in EACH.values()])
    return {split: Photographs(whole, part) for split, part in zip(EACH, np.split(np.arange(ends[-1]), ends[:-1]), strict=True)}
