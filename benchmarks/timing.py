"""Timing of the benchmarks: runs are interleaved round by round; the device is synchronized before and after each."""

import os
import statistics
from collections.abc import Callable

import torch

from vitrail.bench.timing import time_run


def machine(device: str) -> str:
    """Hardware and version of torch."""
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return f"{name}, {os.cpu_count()} CPU cores; torch {torch.__version__}"


def time_rounds(runs: dict[str, Callable[[], object]], device: str, rounds: int, repeats: int) -> dict[str, list[float]]:
    """Seconds per call of every run in every round, after three calls of each to warm up."""
    target = torch.device(device)
    for run in runs.values():
        time_run(run, target, 3)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(time_run(run, target, repeats))
    return times


def half_range(values: list[float]) -> float:
    """Half the distance between the extremes, relative to the median."""
    return (max(values) - min(values)) / statistics.median(values) / 2
