"""CIFAR-10 and CIFAR-100 in the published formats: Python pickles or binary files."""

import io
import os
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.datasets.digits import PixelSource
from vitrail.data.datasets.folder import SourceDict
from vitrail.data.datasets.table import class_labels
from vitrail.data.source import Labels
from vitrail.errors import UserError

PIXELS = 3 * 32 * 32
CIFAR10_FILES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
CIFAR100_FILES = {"train": ["train"], "test": ["test"]}
SUBFOLDERS = ("cifar-10-batches-py", "cifar-10-batches-bin", "cifar-100-python", "cifar-100-binary")


class Layout(NamedTuple):
    """One of the four published formats. A binary record holds the label columns, then the pixels."""

    files: dict[str, list[str]]
    binary: bool
    columns: dict[str, str]  # column name -> name in the files


LAYOUTS = [
    Layout(CIFAR10_FILES, False, {"label": "labels"}),
    Layout({split: [f"{name}.bin" for name in names] for split, names in CIFAR10_FILES.items()}, True, {"label": "labels"}),
    Layout(CIFAR100_FILES, False, {"coarse_label": "coarse_labels", "label": "fine_labels"}),
    Layout({"train": ["train.bin"], "test": ["test.bin"]}, True, {"coarse_label": "coarse_labels", "label": "fine_labels"}),
]


def cifar_folder(path: str) -> str | None:
    """Return the folder with the CIFAR files, `path` itself or one of its known subfolders, or None."""
    for folder in (path, *(os.path.join(path, name) for name in SUBFOLDERS)):
        if _layout(folder) is not None:
            return folder
    return None


def _layout(folder: str) -> Layout | None:
    for layout in LAYOUTS:
        complete = layout.binary or layout.files is CIFAR10_FILES or os.path.isfile(os.path.join(folder, "meta"))
        if complete and any(_present(folder, names) for names in layout.files.values()):
            return layout
    return None


def _present(folder: str, names: list[str]) -> list[str]:
    paths = [os.path.join(folder, name) for name in names]
    return [path for path in paths if os.path.isfile(path)]


def open_cifar(path: str) -> SourceDict:
    """Open the train and test splits. The 20 superclasses of CIFAR-100 are the extra label `coarse_label`."""
    folder = cifar_folder(path)
    layout = _layout(folder) if folder else None
    if folder is None or layout is None:
        raise UserError(f"{path} contains no CIFAR batches: give the folder that contains data_batch_1, or train and meta.")
    files = {split: paths for split, names in layout.files.items() if (paths := _present(folder, names))}
    labels: dict[str, dict[str, Labels | None]] = {}
    for name, column in layout.columns.items():
        indices = {
            split: np.concatenate([_read_labels(file, layout, column) for file in paths]) for split, paths in files.items()
        }
        labels[name] = class_labels({**indices}, _names(folder, layout, column), f"the labels of {folder}")
    sources: SourceDict = {}
    for split, paths in files.items():
        main = labels["label"][split]
        if main is None:
            raise UserError(f"{paths[0]} contains no labeled images: download it again.")
        extra = {name: values for name in labels if name != "label" and (values := labels[name][split])}
        sources[split] = PixelSource(folder, main, partial(_read_pixels, paths, layout), extra, split)
    return sources


def _read_pixels(files: list[str], layout: Layout) -> np.ndarray:
    """Return the pixels, uint8 [N, 32, 32, 3]."""
    rows = [_records(file, layout)[:, -PIXELS:] if layout.binary else _batch(file)["data"] for file in files]
    planes = np.concatenate(rows).reshape(-1, 3, 32, 32)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1))


def _read_labels(file: str, layout: Layout, column: str) -> np.ndarray:
    if layout.binary:
        return _records(file, layout)[:, list(layout.columns.values()).index(column)].astype(np.int64)
    batch = _batch(file)
    values = batch.get(column)
    if not isinstance(values, list) or not all(isinstance(value, int) and abs(value) < 1 << 31 for value in values):
        raise UserError(f"{file} has no list of integers named {column}: download it again.")
    if len(values) != len(batch["data"]):
        raise UserError(f"{file} contains {len(batch['data'])} images and {len(values)} labels: download it again.")
    return np.array(values, dtype=np.int64)


def _records(file: str, layout: Layout) -> np.ndarray:
    """Return the records of a binary file, uint8 [N, labels + pixels]."""
    width = len(layout.columns) + PIXELS
    data = np.fromfile(file, dtype=np.uint8)
    if not len(data) or len(data) % width:
        raise UserError(f"{file} is truncated: its size of {len(data)} bytes is not a multiple of {width}. Download it again.")
    return data.reshape(-1, width)


def _batch(file: str) -> dict[str, Any]:
    batch = read_pickle(file)
    data = batch.get("data")
    if isinstance(data, PickledArray):
        batch["data"] = data = data.array()
    if not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != PIXELS or data.dtype != np.uint8:
        raise UserError(f"{file} is not a CIFAR batch: it has no array of {PIXELS} bytes per image. Download it again.")
    return batch


def _names(folder: str, layout: Layout, column: str) -> list[str] | None:
    """Read the class names from the metadata file next to the batches; None if there is none."""
    stem = column.removesuffix("s")
    if layout.binary:
        for name in ("batches.meta.txt", f"{stem}_names.txt"):
            file = os.path.join(folder, name)
            if os.path.isfile(file):
                with open(file, encoding="utf-8", errors="replace") as text:
                    return [line.strip() for line in text if line.strip()]
        return None
    for name in ("batches.meta", "meta"):
        file = os.path.join(folder, name)
        if os.path.isfile(file):
            names = read_pickle(file).get(f"{stem}_names")
            if isinstance(names, list):
                if not all(isinstance(value, str | bytes) for value in names):
                    raise UserError(f"{file} is damaged: its class names are not text. Download it again.")
                return [value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value) for value in names]
    return None


class PickledDtype:
    """Replaces numpy.dtype while unpickling."""

    def __init__(self, name: str | bytes = "", *_: object) -> None:
        self.name = name.decode("ascii", "replace") if isinstance(name, bytes) else name

    def __setstate__(self, state: object) -> None:
        pass  # byte order and flags do not matter for single bytes


class PickledArray:
    """Replaces numpy.ndarray while unpickling, so that numpy's own unpickling code is never called."""

    def __init__(self, *_: object) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def array(self) -> np.ndarray | None:
        """Return the array if it is a uint8 matrix, else None."""
        if not isinstance(self.state, tuple) or len(self.state) != 5:
            return None
        _, shape, dtype, fortran_order, raw = self.state
        if not isinstance(dtype, PickledDtype) or dtype.name != "u1" or not isinstance(raw, bytes):
            return None
        sides = isinstance(shape, tuple) and len(shape) == 2 and all(type(side) is int and side >= 0 for side in shape)
        if not sides or shape[0] * shape[1] != len(raw):
            return None
        return np.frombuffer(raw, dtype=np.uint8).reshape(shape, order="F" if fortran_order else "C")


def _encode(text: str, encoding: str) -> bytes:
    # Python 3 pickles bytes in this way in protocols 0 to 2.
    return text.encode("latin1")


# Where the keys of dictionaries and sets are on the stack. They must be text: hashing nested tuples can take any time.
KEYS = {
    pickle.SETITEM: slice(-2, -1),
    pickle.SETITEMS: slice(None, None, 2),
    pickle.DICT: slice(None, None, 2),
    pickle.ADDITEMS: slice(None),
    pickle.FROZENSET: slice(None),
}


def with_text_keys(load: Callable[[Any], None], keys: slice) -> Callable[[Any], None]:
    """Return a method of an unpickler that checks the keys on the stack before it calls `load`."""

    def load_checked(unpickler: Any) -> None:
        if not all(isinstance(key, str | bytes) for key in unpickler.stack[keys]):
            raise pickle.UnpicklingError("a key is not text")
        load(unpickler)

    return load_checked


class PlainUnpickler(pickle._Unpickler):
    """Unpickles plain values and arrays. Every other name is rejected, so no code from the file can run.

    It extends the pure-Python unpickler: the one in C can be made to allocate any amount of memory by a few crafted bytes.
    """

    ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {  # noqa: RUF012 - constant
        ("numpy.core.multiarray", "_reconstruct"): PickledArray,
        ("numpy._core.multiarray", "_reconstruct"): PickledArray,
        ("numpy", "ndarray"): PickledArray,
        ("numpy", "dtype"): PickledDtype,
        ("_codecs", "encode"): _encode,
    }

    dispatch = pickle._Unpickler.dispatch | {
        opcode[0]: with_text_keys(pickle._Unpickler.dispatch[opcode[0]], keys) for opcode, keys in KEYS.items()
    }

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is not data")
        return self.ALLOWED[module, name]


def read_pickle(file: str) -> dict[str, Any]:
    """Read a pickled dictionary of plain values; keys are converted to str."""
    try:
        with open(file, "rb") as stream:
            content = PlainUnpickler(io.BytesIO(stream.read()), encoding="bytes").load()
    except PermissionError:
        raise UserError(f"{file} cannot be read: change its permissions.") from None
    except Exception as error:  # damaged pickles raise nearly anything
        reason = str(error) if isinstance(error, pickle.UnpicklingError) else "it is truncated or not a pickle"
        raise UserError(f"{file} is damaged or unsafe ({reason}): download it again.") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} is not a CIFAR batch: it contains no dictionary. Download it again.")
    return {key.decode("latin1") if isinstance(key, bytes) else str(key): value for key, value in content.items()}
