"""Writing of label stores that can be interrupted at any time.

A shard is written to a temporary file, flushed, renamed and then listed in the manifest; the manifest is `complete` when all
shards are listed. A later run checks and reuses the finished shards, and the result is the same to the byte. A thread writes one
shard while the next is computed.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save

from vitrail.atomic_files import atomic_replace, create_folder, file_sha256, shard_write_error
from vitrail.data.loader import Problem
from vitrail.data.progress import Advance, Progress, no_progress
from vitrail.data.source import Source, Subset
from vitrail.errors import UserError
from vitrail.formatting import format_bytes
from vitrail.interrupts import require_cleanup
from vitrail.teachers.image_digests import KEY_BYTES, first_occurrences, image_keys
from vitrail.teachers.label_store import FORMAT, LAYOUT, MANIFEST, read_manifest
from vitrail.version import __version__

SHARD_SIZE = 1024  # images
MAX_PENDING = 2  # computed shards that are not written yet
LOCK = ".lock"
SHARDS = "shard-*.safetensors"
MAY_DIFFER = ("vitrail", "complete", "shards")  # entries of the manifest between a run and the one that continues it
Span = tuple[int, int]
Arrays = dict[str, np.ndarray]
Warn = Callable[[str], Any]


def no_warning(message: str) -> None:
    pass


class Shard(NamedTuple):
    """The predictions for the images of a shard: arrays [n, ...], and the rows of unreadable images with the reason."""

    arrays: Arrays
    skipped: list[tuple[int, Problem]]


PendingShard = Callable[[], Shard]  # waits for the device; called in a thread
ComputeShards = Callable[[list[Span], Advance], Generator[PendingShard, None, None]]


@dataclass(frozen=True)
class AnnotationResult:
    path: Path
    images: int  # unique ones
    source_images: int  # all images of the source
    bytes: int
    shards: int
    reused_shards: int  # finished by an earlier run
    skipped: list[Problem]  # unreadable images
    unreadable_files: int  # of these, files that could not be read at all


@dataclass(frozen=True)
class UniqueImages:
    """The unique images of a source, in the order of their first occurrence."""

    source: Source  # of the unique images
    keys: np.ndarray  # uint8 [N, 16]
    source_images: int
    unreadable: list[Problem]  # files that could not be read; they have no key and no row


def find_unique_images(source: Source, out: Path, workers: int | None, progress: Progress) -> UniqueImages:
    """The unique images of a source that is to be annotated into `out`."""
    check_output_folder(out, source.name)
    if not len(source):
        raise UserError(f"{source.name} contains no images.")
    with progress("hashing images", len(source)) as advance:
        keys, readable = image_keys(source, workers, advance)
    indices = np.flatnonzero(readable)
    if not len(indices):
        raise UserError(f"None of the {len(source):,} images of {source.name} can be read; the first is {source.location(0)}.")
    indices = indices[first_occurrences(keys[indices])]
    unreadable = [Problem(source.location(int(index)), "the file cannot be read") for index in np.flatnonzero(~readable)]
    return UniqueImages(Subset(source, indices), keys[indices], len(source), unreadable)


def write_store(
    out: Path,
    images: UniqueImages,
    header: dict[str, Any],
    compute: ComputeShards,
    progress: Progress = no_progress,
    warn: Warn = no_warning,
    shard_size: int = SHARD_SIZE,
) -> AnnotationResult:
    """Write a label store.

    `header` are the entries of the manifest about teacher, outputs and arrays. `compute` yields the shards of the given spans of
    images and calls its second argument with the number of finished images.
    """
    manifest = {"format": FORMAT, "layout": LAYOUT, "vitrail": __version__, "complete": False} | header
    manifest |= {
        "images": len(images.keys),
        "shard_size": shard_size,
        "data": hashlib.sha256(images.keys.tobytes()).hexdigest(),
        "shards": [],
    }
    require_cleanup()
    try:
        annotating = progress("annotating", len(images.keys))
        with create_folder(out), exclusive_lock(out), remove_without_shards(out), annotating as advance:
            return _write_shards(out, images, manifest, compute, advance, warn)
    except OSError as error:
        raise shard_write_error(out, error, (out / MANIFEST).exists()) from None


@contextmanager
def remove_without_shards(out: Path) -> Iterator[None]:
    """On failure before the first shard, remove the manifest: the next run may have other options."""
    try:
        yield
    except BaseException:
        if has_no_shards(out):
            for file in (out / MANIFEST, *out.glob(SHARDS)):
                file.unlink(missing_ok=True)
        raise


def has_no_shards(out: Path) -> bool:
    """Whether there is a manifest that lists no shard."""
    try:
        return not read_manifest(out)["shards"]
    except UserError:  # no manifest, or that of another version
        return False


def _write_shards(
    out: Path, images: UniqueImages, manifest: dict[str, Any], compute: ComputeShards, advance: Advance, warn: Warn
) -> AnnotationResult:
    for leftover in out.glob(".*.part"):
        leftover.unlink()
    done: dict[str, dict[str, Any]] = {}
    if has_no_shards(out):  # of a run that was killed before its first shard was listed
        for leftover in out.glob(SHARDS):
            leftover.unlink()
    elif (out / MANIFEST).exists():
        manifest = continue_manifest(out, manifest)
        for entry in manifest["shards"]:
            file = out / entry["name"]
            if file.is_file() and file.stat().st_size == entry["bytes"] and file_sha256(file) == entry["sha256"]:
                done[entry["name"]] = entry
                advance(entry["images"])
            else:
                warn(f"{file} is damaged or missing and is computed again.")
    total, size = len(images.keys), manifest["shard_size"]
    spans = {f"shard-{start // size:05d}.safetensors": (start, min(start + size, total)) for start in range(0, total, size)}
    missing = {name: span for name, span in spans.items() if name not in done}
    reused = len(done)
    check_free_space(out, manifest["arrays"], sum(stop - start for start, stop in missing.values()))
    if missing:
        write_manifest(out, manifest | {"complete": False, "shards": [done[name] for name in spans if name in done]})
    failed = False

    def store(name: str, span: Span, pending: PendingShard) -> None:
        nonlocal failed
        if failed:  # shards after one that could not be written are not written either
            return
        try:
            done[name] = write_shard(out / name, images.keys[slice(*span)], pending(), manifest["arrays"])
            shards = [done[each] for each in spans if each in done]
            write_manifest(out, manifest | {"complete": len(done) == len(spans), "shards": shards})
        except BaseException:
            failed = True
            raise

    writing: deque[Future[None]] = deque()
    with closing(compute(list(missing.values()), advance)) as computed, ThreadPoolExecutor(1) as thread:
        for (name, span), pending in zip(missing.items(), computed, strict=True):
            writing.append(thread.submit(store, name, span, pending))
            if len(writing) > MAX_PENDING:
                writing.popleft().result()
        for future in writing:
            future.result()
    shards = [done[name] for name in spans]
    skipped = images.unreadable + [Problem(each["where"], each["reason"]) for shard in shards for each in shard["skipped"]]
    size = sum(shard["bytes"] for shard in shards)
    return AnnotationResult(out, total, images.source_images, size, len(shards), reused, skipped, len(images.unreadable))


def write_shard(path: Path, keys: np.ndarray, shard: Shard, arrays: dict[str, Any]) -> dict[str, Any]:
    """Write a shard and return its entry of the manifest."""
    for name, expected in arrays.items():
        assert shard.arrays[name].shape == (len(keys), *expected["shape"]), name
        assert shard.arrays[name].dtype == expected["dtype"], name
    # safetensors writes the memory of an array without regard to its strides.
    content = save({name: np.ascontiguousarray(array) for name, array in ({"key": keys} | shard.arrays).items()})
    with atomic_replace(path) as temporary:
        temporary.write_bytes(content)
    return {
        "name": path.name,
        "images": len(keys),
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "skipped": [{"row": row, "where": problem.location, "reason": problem.reason} for row, problem in shard.skipped],
    }


def continue_manifest(out: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest of an earlier run, after a check that its options are the same."""
    existing = read_manifest(out)
    check_same_classes(out, existing, manifest)
    for name, value in manifest.items():
        before = existing.get(name)
        if name in MAY_DIFFER or before == json.loads(json.dumps(value)):
            continue
        if name in ("data", "images"):
            raise UserError(
                f"{out} was written for other images, or the data set has changed: give another folder, or remove it."
            )
        if name == "teacher":
            raise UserError(
                f"{out} was written with another teacher, {existing['teacher']['name']}: give that teacher, or another folder."
            )
        raise UserError(
            f"{out} was written with {name.replace('_', ' ')} {format_value(before)}, not {format_value(value)}: give the same "
            f"options, or another folder."
        )
    return existing


def check_same_classes(out: Path, existing: dict[str, Any], manifest: dict[str, Any]) -> None:
    """Raise an error if a store has the same teacher but other classes, or the same classes in another order."""
    before, after = (
        (each["teacher"].get("classes"), each["teacher"].get("class_names"), each.get("class_subset"))
        for each in (existing, manifest)
    )
    if before == after or existing["teacher"].get("weights") != manifest["teacher"].get("weights"):
        return
    first, then = (f"{count:,}" + (f" ({', '.join(names[:2])}, …)" if names else "") for count, names, _ in (before, after))
    difference = f"for {first} classes, not {then}" if before[:2] != after[:2] else "for other classes of the teacher"
    raise UserError(
        f"{out} was written {difference}: give the same data and options (--all-classes stores all of the teacher's classes), or "
        f"another folder."
    )


def format_value(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple | dict) else str(value)


def write_manifest(out: Path, manifest: dict[str, Any]) -> None:
    with atomic_replace(out / MANIFEST) as temporary:
        temporary.write_text(json.dumps(manifest, indent=1, ensure_ascii=True) + "\n", encoding="utf-8")


def bytes_per_image(arrays: dict[str, Any]) -> int:
    """Size of the predictions for one image, including its key."""
    sizes = (int(np.prod(array["shape"])) * int(np.dtype(array["dtype"]).itemsize) for array in arrays.values())
    return KEY_BYTES + sum(sizes)


def check_free_space(out: Path, arrays: dict[str, Any], images: int) -> None:
    """Raise an error before hours of computation whose result does not fit on the disk."""
    needed, free = images * bytes_per_image(arrays), free_space(out)
    if needed > free:
        raise UserError(
            f"{out} needs {format_bytes(needed)} for {images:,} images, but {format_bytes(free)} are free: free disk space, or "
            f"store fewer classes (--top-k 5)."
        )


def free_space(out: Path) -> int:
    existing = next(path for path in (out, *out.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def check_output_folder(out: Path, source: str) -> None:
    """Raise an error if a folder lies inside the data, or contains files that are not a label store."""
    data = Path(os.path.expanduser(source))
    if source and data.is_dir() and Path(os.path.realpath(out)).is_relative_to(data.resolve()):
        raise UserError(f"{out} is inside the data {source}: give a folder elsewhere.")
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: give a folder.")
    try:
        inside = {entry.name for entry in out.iterdir()} if out.exists() else set()
    except OSError as error:
        raise UserError(f"{out} cannot be read: {error.strerror}.") from None
    others = [name for name in inside if name != LOCK and not (name.startswith(".") and name.endswith(".part"))]
    if others and MANIFEST not in inside:
        raise UserError(f"{out} contains files and is not a label store: give a new or empty folder.")


@contextmanager
def exclusive_lock(out: Path) -> Iterator[None]:
    """Hold a lock on a folder until the end of the process at the latest."""
    with (out / LOCK).open("w") as file:
        try:
            # A record lock: unlike flock's, worker processes that outlive a killed run do not inherit it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"Another process is writing {out}: wait until it ends, or stop it.") from None
        try:
            yield
        finally:
            (out / LOCK).unlink(missing_ok=True)
