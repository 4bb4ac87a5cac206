"""Opens a data set by its path. The format is detected from the files at the path."""

import os
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from vitrail.data.datasets.cifar import cifar_folder, open_cifar
from vitrail.data.datasets.coco import find_coco_files, open_coco
from vitrail.data.datasets.digits import open_digits
from vitrail.data.datasets.folder import SPLITS, FolderSource, SourceDict, listing, open_folder, shards
from vitrail.data.datasets.hub import PREFIX, open_hub
from vitrail.data.datasets.idx import is_idx, open_idx
from vitrail.data.datasets.mask_folder import find_root, open_mask_folder
from vitrail.data.datasets.object_folder import add_voc_objects, open_object_folder
from vitrail.data.datasets.parquet import open_parquet
from vitrail.data.datasets.pets import open_pets
from vitrail.data.datasets.table import open_table
from vitrail.data.datasets.tar import expand, open_tar
from vitrail.data.image_formats import is_image_file
from vitrail.data.label_choice import choose_labels
from vitrail.data.source import Labels, Source, Splits, reorder_classes, split_by_seed, split_fold
from vitrail.errors import UserError
from vitrail.formatting import percent

SUPPORTED = (
    "a folder of class folders, Parquet files, WebDataset tars, COCO, VOC or YOLO annotations, CIFAR batches, IDX files, a CSV "
    "or TSV table, hf://owner/name, pets or digits"
)
BUILT_IN = ("digits", "pets")
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


def open_source(path: str | Path, split: str | None = None) -> Source:
    """Open one split of a data set. The default is the training split, which is everything if there are no splits."""
    sources = open_sources(path)
    name = "train" if "train" in sources else next(iter(sources))
    if split is not None:
        if split.lower() not in SPLITS:
            raise UserError(f"Unknown split {split}: choose train, validation or test.")
        name = SPLITS[split.lower()]
        if name not in sources:
            raise UserError(f"{path} has no {name} split, only {', '.join(sources)}.")
    return sources[name]


def open_splits(
    path: str | Path,
    seed: int = 0,
    default_fraction: float = 0.1,
    validation_fraction: float = 0.0,
    class_order: Sequence[str] | None = None,
    fold: tuple[int, int] | None = None,
    label: str = "",
    label_map: str = "",
) -> Splits:
    """Open the training, validation and test splits.

    If the data has no validation split, `default_fraction` of every training class is used for validation. With
    `validation_fraction`, that fraction of every training class is used for validation even if there is a validation split, which
    then becomes the test split if there is none: a model selected on the validation images is reported on other images. The same
    holds for `fold`, (i, n): part i of n equal parts of every training class is used.
    `class_order` are the classes of an earlier run on this data: earlier versions sorted numbers as text, and the order decides
    labels and split. `label` and `label_map` choose other labels (`vitrail.data.label_choice`), which do not change the split.
    """
    splits = _open_splits(path, seed, default_fraction, validation_fraction, class_order, fold, label)
    choose_labels([part for part in splits if part is not None], label, label_map, splits.test)
    return splits


def _open_splits(
    path: str | Path,
    seed: int,
    default_fraction: float,
    validation_fraction: float,
    class_order: Sequence[str] | None,
    fold: tuple[int, int] | None,
    column: str,
) -> Splits:
    sources = open_sources(path, column)
    if class_order is not None:
        for source in sources.values():
            source.label = reorder_classes(source.label, class_order) if source.label else None
    if "train" not in sources and len(sources) > 1:
        raise UserError(f"{path} has only {' and '.join(sources)} splits: add a train split.")
    train = sources["train"] if "train" in sources else next(iter(sources.values()))
    test = sources.get("test") if "train" in sources else None
    if "train" in sources and "validation" in sources:
        if not validation_fraction and fold is None:
            return Splits(train, sources["validation"], test)
        test = test if test is not None else sources["validation"]
    fraction = validation_fraction or default_fraction
    training, validation = split_by_seed(train, fraction, seed) if fold is None else split_fold(train, *fold)
    few = f"{train.name} has too few images per class to use {percent(fraction)} for validation: add images or a val folder."
    if not len(validation):
        single = f"a single image with a mask ({train.unmasked:,} without)" if train.unmasked else "a single image"
        raise UserError(
            few if len(train) > 1 else f"{train.name} holds {single}: add {'masks' if train.unmasked else 'images'}, at least 4."
        )
    labels = [part.label.values for part in (validation, training) if part.label is not None and fold is None]
    if labels and len(np.setdiff1d(labels[0], labels[1])):  # nearly all classes have a single image
        validation.defects = (*validation.defects, few)
    return Splits(training, validation, test)


def check_usable(sources: Iterable[Source]) -> None:
    """Raise UserError with the first defect of the labels. Opening the data does not: some tasks do not need labels."""
    for source in sources:
        if source.defects:
            raise UserError(source.defects[0])


def require_labels(source: Source) -> Labels:
    """Return the main labels; UserError if there are none or if they cannot be used."""
    if source.label is None:
        check_usable([source])
        raise UserError(f"{source.name} has no labels: put the images into one folder per class, or give a table with a label.")
    return source.label


def check_trainable(source: Source) -> None:
    """Raise UserError if no classifier can be trained on the source: no images, no labels or a single class."""
    if not len(source):
        raise UserError(f"{source.name} holds no images: add some.")
    if source.label is None:
        raise UserError(
            f"{source.name} has no labels: put the images into one folder per class or add a label column to the table, or "
            "train without labels with --recipe dino_small."
        )
    present = np.unique(source.label.values[source.label.values >= 0])
    if len(present) < 2:
        only = source.label.names[int(present[0])] if len(present) else "none"
        if len(source.label.names) > 1 and len(present):
            raise UserError(
                f"{source.name} has too few images: of its {len(source.label.names)} classes only {only} is in both the training "
                "and the validation split; add images until every class has at least two."
            )
        raise UserError(
            f"{source.name} has only one class ({only}): give the folder that holds the class folders, at least two, or train "
            "without labels with --recipe dino_small or grafit_small."
        )


def open_sources(path: str | Path, column: str = "") -> SourceDict:
    """Open all splits of a data set, by name. A `column` of a table or of Parquet files is a label whatever its name."""
    path = os.fspath(path)
    if is_built_in(path):
        return open_digits() if path == "digits" else open_pets()
    if path in BUILT_IN:
        warn_shadowed(os.path.abspath(path))
    if not path:
        raise UserError(f"The path to the data is empty: give {SUPPORTED}.")
    if path.startswith(PREFIX):
        return open_hub(path)
    path = os.path.expanduser(path)
    lower = path.lower()
    if lower.endswith(".tar") and (os.path.isfile(path) or expand(path) != [path]):
        return open_tar(path)
    if os.path.isdir(path):
        return _open_directory(path, column)
    if not os.path.exists(path):
        raise UserError(f"{path} does not exist: check the spelling, or give {SUPPORTED}.")
    if lower.endswith(COMPRESSED):
        raise UserError(
            f"{path} is a compressed tar, which has no random access: decompress it to .tar or unpack it to a folder."
        )
    if not os.path.isfile(path):
        raise UserError(f"{path} is not a regular file: give {SUPPORTED}.")
    if lower.endswith((".csv", ".tsv")):
        return open_table(path, column)
    if lower.endswith(".parquet"):
        return open_parquet(path, column)
    if lower.endswith(".json"):
        return open_coco(os.path.dirname(path) or ".", [path])
    if is_idx(os.path.basename(path)):
        return open_idx(path)
    if is_image_file(path):
        raise UserError(f"{path} is a single image: give the folder that contains one folder of images per class.")
    raise UserError(f"{path} has an unknown format: give {SUPPORTED}.")


def is_built_in(path: str) -> bool:
    """Return whether `path` names a built-in data set and no file or folder of that name exists.

    A folder of one or several runs of the same name (`--out digits`) is not data and does not count.
    """
    if path not in BUILT_IN:
        return False
    return not os.path.exists(path) or any(any(Path(path).glob(pattern)) for pattern in ("run.json", "*/run.json"))


@cache  # report it once, even if a command opens its data several times
def warn_shadowed(path: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":  # one process per machine
        name, kind = os.path.basename(path), "folder" if os.path.isdir(path) else "file"
        print(f"Using the {kind} {name} in the current directory instead of the built-in {name}.", file=sys.stderr)


def _open_directory(path: str, column: str) -> SourceDict:
    names = [entry.name for entry in listing(path)]
    if any(is_idx(name) for name in names):
        return open_idx(path)
    if cifar_folder(path) is not None:
        return open_cifar(path)
    # Shards are in the folder itself, in data/ or in split folders. Class folders are not searched.
    folders = ["", "data", *(name for name in names if name.lower() in SPLITS)]
    names_inside = {
        entry.name.lower()
        for folder in folders
        if os.path.isdir(os.path.join(path, folder))
        for entry in listing(os.path.join(path, folder))
    }
    if any(name.endswith(".parquet") for name in names_inside):
        return open_parquet(path, column)
    if any(name.endswith(".tar") for name in names_inside) and shards(path, ".tar"):
        return open_tar(path)
    packed = next((name for name in sorted(names_inside) if name.endswith(COMPRESSED)), None)
    if packed is not None:
        raise UserError(f"{path} contains a compressed tar, {packed}, which has no random access: decompress it to .tar.")
    annotations = find_coco_files(path)
    if annotations:
        return open_coco(path, annotations)
    return open_object_folder(path) or open_masked(path) or open_folder(path)


def open_masked(path: str) -> SourceDict | None:
    """A folder of images and masks; with the boxes of VOC, if it has them."""
    sources, root = open_mask_folder(path), find_root(path)
    if sources is not None and os.path.isdir(os.path.join(root, "Annotations")):
        add_voc_objects([source for source in sources.values() if isinstance(source, FolderSource)], root)
    return sources
