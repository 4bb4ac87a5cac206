"""How the benchmarks measure: runs take turns, round by round, and a round waits for the device only at its ends."""

import os
import statistics
import time
from collections.abc import Callable

import torch


def machine(device: str) -> str:
    """What the numbers were measured on."""
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return f"{name}, {os.cpu_count()} CPU cores; torch {torch.__version__}"


def timed(run: Callable[[], object], device: str, repeats: int) -> float:
    """Seconds per run."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def in_turns(runs: dict[str, Callable[[], object]], device: str, rounds: int, repeats: int) -> dict[str, list[float]]:
    """Seconds per run of every run in every round, after three runs of each to warm up."""
    for run in runs.values():
        timed(run, device, 3)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(timed(run, device, repeats))
    return times


def half_spread(values: list[float]) -> float:
    """Half the distance between the extremes, as a share of the median."""
    return (max(values) - min(values)) / statistics.median(values) / 2
