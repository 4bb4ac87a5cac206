"""Folders of images, and the directory listing used by all formats.

A folder has one subfolder per class, optionally below `train/`, `val/` and `test/`. Images without class folders have no labels.
"""

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from vitrail.data.datasets.object_table import ObjectTable
from vitrail.data.image_formats import describe_skipped, is_image_file
from vitrail.data.objects import Objects
from vitrail.data.source import Labels, Source
from vitrail.errors import UserError

SPLITS = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
    "testing": "test",
}
MAX_DEPTH = 64  # of folders inside a class folder
MAX_VISITS = 16  # of one folder inside a class or another folder, to which several links can lead
SourceDict = dict[str, Source]  # the splits of a data set: "train", "validation", "test"


class Paths:
    """A sequence of paths stored as one bytes object, so that a million paths are sent to a worker process in one copy."""

    def __init__(self, paths: Iterable[str]) -> None:
        encoded = [os.fsencode(path) for path in paths]
        self._ends = np.cumsum([len(path) for path in encoded], dtype=np.int64)
        self._bytes = b"".join(encoded)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self._ends):
            raise IndexError(index)
        start = self._ends[index - 1] if index else 0
        return os.fsdecode(self._bytes[start : self._ends[index]])


class FolderSource(Source):
    """Image files below a folder, sorted by the bytes of their names."""

    def __init__(
        self,
        root: str,
        paths: Paths,
        label: Labels | None,
        extra: dict[str, Labels] | None = None,
        skipped: Sequence[str] = (),
        defects: Sequence[str] = (),
    ) -> None:
        self.name = root
        self.label = label
        self.extra = extra or {}
        self.skipped, self.defects = tuple(skipped), tuple(defects)
        self._paths = paths
        self._table: ObjectTable | None = None
        self._instances: Paths | None = None

    def __len__(self) -> int:
        return len(self._paths)

    def encoded(self, index: int) -> bytes:
        with open(self.location(index), "rb") as file:
            return file.read()

    def location(self, index: int) -> str:
        return os.path.join(self.name, self._paths[index])

    def add_objects(self, table: ObjectTable, instances: Paths | None = None) -> None:
        """Give the images their objects; `instances` are index masks of the objects, one file per image."""
        self._table, self._instances = table, instances
        self.object_classes, self.object_notes = table.classes, table.notes
        self.has_instances = instances is not None or table.has_shapes

    def objects(self, index: int) -> Objects | None:
        if self._table is None:
            return None
        found = self._table.read(index)
        if self._instances is None or not len(found):
            return found
        with open(os.path.join(self.name, self._instances[index]), "rb") as file:
            return replace(found, instances=file.read())


def open_folder(path: str) -> SourceDict:
    """Open the splits of a folder of images. A folder without split folders is one "train" split."""
    split_folders = _split_folders(path)
    if not split_folders:
        return {"train": _open_split(path, None)}
    # The class indices of all splits are those of the training split.
    splits = sorted(split_folders, key=lambda split: (split != "train", split))
    sources: SourceDict = {}
    for split in splits:
        known = sources["train"].label if "train" in sources else None
        sources[split] = _open_split(split_folders[split], known.names if known else None)
    return sources


def _split_folders(path: str) -> dict[str, str]:
    """Return the split folders by split name; {} if the folders are classes ("train" may be a class next to "bus" and "car")."""
    names = [entry.name for entry in listing(path) if _is_folder(entry)]
    folders: dict[str, str] = {}
    for name in names:
        split = SPLITS.get(name.lower())
        if split is None:
            continue
        if split in folders:
            raise UserError(
                f"{path} contains two folders for the {split} split, {os.path.basename(folders[split])} and {name}: keep one."
            )
        folders[split] = os.path.join(path, name)
    all_are_splits = len(folders) == len(names)
    return folders if folders and (all_are_splits or ("train" in folders and len(folders) > 1)) else {}


def _open_split(path: str, known: list[str] | None) -> FolderSource:
    folders = [entry.name for entry in listing(path) if _is_folder(entry)]
    skipped: list[str] = []
    files = [(folder, list(_images(os.path.join(path, folder), folder, skipped))) for folder in folders]
    outside: list[str] = []
    flat = [entry.name for entry in listing(path) if _is_image(entry, entry.name, outside)]
    if not any(members for _, members in files):
        if not flat:
            found = describe_skipped([*skipped, *outside])
            raise UserError(
                f"{path} holds no images{f' ({found})' if found else ''}: give a folder with one folder of .jpg, .png or .webp "
                "files per class, or with the files alone if they have no labels."
            )
        return FolderSource(path, Paths(flat), None, skipped=[*skipped, *outside])

    names = known if known is not None else sort_classes(list(dict.fromkeys(map(_class_name, folders))))
    defects = _name_conflicts(path, folders)
    for folder, members in files:
        if not members and known is None:
            defects.append(f"The class folder {os.path.join(path, folder)} holds no images: add some or remove it.")
        if members and _class_name(folder) not in names:
            defects.append(f"The class {folder} of {path} is not a class of the training split: add it there or remove it.")
            names = [*names, _class_name(folder)]
    number = {name: index for index, name in enumerate(names)}
    values = [number[_class_name(folder)] for folder, members in files for _ in members]
    paths = Paths(member for _, members in files for member in members)
    # Other files next to the class folders, such as a license, are not reported; images there are probably misplaced.
    return FolderSource(path, paths, Labels(np.array(values, dtype=np.int64), names), None, [*skipped, *flat], defects)


def sort_classes(names: list[str]) -> list[str]:
    """Return the names in numerical order if all are plain integers ("2" before "10"), otherwise as they are."""
    if not all(name.isascii() and name.isdigit() for name in names):
        return names
    return sorted(names, key=lambda name: (len(name.lstrip("0")), name.lstrip("0")))  # of any length, unlike int()


def _class_name(folder: str) -> str:
    # File systems normalize accents differently; a class name must not depend on where the folder was copied.
    return unicodedata.normalize("NFC", os.fsencode(folder).decode("utf-8", "replace"))


def _name_conflicts(path: str, folders: list[str]) -> list[str]:
    conflicts = []
    seen: dict[str, str] = {}
    for folder in folders:
        key = _class_name(folder).casefold()
        if key in seen:
            same = _class_name(folder) == _class_name(seen[key])
            reason = "have the same name after Unicode normalization" if same else "differ only in case"
            conflicts.append(f"The class folders {seen[key]} and {folder} of {path} {reason}: merge or rename them.")
        seen[key] = folder
    return conflicts


def _images(
    folder: str, relative: str, skipped: list[str], parents: tuple[str, ...] = (), visits: Counter[str] | None = None
) -> Iterator[str]:
    """Yield the relative paths of the images at any depth; other files are appended to `skipped`.

    Links to a parent folder are not followed.
    """
    visits = Counter() if visits is None else visits
    here = os.path.realpath(folder)
    if here in parents:
        return
    count_visit(here, visits)
    if len(parents) > MAX_DEPTH:
        raise UserError(f"{folder} is more than {MAX_DEPTH} folders deep inside its class: move the images up.")
    for entry in listing(folder):
        inside = f"{relative}/{entry.name}"
        if _is_folder(entry):
            yield from _images(entry.path, inside, skipped, (*parents, here), visits)
        elif _is_image(entry, inside, skipped):
            yield inside


def count_visit(folder: str, visits: Counter[str]) -> None:
    """Raise UserError if a folder is visited so often that links, each to a folder with more links, multiply its images."""
    visits[folder] += 1
    if visits[folder] > MAX_VISITS:
        raise UserError(f"More than {MAX_VISITS} links lead to {folder}: remove some of them.")


def listing(path: str | Path) -> list[os.DirEntry[str]]:
    """List a directory without hidden entries, sorted by the bytes of the names, so that the order is the same everywhere."""
    try:
        with os.scandir(path) as entries:
            visible = [entry for entry in entries if not entry.name.startswith((".", "__MACOSX"))]
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: check the spelling.") from None
    except PermissionError:
        raise UserError(f"The folder {path} cannot be read: change its permissions.") from None
    except OSError as error:
        raise UserError(f"The folder {path} cannot be read: {error.strerror or error}.") from None
    return sorted(visible, key=lambda entry: os.fsencode(entry.name))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _is_image(entry: os.DirEntry[str], relative: str, skipped: list[str]) -> bool:
    """Return whether the entry is an image; the relative path of another file is appended to `skipped`."""
    try:
        if not entry.is_file():  # opening a named pipe would block
            return False
    except OSError:
        return False
    if is_image_file(entry.path):
        return True
    skipped.append(relative)
    return False


def split_of(name: str) -> str | None:
    """Return the split that a file, folder or table entry is named after: "validation" for "val-00000.parquet"."""
    word = re.match(r"[a-z]*", name.lower())
    return SPLITS.get(word.group()) if word else None


def shards(path: str, suffix: str) -> dict[str, list[str]]:
    """Return the files with a suffix below a folder by split, which is taken from the name of the file or of its folder."""
    files: dict[str, list[str]] = {}
    unnamed: list[str] = []
    for file, split in _files(path, suffix, None, 0, Counter()):
        if split is None:
            unnamed.append(file)
        else:
            files.setdefault(split, []).append(file)
    if files and unnamed:
        raise UserError(
            f"{path} contains {suffix} files with and without a split in their name ({os.path.basename(unnamed[0])}): "
            f"rename or move the others."
        )
    return files or ({"train": unnamed} if unnamed else {})


def _files(path: str, suffix: str, split: str | None, depth: int, visits: Counter[str]) -> Iterator[tuple[str, str | None]]:
    count_visit(os.path.realpath(path), visits)
    for entry in listing(path):
        own = split_of(entry.name) or split
        if _is_folder(entry):
            if depth < 3:  # deep enough for data/train/0000.parquet; stops at cyclic links
                yield from _files(entry.path, suffix, own, depth + 1, visits)
        elif entry.name.lower().endswith(suffix) and os.path.isfile(entry.path):  # opening a named pipe would block
            yield entry.path, own
