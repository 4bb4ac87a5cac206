"""The built-in photographs of twelve breeds of cats and dogs. See `pets.md` for their license."""

from pathlib import Path

import numpy as np

from vitrail.data.datasets.folder import SourceDict
from vitrail.data.datasets.parquet import open_parquet
from vitrail.data.source import Source, Subset

PETS = Path(__file__).with_name("pets.parquet")
BREEDS = 12
IMAGES_PER_BREED = {"train": 50, "validation": 10, "test": 25}  # in the order of the file (tools/make_pets.py)


class PetsSubset(Subset):
    """A split of the photographs, whose locations name the data set instead of the file in the package."""

    def location(self, index: int) -> str:
        return f"image {int(self.indices[index])} of {self.name}"


def open_pets() -> SourceDict:
    """Open 1,020 photographs of 128 x 128 pixels: per breed 50 for training, 10 for validation and 25 for testing."""
    images: Source = open_parquet(str(PETS))["train"]
    images.name = "pets"
    ends = np.cumsum([BREEDS * count for count in IMAGES_PER_BREED.values()])
    indices = np.split(np.arange(ends[-1]), ends[:-1])
    return {split: PetsSubset(images, own) for split, own in zip(IMAGES_PER_BREED, indices, strict=True)}
