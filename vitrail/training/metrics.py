"""Metrics of a run: one JSON line per logging point and per validation in metrics.jsonl, and the same as TensorBoard events."""

import contextlib
import json
import math
import os
import socket
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

from vitrail.aliases import upgrade_metrics
from vitrail.atomic_files import WriteError, atomic_write, describe_error
from vitrail.errors import UserError
from vitrail.formatting import format_significant

FILE = "metrics.jsonl"
Kind = Literal["train", "validation"]
# Written under the key "speed", since they vary between runs: the other metrics of two equal runs are equal byte by byte.
SPEED = frozenset(("images_per_second", "flops_per_second", "flops_share", "data_wait", "memory", "seconds"))


class Metric(NamedTuple):
    """A validation metric: its key in metrics.jsonl and how it is shown."""

    name: str
    title: str
    higher_is_better: bool = True
    percent: bool = False

    def show(self, value: float | None, signed: bool = False) -> str:
        """Format a value; fractions as percent without the % sign."""
        if value is None:
            return ""
        sign = "+" if signed else ""
        return f"{100 * value:{sign}.2f}" if self.percent else f"{value:{sign}.4f}"

    def clip(self, value: float) -> float:
        """The nearest possible value: a share is from 0 to 1, an error or a loss not negative."""
        return min(max(value, 0.0), 1.0) if self.percent else value if self.higher_is_better else max(value, 0.0)

    def show_interval(self, low: float | None, high: float | None) -> str:
        """Format the interval of a mean, which the t distribution extends beyond possible values: "84.10 to 100.00"."""
        return "" if low is None or high is None else f"{self.show(self.clip(low))} to {self.show(self.clip(high))}"

    def format(self, value: Any) -> str:
        """Format a value with its unit: "84.10 %" or "0.01234"."""
        return "" if value is None else f"{self.show(float(value))} %" if self.percent else format_significant(float(value))


TOP1 = Metric("top1", "top-1", percent=True)
HORIZON = 0.01  # time constant of the smoothed loss, as a fraction of the training


class SmoothedValue:
    """An exponential moving average over training progress, so that it does not depend on the logging interval."""

    def __init__(self) -> None:
        self.progress, self.total, self.weight = 0.0, 0.0, 0.0

    def add(self, progress: float, value: float) -> float:
        """Add a value and return the average; NaN and Inf are returned as they are and not added."""
        if not math.isfinite(value):
            return value
        gap = max(progress - self.progress, 1e-9)
        share = -math.expm1(-gap / HORIZON)
        self.total += share * (value - self.total)
        self.weight += share * (1 - self.weight)
        self.progress = progress
        return self.total / self.weight


class MetricsWriter:
    """Writes metrics.jsonl and TensorBoard events of a run.

    `resume_step` is the step of the checkpoint that a run resumes from (0: restarts). Later lines are removed and existing lines
    are not written twice, so that the file equals that of an uninterrupted run.
    """

    def __init__(self, folder: str | Path, resume_step: int | None = None) -> None:
        self.path = Path(folder) / FILE
        self._written: dict[str, int] = {}
        if resume_step is None and self.path.exists() and self.path.stat().st_size:
            raise UserError(f"{self.path} holds the metrics of another run: resume that run, or choose another folder.")
        if resume_step is not None:
            self._rewind(resume_step)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
            self._board = open_tensorboard(self.path.parent / "tensorboard", None if resume_step is None else resume_step + 1)
        except OSError as error:
            raise self._write_error(error) from None

    def _rewind(self, step: int) -> None:
        before = read_content(self.path)
        lines = [(line, entry) for line, entry in parse_lines(self.path, before) if entry["step"] <= step]
        kept = b"".join(line + b"\n" for line, _ in lines)
        if kept != before:
            atomic_write(self.path, lambda temporary: temporary.write_bytes(kept))
        self._written = {entry["kind"]: entry["step"] for _, entry in lines}

    def _write_error(self, error: OSError) -> UserError:
        return WriteError(f"{self.path} cannot be written, {describe_error(error)}", "free disk space")

    def write(self, kind: Kind, step: int, epoch: float, values: Mapping[str, Any]) -> None:
        """Write one line. Values are numbers or None; those named in SPEED go under the key "speed"."""
        if step <= self._written.get(kind, -1):
            return
        self._written[kind] = step
        plain = {name: to_number(value) for name, value in values.items()}
        entry: dict[str, Any] = {"step": step, "epoch": epoch, "kind": kind}
        entry |= {name: as_json(value) for name, value in plain.items() if name not in SPEED}
        speed = {name: as_json(value) for name, value in plain.items() if name in SPEED}
        if speed:
            entry["speed"] = speed
        try:
            self._file.write(json.dumps(entry, allow_nan=False) + "\n")
            self._file.flush()
            if self._board is not None:
                self._board.write(kind, step, plain)
        except OSError as error:
            raise self._write_error(error) from None

    def sync(self) -> None:
        """Flush to the disk; called before saving a checkpoint, so that a checkpoint never has more steps than the metrics."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._write_error(error) from None

    def close(self) -> None:
        if not self._file.closed:
            self.sync()
            self._file.close()
        if self._board is not None:
            self._board.close()
            self._board = None

    def _close_after_error(self) -> None:
        """Close the files and ignore write errors, which may be the cause of the exception."""
        for file in (self._file, self._board):
            with contextlib.suppress(OSError):
                if file is not None:
                    file.close()
        self._board = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close() if error is None else self._close_after_error()


class TensorBoardWriter:
    """Writes a TensorBoard event file.

    TensorBoard's own writer runs a thread, in which write errors are lost and which is unsafe when data loaders fork processes.
    """

    def __init__(self, folder: Path, purge_step: int | None) -> None:
        """Events of this and later steps in other files of the folder are discarded by TensorBoard if `purge_step` is set."""
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

    def write(self, kind: Kind, step: int, values: Mapping[str, float | int | None]) -> None:
        """Write all values of a line as one event."""
        parts = [
            self._summary.Value(tag=f"{kind}/{name}", simple_value=value) for name, value in values.items() if value is not None
        ]
        self._add(step=step, summary=self._summary(value=parts))

    def _add(self, **content: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def open_tensorboard(folder: Path, purge_step: int | None) -> TensorBoardWriter | None:
    """None, with a warning, if TensorBoard cannot be imported."""
    try:
        return TensorBoardWriter(folder, purge_step)
    except ImportError as error:
        warnings.warn(f"TensorBoard cannot be imported, so no events are written ({error}).", stacklevel=3)
        return None


def to_number(value: Any) -> float | int | None:
    """A Python number from a NumPy scalar or a tensor with one element; None stays None."""
    return value if value is None or type(value) in (bool, int, float) else float(value)


def as_json(value: float | int | None) -> float | int | str | None:
    """NaN and Inf as text that float() reads, since JSON has neither."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def from_json(value: Any) -> Any:
    """The inverse of `as_json`, also inside dictionaries."""
    if isinstance(value, dict):
        return {name: from_json(part) for name, part in value.items()}
    return float(value) if value in ("nan", "inf", "-inf") else value


def is_entry(entry: Any) -> bool:
    """Whether this is a line of metrics.jsonl: step, epoch and kind, and otherwise numbers or null."""
    if not isinstance(entry, dict) or not isinstance(entry.get("speed", {}), dict):
        return False
    numbers = [value for name, value in entry.items() if name not in ("kind", "speed")] + list(entry.get("speed", {}).values())
    if not all(value is None or value in ("nan", "inf", "-inf") or is_finite(value) for value in numbers):
        return False
    step, epoch = entry.get("step"), entry.get("epoch")
    if type(step) is not int or not isinstance(epoch, int | float):
        return False
    return step >= 0 and epoch >= 0 and entry.get("kind") in ("train", "validation")


def is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def parse_lines(path: Path, content: bytes) -> list[tuple[bytes, dict[str, Any]]]:
    """The lines of metrics.jsonl and their entries, without an incomplete last line."""
    parsed = []
    *lines, rest = content.split(b"\n")
    for number, line in enumerate(lines):
        try:
            entry = json.loads(line)
            if not is_entry(entry):
                raise ValueError
        except (ValueError, RecursionError):
            if number == len(lines) - 1 and not rest:
                break  # after a power failure the file may have the length of the last line but not its content
            raise UserError(f"Line {number + 1} of {path} is damaged: remove it to continue.") from None
        parsed.append((line, entry))
    return parsed


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """All entries of a run's metrics.jsonl; empty if there is none."""
    path = Path(folder) / FILE
    return [upgrade_metrics(from_json(entry)) for _, entry in parse_lines(path, read_content(path))]


def read_content(path: Path) -> bytes:
    try:
        return path.read_bytes() if path.is_file() else b""
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}.") from None
