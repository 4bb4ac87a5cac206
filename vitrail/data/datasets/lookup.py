"""Which source a path is. There are no flags: what lies at the path says it."""

import os
import sys
from functools import cache
from pathlib import Path

import numpy as np

from vitrail.data.datasets.cifar import cifar_folder, open_cifar
from vitrail.data.datasets.digits import open_digits
from vitrail.data.datasets.folder import SPLITS, Parts, listing, open_folder, shards
from vitrail.data.datasets.hub import PREFIX, open_hub
from vitrail.data.datasets.idx import is_idx, open_idx
from vitrail.data.datasets.parquet import open_parquet
from vitrail.data.datasets.pets import open_pets
from vitrail.data.datasets.table import open_table
from vitrail.data.datasets.tar import expand, open_tar
from vitrail.data.source import Source, Splits, split_by_seed
from vitrail.errors import UserError
from vitrail.formatting import percent

UNDERSTOOD = (
    "a folder of class folders, Parquet files, WebDataset tars, CIFAR batches, IDX files, a CSV or TSV table, "
    "hf://owner/name, pets or digits"
)
BUILT_IN = ("digits", "pets")
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


def open_source(path: str | Path, split: str | None = None) -> Source:
    """One split of the data at the path; without a name the training split, which is everything if there are no splits."""
    parts = open_parts(path)
    if split is None:
        return parts["train"] if "train" in parts else next(iter(parts.values()))
    wanted = SPLITS.get(split.lower())
    if wanted is None:
        raise UserError(f"There is no split called {split}: ask for train, validation or test.")
    if wanted not in parts:
        raise UserError(f"{path} has no {wanted} split, only {', '.join(parts)}.")
    return parts[wanted]


def open_splits(path: str | Path, seed: int = 0, share: float = 0.1, held_out: float = 0.0) -> Splits:
    """Train, validation and test; where the data has no validation split, `share` of every training class is set aside.

    With `held_out` that share of every training class is validated on even where there is a validation split, which then stands
    in for a missing test split: what is chosen by the validation must not have been chosen by the images it is reported on.
    """
    parts = open_parts(path)
    if "train" not in parts and len(parts) > 1:
        raise UserError(f"{path} has only {' and '.join(parts)} splits: add a train split.")
    train = parts["train"] if "train" in parts else next(iter(parts.values()))
    test = parts.get("test") if "train" in parts else None
    if "train" in parts and "validation" in parts:
        if not held_out:
            return Splits(train, parts["validation"], test)
        test = test if test is not None else parts["validation"]
    share = held_out or share
    rest, held = split_by_seed(train, share, seed)
    if not len(held):
        raise UserError(f"{train.name} has too few images per class to set {percent(share)} aside: add images or a val folder.")
    return Splits(rest, held, test)


def check_trainable(source: Source) -> None:
    """Refuses what no classifier can learn from: no images, no labels, a single class."""
    if not len(source):
        raise UserError(f"{source.name} holds no images: add some.")
    if source.label is None:
        raise UserError(f"{source.name} has no labels: put the images into one folder per class, or give a table with a label.")
    present = np.unique(source.label.values[source.label.values >= 0])
    if len(present) < 2:
        only = source.label.names[int(present[0])] if len(present) else "none"
        if len(source.label.names) > 1 and len(present):
            raise UserError(
                f"{source.name} has too few images: of its {len(source.label.names)} classes only {only} is both learned and "
                "validated; give every class at least two."
            )
        raise UserError(f"{source.name} has only one class ({only}): give the folder that holds the class folders, at least two.")


def open_parts(path: str | Path) -> Parts:
    """All the splits of the data at the path, by name."""
    path = os.fspath(path)
    if is_built_in(path):
        return open_digits() if path == "digits" else open_pets()
    if path in BUILT_IN:
        tell_hidden(os.path.abspath(path))
    if not path:
        raise UserError(f"The path to the data is empty: give {UNDERSTOOD}.")
    if path.startswith(PREFIX):
        return open_hub(path)
    path = os.path.expanduser(path)
    lower = path.lower()
    if lower.endswith(".tar") and (os.path.isfile(path) or expand(path) != [path]):
        return open_tar(path)
    if os.path.isdir(path):
        return _open_directory(path)
    if not os.path.exists(path):
        raise UserError(f"There is nothing at {path}: check the spelling, or give {UNDERSTOOD}.")
    if lower.endswith(COMPRESSED):
        raise UserError(f"{path} is a compressed tar, in which no image can be reached: unpack it to .tar or to a folder.")
    if lower.endswith((".csv", ".tsv")):
        return open_table(path)
    if lower.endswith(".parquet"):
        return open_parquet(path)
    if is_idx(os.path.basename(path)):
        return open_idx(path)
    raise UserError(f"{path} is of an unknown kind: give {UNDERSTOOD}.")


def is_built_in(path: str) -> bool:
    """Whether the name stands for a set of the package: what lies here by that name comes first, as with weights.

    A folder that `--out` made, of one training or of several, may be called like the data, and is no data.
    """
    if path not in BUILT_IN:
        return False
    return not os.path.exists(path) or any(any(Path(path).glob(pattern)) for pattern in ("run.json", "*/run.json"))


@cache  # a command may open its data more than once
def tell_hidden(path: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":  # of the processes on a machine one says it
        name, kind = os.path.basename(path), "folder" if os.path.isdir(path) else "file"
        print(f"The {kind} {name} that lies here is taken, not the built-in {name}: for that, run elsewhere.", file=sys.stderr)


def _open_directory(path: str) -> Parts:
    names = [entry.name for entry in listing(path)]
    if any(is_idx(name) for name in names):
        return open_idx(path)
    if cifar_folder(path) is not None:
        return open_cifar(path)
    # Shards lie at the top, or below folders that a data set's own tools make; class folders are not searched for them.
    likely = ["", "data", *(name for name in names if name.lower() in SPLITS)]
    inside = {
        each.name.lower()
        for folder in likely
        if os.path.isdir(os.path.join(path, folder))
        for each in listing(os.path.join(path, folder))
    }
    if any(name.endswith(".parquet") for name in inside):
        return open_parquet(path)
    if any(name.endswith(".tar") for name in inside) and shards(path, ".tar"):
        return open_tar(path)
    packed = next((name for name in sorted(inside) if name.endswith(COMPRESSED)), None)
    if packed is not None:
        raise UserError(f"{path} holds a compressed tar, {packed}, in which no image can be reached: unpack it to .tar.")
    return open_folder(path)
