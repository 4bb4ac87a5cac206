"""Make the folders that benchmarks/first_use.py reads: train/ and test/ with one subfolder per class, of public photographs.

    git clone --depth 1 https://github.com/palewithout/RSSCN7
    python benchmarks/first_use_sets.py satellite RSSCN7 sets/satellite

Takes the images of a repository in `SETS`, removes duplicates and near-duplicates, draws at most --train and --test images of
each class at random (seed 0; the split of the repository is kept where it has one), reduces their longer side to --side pixels
and writes JPEG files. Classes with too few images are left out. The same repository gives the same folders.
"""

import argparse
import random
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
from arguments import positive, run_program
from PIL import Image

from vitrail.data.decode import decode
from vitrail.data.duplicates import exact_groups, fingerprint, near_groups
from vitrail.errors import UserError

QUALITY = 60  # of the JPEG files


class PublicSet(NamedTuple):
    """Where the photographs of a set are: `pattern` is matched with paths in the repository; `split` is optional in it."""

    repository: str
    pattern: str
    classes: int  # those with most images


SETS = {
    "butterflies": PublicSet("dsw88/cs601r-project1-dataset", r"dataset/butterflies/images/(?P<label>\d{3})\d{4}\.png", 10),
    "food": PublicSet("Jsrodrigue/food101_prototipe", r"data/dataset/(train|val|test)/(?P<label>[^/]+)/\d+\.jpg", 10),
    "grocery": PublicSet(
        "marcusklasson/GroceryStoreDataset", r"dataset/(?P<split>train|test)/[^/]+/(?P<label>[^/]+)/.+\.jpg", 20
    ),
    "satellite": PublicSet("palewithout/RSSCN7", r"[a-g](?P<label>[A-Z]\w+)/.+\.jpg", 7),
    "waste": PublicSet("cardstdani/WasteClassificationNeuralNetwork", r"WasteImagesDataset/(?P<label>[^/]+)/.+\.(jpe?g|png)", 9),
    "steel": PublicSet("siddhartamukherjee/NEU-DET-Steel-Surface-Defect-Detection", r"IMAGES/(?P<label>[a-z_-]+)_\d+\.jpg", 6),
    "tiles": PublicSet("abin24/Magnetic-tile-defect-datasets.", r"(?P<label>MT_\w+)/Imgs/.+\.jpg", 6),
    "birds": PublicSet("cyizhuo/CUB-200-2011-dataset", r"(?P<split>train|test)/\d+\.(?P<label>[^/]+)/.+\.jpg", 25),
}

Images = dict[str, dict[str, list[Path]]]  # files by class and split; the split "" is not divided yet


def find_images(folder: Path, wanted: PublicSet) -> Images:
    """Files by class and split, in a random order that depends on nothing but their names."""
    found: Images = defaultdict(lambda: defaultdict(list))
    for path in sorted(folder.rglob("*")):
        match = re.fullmatch(wanted.pattern, path.relative_to(folder).as_posix(), re.IGNORECASE)
        if match and path.is_file():
            found[match["label"]][match.groupdict().get("split") or ""].append(path)
    if not found:
        raise UserError(f"{folder} holds no images of {wanted.repository}: give the folder of a clone of that repository.")
    for label, splits in found.items():
        for split, paths in splits.items():
            random.Random(f"0 {label} {split}").shuffle(paths)
    return found


def read_pixels(path: Path) -> np.ndarray | None:
    """RGB values uint8 [H, W, 3], None if the file is damaged."""
    try:
        return decode(path.read_bytes())
    except (OSError, ValueError) as error:
        print(f"{path.name} left out: {error}", file=sys.stderr)
        return None


def remove_duplicates(found: Images) -> None:
    """Keep the first of every group of equal or nearly equal images; unreadable files are removed too."""
    paths = [path for splits in found.values() for split in sorted(splits, reverse=True) for path in splits[split]]
    prints = {path: fingerprint(pixels) for path in paths if (pixels := read_pixels(path)) is not None}
    digests, hashes, thumbnails = (np.array(column) for column in zip(*prints.values(), strict=True))
    groups = near_groups(exact_groups(digests), hashes.astype(np.uint64), thumbnails)
    kept = {path for row, path in enumerate(prints) if groups[row] == row}
    print(f"{len(paths):,} images, {len(prints) - len(kept):,} of them duplicates", file=sys.stderr)
    for splits in found.values():
        for split, members in splits.items():
            splits[split] = [path for path in members if path in kept]


def draw(splits: dict[str, list[Path]], train: int, test: int) -> dict[str, list[Path]]:
    """At most `train` and `test` images of a class; without a split, two thirds of few images are for training."""
    if "" in splits:
        paths = splits[""]
        cut = min(train, 2 * len(paths) // 3)
        splits = {"train": paths[:cut], "test": paths[cut:]}
    return {"train": splits.get("train", [])[:train], "test": splits.get("test", [])[:test]}


def write_reduced(path: Path, target: Path, side: int) -> None:
    image = Image.fromarray(decode(path.read_bytes()))
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    image.save(target, quality=QUALITY, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=SETS)
    parser.add_argument("clone", type=Path, help="a clone of its repository: " + ", ".join(each[0] for each in SETS.values()))
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("--train", type=positive, default=60, help="most training images of a class")
    parser.add_argument("--test", type=positive, default=40, help="most test images of a class")
    parser.add_argument("--fewest", type=positive, default=20, help="fewest training images of a class, and a half for the test")
    parser.add_argument("--side", type=positive, default=256, help="longer side of the written images in pixels")
    options = parser.parse_args()
    if options.out.exists():
        raise UserError(f"{options.out} exists: give a new folder.")
    found = find_images(options.clone, SETS[options.set])
    remove_duplicates(found)
    drawn = {label: draw(splits, options.train, options.test) for label, splits in found.items()}
    drawn = {
        label: splits
        for label, splits in drawn.items()
        if len(splits["train"]) >= options.fewest and len(splits["test"]) >= options.fewest // 2
    }
    largest = sorted(drawn, key=lambda label: (-len(drawn[label]["train"]), label))[: SETS[options.set].classes]
    for label in largest:
        for split, paths in drawn[label].items():
            folder = options.out / split / label
            folder.mkdir(parents=True)
            for number, path in enumerate(paths):
                write_reduced(path, folder / f"{number:03}.jpg", options.side)
    counts = [sum(len(drawn[label][split]) for label in largest) for split in ("train", "test")]
    print(f"{options.out}: {len(largest)} classes, {counts[0]:,} training and {counts[1]:,} test images")


if __name__ == "__main__":
    run_program(main)
