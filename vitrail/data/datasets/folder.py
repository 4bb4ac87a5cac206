"""Folders of images, and how every other source lists a directory.

A folder per class, with or without `train/`, `val/`, `test/` around them; or images without class folders, which have no label.
"""

import os
import re
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from vitrail.data.source import Labels, Source
from vitrail.errors import UserError

EXTENSIONS = frozenset(["jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm"])
SPLITS = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
    "testing": "test",
}
Parts = dict[str, Source]  # the splits of a data set by canonical name: "train", "validation", "test"


class Paths:
    """Many paths as one block of bytes: a million of them reach a worker process as one copy, not a million objects."""

    def __init__(self, paths: Iterable[str]) -> None:
        encoded = [os.fsencode(path) for path in paths]
        self._ends = np.cumsum([len(path) for path in encoded], dtype=np.int64)
        self._block = b"".join(encoded)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self._ends):
            raise IndexError(index)
        start = self._ends[index - 1] if index else 0
        return os.fsdecode(self._block[start : self._ends[index]])


class FolderSource(Source):
    """Image files below one folder, in byte order."""

    def __init__(self, root: str, paths: Paths, label: Labels | None, extra: dict[str, Labels] | None = None) -> None:
        self.name = root
        self.label = label
        self.extra = extra or {}
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def encoded(self, index: int) -> bytes:
        with open(self.where(index), "rb") as file:
            return file.read()

    def where(self, index: int) -> str:
        return os.path.join(self.name, self._paths[index])


def open_folder(path: str) -> Parts:
    """The splits of a folder of images; a folder without split folders is all "train"."""
    split_folders = _split_folders(path)
    if not split_folders:
        return {"train": _open_part(path, None)}
    # The classes of the training images number those of every other split.
    order = sorted(split_folders, key=lambda split: (split != "train", split))
    parts: Parts = {}
    for split in order:
        known = parts["train"].label if "train" in parts else None
        parts[split] = _open_part(split_folders[split], known.names if known else None)
    return parts


def _split_folders(path: str) -> dict[str, str]:
    """Where the splits lie; {} if the folders are classes ("train" may be one, beside "bus" and "car")."""
    names = [entry.name for entry in listing(path) if _is_folder(entry)]
    found: dict[str, str] = {}
    for name in names:
        split = SPLITS.get(name.lower())
        if split is None:
            continue
        if split in found:
            raise UserError(
                f"{path} holds two folders for the {split} split, {os.path.basename(found[split])} and {name}: keep one of them."
            )
        found[split] = os.path.join(path, name)
    all_are_splits = len(found) == len(names)
    return found if found and (all_are_splits or ("train" in found and len(found) > 1)) else {}


def _open_part(path: str, known: list[str] | None) -> FolderSource:
    folders = [entry.name for entry in listing(path) if _is_folder(entry)]
    _check_class_names(path, folders)
    files = [(folder, list(_images(os.path.join(path, folder), folder))) for folder in folders]
    if not any(members for _, members in files):
        flat = [entry.name for entry in listing(path) if _is_image(entry)]
        if not flat:
            raise UserError(f"{path} holds no images: give a folder with one folder of {_some_extensions()} files per class.")
        return FolderSource(path, Paths(flat), None)

    names = known if known is not None else [_class_name(folder) for folder in folders]
    number = {name: index for index, name in enumerate(names)}
    values: list[int] = []
    for folder, members in files:
        if not members and known is None:
            raise UserError(f"The class folder {os.path.join(path, folder)} holds no images: fill it or remove it.")
        if members and _class_name(folder) not in number:
            raise UserError(f"The class {folder} of {path} is not among the training classes: add it there or remove it.")
        values += [number[_class_name(folder)]] * len(members) if members else []
    paths = Paths(member for _, members in files for member in members)
    return FolderSource(path, paths, Labels(np.array(values, dtype=np.int64), names))


def _class_name(folder: str) -> str:
    # File systems differ in how they spell accents; a class must be called the same wherever the folder was copied.
    return unicodedata.normalize("NFC", os.fsencode(folder).decode("utf-8", "replace"))


def _check_class_names(path: str, folders: list[str]) -> None:
    seen: dict[str, str] = {}
    for folder in folders:
        key = _class_name(folder).casefold()
        if key in seen:
            same = _class_name(folder) == _class_name(seen[key])
            why = "are spelled the same, which makes duplicate class names" if same else "differ only in upper and lower case"
            raise UserError(f"The class folders {seen[key]} and {folder} of {path} {why}: join or rename them.")
        seen[key] = folder


def _images(folder: str, relative: str, above: frozenset[tuple[int, int]] = frozenset()) -> Iterator[str]:
    """Relative paths of the images at any depth; a link back to a folder above is not followed."""
    status = os.stat(folder)
    here = (status.st_dev, status.st_ino)
    if here in above:
        return
    for entry in listing(folder):
        inside = f"{relative}/{entry.name}"
        if _is_image(entry):
            yield inside
        elif _is_folder(entry):
            yield from _images(entry.path, inside, above | {here})


def listing(path: str | Path) -> list[os.DirEntry[str]]:
    """What a directory shows, hidden entries left out, in byte order: the same on every file system."""
    try:
        with os.scandir(path) as entries:
            shown = [entry for entry in entries if not entry.name.startswith((".", "__MACOSX"))]
    except FileNotFoundError:
        raise UserError(f"There is nothing at {path}: check the spelling.") from None
    except PermissionError:
        raise UserError(f"The folder {path} may not be read: change its permissions.") from None
    except OSError as error:
        raise UserError(f"The folder {path} cannot be read: {error.strerror or error}.") from None
    return sorted(shown, key=lambda entry: os.fsencode(entry.name))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _is_image(entry: os.DirEntry[str]) -> bool:
    if entry.name.rpartition(".")[2].lower() not in EXTENSIONS:
        return False
    try:
        return entry.is_file()
    except OSError:
        return False


def _some_extensions() -> str:
    return ".jpg, .png or .webp"


def split_of(name: str) -> str | None:
    """The split that a file, folder or table entry is named after: "val-00000.parquet" is "validation"."""
    word = re.match(r"[a-z]*", name.lower())
    return SPLITS.get(word.group()) if word else None


def shards(path: str, suffix: str) -> dict[str, list[str]]:
    """The files of one kind below a folder by split; the name of the file or else of its folder says which."""
    found: dict[str, list[str]] = {}
    unnamed: list[str] = []
    for file, split in _files(path, suffix, None, 0):
        if split is None:
            unnamed.append(file)
        else:
            found.setdefault(split, []).append(file)
    if found and unnamed:
        raise UserError(
            f"{path} holds {suffix} files with a split in their name and others without ({os.path.basename(unnamed[0])}): "
            f"rename or move the others."
        )
    return found or ({"train": unnamed} if unnamed else {})


def _files(path: str, suffix: str, split: str | None, depth: int) -> Iterator[tuple[str, str | None]]:
    for entry in listing(path):
        own = split_of(entry.name) or split
        if _is_folder(entry):
            if depth < 3:  # deep enough for data/train/0000.parquet, and an end to links that go round
                yield from _files(entry.path, suffix, own, depth + 1)
        elif entry.name.lower().endswith(suffix):
            yield entry.path, own


def cache_folder() -> Path:
    """Where what can be computed again is kept when there is no place beside the data."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vitrail"
