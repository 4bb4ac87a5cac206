"""A run's numbers on disk: one JSON line per logging point and per validation, and the same as TensorBoard events."""

import contextlib
import json
import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from vitrail.aliases import upgrade_metrics
from vitrail.atomic_files import Unwritten, reason, write_aside
from vitrail.errors import UserError

FILE = "metrics.jsonl"
Kind = Literal["train", "validation"]
# What depends on the machine and the hour lies apart, so that the rest of two equal runs is equal byte by byte.
SPEED = frozenset(("images_per_second", "flops_per_second", "flops_share", "data_wait", "memory", "seconds"))
HORIZON = 0.01  # of the training: how far back a smoothed loss looks


class Smoothed:
    """A running mean that forgets by progress, not by calls: how often one logs does not change what one sees."""

    def __init__(self, horizon: float = HORIZON) -> None:
        self.horizon, self.progress, self.total, self.weight = horizon, 0.0, 0.0, 0.0

    def add(self, progress: float, value: float) -> float:
        """The mean after one more value; one that is not finite is passed through and not remembered."""
        if not math.isfinite(value):
            return value
        gap = max(progress - self.progress, 1e-9)
        share = -math.expm1(-gap / self.horizon)
        self.total += share * (value - self.total)
        self.weight += share * (1 - self.weight)
        self.progress = progress
        return self.total / self.weight


class Metrics:
    """The writer of a run's numbers.

    `resume_step` is the step of the checkpoint that a run goes on from (0: from the start again). Lines after it are dropped,
    and a line that is already there is not written twice, so the file ends up like that of a run that was never interrupted.
    """

    def __init__(self, folder: str | Path, resume_step: int | None = None) -> None:
        self.path = Path(folder) / FILE
        self.note: str | None = None  # a sentence for the user, if something is missing
        self._written: dict[str, int] = {}
        if resume_step is None and self.path.exists() and self.path.stat().st_size:
            raise UserError(f"{self.path} holds the numbers of another run: resume that one, or choose another folder.")
        if resume_step is not None:
            self._rewind(resume_step)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
            self._board = self._open_board(resume_step)
        except OSError as error:
            raise self._refused(error) from None

    def _rewind(self, step: int) -> None:
        before = content_of(self.path)
        lines = [(line, entry) for line, entry in whole_lines(self.path, before) if entry["step"] <= step]
        kept = b"".join(line + b"\n" for line, _ in lines)
        if kept != before:
            write_aside(self.path, lambda side: side.write_bytes(kept))
        self._written = {entry["kind"]: entry["step"] for _, entry in lines}

    def _refused(self, error: OSError) -> UserError:
        return Unwritten(f"{self.path} cannot be written, {reason(error)}", "make room there")

    def _open_board(self, resume_step: int | None) -> "Board | None":
        try:
            return Board(self.path.parent / "tensorboard", None if resume_step is None else resume_step + 1)
        except ImportError:
            self.note = "TensorBoard is not installed, so no events are written; metrics.jsonl has every number."
            return None

    def write(self, kind: Kind, step: int, epoch: float, values: Mapping[str, Any]) -> None:
        """One line. Values are numbers, or None where there is none; those named in SPEED are kept apart."""
        if step <= self._written.get(kind, -1):
            return
        self._written[kind] = step
        plain = {name: as_number(value) for name, value in values.items()}
        entry: dict[str, Any] = {"step": step, "epoch": epoch, "kind": kind}
        entry |= {name: as_json(value) for name, value in plain.items() if name not in SPEED}
        speed = {name: as_json(value) for name, value in plain.items() if name in SPEED}
        if speed:
            entry["speed"] = speed
        try:
            self._file.write(json.dumps(entry, allow_nan=False) + "\n")
            self._file.flush()
            if self._board is not None:
                self._board.show(kind, step, plain)
        except OSError as error:
            raise self._refused(error) from None

    def sync(self) -> None:
        """Put every line on the disk; call it before a checkpoint, or a power cut could leave that without its numbers."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._refused(error) from None

    def close(self) -> None:
        if not self._file.closed:
            self.sync()
            self._file.close()
        if self._board is not None:
            self._board.close()
            self._board = None

    def _abandon(self) -> None:
        """Close after something went wrong, of which this may be the cause: what cannot be written is left."""
        for file in (self._file, self._board):
            with contextlib.suppress(OSError):
                if file is not None:
                    file.close()
        self._board = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close() if error is None else self._abandon()


class Board:
    """An event file of TensorBoard's. Its own writer has a thread, which cannot say what goes wrong, and loading processes are
    forked off beside it.
    """

    def __init__(self, folder: Path, purge_step: int | None) -> None:
        """`purge_step`: what other files of the folder say about this step and later ones is to be forgotten."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._file = (folder / name).open("wb")
        self._records = RecordWriter(self._file)
        self._add(file_version="brain.Event:2")
        if purge_step is not None:
            self._add(step=purge_step, session_log=SessionLog(status=SessionLog.START))

    def show(self, kind: Kind, step: int, values: Mapping[str, float | int | None]) -> None:
        """All of a line in one event."""
        shown = {f"{kind}/{name}": value for name, value in values.items() if value is not None}
        parts = [self._summary.Value(tag=tag, simple_value=value) for tag, value in shown.items()]
        self._add(step=step, summary=self._summary(value=parts))

    def _add(self, **content: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def figures(value: float, digits: int = 4) -> str:
    """A number with so many digits that count: 1.400, 0.03120."""
    return f"{value:#.{digits}g}".rstrip(".")


def as_number(value: Any) -> float | int | None:
    """A plain number of whatever holds one: a NumPy scalar, a tensor of one element."""
    return value if value is None or type(value) in (bool, int, float) else float(value)


def as_json(value: float | int | None) -> float | int | str | None:
    """JSON has no NaN and no infinity: they become text that Python's float() reads."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: from_json(part) for name, part in value.items()}
    return float(value) if value in ("nan", "inf", "-inf") else value


def merit(result: Mapping[str, Any]) -> tuple[float, float]:
    """Of equal accuracies, which few images often have, less loss is better; weights that give no number are worth least."""
    loss = float(result["loss"])  # text where it has been through JSON and is no number
    return (-1.0, -math.inf) if math.isnan(loss) else (result["top1"], -loss)


def whole_lines(path: Path, content: bytes) -> list[tuple[bytes, dict[str, Any]]]:
    """Lines and what they say, without a last one that a power cut has torn."""
    found = []
    *lines, rest = content.split(b"\n")
    for number, line in enumerate(lines):
        try:
            entry = json.loads(line)
            if not (isinstance(entry["step"], int) and entry["kind"] in ("train", "validation")):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            if number == len(lines) - 1 and not rest:
                break  # a file system may have kept the length of the last line and not its content
            raise UserError(f"Line {number + 1} of {path} is damaged; remove it to go on.") from None
        found.append((line, entry))
    return found


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """Every line of a run as a dictionary; empty for a run that has not written any."""
    path = Path(folder) / FILE
    return [upgrade_metrics(from_json(entry)) for _, entry in whole_lines(path, content_of(path))]


def content_of(path: Path) -> bytes:
    try:
        return path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}.") from None
