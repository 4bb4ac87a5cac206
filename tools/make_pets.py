"""Writes `vitrail/data/datasets/pets.parquet` from the Oxford-IIIT Pet data set.

    python tools/make_pets.py oxford-pets/

The argument is the data set in any format that `vitrail train` reads, with its official train and test splits and its 37
breeds as classes. Of each of twelve breeds the first images of each split are used; validation images are taken from the
official train split. They are written in the order train, validation, test. An image that is not 128 x 128 is cropped to its
center square and resized; near duplicates of an earlier image are skipped.
"""

import argparse
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from vitrail.atomic_files import atomic_write
from vitrail.data.datasets.lookup import open_sources
from vitrail.data.datasets.pets import IMAGES_PER_BREED, PETS
from vitrail.data.decode import decode
from vitrail.data.duplicates import exact_groups, fingerprint, near_groups
from vitrail.data.parquet_shard import ShardWriter, make_schema
from vitrail.data.reencoding import Row
from vitrail.data.source import Labels, Source, Subset

# Half cats, half dogs; none of them is a class of Tiny ImageNet, on which the bundled weights were trained.
BREEDS = {
    "Abyssinian": "Abyssinian",
    "beagle": "Beagle",
    "Bengal": "Bengal",
    "Bombay": "Bombay",
    "boxer": "Boxer",
    "pomeranian": "Pomeranian",
    "pug": "Pug",
    "Russian_Blue": "Russian Blue",
    "samoyed": "Samoyed",
    "shiba_inu": "Shiba Inu",
    "Siamese": "Siamese",
    "Sphynx": "Sphynx",
}
SIDE = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="the Oxford-IIIT Pet data set")
    parser.add_argument("--out", type=Path, default=PETS)
    options = parser.parse_args()
    parts = open_sources(options.source)
    splits = {split: select_breeds(parts[split]) for split in ("train", "test")}
    duplicates = find_duplicates(splits)
    train, validation, test = IMAGES_PER_BREED["train"], IMAGES_PER_BREED["validation"], IMAGES_PER_BREED["test"]
    parts = {
        "train": pick(splits["train"], duplicates["train"], 0, train),
        "validation": pick(splits["train"], duplicates["train"], train, train + validation),
        "test": pick(splits["test"], duplicates["test"], 0, test),
    }
    atomic_write(options.out, lambda temporary: write(temporary, parts))
    count = sum(map(len, parts.values()))
    print(f"{options.out}: {count} images, {options.out.stat().st_size / 1e6:.2f} MB")


def select_breeds(source: Source) -> Subset:
    """The images of the twelve breeds, with the displayed names as classes."""
    assert source.label is not None
    index = {source.classes.index(theirs): number for number, theirs in enumerate(BREEDS)}
    kept = Subset(source, np.flatnonzero(np.isin(source.label.values, list(index))))
    assert kept.label is not None
    kept.label = Labels(np.array([index[int(value)] for value in kept.label.values], dtype=np.int64), list(BREEDS.values()))
    kept.extra, kept.has_masks = {}, False
    return kept


def find_duplicates(parts: dict[str, Subset]) -> dict[str, np.ndarray]:
    """Whether each image is a near duplicate of an earlier image of either split: bool [N] by split."""
    fingerprints = [fingerprint(pixels) for source in parts.values() for pixels in decode_all(source)]
    exact = exact_groups(np.array([each.digest for each in fingerprints]))
    hashes = np.array([each.hash for each in fingerprints], dtype=np.uint64)
    group = near_groups(exact, hashes, np.stack([each.thumbnail for each in fingerprints]))
    duplicate = group != np.arange(len(group))
    num_train = len(parts["train"])
    return {"train": duplicate[:num_train], "test": duplicate[num_train:]}


def decode_all(source: Source) -> Iterator[np.ndarray]:
    return (decode(source.encoded(index)) for index in range(len(source)))


def pick(source: Source, skipped: np.ndarray, start: int, stop: int) -> Subset:
    """The images from `start` to `stop` of every breed, in the order of the source."""
    assert source.label is not None
    indices = [np.flatnonzero((source.label.values == breed) & ~skipped)[start:stop] for breed in range(len(BREEDS))]
    if min(map(len, indices)) < stop - start:
        raise SystemExit(f"{source.name} has fewer than {stop} different images of some breed.")
    return Subset(source, np.sort(np.concatenate(indices)))


def write(path: Path, parts: dict[str, Subset]) -> None:
    with ShardWriter(path, make_schema(dict(parts))) as file:
        for source in parts.values():
            for index in range(len(source)):
                file.add(Row(square(source.encoded(index)), None, None), source, index)


def square(encoded: bytes | np.ndarray) -> bytes:
    """The image unchanged if it has the right size, else its center square, resized."""
    pixels = decode(encoded)
    height, width = pixels.shape[:2]
    if isinstance(encoded, bytes) and height == width == SIDE:
        return encoded
    short = min(height, width)
    left, top = (width - short) // 2, (height - short) // 2
    image = Image.fromarray(pixels).crop((left, top, left + short, top + short)).resize((SIDE, SIDE), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, "WEBP", quality=80, method=6)
    return file.getvalue()


if __name__ == "__main__":
    main()
