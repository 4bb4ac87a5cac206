"""Writes a data set as Parquet shards in the Hugging Face convention. An interrupted run can be resumed.

Shards are written atomically to `OUT/.packing` and recorded in a manifest, `_pack.json`. When all are complete, that folder is
renamed to `OUT/data`, so an incomplete data set is never visible. A resumed run verifies and keeps the finished shards, and its
result is byte-identical to that of an uninterrupted run.
"""

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vitrail.aliases import upgrade_skipped
from vitrail.atomic_files import atomic_replace, create_folder, describe_error, file_sha256, fsync_path, shard_write_error
from vitrail.data.datasets.folder import SPLITS, SourceDict
from vitrail.data.datasets.lookup import check_usable
from vitrail.data.loader import Problem, unreadable_error
from vitrail.data.parquet_shard import ShardWriter, make_schema
from vitrail.data.reencoding import Reencoding, Row
from vitrail.data.source import Source
from vitrail.data.workers import Workers, default_workers
from vitrail.errors import UserError
from vitrail.interrupts import require_cleanup

LAYOUT = 1  # version of the manifest
CHUNK = 8  # images per task, all in the memory of a worker
FINGERPRINT_IMAGES = 64  # images per split whose bytes are hashed into the fingerprint of the source
UNFINISHED, FINISHED, LOCK = ".packing", "data", "lock"
MANIFEST = "_pack.json"  # readers of Parquet folders ignore names that start with an underscore
SPLIT_ORDER = ("train", "validation", "test")


@dataclass(frozen=True)
class Shard:
    """A finished file: the range of images of the split, and the skipped images in it."""

    split: str
    start: int
    stop: int
    rows: int
    bytes: int
    sha256: str
    skipped: tuple[Problem, ...]

    @property
    def temporary_name(self) -> str:
        # The final name contains the number of shards, which is not known yet.
        return f"{self.split}-{self.start:09d}.parquet"


@dataclass(frozen=True)
class Result:
    shards: dict[str, Shard]  # by final name
    kept: int  # shards finished by an earlier run

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards.values())

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards.values())

    @property
    def skipped(self) -> list[Problem]:
        return [problem for shard in self.shards.values() for problem in shard.skipped]


def pack(
    name: str,
    sources: SourceDict,
    out: Path,
    reencoding: Reencoding,
    shard_size: int = 500_000_000,
    fatal: bool = False,
    workers: int | None = None,
    advance: Callable[[int], Any] = lambda count: None,
    log: Callable[[str], Any] = lambda message: None,
) -> Result:
    """Write all splits to `out`; `name` is the path that the user gave.

    A shard contains consecutive images with at most `shard_size` bytes. Unreadable images are skipped and recorded or, if
    `fatal`, raise UserError. `advance` is called with the number of images just finished.
    """
    try:
        import pyarrow  # noqa: F401 - for a clear error message
    except ImportError:
        raise UserError("Writing Parquet files needs pyarrow: pip install pyarrow.") from None
    sources = {split: sources[split] for split in SPLIT_ORDER if split in sources}
    check_usable(source for source in sources.values() if source.label is None)  # else its labels would be lost
    check_output(name, out)
    # Format and quality have no effect without resize.
    options = {"splits": list(sources), "shard_size": shard_size, "resize": None}
    options |= asdict(reencoding) if reencoding.resize else {}
    expected = {"layout": LAYOUT, "source": fingerprint(sources), "options": options}
    if (out / FINISHED / MANIFEST).exists():
        return _check_finished(out / FINISHED, expected, fatal, advance)
    folder = out / UNFINISHED
    require_cleanup()
    try:
        with create_folder(folder), _exclusive_lock(out), _cleanup_without_shards(folder):
            result = _PackRun(sources, folder, expected, reencoding, shard_size, fatal, advance, log).run(workers)
        folder.rename(out / FINISHED)
        fsync_path(out)
    except OSError as error:
        raise shard_write_error(out, error, has_partial_output(out)) from None
    return result


def has_partial_output(out: Path) -> bool:
    """Return whether an interrupted run has finished at least one shard."""
    try:
        return bool(json.loads((out / UNFINISHED / MANIFEST).read_text())["shards"])
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError):  # damaged: do not overwrite it
        return True


@dataclass
class _PackRun:
    """One run: verifies the shards of an earlier run and writes the missing ones."""

    sources: SourceDict
    folder: Path
    expected: dict[str, Any]  # layout, source and options that the manifest must have
    reencoding: Reencoding
    shard_size: int
    fatal: bool
    advance: Callable[[int], Any]
    log: Callable[[str], Any]

    def __post_init__(self) -> None:
        self.schema = make_schema(self.sources)
        self.shards: list[Shard] = []

    def run(self, workers: int | None) -> Result:
        for leftover in self.folder.glob(".*.part"):
            leftover.unlink()
        self._resume()
        kept = len(self.shards)
        pool = Workers(RowEncoder(self.sources, self.reencoding), default_workers() if workers is None else workers)
        try:
            for split, source in self.sources.items():
                for start, stop in self._missing(split, len(source)):
                    self._write_shards(pool, split, start, stop)
        finally:
            pool.close()
        self._write_manifest()
        names = final_names(self.shards)
        for final, shard in names.items():
            (self.folder / shard.temporary_name).rename(self.folder / final)
        (self.folder / LOCK).unlink()
        fsync_path(self.folder)
        return Result(names, kept)

    def _resume(self) -> None:
        """Keep the shards of an earlier run that match the manifest."""
        if not has_partial_output(self.folder.parent):  # leftovers of a run that was killed before its first shard
            _clear(self.folder)
            self._write_manifest()
            return
        recorded = _read_manifest(self.folder / MANIFEST, self.expected)
        for final, shard in final_names(recorded).items():
            if (self.folder / final).exists():  # the run was stopped while renaming the files
                (self.folder / final).rename(self.folder / shard.temporary_name)
        for stray in {*self.folder.glob("*.parquet")} - {self.folder / shard.temporary_name for shard in recorded}:
            stray.unlink()  # not recorded before the run was stopped; the new shards may have other ranges
        for shard in recorded:
            if _is_intact(self.folder / shard.temporary_name, shard):
                self.shards.append(shard)
                self.advance(shard.stop - shard.start)
                self._check_fatal(shard.skipped)
            else:
                self.log(f"The {shard.split} shard from image {shard.start} on is damaged or missing and is written again.")

    def _missing(self, split: str, count: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of a split that no shard covers."""
        position = 0
        for start, stop in [*sorted((shard.start, shard.stop) for shard in self.shards if shard.split == split), (count, count)]:
            if start > position:
                yield position, start
            position = stop

    def _write_shards(self, pool: Workers, split: str, start: int, stop: int) -> None:
        """Write the images `start` ... `stop - 1` of a split to one or more shards."""
        tasks = [(split, first, min(first + CHUNK, stop)) for first in range(start, stop, CHUNK)]
        items = ((index, item) for task in zip(tasks, pool.run(tasks), strict=True) for index, item in _numbered(*task))
        pending = next(items, None)
        while pending is not None:
            skipped: list[Problem] = []
            path = self.folder / f"{split}-{start:09d}.parquet"
            with atomic_replace(path) as side, ShardWriter(side, self.schema) as writer:
                while pending is not None:
                    index, item = pending
                    if isinstance(item, Problem):
                        self._check_fatal([item])
                        skipped.append(item)
                    elif writer.rows and writer.size + item.size > self.shard_size:
                        break
                    else:
                        writer.add(item, self.sources[split], index)
                    self.advance(1)
                    pending = next(items, None)
                if not writer.rows:
                    problem = skipped[0]
                    reason = f"{problem.location}: {problem.reason}"
                    raise UserError(f"None of the images {start} to {stop - 1} of {split} can be read; {reason}.")
            until = pending[0] if pending is not None else stop
            size, digest = path.stat().st_size, file_sha256(path)
            self.shards.append(Shard(split, start, until, writer.rows, size, digest, tuple(skipped)))
            self._write_manifest()
            start = until

    def _check_fatal(self, problems: list[Problem] | tuple[Problem, ...]) -> None:
        if problems and self.fatal:
            raise unreadable_error(problems[0])

    def _write_manifest(self) -> None:
        self.shards.sort(key=lambda shard: (SPLIT_ORDER.index(shard.split), shard.start))
        shards = [asdict(shard) | {"skipped": [problem._asdict() for problem in shard.skipped]} for shard in self.shards]
        with atomic_replace(self.folder / MANIFEST) as side:
            side.write_text(json.dumps(self.expected | {"shards": shards}, indent=1) + "\n")


@dataclass(frozen=True)
class RowEncoder:
    """Reads, checks and re-encodes images; sent to the worker processes."""

    sources: SourceDict
    reencoding: Reencoding

    def __call__(self, task: tuple[str, int, int]) -> list[Row | Problem]:
        split, start, stop = task
        source = self.sources[split]
        rows: list[Row | Problem] = []
        for index in range(start, stop):
            try:
                rows.append(self.reencoding.encode(source, index))
            except (OSError, ValueError) as error:
                rows.append(Problem(source.location(index), describe_error(error)))
        return rows


def select_splits(name: str, sources: SourceDict, splits: list[str]) -> SourceDict:
    """Return the given splits, by any of their names; all splits if none is given."""
    selected = [SPLITS.get(split.lower(), split) for split in splits] or list(sources)
    missing = next((split for split in selected if split not in sources), None)
    if missing is not None:
        raise UserError(f"{name} has no {missing} split, only {', '.join(sources)}.")
    return {split: sources[split] for split in SPLIT_ORDER if split in selected}


def parse_bytes(text: str) -> int:
    """Parse 500MB, 1.5 GB, 64MiB or a plain number of bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(k|m|g|t)?(i)?b?\s*", text.lower())
    size = round(float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " ")) if match else 0
    if size < 1:
        raise UserError(f"{text!r} is not a number of bytes: write 500MB, 1GB or 64MiB.")
    return size


def _numbered(task: tuple[str, int, int], rows: list[Row | Problem]) -> Iterator[tuple[int, Row | Problem]]:
    yield from enumerate(rows, task[1])


def final_names(shards: list[Shard]) -> dict[str, Shard]:
    """Return the shards by their final names, such as train-00000-of-00007.parquet."""
    names: dict[str, Shard] = {}
    for split in SPLIT_ORDER:
        own = sorted((shard for shard in shards if shard.split == split), key=lambda shard: shard.start)
        names |= {f"{split}-{number:05d}-of-{len(own):05d}.parquet": shard for number, shard in enumerate(own)}
    return names


def check_output(name: str, out: Path) -> None:
    """Raise UserError if `out` contains anything that was not written by `pack`, or is inside of the data set."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: give a folder to write to.")
    source = Path(os.path.expanduser(name))
    if source.is_dir() and Path(os.path.realpath(out)).is_relative_to(source.resolve()):
        raise UserError(f"{out} is inside of {name} and would become a part of it: give another folder.")
    try:
        entries = {entry.name for entry in out.iterdir()} if out.exists() else set()
    except OSError as error:
        raise UserError(f"{out} cannot be read: {error.strerror}.") from None
    started = (out / UNFINISHED / MANIFEST).exists() and FINISHED not in entries
    if not (started or entries <= {UNFINISHED} or (out / FINISHED / MANIFEST).exists()):
        raise UserError(f"{out} is not empty and was not written by this command: give a new or empty folder.")


def fingerprint(sources: SourceDict) -> str:
    """Return a hash of the splits, the labels, the locations of all images and the bytes of some images of each split."""
    digest = hashlib.sha256()
    for split, source in sources.items():
        columns = {"": source.label, **source.extra}
        names = {column: labels.names for column, labels in columns.items() if labels}
        digest.update(json.dumps([split, len(source), names]).encode())
        for labels in columns.values():
            digest.update(labels.values.astype("<i8").tobytes() if labels else b"")
        for index in range(len(source)):
            # Without the path that the user typed: the same folder may be given by another path.
            digest.update(os.fsencode(source.location(index).replace(source.name.rstrip("/"), "", 1)) + b"\0")
        for index in source.spread(FINGERPRINT_IMAGES).tolist():
            digest.update(_image_digest(source, index))
    return digest.hexdigest()


def _image_digest(source: Source, index: int) -> bytes:
    try:
        encoded = source.encoded(index)
        return hashlib.sha256(encoded if isinstance(encoded, bytes) else encoded.tobytes()).digest()
    except (OSError, ValueError):
        return b"unreadable"


def _read_manifest(path: Path, expected: dict[str, Any]) -> list[Shard]:
    """Read the shards of a manifest; a manifest of other data or options is rejected."""
    out = path.parent.parent
    try:
        manifest = json.loads(path.read_text())
        skipped = [tuple(Problem(**upgrade_skipped(entry)) for entry in shard["skipped"]) for shard in manifest["shards"]]
        shards = [Shard(**shard | {"skipped": problems}) for shard, problems in zip(manifest["shards"], skipped, strict=True)]
        layout, source, options = manifest["layout"], manifest["source"], dict(manifest["options"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} is damaged: remove {out} and pack again.") from None
    if layout != LAYOUT:
        raise UserError(f"{out} was written by another version of Vitrail: give another folder, or remove it.")
    for name, value in expected["options"].items():
        if options.get(name) != value:
            before, now = (", ".join(each) if isinstance(each, list) else each or "none" for each in (options.get(name), value))
            option = name.replace("_", " ")
            raise UserError(f"{out} was started with {option} {before}, not {now}: give the same options, or another folder.")
    if source != expected["source"]:
        raise UserError(f"{out} was started from other data, or the data has changed: give another folder, or remove it.")
    return shards


def _check_finished(folder: Path, expected: dict[str, Any], fatal: bool, advance: Callable[[int], Any]) -> Result:
    shards = final_names(_read_manifest(folder / MANIFEST, expected))
    for name, shard in shards.items():
        if not _is_intact(folder / name, shard):
            raise UserError(f"{folder / name} is damaged or missing: remove {folder} and pack again.")
        if fatal and shard.skipped:
            raise unreadable_error(shard.skipped[0])
        advance(shard.stop - shard.start)
    return Result(shards, len(shards))


def _is_intact(path: Path, shard: Shard) -> bool:
    return path.is_file() and path.stat().st_size == shard.bytes and file_sha256(path) == shard.sha256


@contextmanager
def _cleanup_without_shards(folder: Path) -> Iterator[None]:
    """Remove everything if the run fails before its first shard, so that the next run may use other options."""
    try:
        yield
    except BaseException:
        if not has_partial_output(folder.parent):
            _clear(folder)
            (folder / LOCK).unlink(missing_ok=True)
        raise


def _clear(folder: Path) -> None:
    for path in (folder / MANIFEST, *folder.glob("*.parquet")):
        path.unlink(missing_ok=True)


@contextmanager
def _exclusive_lock(out: Path) -> Iterator[None]:
    """Lock the folder for one run at a time. The lock is released when the process ends."""
    with (out / UNFINISHED / LOCK).open("w") as file:
        try:
            # A record lock: unlike flock, it is not inherited by the workers, which may outlive a killed run for a moment.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"Another process is packing into {out}: wait for it, or stop it.") from None
        yield
