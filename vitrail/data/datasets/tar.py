"""Tar shards in the WebDataset layout: `000123.jpg` with `000123.cls`, `.json` or `.txt` beside it.

Nothing is ever extracted. The shards are read through once; where every image lies is kept in an index beside them.
"""

import hashlib
import json
import mmap
import os
import re
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.datasets.folder import EXTENSIONS, Parts, Paths, cache_folder, shards
from vitrail.data.datasets.table import class_labels, label_columns, numbers_if_all
from vitrail.data.source import Labels, Source
from vitrail.errors import UserError

LAYOUT = 1  # of the index file; another number is another layout, and the index is built again
LARGEST_TEXT = 1 << 20  # bytes of a .cls, .json or .txt member that are looked at
LONGEST_LABEL = 256  # characters; longer text is a caption
MOST_SHARDS = 100_000
MOST_OPEN = 256  # mapped files hold a descriptor each, and a process may have few


class MappedFiles:
    """Files mapped into memory where they are read: each process opens its own, at the first use."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths
        self._open: dict[int, mmap.mmap] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths, "_open": {}}

    def __getitem__(self, number: int) -> mmap.mmap:
        # Single dictionary operations only: threads may come here at once, and at worst map a file twice.
        mapped = self._open.get(number)
        if mapped is None:
            with open(self.paths[number], "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if len(self._open) >= MOST_OPEN:
                self._open.pop(next(iter(list(self._open))), None)
            self._open[number] = mapped
        return mapped


@dataclass
class Index:
    """Where the images of some shards lie: arrays [N], in the order of the shards and of their members."""

    keys: np.ndarray  # text
    shard: np.ndarray
    offset: np.ndarray
    size: np.ndarray
    mask_offset: np.ndarray  # 0: no mask
    mask_size: np.ndarray
    columns: dict[str, np.ndarray]  # label columns as text, "" where there is none


class TarSource(Source):
    """Images of some tar shards; a part of an index."""

    def __init__(
        self, name: str, files: list[str], index: Index, rows: np.ndarray, label: Labels | None, extra: dict[str, Labels]
    ) -> None:
        self.name = name
        self.label = label
        self.extra = extra
        self._files = MappedFiles(files)
        self._keys = Paths(index.keys[rows].tolist())
        self._places = np.stack(
            [index.shard[rows], index.offset[rows], index.size[rows], index.mask_offset[rows], index.mask_size[rows]], axis=1
        )
        self.has_masks = bool(self._places[:, 3].any())

    def __len__(self) -> int:
        return len(self._places)

    def encoded(self, index: int) -> bytes:
        shard, offset, size, _, _ = self._places[index].tolist()
        return self._read(index, shard, offset, size)

    def mask(self, index: int) -> bytes | None:
        shard, _, _, offset, size = self._places[index].tolist()
        return self._read(index, shard, offset, size) if offset else None

    def where(self, index: int) -> str:
        return f"{self._keys[index]} in {self._files.paths[self._places[index, 0]]}"

    def _read(self, index: int, shard: int, offset: int, size: int) -> bytes:
        data = self._files[shard][offset : offset + size]
        if len(data) != size:
            raise ValueError(f"{self.where(index)} ends too early: the shard has changed since it was indexed")
        return data


def open_tar(path: str) -> Parts:
    """The splits of a shard, a folder of shards or a pattern such as `shard-{000..003}.tar`."""
    if os.path.isdir(path):
        found = shards(path, ".tar")
    else:
        files = expand(path)
        missing = [file for file in files if not os.path.isfile(file)]
        if missing:
            raise UserError(f"{len(missing)} of the {len(files)} shards of {path} do not exist, first {missing[0]}.")
        found = {"train": files}
    files = [file for members in found.values() for file in members]
    index = _index(files)
    if not len(index.keys):
        raise UserError(f"{path} holds no images: give tars with members such as 000123.jpg and 000123.cls.")
    split_of_shard = np.array([split for split, members in found.items() for _ in members])
    rows = {split: np.flatnonzero(split_of_shard[index.shard] == split) for split in found}
    main, further = label_columns(sorted(index.columns))
    labels: dict[str, dict[str, Labels | None]] = {}
    for name in ([main] if main else []) + further:
        texts = {split: index.columns[name][members].tolist() for split, members in rows.items()}
        labels[name] = class_labels(numbers_if_all(texts), None, f"{name} of {path}", required=name == main)
    return {
        split: TarSource(
            path,
            files,
            index,
            members,
            labels[main][split] if main else None,
            {name: column for name in further if (column := labels[name][split]) is not None},
        )
        for split, members in rows.items()
        if len(members)
    }


def expand(pattern: str) -> list[str]:
    """The paths that `{000..003}` and `{a,b}` in a pattern stand for."""
    match = re.search(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}", pattern)
    if match is None:
        return [pattern]
    first, last, words = match.groups()
    if words is None:
        count = int(last) - int(first) + 1
        if not 0 < count <= MOST_SHARDS:
            raise UserError(f"The pattern {pattern} stands for {max(count, 0)} shards: write it as in shard-{{000..003}}.tar.")
        options = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    else:
        options = words.split(",")
    return [path for option in options for path in expand(pattern[: match.start()] + option + pattern[match.end() :])]


def _index(files: list[str]) -> Index:
    """The index of the shards: the one that was kept, if no shard has changed since, or a new one."""
    try:
        states = [os.stat(file) for file in files]
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}.") from None
    stamp = np.array([(state.st_size, state.st_mtime_ns) for state in states], dtype=np.int64)
    # Another choice of shards has another index, so that opening a part does not undo the index of the whole.
    parent = Path(files[0]).parent
    digest = hashlib.sha256(b"\n".join(os.fsencode(os.path.relpath(file, parent)) for file in files)).hexdigest()
    beside = parent / f".vitrail-index-{digest[:12]}.npz"
    folder = hashlib.sha256(os.fsencode(os.path.abspath(files[0]))).hexdigest()
    elsewhere = cache_folder() / "tar" / f"{digest[:12]}-{folder[:12]}.npz"
    for place in (beside, elsewhere):
        kept = _load(place, stamp)
        if kept is not None:
            return kept
    index = _build(files)
    mode = states[0].st_mode & 0o666  # whoever may read the shards may read their index
    for place in (beside, elsewhere):
        if _keep(place, stamp, index, mode):
            break
    return index


def _load(place: Path, stamp: np.ndarray) -> Index | None:
    try:
        with np.load(place, allow_pickle=False) as file:
            if int(file["layout"]) != LAYOUT or not np.array_equal(file["stamp"], stamp):
                return None
            columns = {name.removeprefix("column_"): file[name] for name in file.files if name.startswith("column_")}
            names = ("keys", "shard", "offset", "size", "mask_offset", "mask_size")
            return Index(**{name: file[name] for name in names}, columns=columns)
    except Exception:  # absent, unreadable or damaged: it is built again
        return None


def _keep(place: Path, stamp: np.ndarray, index: Index, mode: int) -> bool:
    """Writes the index beside its place and renames it, so that nobody reads half a file; False if that is not allowed."""
    arrays = {name: value for name, value in vars(index).items() if name != "columns"}
    arrays |= {f"column_{name}": column for name, column in index.columns.items()}
    temporary = None
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place.parent, prefix=".vitrail-", delete=False) as file:
            temporary = file.name
            np.savez(file, layout=np.array(LAYOUT), stamp=stamp, **arrays)
        os.chmod(temporary, mode)
        os.replace(temporary, place)
    except OSError:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        return False
    return True


def _build(files: list[str]) -> Index:
    samples: list[dict[str, Any]] = []
    for number, file in enumerate(files):
        samples += (sample for sample in _samples(file, number) if "offset" in sample)
    names = sorted({name for sample in samples for name in sample["columns"]})
    numbers = {
        name: np.array([sample.get(name, 0) for sample in samples], dtype=np.int64)
        for name in ("shard", "offset", "size", "mask_offset", "mask_size")
    }
    return Index(
        keys=np.array([sample["key"] for sample in samples], dtype=np.str_),
        **numbers,
        columns={name: np.array([sample["columns"].get(name, "") for sample in samples], dtype=np.str_) for name in names},
    )


def _samples(file: str, number: int) -> list[dict[str, Any]]:
    """What belongs together in one shard, by the name up to the first dot."""
    size = os.path.getsize(file)
    found: dict[str, dict[str, Any]] = {}
    try:
        with tarfile.open(file, "r:") as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined] # or it would keep every member
                _check_member(file, member, size)
                folder, _, base = member.name.rpartition("/")
                stem, _, kind = base.partition(".")
                if not member.isreg() or not stem or not kind:
                    continue
                key = f"{folder}/{stem}" if folder else stem
                sample = found.setdefault(key, {"key": key, "shard": number, "columns": {}})
                _add(file, archive, member, kind.lower(), sample)
            end = archive.offset
        with open(file, "rb") as stream:
            stream.seek(end)
            complete = not any(stream.read(tarfile.BLOCKSIZE))
    except tarfile.ReadError:
        raise UserError(f"{file} is damaged or no uncompressed tar: download it again, or unpack .tar.gz to .tar.") from None
    except PermissionError:
        raise UserError(f"{file} may not be read: change its permissions.") from None
    # Python's reader takes a damaged header for the end of the file, which would lose the rest without a word.
    if not complete or size % tarfile.BLOCKSIZE:
        raise UserError(f"{file} is truncated or damaged at byte {end}: download it again.")
    return list(found.values())


def _check_member(file: str, member: tarfile.TarInfo, size: int) -> None:
    if member.name.startswith("/") or ".." in member.name.split("/"):
        raise UserError(f"{file} has a member that leads out of it, {member.name!r}: pack it again with plain names.")
    if member.isreg() and (member.issparse() or member.offset_data + member.size > size):
        raise UserError(f"{file} is truncated or damaged at {member.name!r}: download it again.")


def _add(file: str, archive: tarfile.TarFile, member: tarfile.TarInfo, kind: str, sample: dict[str, Any]) -> None:
    """Puts one member where it belongs: the image, its mask, or a label in text, number or JSON."""
    extension = kind.rpartition(".")[2]
    if kind in EXTENSIONS:
        sample |= {"offset": member.offset_data, "size": member.size}
    elif extension in EXTENSIONS and kind.startswith(("mask.", "seg.")):
        sample |= {"mask_offset": member.offset_data, "mask_size": member.size}
    elif kind in ("cls", "txt", "json"):
        stream = archive.extractfile(member) if member.size <= LARGEST_TEXT else None
        text = stream.read().decode("utf-8", "replace").strip() if stream else ""
        columns = {"label": text} if kind != "json" else _json_labels(file, member.name, text)
        columns = {name: value for name, value in columns.items() if len(value) <= LONGEST_LABEL}
        # Shards often have all three: the number in .cls is the class, and .txt may be a caption.
        rank = ("cls", "json", "txt").index(kind)
        if rank > sample.get("rank", rank):
            columns.pop("label", None)
        elif "label" in columns:
            sample["rank"] = rank
        sample["columns"] |= columns


def _json_labels(file: str, member: str, text: str) -> dict[str, str]:
    try:
        content = json.loads(text)
    except ValueError:
        raise UserError(f"{member!r} in {file} is not readable JSON: write the shard again.") from None
    main, further = label_columns([str(name) for name in content] if isinstance(content, dict) else [])
    names = ({main: "label"} if main else {}) | {name: name for name in further}
    return {ours: str(content[name]) for name, ours in names.items() if isinstance(content[name], str | int)}
