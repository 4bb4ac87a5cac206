"""A data set as Parquet shards in the Hugging Face convention, so written that what is there is whole.

Shards are made in `OUT/.packing`, each beside its place, flushed, renamed and noted in a manifest, `_pack.json`. When all are
there, that folder becomes `OUT/data`: in one step, so that nobody meets half a data set. What an interrupted run has finished is
checked and kept, and the result is the same to the byte.
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

import numpy as np

from vitrail.atomic_files import aside, flush, reason, removing_folders, unwritten
from vitrail.data.datasets.folder import SPLITS, Parts
from vitrail.data.loader import Problem, unreadable
from vitrail.data.parquet_shard import ShardWriter, schema_of
from vitrail.data.reencoding import Recoding, Row
from vitrail.data.source import Source
from vitrail.data.workers import Workers, usual_workers
from vitrail.errors import UserError
from vitrail.interrupts import work_begins

LAYOUT = 1  # of the manifest
CHUNK = 8  # images per task: a worker holds them all, and they may be large
SAMPLED = 64  # images of a split whose bytes are part of the source's fingerprint
UNFINISHED, FINISHED, LOCK = ".packing", "data", "lock"
MANIFEST = "_pack.json"  # readers of a folder of Parquet files pass over names that begin like this
ORDER = ("train", "validation", "test")


@dataclass(frozen=True)
class Shard:
    """A finished file: which images of the split it covers, and what was left out of it."""

    split: str
    start: int
    stop: int
    rows: int
    bytes: int
    sha256: str
    skipped: tuple[Problem, ...]

    @property
    def side_name(self) -> str:
        # How many there will be is not known yet.
        return f"{self.split}-{self.start:09d}.parquet"


@dataclass(frozen=True)
class Result:
    shards: dict[str, Shard]  # by final name
    kept: int  # shards that an earlier run had finished

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
    parts: Parts,
    out: Path,
    how: Recoding,
    shard_size: int = 500_000_000,
    fatal: bool = False,
    workers: int | None = None,
    advance: Callable[[int], Any] = lambda count: None,
    warn: Callable[[str], Any] = lambda sentence: None,
) -> Result:
    """Writes all splits of `parts` below `out`; `name` is what the user called the data.

    A shard takes images, in their order, until the next would bring it above `shard_size` bytes. Unreadable images are left
    out and noted, or `fatal`. `advance` is told how many more images are done.
    """
    try:
        import pyarrow  # noqa: F401 - only to say early, and in words, that it is missing
    except ImportError:
        raise UserError("To write Parquet files, install pyarrow: pip install pyarrow.") from None
    parts = {split: parts[split] for split in ORDER if split in parts}
    check_place(name, out)
    # Format and quality matter only to images that are made smaller.
    options = {"splits": list(parts), "shard_size": shard_size, "resize": None} | (asdict(how) if how.resize else {})
    wanted = {"layout": LAYOUT, "source": fingerprint(parts), "options": options}
    if (out / FINISHED / MANIFEST).exists():
        return _check_finished(out / FINISHED, wanted, fatal, advance)
    folder = out / UNFINISHED
    work_begins()
    try:
        with removing_folders(folder), _alone(out), _begun(folder):
            result = _Pack(parts, folder, wanted, how, shard_size, fatal, advance, warn).run(workers)
        folder.rename(out / FINISHED)
        flush(out)
    except OSError as error:
        raise unwritten(out, error, is_begun(out)) from None
    return result


def is_begun(out: Path) -> bool:
    """Whether there is something to go on with: a manifest that knows of no shard binds nobody to what it says."""
    try:
        return bool(json.loads((out / UNFINISHED / MANIFEST).read_text())["shards"])
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError):  # damaged: not ours to touch
        return True


@dataclass
class _Pack:
    """One run: what is there is checked, what is missing is made."""

    parts: Parts
    folder: Path
    wanted: dict[str, Any]  # what the manifest must say of source and options
    how: Recoding
    shard_size: int
    fatal: bool
    advance: Callable[[int], Any]
    warn: Callable[[str], Any]

    def __post_init__(self) -> None:
        self.schema = schema_of(self.parts)
        self.shards: list[Shard] = []

    def run(self, workers: int | None) -> Result:
        for leftover in self.folder.glob(".*.part"):
            leftover.unlink()
        self._resume()
        kept = len(self.shards)
        pool = Workers(Packer(self.parts, self.how), usual_workers() if workers is None else workers)
        try:
            for split, source in self.parts.items():
                for start, stop in self._missing(split, len(source)):
                    self._make(pool, split, start, stop)
        finally:
            pool.close()
        self._note()
        names = final_names(self.shards)
        for final, shard in names.items():
            (self.folder / shard.side_name).rename(self.folder / final)
        (self.folder / LOCK).unlink()
        flush(self.folder)
        return Result(names, kept)

    def _resume(self) -> None:
        """Takes over the shards of an earlier run that are what their manifest says."""
        if not is_begun(self.folder.parent):  # what is there is of a run that was killed before it could tidy up
            _clear(self.folder)
            self._note()
            return
        noted = _read_manifest(self.folder / MANIFEST, self.wanted)
        for final, shard in final_names(noted).items():
            if (self.folder / final).exists():  # that run was stopped while it gave the files their names
                (self.folder / final).rename(self.folder / shard.side_name)
        for stray in {*self.folder.glob("*.parquet")} - {self.folder / shard.side_name for shard in noted}:
            stray.unlink()  # of a run that could not note it any more; the next to come may be cut otherwise
        for shard in noted:
            if _sound(self.folder / shard.side_name, shard):
                self.shards.append(shard)
                self.advance(shard.stop - shard.start)
                self._refuse(shard.skipped)
            else:
                self.warn(f"The shard with image {shard.start} of {shard.split} is damaged or gone and is packed again.")

    def _missing(self, split: str, count: int) -> Iterator[tuple[int, int]]:
        """The stretches of a split that no shard covers."""
        position = 0
        for start, stop in [*sorted((each.start, each.stop) for each in self.shards if each.split == split), (count, count)]:
            if start > position:
                yield position, start
            position = stop

    def _make(self, pool: Workers, split: str, start: int, stop: int) -> None:
        """Packs one stretch into as many shards as it takes."""
        tasks = [(split, each, min(each + CHUNK, stop)) for each in range(start, stop, CHUNK)]
        items = ((index, item) for task in zip(tasks, pool.run(tasks), strict=True) for index, item in _numbered(*task))
        ahead = next(items, None)
        while ahead is not None:
            skipped: list[Problem] = []
            path = self.folder / f"{split}-{start:09d}.parquet"
            with aside(path) as side, ShardWriter(side, self.schema) as writer:
                while ahead is not None:
                    index, item = ahead
                    if isinstance(item, Problem):
                        self._refuse([item])
                        skipped.append(item)
                    elif writer.rows and writer.size + item.size > self.shard_size:
                        break
                    else:
                        writer.add(item, self.parts[split], index)
                    self.advance(1)
                    ahead = next(items, None)
                if not writer.rows:
                    where, why = skipped[0]
                    raise UserError(f"None of the images {start} to {stop - 1} of {split} can be read; {where}: {why}.")
            until = ahead[0] if ahead is not None else stop
            size, digest = path.stat().st_size, _digest(path)
            self.shards.append(Shard(split, start, until, writer.rows, size, digest, tuple(skipped)))
            self._note()
            start = until

    def _refuse(self, problems: list[Problem] | tuple[Problem, ...]) -> None:
        if problems and self.fatal:
            raise unreadable(problems[0])

    def _note(self) -> None:
        self.shards.sort(key=lambda shard: (ORDER.index(shard.split), shard.start))
        shards = [asdict(shard) | {"skipped": [problem._asdict() for problem in shard.skipped]} for shard in self.shards]
        with aside(self.folder / MANIFEST) as side:
            side.write_text(json.dumps(self.wanted | {"shards": shards}, indent=1) + "\n")


@dataclass(frozen=True)
class Packer:
    """Reads, checks and re-encodes images; all that a worker process needs to know about the data."""

    parts: Parts
    how: Recoding

    def __call__(self, task: tuple[str, int, int]) -> list[Row | Problem]:
        split, start, stop = task
        source = self.parts[split]
        rows: list[Row | Problem] = []
        for index in range(start, stop):
            try:
                rows.append(self.how.row(source, index))
            except (OSError, ValueError) as error:
                rows.append(Problem(source.where(index), reason(error)))
        return rows


def choose(name: str, parts: Parts, splits: list[str]) -> Parts:
    """The splits that were asked for, by any of their names; all if none was."""
    wanted = [SPLITS.get(split.lower(), split) for split in splits] or list(parts)
    missing = next((split for split in wanted if split not in parts), None)
    if missing is not None:
        raise UserError(f"{name} has no {missing} split, only {', '.join(parts)}.")
    return {split: parts[split] for split in ORDER if split in wanted}


def parse_bytes(text: str) -> int:
    """500MB, 1.5 GB, 64MiB or a plain number of bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(k|m|g|t)?(i)?b?\s*", text.lower())
    size = round(float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " ")) if match else 0
    if size < 1:
        raise UserError(f"{text!r} is no number of bytes: write 500MB, 1GB or 64MiB.")
    return size


def _numbered(task: tuple[str, int, int], rows: list[Row | Problem]) -> Iterator[tuple[int, Row | Problem]]:
    yield from enumerate(rows, task[1])


def final_names(shards: list[Shard]) -> dict[str, Shard]:
    """What the shards are called when all are there: train-00000-of-00007.parquet."""
    names: dict[str, Shard] = {}
    for split in ORDER:
        own = sorted((shard for shard in shards if shard.split == split), key=lambda shard: shard.start)
        names |= {f"{split}-{number:05d}-of-{len(own):05d}.parquet": shard for number, shard in enumerate(own)}
    return names


def check_place(name: str, out: Path) -> None:
    """Refuses to write over, beside or into anything that `pack` has not made itself."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: give a folder to write to.")
    source = Path(os.path.expanduser(name))
    if source.is_dir() and Path(os.path.realpath(out)).is_relative_to(source.resolve()):
        raise UserError(f"{out} lies inside {name} and would become a part of it: give a folder elsewhere.")
    try:
        inside = {entry.name for entry in out.iterdir()} if out.exists() else set()
    except OSError as error:
        raise UserError(f"{out} cannot be read: {error.strerror}.") from None
    begun = (out / UNFINISHED / MANIFEST).exists() and FINISHED not in inside
    if not (begun or inside <= {UNFINISHED} or (out / FINISHED / MANIFEST).exists()):
        raise UserError(f"{out} is not empty, and what is in it was not made by this command: give a new or empty folder.")


def fingerprint(parts: Parts) -> str:
    """What the source is: its splits, labels, the names of its images, and the bytes of some images of each split."""
    digest = hashlib.sha256()
    for split, source in parts.items():
        columns = {"": source.label, **source.extra}
        names = {column: labels.names for column, labels in columns.items() if labels}
        digest.update(json.dumps([split, len(source), names]).encode())
        for labels in columns.values():
            digest.update(labels.values.astype("<i8").tobytes() if labels else b"")
        for index in range(len(source)):
            # Without what the user typed: the same folder may be called otherwise the next time.
            digest.update(os.fsencode(source.where(index).replace(source.name.rstrip("/"), "", 1)) + b"\0")
        for index in np.unique(np.linspace(0, len(source) - 1, SAMPLED).astype(np.int64)).tolist():
            digest.update(_bytes_of(source, index))
    return digest.hexdigest()


def _bytes_of(source: Source, index: int) -> bytes:
    try:
        encoded = source.encoded(index)
        return hashlib.sha256(encoded if isinstance(encoded, bytes) else encoded.tobytes()).digest()
    except (OSError, ValueError):
        return b"unreadable"


def _read_manifest(path: Path, wanted: dict[str, Any]) -> list[Shard]:
    """The shards that a manifest notes; a manifest of other data or options is refused."""
    place = path.parent.parent
    try:
        found = json.loads(path.read_text())
        shards = [Shard(**each | {"skipped": tuple(Problem(**one) for one in each["skipped"])}) for each in found["shards"]]
        layout, source, options = found["layout"], found["source"], dict(found["options"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} is damaged: remove {place} and pack again.") from None
    if layout != LAYOUT:
        raise UserError(f"{place} was packed by another version of Vitrail: give another folder, or remove it.")
    for name, value in wanted["options"].items():
        if options.get(name) != value:
            before, now = (", ".join(each) if isinstance(each, list) else each or "none" for each in (options.get(name), value))
            raise UserError(
                f"{place} was begun with {name.replace('_', ' ')} {before}, not {now}: give the same options, or another folder."
            )
    if source != wanted["source"]:
        raise UserError(f"{place} was begun from other data, or the data has changed since: give another folder, or remove it.")
    return shards


def _check_finished(folder: Path, wanted: dict[str, Any], fatal: bool, advance: Callable[[int], Any]) -> Result:
    shards = final_names(_read_manifest(folder / MANIFEST, wanted))
    for name, shard in shards.items():
        if not _sound(folder / name, shard):
            raise UserError(f"{folder / name} is damaged or gone: remove {folder} and pack again.")
        if fatal and shard.skipped:
            raise unreadable(shard.skipped[0])
        advance(shard.stop - shard.start)
    return Result(shards, len(shards))


def _sound(path: Path, shard: Shard) -> bool:
    return path.is_file() and path.stat().st_size == shard.bytes and _digest(path) == shard.sha256


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _begun(folder: Path) -> Iterator[None]:
    """What fails or is stopped before its first shard leaves nothing: the next one to come may want something else."""
    try:
        yield
    except BaseException:
        if not is_begun(folder.parent):
            _clear(folder)
            (folder / LOCK).unlink(missing_ok=True)
        raise


def _clear(folder: Path) -> None:
    for each in (folder / MANIFEST, *folder.glob("*.parquet")):
        each.unlink(missing_ok=True)


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Only one run at a time writes here; the lock goes with the process, however it ends."""
    with (out / UNFINISHED / LOCK).open("w") as file:
        try:
            # A record lock: unlike flock's, it is not inherited by the workers, who may outlive a killed run by a moment.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"Another process is packing into {out}: wait for it, or stop it.") from None
        yield
