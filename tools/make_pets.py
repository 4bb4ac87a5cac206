"""Writes `vitrail/data/pets.parquet` from the Oxford-IIIT Pet data set.

    python tools/make_pets.py oxford-pets/

The argument is the data set in any form that `vitrail train` takes, with its official train and test splits and its 37 breeds as
classes. Of each of twelve breeds the first images of either split are kept, validation images being some of the official
training part; they are written in the order training, validation, test. An image that is not 128 x 128 already is cut to its
centre square and scaled; near twins of an image that is kept are passed over.
"""

import argparse
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from vitrail.atomic_files import write_aside
from vitrail.data.datasets.lookup import open_parts
from vitrail.data.datasets.pets import EACH, PETS
from vitrail.data.decode import decode
from vitrail.data.duplicates import exact_groups, fingerprint, near_groups
from vitrail.data.parquet_shard import ShardWriter, schema_of
from vitrail.data.reencoding import Row
from vitrail.data.source import Labels, Source, Subset

# Half cats, half dogs; none of them is a class of Tiny ImageNet, from which the bundled weights have learnt.
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
    given = parser.parse_args()
    parts = open_parts(given.source)
    whole = {split: renamed(parts[split]) for split in ("train", "test")}
    twins = later_twins(whole)
    train, validation, test = EACH["train"], EACH["validation"], EACH["test"]
    parts = {
        "train": pick(whole["train"], twins["train"], 0, train),
        "validation": pick(whole["train"], twins["train"], train, train + validation),
        "test": pick(whole["test"], twins["test"], 0, test),
    }
    write_aside(given.out, lambda side: write(side, parts))
    count = sum(map(len, parts.values()))
    print(f"{given.out}: {count} images, {given.out.stat().st_size / 1e6:.2f} MB")


def renamed(source: Source) -> Subset:
    """The twelve breeds alone, by the names they are shown by."""
    assert source.label is not None
    place = {source.classes.index(theirs): number for number, theirs in enumerate(BREEDS)}
    kept = Subset(source, np.flatnonzero(np.isin(source.label.values, list(place))))
    assert kept.label is not None
    kept.label = Labels(np.array([place[int(value)] for value in kept.label.values], dtype=np.int64), list(BREEDS.values()))
    kept.extra, kept.has_masks = {}, False
    return kept


def later_twins(parts: dict[str, Subset]) -> dict[str, np.ndarray]:
    """Which images are, nearly, an earlier one of either split: bool [N] by split."""
    found = [fingerprint(pixels) for source in parts.values() for pixels in decoded(source)]
    exact = exact_groups(np.array([each.digest for each in found]))
    hashes = np.array([each.hash for each in found], dtype=np.uint64)
    group = near_groups(exact, hashes, np.stack([each.thumbnail for each in found]))
    later = group != np.arange(len(group))
    middle = len(parts["train"])
    return {"train": later[:middle], "test": later[middle:]}


def decoded(source: Source) -> Iterator[np.ndarray]:
    return (decode(source.encoded(index)) for index in range(len(source)))


def pick(source: Source, passed_over: np.ndarray, start: int, stop: int) -> Subset:
    """Of every breed the images from `start` to `stop`, in the order of the source."""
    assert source.label is not None
    found = [np.flatnonzero((source.label.values == breed) & ~passed_over)[start:stop] for breed in range(len(BREEDS))]
    if min(map(len, found)) < stop - start:
        raise SystemExit(f"{source.name} has fewer than {stop} different images of some breed.")
    return Subset(source, np.sort(np.concatenate(found)))


def write(side: Path, parts: dict[str, Subset]) -> None:
    with ShardWriter(side, schema_of(dict(parts))) as file:
        for source in parts.values():
            for index in range(len(source)):
                file.add(Row(square(source.encoded(index)), None, None), source, index)


def square(encoded: bytes | np.ndarray) -> bytes:
    """The image as it is if it has the size already, else its centre square, scaled to it."""
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
