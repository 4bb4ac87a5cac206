"""Time: runs take turns, round by round, so that a clock that drifts hits all alike; a round waits for the device at its ends."""

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
ROUND = 0.25  # seconds that a round of one run should last at least
MOST = 200  # runs in a round


class Summary(NamedTuple):
    """Seconds of one run over n rounds."""

    n: int
    median: float
    spread: float  # half the interquartile range, as a share of the median


def summarize(seconds: Sequence[float]) -> Summary:
    """Median and half the interquartile range; a single round has no spread."""
    median = statistics.median(seconds)
    if len(seconds) < 2:
        return Summary(len(seconds), median, 0.0)
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Summary(len(seconds), median, (high - low) / 2 / median)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(run: Run, device: torch.device, repeats: int = 1) -> float:
    """Seconds per run."""
    wait(device)
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    wait(device)
    return (time.perf_counter() - start) / repeats


def enough_repeats(seconds: float) -> int:
    """How often a run of so many seconds is repeated in a round."""
    return min(max(round(ROUND / max(seconds, 1e-9)), 1), MOST)


def in_turns(
    runs: Sequence[Run],
    repeats: Sequence[int],
    times: Sequence[list[float]],
    rounds: int,
    device: torch.device,
    advance: Callable[[int], None] = lambda count: None,
) -> None:
    """Append each run's seconds of each round to its list, which whoever interrupts this keeps.

    Each round another run is the first, so that none always follows the same one.
    """
    for number in range(rounds):
        for place in range(len(runs)):
            which = (number + place) % len(runs)
            times[which].append(timed(runs[which], device, repeats[which]))
            advance(1)


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers were measured on."""
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "kind": device.type,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "vitrail": __version__,
    }
    if device.type == "cuda":
        found |= {"memory": torch.cuda.get_device_properties(device).total_memory, "cuda": torch.version.cuda}
    return found


def processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next((name for name in names if name), platform.processor() or platform.machine() or "CPU")
