"""Files that are whole or not there: written to the side, flushed to the disk, renamed."""

import errno
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


class Unwritten(UserError):
    """A file that could not be written; `problem` is the sentence without its advice, for those who know a better one."""

    def __init__(self, problem: str, advice: str) -> None:
        super().__init__(f"{problem}: {advice}.")
        self.problem = problem


def write_aside(path: Path, write: Callable[[Path], Any]) -> None:
    """`write` is given a place next to the target; a crash or a full disk leaves the old file whole and is told in a sentence."""
    try:
        path = path.resolve()  # a link is written through, not replaced
        side = path.with_name(f".{path.name[:200]}.{os.getpid()}.part")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is a folder or a device; give a file name.")
    except (OSError, ValueError, RuntimeError) as error:  # the last is what older Pythons say of links in a circle
        raise Unwritten(f"{path} cannot be written, {reason(error)}", "choose another place") from None
    try:
        with aside(path, side):
            write(side)
            side.chmod(0o666 & ~current_umask())
    except (OSError, RuntimeError, TypeError, safetensors.SafetensorError) as error:
        free = shutil.disk_usage(path.parent).free >> 20
        problem = f"{path} could not be written, {reason(error)} ({free} MiB free)"
        raise Unwritten(problem, "choose another place, or make room there") from None


def check_writable(path: Path | None) -> None:
    """Complain, before anything is computed, about a file or a folder that could not be written in the end; None is none."""
    if path is None:
        return
    above = path
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UserError(f"{path} is a device; give the name of a file or a folder.")
        whole = path.resolve()
        above = whole if whole.is_dir() else next(each for each in whole.parents if each.exists())
        with tempfile.TemporaryFile(dir=above):
            pass  # tried, because permissions do not tell: the system's own folders take nothing from anybody
    except (OSError, ValueError, RuntimeError) as error:
        why = f"because {above} takes no new files ({reason(error)})" if above != path else reason(error)
        raise UserError(f"{path} cannot be written, {why}: choose another place.") from None


def check_folder(path: Path | None) -> None:
    """The same of what must be a folder."""
    if path is not None and path.is_file():
        raise UserError(f"{path} is a file: give a folder to write to.")
    check_writable(path)


def reason(error: Exception) -> str:
    """What the system says, without the names of the files to the side."""
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    first = str(error).partition("\n")[0].rstrip(".")
    # NumPy does not hand on what the system said of an array that it could not write whole.
    return "not all of it fits" if re.fullmatch(r"\d+ requested and \d+ written", first) else first


def unwritten(out: Path, error: OSError, kept: bool) -> UserError:
    """Of a folder that is filled shard by shard; `kept`: some are finished, and the next run goes on after them."""
    place = next(each for each in (out, *out.absolute().parents) if os.path.exists(each))
    free = shutil.disk_usage(place).free >> 20
    what = "choose another place"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = "make room and run the same command again" + (", the finished shards are kept" if kept else "")
    return UserError(f"{out} could not be written, {reason(error)} ({free} MiB free): {what}.")


@contextmanager
def removing_folders(out: Path) -> Iterator[None]:
    """Makes the folder; on failure those that were made for it go again, where nothing is in them to go on with."""
    made = [each for each in (out, *out.absolute().parents) if not os.path.exists(each)]
    try:
        out.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for each in made:
            with suppress(OSError):
                each.rmdir()
        raise


def refuse_overwriting(out: Path | None, *read: str | Path) -> None:
    """Complain if the file to write is one that is read; the folder of a run stands for the weights in it."""
    if out is None or not out.exists():
        return
    for path in map(Path, read):
        for each in (path, path / "best.safetensors"):
            if each.exists() and each.samefile(out):
                raise UserError(f"{out} is read here and would be overwritten: give another name to write to.")


@contextmanager
def aside(path: Path, side: Path | None = None) -> Iterator[Path]:
    """The place beside the path to write to; it gets its name at the end, or is removed on failure."""
    side = side or path.with_name(f".{path.name}.part")
    try:
        yield side
        flush(side)
        side.replace(path)
        flush(path.parent)
    finally:
        side.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """A file or a folder to the disk: a rename is only safe from a power cut once the folder that holds it is there too."""
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
