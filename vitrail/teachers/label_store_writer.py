"""Writing a store so that what is there is whole.

A shard is written beside its place, flushed, renamed and noted in the manifest, which says `complete` when all are there. What an
interrupted run has finished is checked and kept, and the result is the same to the byte. Disks are slow beside devices: a thread
writes one shard while the next is made.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save

from vitrail.atomic_files import aside, removing_folders, unwritten
from vitrail.data.inspection_report import bytes_text
from vitrail.data.loader import Problem
from vitrail.data.source import Source, Subset
from vitrail.errors import UserError
from vitrail.interrupts import work_begins
from vitrail.teachers.image_digests import WIDTH, first_of_each, keys_of
from vitrail.teachers.label_store import FORMAT, LAYOUT, MANIFEST, digest_of, read_manifest
from vitrail.version import __version__

SHARD = 1024  # images
AHEAD = 2  # shards that wait for the disk while the next is made
LOCK = ".lock"
SHARDS = "shard-*.safetensors"
FREE_TO_DIFFER = ("vitrail", "complete", "shards")  # between a run and the one that goes on
Span = tuple[int, int]
Arrays = dict[str, np.ndarray]
Advance = Callable[[int], Any]
Watch = Callable[[str, int], AbstractContextManager[Advance]]  # work by its name and length to what is told how much is done


@contextmanager
def unwatched(title: str, total: int) -> Iterator[Advance]:
    yield lambda count: None


class Part(NamedTuple):
    """What is known about the images of a shard: arrays [n, ...], and which rows could not be read, and why."""

    arrays: Arrays
    skipped: list[tuple[int, Problem]]


Finish = Callable[[], Part]  # waits for what is still being computed; a thread calls it
Make = Callable[[list[Span], Advance], Generator[Finish, None, None]]


@dataclass(frozen=True)
class Written:
    path: Path
    images: int  # different ones
    given: int  # as many as the source has
    bytes: int
    shards: int
    kept: int  # shards that an earlier run had finished
    skipped: list[Problem]  # images that could not be read
    lost: int  # of these, such as had no bytes at all


@dataclass(frozen=True)
class Shelf:
    """Different images of a source, each once, in the order of their first appearance."""

    source: Source  # of the different images
    keys: np.ndarray  # uint8 [N, 16]
    given: int
    lost: list[Problem]  # files without bytes to read: they have no key, and nobody can ask for them


def shelve(source: Source, out: Path, workers: int | None, watch: Watch) -> Shelf:
    """The different images of a source that is to be kept at `out`."""
    check_place(out, source.name)
    if not len(source):
        raise UserError(f"{source.name} holds no images: add some.")
    with watch("looking images up", len(source)) as advance:
        keys, readable = keys_of(source, workers, advance)
    places = np.flatnonzero(readable)
    if not len(places):
        raise UserError(f"None of the {len(source):,} images of {source.name} can be read; the first is {source.where(0)}.")
    places = places[first_of_each(keys[places])]
    lost = [Problem(source.where(int(index)), "there is nothing to read") for index in np.flatnonzero(~readable)]
    return Shelf(Subset(source, places), keys[places], len(source), lost)


def write_store(
    out: Path,
    shelf: Shelf,
    head: dict[str, Any],
    make: Make,
    watch: Watch = unwatched,
    warn: Callable[[str], Any] = lambda sentence: None,
    shard: int = SHARD,
) -> Written:
    """The store of a shelf's images. `head` says what the manifest must say of the teacher and of what is kept, `arrays` among
    it; `make` gives the parts of the spans that are missing and tells how many images it has done.
    """
    wanted = {"format": FORMAT, "layout": LAYOUT, "vitrail": __version__, "complete": False} | head
    wanted |= {
        "images": len(shelf.keys),
        "shard": shard,
        "data": hashlib.sha256(shelf.keys.tobytes()).hexdigest(),
        "shards": [],
    }
    work_begins()
    try:
        with removing_folders(out), alone(out), begun(out), watch("annotating", len(shelf.keys)) as advance:
            return _write(out, shelf, wanted, make, advance, warn)
    except OSError as error:
        raise unwritten(out, error, (out / MANIFEST).exists()) from None


@contextmanager
def begun(out: Path) -> Iterator[None]:
    """What fails or is stopped before its first shard leaves nothing: the next one to come may want something else."""
    try:
        yield
    except BaseException:
        if is_bare(out):
            for each in (out / MANIFEST, *out.glob(SHARDS)):
                each.unlink(missing_ok=True)
        raise


def is_bare(out: Path) -> bool:
    """Whether there is a manifest that knows of no shard: nothing was kept, and nobody is bound to what it says."""
    try:
        return not read_manifest(out)["shards"]
    except UserError:  # none, or not ours to touch
        return False


def _write(
    out: Path,
    shelf: Shelf,
    wanted: dict[str, Any],
    make: Make,
    advance: Advance,
    warn: Callable[[str], Any],
) -> Written:
    manifest, size = wanted, wanted["shard"]
    for leftover in out.glob(".*.part"):
        leftover.unlink()
    done: dict[str, dict[str, Any]] = {}
    if is_bare(out):  # of a run that was killed before it could tidy up
        for leftover in out.glob(SHARDS):
            leftover.unlink()
    elif (out / MANIFEST).exists():
        manifest = resumed(out, wanted)
        for each in manifest["shards"]:
            file = out / each["name"]
            if file.is_file() and file.stat().st_size == each["bytes"] and digest_of(file) == each["sha256"]:
                done[each["name"]] = each
                advance(each["images"])
            else:
                warn(f"{file} is damaged or gone and is made anew.")
    total = len(shelf.keys)
    spans = {f"shard-{start // size:05d}.safetensors": (start, min(start + size, total)) for start in range(0, total, size)}
    missing = {name: span for name, span in spans.items() if name not in done}
    kept = len(done)
    check_room(out, manifest["arrays"], sum(stop - start for start, stop in missing.values()))
    if missing:
        note(out, manifest | {"complete": False, "shards": [done[name] for name in spans if name in done]})
    broken = False

    def keep(name: str, span: Span, finish: Finish) -> None:
        nonlocal broken
        if broken:  # what comes after a shard that could not be kept is not kept either
            return
        try:
            done[name] = write_shard(out / name, shelf.keys[slice(*span)], finish(), manifest["arrays"])
            note(out, manifest | {"complete": len(done) == len(spans), "shards": [done[each] for each in spans if each in done]})
        except BaseException:
            broken = True
            raise

    waiting: deque[Future] = deque()
    with closing(make(list(missing.values()), advance)) as parts, ThreadPoolExecutor(1) as writer:
        for (name, span), finish in zip(missing.items(), parts, strict=True):
            waiting.append(writer.submit(keep, name, span, finish))
            if len(waiting) > AHEAD:
                waiting.popleft().result()
        for each in waiting:
            each.result()
    shards = [done[name] for name in spans]
    skipped = shelf.lost + [Problem(each["where"], each["reason"]) for one in shards for each in one["skipped"]]
    return Written(out, total, shelf.given, sum(one["bytes"] for one in shards), len(shards), kept, skipped, len(shelf.lost))


def write_shard(path: Path, keys: np.ndarray, part: Part, arrays: dict[str, Any]) -> dict[str, Any]:
    """What the manifest says of it."""
    check_part(part, arrays, len(keys))
    # safetensors writes memory as it lies.
    content = save({name: np.ascontiguousarray(array) for name, array in ({"key": keys} | part.arrays).items()})
    with aside(path) as side:
        side.write_bytes(content)
    return {
        "name": path.name,
        "images": len(keys),
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "skipped": [{"row": row, "where": problem.where, "reason": problem.reason} for row, problem in part.skipped],
    }


def check_part(part: Part, arrays: dict[str, Any], count: int) -> None:
    for name, each in arrays.items():
        assert part.arrays[name].shape == (count, *each["shape"]), name
        assert part.arrays[name].dtype == each["dtype"], name


def resumed(out: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """The manifest of an earlier run, which must want the same."""
    found = read_manifest(out)
    check_classes(out, found, wanted)
    for name, value in wanted.items():
        before = found.get(name)
        if name in FREE_TO_DIFFER or before == json.loads(json.dumps(value)):
            continue
        if name in ("data", "images"):
            raise UserError(f"{out} was begun from other data, or the data has changed since: give another folder, or remove it.")
        if name == "teacher":
            raise UserError(
                f"{out} was begun with another teacher, {found['teacher']['name']}: give the same, or another folder."
            )
        raise UserError(
            f"{out} was begun with {name.replace('_', ' ')} {told(before)}, not {told(value)}: give the same options, or another "
            f"folder."
        )
    return found


def check_classes(out: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuses to go on with the same teacher about other classes, or the same ones in another order."""
    before, after = (
        (manifest["teacher"].get("classes"), manifest["teacher"].get("class_names"), manifest.get("chosen"))
        for manifest in (found, wanted)
    )
    if before == after or found["teacher"].get("weights") != wanted["teacher"].get("weights"):
        return
    first, then = (f"{count:,}" + (f" ({', '.join(names[:2])}, …)" if names else "") for count, names, _ in (before, after))
    what = f"begun about {first} classes, not {then}" if before[:2] != after[:2] else "begun with others of the teacher's classes"
    raise UserError(
        f"{out} was {what}: give the same data and options (--all-classes keeps all of the teacher's), or another folder."
    )


def told(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple | dict) else str(value)


def note(out: Path, manifest: dict[str, Any]) -> None:
    with aside(out / MANIFEST) as side:
        side.write_text(json.dumps(manifest, indent=1, ensure_ascii=True) + "\n", encoding="utf-8")


def row_bytes(arrays: dict[str, Any]) -> int:
    """Bytes that one image takes, its key included."""
    return WIDTH + sum(int(np.prod(each["shape"])) * np.dtype(each["dtype"]).itemsize for each in arrays.values())


def check_room(out: Path, arrays: dict[str, Any], images: int) -> None:
    """Hours of a teacher's work are not begun where they cannot be kept."""
    need, free = images * row_bytes(arrays), free_space(out)
    if need > free:
        raise UserError(
            f"{out} needs {bytes_text(need)} for {images:,} images, and {bytes_text(free)} are free: make room, or keep less "
            f"(--top-k 5)."
        )


def free_space(out: Path) -> int:
    place = next(each for each in (out, *out.absolute().parents) if each.exists())
    return shutil.disk_usage(place).free


def check_place(out: Path, source: str) -> None:
    """Refuses to write into the data, or beside anything that is no store."""
    data = Path(os.path.expanduser(source))
    if source and data.is_dir() and Path(os.path.realpath(out)).is_relative_to(data.resolve()):
        raise UserError(f"{out} lies inside {source} and would become a part of it: give a folder elsewhere.")
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: give a folder to write to.")
    try:
        inside = {entry.name for entry in out.iterdir()} if out.exists() else set()
    except OSError as error:
        raise UserError(f"{out} cannot be read: {error.strerror}.") from None
    strange = [name for name in inside if name != LOCK and not (name.startswith(".") and name.endswith(".part"))]
    if strange and MANIFEST not in inside:
        raise UserError(f"{out} is not empty, and what is in it is no store: give a new or empty folder.")


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Only one run at a time writes here; the lock goes with the process, however it ends."""
    with (out / LOCK).open("w") as file:
        try:
            # A record lock: unlike flock's, it is not inherited by the workers, who may outlive a killed run by a moment.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"Another process is writing {out}: wait for it, or stop it.") from None
        try:
            yield
        finally:
            (out / LOCK).unlink(missing_ok=True)
