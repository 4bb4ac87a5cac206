"""IDX files, the format of MNIST and its kin: `train-images-idx3-ubyte` with `train-labels-idx1-ubyte`, gzipped or not."""

import gzip
import math
import os
import re
import zlib
from functools import partial

import numpy as np

from vitrail.data.datasets.digits import PixelSource
from vitrail.data.datasets.folder import Parts, listing
from vitrail.data.datasets.table import class_labels
from vitrail.errors import UserError

IMAGES = re.compile(
    r"(?P<start>.*?)(?P<split>train|t10k|test|validation|val)(?P<dash>[-_.])images(?P<rest>[-_.]idx3-ubyte(\.gz)?)"
)
SPLITS = {"train": "train", "t10k": "test", "test": "test", "val": "validation", "validation": "validation"}


def is_idx(name: str) -> bool:
    return IMAGES.fullmatch(name) is not None


def open_idx(path: str) -> Parts:
    """The splits in a folder of IDX files, or the one split that a file of images stands for."""
    whole = os.path.isdir(path)
    folder = path if whole else os.path.dirname(path)
    names = [entry.name for entry in listing(path)] if whole else [os.path.basename(path)]
    found: dict[str, tuple[str, np.ndarray]] = {}
    for name in names:
        match = IMAGES.fullmatch(name)
        if match is None:
            continue
        split = SPLITS[match["split"]] if whole else "train"
        if split in found:
            continue  # the same file again, gzipped beside not gzipped
        images = os.path.join(folder, name)
        labels = _labels_beside(images, match)
        values = _read(labels, 1).astype(np.int64)
        count = len(_read(images, 3))  # all of it, so that a truncated file is known before the training starts
        if count != len(values):
            raise UserError(f"{images} holds {count} images but {labels} {len(values)} labels: download both again.")
        found[split] = (images, values)
    columns = class_labels({split: values for split, (_, values) in found.items()}, None, f"the labels of {path}")
    parts: Parts = {}
    for split, (images, _) in found.items():
        label = columns[split]
        if label is None or not len(label.values):
            raise UserError(f"{images} holds no images: download it again.")
        parts[split] = PixelSource(images, label, partial(_read, images, 3))
    return parts


def _labels_beside(images: str, match: re.Match[str]) -> str:
    rest = match["rest"].replace("idx3", "idx1").removesuffix(".gz")
    stem = os.path.join(os.path.dirname(images), f"{match['start']}{match['split']}{match['dash']}labels{rest}")
    for candidate in (stem, f"{stem}.gz"):
        if os.path.isfile(candidate):
            return candidate
    raise UserError(f"The labels that belong to {images} are missing: put {os.path.basename(stem)} beside it.")


def _read(path: str, dimensions: int) -> np.ndarray:
    """The uint8 array of an IDX file; a file that is shorter or longer than it says is refused."""
    try:
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            start = file.read(4 + 4 * dimensions)
            if start[:4] != bytes((0, 0, 8, dimensions)):
                raise UserError(f"{path} is not an IDX file of bytes with {dimensions} dimensions: download it again.")
            shape = tuple(int.from_bytes(start[4 + 4 * axis : 8 + 4 * axis], "big") for axis in range(dimensions))
            size = math.prod(shape)
            data = bytearray()
            # In pieces: a damaged header may promise terabytes, which must not be asked of the memory at once.
            while len(data) <= size and (piece := file.read(min(1 << 24, size + 1 - len(data)))):
                data += piece
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise UserError(f"{path} is damaged, its compressed data ends or breaks off: download it again.") from None
    except PermissionError:
        raise UserError(f"{path} may not be read: change its permissions.") from None
    if len(data) != size or len(start) != 4 + 4 * dimensions:
        more = "shorter" if len(data) < size else "longer"
        raise UserError(f"{path} is truncated or damaged, {more} than its header says: download it again.")
    return np.frombuffer(data, dtype=np.uint8).reshape(shape)
