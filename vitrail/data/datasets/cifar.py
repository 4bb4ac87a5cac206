"""CIFAR-10 and CIFAR-100 as their authors publish them: Python batches or binary files."""

import io
import os
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.datasets.digits import PixelSource
from vitrail.data.datasets.folder import Parts
from vitrail.data.datasets.table import class_labels
from vitrail.data.source import Labels
from vitrail.errors import UserError

PIXELS = 3 * 32 * 32
TEN = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
HUNDRED = {"train": ["train"], "test": ["test"]}
SUBFOLDERS = ("cifar-10-batches-py", "cifar-10-batches-bin", "cifar-100-python", "cifar-100-binary")


class Layout(NamedTuple):
    """One of the four ways: which files, whether pickles, which labels before the pixels of a binary record."""

    files: dict[str, list[str]]
    binary: bool
    columns: dict[str, str]  # our name of a label -> the authors' name


LAYOUTS = [
    Layout(TEN, False, {"label": "labels"}),
    Layout({split: [f"{name}.bin" for name in names] for split, names in TEN.items()}, True, {"label": "labels"}),
    Layout(HUNDRED, False, {"coarse_label": "coarse_labels", "label": "fine_labels"}),
    Layout({"train": ["train.bin"], "test": ["test.bin"]}, True, {"coarse_label": "coarse_labels", "label": "fine_labels"}),
]


def cifar_folder(path: str) -> str | None:
    """The folder at or right below the path that holds CIFAR's files, None if there is none."""
    for folder in (path, *(os.path.join(path, name) for name in SUBFOLDERS)):
        if _layout(folder) is not None:
            return folder
    return None


def _layout(folder: str) -> Layout | None:
    for layout in LAYOUTS:
        named = layout.binary or layout.files is TEN or os.path.isfile(os.path.join(folder, "meta"))
        if named and any(_present(folder, names) for names in layout.files.values()):
            return layout
    return None


def _present(folder: str, names: list[str]) -> list[str]:
    paths = [os.path.join(folder, name) for name in names]
    return [path for path in paths if os.path.isfile(path)]


def open_cifar(path: str) -> Parts:
    """Train and test, with the hundred's twenty groups as `coarse_label`."""
    folder = cifar_folder(path)
    layout = _layout(folder) if folder else None
    if folder is None or layout is None:
        raise UserError(f"{path} holds no CIFAR batches: give the folder with data_batch_1 or train and meta in it.")
    files = {split: found for split, names in layout.files.items() if (found := _present(folder, names))}
    labels: dict[str, dict[str, Labels | None]] = {}
    for name, column in layout.columns.items():
        values = {split: np.concatenate([_read_labels(file, layout, column) for file in found]) for split, found in files.items()}
        labels[name] = class_labels({**values}, _names(folder, layout, column), f"the labels of {folder}")
    parts: Parts = {}
    for split, found in files.items():
        main = labels["label"][split]
        if main is None:
            raise UserError(f"{found[0]} holds no labelled images: download it again.")
        extra = {name: further for name in labels if name != "label" and (further := labels[name][split])}
        parts[split] = PixelSource(folder, main, partial(_read_pixels, found, layout), extra)
    return parts


def _read_pixels(files: list[str], layout: Layout) -> np.ndarray:
    """uint8 [N, 32, 32, 3]"""
    rows = [_records(file, layout)[:, -PIXELS:] if layout.binary else _batch(file)["data"] for file in files]
    planes = np.concatenate(rows).reshape(-1, 3, 32, 32)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1))


def _read_labels(file: str, layout: Layout, column: str) -> np.ndarray:
    if layout.binary:
        return _records(file, layout)[:, list(layout.columns.values()).index(column)].astype(np.int64)
    batch = _batch(file)
    values = batch.get(column)
    if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
        raise UserError(f"{file} has no list of numbers called {column}: download it again.")
    if len(values) != len(batch["data"]):
        raise UserError(f"{file} holds {len(batch['data'])} images and {len(values)} labels: download it again.")
    return np.array(values, dtype=np.int64)


def _records(file: str, layout: Layout) -> np.ndarray:
    """uint8 [N, labels and pixels] of a binary file."""
    width = len(layout.columns) + PIXELS
    data = np.fromfile(file, dtype=np.uint8)
    if not len(data) or len(data) % width:
        raise UserError(f"{file} is truncated, its {len(data)} bytes are not whole records of {width}: download it again.")
    return data.reshape(-1, width)


def _batch(file: str) -> dict[str, Any]:
    batch = read_pickle(file)
    data = batch.get("data")
    if isinstance(data, Block):
        batch["data"] = data = data.array()
    if not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != PIXELS or data.dtype != np.uint8:
        raise UserError(f"{file} is no CIFAR batch, it has no data of {PIXELS} bytes per image: download it again.")
    return batch


def _names(folder: str, layout: Layout, column: str) -> list[str] | None:
    """The class names that lie beside the batches, None if they do not."""
    stem = column.removesuffix("s")
    if layout.binary:
        for name in ("batches.meta.txt", f"{stem}_names.txt"):
            file = os.path.join(folder, name)
            if os.path.isfile(file):
                with open(file, encoding="utf-8") as text:
                    return [line.strip() for line in text if line.strip()]
        return None
    for name in ("batches.meta", "meta"):
        file = os.path.join(folder, name)
        if os.path.isfile(file):
            names = read_pickle(file).get(f"{stem}_names")
            if isinstance(names, list):
                return [value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value) for value in names]
    return None


class Kind:
    """Stands for numpy's dtype in a pickle."""

    def __init__(self, name: str | bytes = "", *_: object) -> None:
        self.name = name.decode("ascii", "replace") if isinstance(name, bytes) else name

    def __setstate__(self, state: object) -> None:
        pass  # byte order and flags: of no consequence for single bytes


class Block:
    """Stands for numpy's array in a pickle; numpy's own unpickling code never sees the file."""

    def __init__(self, *_: object) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def array(self) -> np.ndarray | None:
        """The array if it is of unsigned bytes, in rows; None for anything else."""
        if len(self.state) != 5:
            return None
        _, shape, kind, columns_first, raw = self.state
        if not isinstance(kind, Kind) or kind.name != "u1" or not isinstance(raw, bytes):
            return None
        if not isinstance(shape, tuple) or len(shape) != 2 or shape[0] * shape[1] != len(raw):
            return None
        return np.frombuffer(raw, dtype=np.uint8).reshape(shape, order="F" if columns_first else "C")


def _encode(text: str, encoding: str) -> bytes:
    # Python 3 writes bytes in this roundabout way when asked for an old protocol.
    return text.encode("latin1")


class PlainUnpickler(pickle._Unpickler):  # type: ignore[name-defined, misc]
    """Opens pickles of plain values and arrays; every other name in the file is refused, so that no code of it runs.

    It is built on Python's own reader and not the one in C, which a few crafted bytes make ask for any amount of memory.
    """

    ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {  # noqa: RUF012 - a table, not state
        ("numpy.core.multiarray", "_reconstruct"): Block,
        ("numpy._core.multiarray", "_reconstruct"): Block,
        ("numpy", "ndarray"): Block,
        ("numpy", "dtype"): Kind,
        ("_codecs", "encode"): _encode,
    }

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not data")
        return self.ALLOWED[module, name]


def read_pickle(file: str) -> dict[str, Any]:
    """The dictionary in a pickle of plain values, keys as text."""
    try:
        with open(file, "rb") as stream:
            content = PlainUnpickler(io.BytesIO(stream.read()), encoding="bytes").load()
    except PermissionError:
        raise UserError(f"{file} may not be read: change its permissions.") from None
    except Exception as error:  # damaged pickles raise nearly anything
        reason = str(error) if isinstance(error, pickle.UnpicklingError) else "it breaks off or is no pickle"
        raise UserError(f"{file} is damaged or unsafe ({reason}): download it again.") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} is no CIFAR batch, it holds no dictionary: download it again.")
    return {key.decode("latin1") if isinstance(key, bytes) else str(key): value for key, value in content.items()}
