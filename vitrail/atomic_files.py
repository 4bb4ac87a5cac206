"""Atomic writes: a file is written under a temporary name, flushed to disk and renamed, so it is complete or unchanged."""

import errno
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import safetensors

from vitrail.errors import UserError
from vitrail.formatting import format_bytes


class WriteError(UserError):
    """A file could not be written; `problem` is the message without its advice, for callers that have a better one."""

    def __init__(self, problem: str, advice: str) -> None:
        super().__init__(f"{problem}: {advice}.")
        self.problem = problem


def atomic_write(path: Path, write: Callable[[Path], Any]) -> None:
    """Call `write` with a temporary path and rename it to `path`; on failure an existing file stays and WriteError is raised."""
    try:
        path = path.resolve()  # write through a link instead of replacing it
        temporary = path.with_name(f".{path.name[:200]}.{os.getpid()}.part")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is a folder or a device: give a file name.")
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: symlink loops in older Python versions
        raise WriteError(f"{path} cannot be written, {describe_error(error)}", "choose another path") from None
    try:
        with atomic_replace(path, temporary):
            write(temporary)
            temporary.chmod(0o666 & ~current_umask())
    except (OSError, RuntimeError, TypeError, safetensors.SafetensorError) as error:
        free = format_bytes(shutil.disk_usage(path.parent).free)
        problem = f"{path} could not be written, {describe_error(error)} ({free} free)"
        raise WriteError(problem, "choose another path, or free disk space") from None


def atomic_write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically; bytes of file names that are not valid UTF-8 are written unchanged."""
    atomic_write(path, lambda temporary: temporary.write_text(text, encoding="utf-8", errors="surrogateescape"))


def reject_links(folder: Path, names: re.Pattern[str]) -> None:
    """Raise UserError if an entry of a folder with such a name is a link that leads out of it, through which would be written."""
    for path in folder.iterdir() if folder.is_dir() else ():
        target = Path(os.path.realpath(path))
        if path.is_symlink() and names.fullmatch(path.name) and not target.is_relative_to(os.path.realpath(folder)):
            raise UserError(f"{path} is a link to {target} outside of its folder, which would be overwritten: remove the link.")


def check_writable(path: Path | None) -> None:
    """Raise UserError if a file or folder cannot be written at `path`; called before anything is computed."""
    if path is None:
        return
    existing = path
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UserError(f"{path} is a device: give the name of a file or a folder.")
        if any("\udc80" <= letter <= "\udcff" for letter in os.fspath(path)):
            raise UserError(f"{path} is not valid UTF-8, which safetensors requires: choose another name.")
        resolved = path.resolve()
        existing = resolved if resolved.is_dir() else next(parent for parent in resolved.parents if parent.exists())
        with tempfile.TemporaryFile(dir=existing):
            pass  # permission bits do not suffice: some file systems reject every write
    except (OSError, ValueError, RuntimeError) as error:
        cause = f"because {existing} is not writable ({describe_error(error)})" if existing != path else describe_error(error)
        raise UserError(f"{path} cannot be written, {cause}: choose another path.") from None


def check_writable_folder(path: Path | None) -> None:
    """Raise UserError if `path` is a file or a folder that cannot be written to."""
    if path is not None and path.is_file():
        raise UserError(f"{path} is a file: give a folder to write to.")
    check_writable(path)


def describe_error(error: Exception) -> str:
    """Return the operating system's error message without temporary file names."""
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    first_line = str(error).partition("\n")[0].rstrip(".")
    # NumPy reports an incomplete write without the system's error.
    return "not enough disk space" if re.fullmatch(r"\d+ requested and \d+ written", first_line) else first_line


def shard_write_error(out: Path, error: OSError, resumable: bool) -> UserError:
    """Return the error for a folder of shards; `resumable`: finished shards exist and the next run continues after them."""
    existing = next(path for path in (out, *out.absolute().parents) if os.path.exists(path))
    free = format_bytes(shutil.disk_usage(existing).free)
    advice = "choose another path"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = "free disk space and run the same command again" + (", the finished shards are kept" if resumable else "")
    return UserError(f"{out} could not be written, {describe_error(error)} ({free} free): {advice}.")


@contextmanager
def create_folder(out: Path) -> Iterator[None]:
    """Create a folder and its parents; on failure those that were created and are empty are removed."""
    created = [path for path in (out, *out.absolute().parents) if not os.path.exists(path)]
    try:
        out.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for path in created:
            with suppress(OSError):
                path.rmdir()
        raise


def reject_overwrite(out: Path | None, *inputs: str | Path) -> None:
    """Raise UserError if the output file is one of the inputs; a run directory stands for its best weights."""
    if out is None or not out.exists():
        return
    for path in map(Path, inputs):
        for candidate in (path, path / "best.safetensors"):
            if candidate.exists() and candidate.samefile(out):
                raise UserError(f"{out} is an input and would be overwritten: give another output name.")


@contextmanager
def atomic_replace(path: Path, temporary: Path | None = None) -> Iterator[Path]:
    """Yield a temporary path next to `path`, which replaces `path` at the end or is removed on failure."""
    temporary = temporary or path.with_name(f".{path.name}.part")
    temporary.unlink(missing_ok=True)  # of an interrupted process, or a link
    try:
        yield temporary
        fsync_path(temporary)
        temporary.replace(path)
        fsync_path(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_path(path: Path) -> None:
    """Flush a file or folder to disk: a rename survives a power failure only after its folder is flushed too."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        if path.is_dir():
            return  # systems that cannot open a folder
        raise
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
