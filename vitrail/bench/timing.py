"""Timing: runs are interleaved round by round, so that clock drift affects all of them; the device is synchronized per round."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vitrail.version import __version__

Run = Callable[[], object]
ROUND_SECONDS = 0.25  # minimum duration of a round of one run
MAX_REPEATS = 200  # per round


class Summary(NamedTuple):
    """Seconds of one run over n rounds."""

    n: int
    median: float
    spread: float  # half the interquartile range, relative to the median


def summarize(seconds: Sequence[float]) -> Summary:
    """Median and half the interquartile range; a single round has no spread."""
    median = statistics.median(seconds)
    if len(seconds) < 2:
        return Summary(len(seconds), median, 0.0)
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Summary(len(seconds), median, (high - low) / 2 / median)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_run(run: Run, device: torch.device, repeats: int = 1) -> float:
    """Seconds per run."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def choose_repeats(seconds: float) -> int:
    """Number of repeats in a round for a run that takes `seconds`."""
    return min(max(round(ROUND_SECONDS / max(seconds, 1e-9)), 1), MAX_REPEATS)


def time_interleaved(
    runs: Sequence[Run],
    repeats: Sequence[int],
    times: Sequence[list[float]],
    rounds: int,
    device: torch.device,
    advance: Callable[[int], None] = lambda count: None,
) -> None:
    """Append the seconds of each run in each round to its list in `times`; an interrupt keeps what was appended.

    Each round starts with another run, so that no run always follows the same one.
    """
    for number in range(rounds):
        for offset in range(len(runs)):
            index = (number + offset) % len(runs)
            times[index].append(time_run(runs[index], device, repeats[index]))
            advance(1)


def machine(device: torch.device) -> dict[str, Any]:
    """Hardware and versions."""
    info: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "kind": device.type,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "vitrail": __version__,
    }
    if device.type == "cuda":
        info |= {"memory": torch.cuda.get_device_properties(device).total_memory, "cuda": torch.version.cuda}
    return info


def cpu_name() -> str:
    """The name of the CPU, if the system provides it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next((name for name in names if name), platform.processor() or platform.machine() or "CPU")
