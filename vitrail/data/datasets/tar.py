"""Tar shards in the WebDataset layout: `000123.jpg` with `000123.cls`, `.json` or `.txt`.

Nothing is extracted. The shards are scanned once; the offsets of the images are stored in an index file next to them.
"""

import hashlib
import json
import mmap
import os
import re
import struct
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.cache import cache_folder
from vitrail.data.datasets.folder import Paths, SourceDict, shards
from vitrail.data.datasets.table import class_labels, integers_if_all, label_columns, main_labels
from vitrail.data.image_formats import EXTENSIONS
from vitrail.data.source import Labels, Source
from vitrail.errors import UserError

LAYOUT = 1  # version of the index file; an index of another version is rebuilt
MAX_TEXT_BYTES = 1 << 20  # larger .cls, .json and .txt members are ignored
MAX_LABEL_COLUMNS = 32  # besides the label
MAX_LABEL_LENGTH = 256  # characters; longer text is a caption
MAX_NAME_LENGTH = 1024  # characters
MAX_HEADER_BYTES = 1 << 14  # of an extended header
MAX_SHARDS = 100_000
BRACES = re.compile(r"\{(?:(\d{1,18})\.\.(\d{1,18})|([^{}]*,[^{}]*))\}")
MAX_OPEN_FILES = 256  # each mapped file uses a file descriptor


class MappedFiles:
    """Memory-mapped files; each process opens them at the first use."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths
        self._open: dict[int, mmap.mmap] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths, "_open": {}}

    def __getitem__(self, number: int) -> mmap.mmap:
        # Only atomic dictionary operations: concurrent threads at worst map a file twice.
        mapped = self._open.get(number)
        if mapped is None:
            with open(self.paths[number], "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if len(self._open) >= MAX_OPEN_FILES:
                self._open.pop(next(iter(list(self._open))), None)
            self._open[number] = mapped
        return mapped


@dataclass
class Index:
    """The positions of the images in the shards: arrays [N], in the order of the shards and their members."""

    keys: np.ndarray  # text
    shard: np.ndarray
    offset: np.ndarray
    size: np.ndarray
    mask_offset: np.ndarray  # 0: no mask
    mask_size: np.ndarray
    columns: dict[str, np.ndarray]  # label columns as text, "" if missing


class TarSource(Source):
    """The images of some tar shards: rows of an index."""

    def __init__(
        self,
        name: str,
        files: list[str],
        index: Index,
        rows: np.ndarray,
        label: Labels | None,
        extra: dict[str, Labels],
        defects: Sequence[str],
    ) -> None:
        self.name = name
        self.label = label
        self.extra = extra
        self.defects = tuple(defects)
        self._files = MappedFiles(files)
        self._keys = Paths(index.keys[rows].tolist())
        self._entries = np.stack(
            [index.shard[rows], index.offset[rows], index.size[rows], index.mask_offset[rows], index.mask_size[rows]], axis=1
        )
        self.has_masks = bool(self._entries[:, 3].any())

    def __len__(self) -> int:
        return len(self._entries)

    def encoded(self, index: int) -> bytes:
        shard, offset, size, _, _ = self._entries[index].tolist()
        return self._read(index, shard, offset, size)

    def mask(self, index: int) -> bytes | None:
        shard, _, _, offset, size = self._entries[index].tolist()
        return self._read(index, shard, offset, size) if offset else None

    def location(self, index: int) -> str:
        return f"{self._keys[index]} in {self._files.paths[self._entries[index, 0]]}"

    def _read(self, index: int, shard: int, offset: int, size: int) -> bytes:
        data = self._files[shard][offset : offset + size]
        if len(data) != size:
            raise ValueError(f"{self.location(index)} is truncated: the shard has changed since it was indexed")
        return data


def open_tar(path: str) -> SourceDict:
    """Open the splits of a shard, a folder of shards or a pattern such as `shard-{000..003}.tar`."""
    if os.path.isdir(path):
        split_files = shards(path, ".tar")
    else:
        files = expand(path)
        missing = [file for file in files if not os.path.isfile(file)]
        if missing:
            raise UserError(f"{len(missing)} of the {len(files)} shards of {path} do not exist, first {missing[0]}.")
        split_files = {"train": files}
    files = [file for members in split_files.values() for file in members]
    index = _index(files)
    if not len(index.keys):
        raise UserError(f"{path} holds no images: give tar files with members such as 000123.jpg and 000123.cls.")
    split_of_shard = np.array([split for split, members in split_files.items() for _ in members])
    rows = {split: np.flatnonzero(split_of_shard[index.shard] == split) for split in split_files}
    main, extra = label_columns(sorted(index.columns))
    labels: dict[str, dict[str, Labels | None]] = {}
    defects: list[str] = []
    for name in ([main] if main else []) + extra:
        texts = {split: index.columns[name][members].tolist() for split, members in rows.items()}
        values, what = integers_if_all(texts), f"{name} of {path}"
        labels[name] = main_labels(values, None, what, defects) if name == main else class_labels(values, None, what, False)
    return {
        split: TarSource(
            path,
            files,
            index,
            members,
            labels[main][split] if main else None,
            {name: column for name in extra if (column := labels[name][split]) is not None},
            defects,
        )
        for split, members in rows.items()
        if len(members)
    }


def expand(pattern: str) -> list[str]:
    """Expand `{000..003}` and `{a,b}` in a pattern to paths."""
    paths = [pattern]
    while match := BRACES.search(paths[0]):  # the others have the same braces
        first, last, alternatives = match.groups()
        count = len(paths) * (alternatives.count(",") + 1 if alternatives else max(int(last) - int(first) + 1, 0))
        if not 0 < count <= MAX_SHARDS:
            raise UserError(
                f"The pattern {pattern} expands to {count:,} shards or more, not 1 to {MAX_SHARDS:,}: write it as in "
                "shard-{000..003}.tar."
            )
        paths = [each for path in paths for each in _expand_first(path)]
    return paths


def _expand_first(pattern: str) -> list[str]:
    match = BRACES.search(pattern)
    assert match
    first, last, alternatives = match.groups()
    if alternatives:
        options = alternatives.split(",")
    else:
        options = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return [pattern[: match.start()] + option + pattern[match.end() :] for option in options]


def _index(files: list[str]) -> Index:
    """Load the index of the shards if no shard has changed since it was written, else build it."""
    try:
        states = [os.stat(file) for file in files]
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}.") from None
    stamp = np.array([(state.st_size, state.st_mtime_ns) for state in states], dtype=np.int64)
    # Each selection of shards has its own index, so that opening a part does not overwrite the index of all shards.
    parent = Path(files[0]).parent
    digest = hashlib.sha256(b"\n".join(os.fsencode(os.path.relpath(file, parent)) for file in files)).hexdigest()
    sidecar = parent / f".vitrail-index-{digest[:12]}.npz"
    folder = hashlib.sha256(os.fsencode(os.path.abspath(files[0]))).hexdigest()
    cached = cache_folder("tar") / f"{digest[:12]}-{folder[:12]}.npz"
    for path in (sidecar, cached):
        index = _load_index(path, stamp)
        if index is not None:
            return index
    index = _build_index(files)
    mode = states[0].st_mode & 0o666  # the index is as readable as the shards
    for path in (sidecar, cached):
        if _save_index(path, stamp, index, mode):
            break
    return index


def _load_index(path: Path, stamp: np.ndarray) -> Index | None:
    try:
        with np.load(path, allow_pickle=False) as file:
            if any(member.compress_type for member in file.zip.infolist()):  # not written by `_save_index`
                return None
            if int(file["layout"]) != LAYOUT or not np.array_equal(file["stamp"], stamp):
                return None
            columns = {name.removeprefix("column_"): file[name] for name in file.files if name.startswith("column_")}
            names = ("shard", "offset", "size", "mask_offset", "mask_size")
            numbers = {name: file[name].astype(np.int64, casting="safe") for name in names}
            index = Index(keys=file["keys"], **numbers, columns=columns)
            texts = (index.keys, *columns.values())
            is_valid = all(text.dtype.kind == "U" for text in texts) and {array.shape for array in texts} == {index.shard.shape}
            in_range = np.stack(list(numbers.values())) >= 0
            return index if is_valid and in_range.all() and (index.shard < len(stamp)).all() else None
    except Exception:  # missing, unreadable or damaged: it is rebuilt
        return None


def _save_index(path: Path, stamp: np.ndarray, index: Index, mode: int) -> bool:
    """Write the index atomically; return False if the folder is not writable."""
    arrays = {name: value for name, value in vars(index).items() if name != "columns"}
    arrays |= {f"column_{name}": column for name, column in index.columns.items()}
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".vitrail-", delete=False) as file:
            temporary = file.name
            np.savez(file, layout=np.array(LAYOUT), stamp=stamp, **arrays)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except OSError:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        return False
    return True


def _build_index(files: list[str]) -> Index:
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
    """Group the members of a shard by their name up to the first dot."""
    size = os.path.getsize(file)
    samples: dict[str, dict[str, Any]] = {}
    try:
        with tarfile.open(file, "r:", tarinfo=BoundedTarInfo) as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined] # do not accumulate the members
                _check_member(file, member, size)
                folder, _, base = member.name.rpartition("/")
                stem, _, kind = base.partition(".")
                if not member.isreg() or not stem or not kind:
                    continue
                key = f"{folder}/{stem}" if folder else stem
                sample = samples.setdefault(key, {"key": key, "shard": number, "columns": {}})
                _add_member(file, archive, member, kind.lower(), sample)
            end = archive.offset
        with open(file, "rb") as stream:
            stream.seek(end)
            complete = not any(stream.read(tarfile.BLOCKSIZE))
    # Damaged headers raise nearly anything.
    except (tarfile.TarError, ValueError, ArithmeticError, LookupError, RecursionError, struct.error):
        raise UserError(
            f"{file} is damaged or not an uncompressed tar: download it again, or decompress .tar.gz to .tar."
        ) from None
    except PermissionError:
        raise UserError(f"{file} cannot be read: change its permissions.") from None
    # tarfile treats a damaged header as the end of the archive, which would silently drop the rest.
    if not complete or size % tarfile.BLOCKSIZE:
        raise UserError(f"{file} is truncated or damaged at byte {end}: download it again.")
    return list(samples.values())


class BoundedTarInfo(tarfile.TarInfo):
    """Rejects long extended headers, for which the expressions of some Python versions need quadratic time."""

    def _proc_pax(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        self._check_size()
        return super()._proc_pax(archive)  # type: ignore[misc,no-any-return]

    def _proc_gnulong(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        self._check_size()
        return super()._proc_gnulong(archive)  # type: ignore[misc,no-any-return]

    def _check_size(self) -> None:
        if not 0 <= self.size <= MAX_HEADER_BYTES:
            raise tarfile.ReadError("invalid size of an extended header")


def _check_member(file: str, member: tarfile.TarInfo, size: int) -> None:
    if member.name.startswith("/") or ".." in member.name.split("/"):
        raise UserError(f"{file} has a member with an unsafe path, {member.name!r}: create it again with relative paths.")
    if len(member.name) > MAX_NAME_LENGTH:
        raise UserError(f"{file} has a member name of {len(member.name)} characters: shorten it to {MAX_NAME_LENGTH}.")
    if member.size < 0 or (member.isreg() and (member.issparse() or member.offset_data + member.size > size)):
        raise UserError(f"{file} is truncated or damaged at {member.name!r}: download it again.")


def _add_member(file: str, archive: tarfile.TarFile, member: tarfile.TarInfo, kind: str, sample: dict[str, Any]) -> None:
    """Add a member to its sample: the image, its mask, or labels as text or JSON."""
    extension = kind.rpartition(".")[2]
    if kind in EXTENSIONS:
        sample |= {"offset": member.offset_data, "size": member.size}
    elif extension in EXTENSIONS and kind.startswith(("mask.", "seg.")):
        sample |= {"mask_offset": member.offset_data, "mask_size": member.size}
    elif kind in ("cls", "txt", "json"):
        stream = archive.extractfile(member) if member.size <= MAX_TEXT_BYTES else None
        text = stream.read().decode("utf-8", "replace").strip() if stream else ""
        columns = {"label": text} if kind != "json" else _json_labels(file, member.name, text)
        columns = {name: value for name, value in columns.items() if len(value) <= MAX_LABEL_LENGTH}
        # Shards often have all three: .cls is the class index, and .txt may be a caption.
        rank = ("cls", "json", "txt").index(kind)
        if rank > sample.get("rank", rank):
            columns.pop("label", None)
        elif "label" in columns:
            sample["rank"] = rank
        sample["columns"] |= columns


def _json_labels(file: str, member: str, text: str) -> dict[str, str]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"{member!r} in {file} is not valid JSON: create the shard again.") from None
    main, extra = label_columns([str(name) for name in content] if isinstance(content, dict) else [])
    names = ({main: "label"} if main else {}) | {name: name for name in extra[:MAX_LABEL_COLUMNS]}
    labels = {column: content[name] for name, column in names.items() if isinstance(content[name], str | int)}
    return {column: str(label).encode("utf-8", "replace").decode() for column, label in labels.items()}  # no lone surrogates
