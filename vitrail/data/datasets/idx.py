"""IDX files, the format of MNIST: `train-images-idx3-ubyte` with `train-labels-idx1-ubyte`, optionally gzipped."""

import gzip
import math
import os
import re
import zlib
from functools import partial

import numpy as np

from vitrail.data.datasets.digits import PixelSource
from vitrail.data.datasets.folder import SourceDict, listing
from vitrail.data.datasets.table import class_labels
from vitrail.errors import UserError

IMAGES = re.compile(
    r"(?P<start>.*?)(?P<split>train|t10k|test|validation|val)(?P<dash>[-_.])images(?P<rest>[-_.]idx3-ubyte(\.gz)?)"
)
MAX_RATIO = 100  # of compressed files; MNIST has 5
SPLITS = {"train": "train", "t10k": "test", "test": "test", "val": "validation", "validation": "validation"}


def is_idx(name: str) -> bool:
    return IMAGES.fullmatch(name) is not None


def open_idx(path: str) -> SourceDict:
    """Open the splits of a folder of IDX files, or a single file of images as one split."""
    is_folder = os.path.isdir(path)
    folder = path if is_folder else os.path.dirname(path)
    names = [entry.name for entry in listing(path)] if is_folder else [os.path.basename(path)]
    files: dict[str, tuple[str, np.ndarray]] = {}
    for name in names:
        match = IMAGES.fullmatch(name)
        if match is None or not os.path.isfile(os.path.join(folder, name)):
            continue
        split = SPLITS[match["split"]] if is_folder else "train"
        if split in files:
            continue  # the same file, both gzipped and uncompressed
        images = os.path.join(folder, name)
        labels = _labels_path(images, match)
        values = _read(labels, 1).astype(np.int64)
        count = len(_read(images, 3))  # read all of it to detect a truncated file before training starts
        if count != len(values):
            raise UserError(f"{images} contains {count} images but {labels} contains {len(values)} labels: download both again.")
        files[split] = (images, values)
    if not files:
        raise UserError(f"{path} holds no images: give a folder with files such as train-images-idx3-ubyte.")
    columns = class_labels({split: values for split, (_, values) in files.items()}, None, f"the labels of {path}")
    sources: SourceDict = {}
    for split, (images, _) in files.items():
        label = columns[split]
        if label is None or not len(label.values):
            raise UserError(f"{images} holds no images: download it again.")
        sources[split] = PixelSource(images, label, partial(_read, images, 3))
    return sources


def _labels_path(images: str, match: re.Match[str]) -> str:
    rest = match["rest"].replace("idx3", "idx1").removesuffix(".gz")
    stem = os.path.join(os.path.dirname(images), f"{match['start']}{match['split']}{match['dash']}labels{rest}")
    for candidate in (stem, f"{stem}.gz"):
        if os.path.isfile(candidate):
            return candidate
    raise UserError(f"The labels of {images} are missing: add {os.path.basename(stem)} to the same folder.")


def _read(path: str, dimensions: int) -> np.ndarray:
    """Read the uint8 array of an IDX file. A file that is shorter or longer than its header states is rejected."""
    try:
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            start = file.read(4 + 4 * dimensions)
            if start[:4] != bytes((0, 0, 8, dimensions)):
                raise UserError(f"{path} is not an IDX file of bytes with {dimensions} dimensions: download it again.")
            shape = tuple(int.from_bytes(start[4 + 4 * axis : 8 + 4 * axis], "big") for axis in range(dimensions))
            size = math.prod(shape)
            if path.endswith(".gz") and size > MAX_RATIO * os.path.getsize(path) + 2**20:
                raise UserError(f"{path} would expand to more than {MAX_RATIO} times its size: decompress it if you trust it.")
            data = bytearray()
            # Read in chunks: a damaged header may state terabytes, which must not be allocated at once.
            while len(data) <= size and (piece := file.read(min(1 << 24, size + 1 - len(data)))):
                data += piece
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise UserError(f"{path} is damaged: its compressed data is truncated or invalid. Download it again.") from None
    except PermissionError:
        raise UserError(f"{path} cannot be read: change its permissions.") from None
    if len(data) != size or len(start) != 4 + 4 * dimensions:
        difference = "shorter" if len(data) < size else "longer"
        raise UserError(f"{path} is truncated or damaged: it is {difference} than its header states. Download it again.")
    return np.frombuffer(data, dtype=np.uint8).reshape(shape)
