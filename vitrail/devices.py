"""Choice of the device that a model runs on, and of the number of threads on a CPU that other programs use too; free memory."""

import contextlib
import math
import os
import time
from functools import cache
from pathlib import Path

import torch

from vitrail.data.workers import count_cores
from vitrail.errors import UserError

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # set by users who choose the number of threads themselves
TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100  # per second, in /proc/stat
MEASURED_SECONDS = 0.2


def choose_device(name: str | None, local_rank: int = 0) -> torch.device:
    """The device of this name; by default the GPU of this local rank if there is one, otherwise the CPU."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"Unknown device {name!r}: give cpu, cuda or cuda:1.") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"Device {name!r} is not supported: give cpu, cuda or cuda:1.")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError("No CUDA device is available: give --device cpu.")
        if device.index is not None and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
            raise UserError(f"Each process uses a GPU of its own: give --device cuda, not {name}.")
        index, count = local_rank if device.index is None else device.index, torch.cuda.device_count()
        if index >= count:
            error = UserError(f"There is no GPU {index}: this machine has {count}.")
            # Of the processes without a GPU the first reports the error; those with one are not affected by it.
            error.report_here = index == count if device.index is None else None
            raise error
        return torch.device("cuda", index)
    return device


def check_device(device: torch.device | str) -> torch.device:
    """The device, on which a tensor can be created."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, TypeError, AssertionError, ImportError):
        raise UserError(f"Device {str(device)!r} is not available: give cpu, or cuda on a machine with a GPU.") from None


def use_device(device: torch.device) -> torch.device:
    """Make this the current CUDA device; returns it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


class OtherPrograms:
    """The CPU time of other programs on the cores of this process since the object was created."""

    def __init__(self) -> None:
        self.start = time.monotonic(), time.process_time(), read_busy_seconds()

    def cores(self) -> float:
        """Mean number of cores that they used; 0 where the system does not report it or too little time has passed."""
        start, own, busy = self.start
        elapsed, used, now = time.monotonic() - start, time.process_time() - own, read_busy_seconds()
        if busy is None or now is None or elapsed < MEASURED_SECONDS / 2:
            return 0.0
        return min(max((now - busy - used) / elapsed, 0.0), float(count_cores()))


def read_busy_seconds() -> float | None:
    """Seconds for which the cores of this process were not idle since the system was started; None if unknown."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        lines = (line.split() for line in Path("/proc/stat").read_text().splitlines())
        # user, nice, system, idle, iowait, irq, softirq, steal; guest times are part of user
        return sum(sum(map(int, (*line[1:4], *line[6:9]))) for line in lines if line[0] in cores) / TICKS
    return None


def describe_load(cores: float) -> str:
    """For messages: "other programs use 1.6 of 2 cores"."""
    return f"other programs use {cores:.1f} of {count_cores()} cores"


def has_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 in hardware; emulation is up to fifteen times slower than float32."""
    if device.type == "cuda":
        return bool(torch.version.hip) or torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.backends.mkldnn.is_available() and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


@cache
def default_threads() -> int:
    return torch.get_num_threads()


def set_threads(count: object) -> None:
    """Use the number of threads that a run was started with, so that it is continued bit by bit, up to all cores.

    An environment variable takes precedence.
    """
    if isinstance(count, int) and count > 0 and not any(name in os.environ for name in THREAD_VARIABLES):
        torch.set_num_threads(min(count, count_cores()))


def adapt_threads(device: torch.device) -> list[str]:
    """Use as many threads as cores are idle now, and return a message if these are not all.

    Threads wait for each other at every layer: with one more thread than idle cores a step takes many times as long as with one
    thread. The number stays as it is on a GPU, in one of several processes, and where an environment variable sets it.
    """
    if device.type != "cpu" or "RANK" in os.environ or any(name in os.environ for name in THREAD_VARIABLES):
        return []
    others = OtherPrograms()
    time.sleep(MEASURED_SECONDS)
    busy = others.cores()
    threads = max(min(math.floor(count_cores() - busy + 0.25), default_threads()), 1)
    torch.set_num_threads(threads)
    if threads == default_threads():
        return []
    return [
        f"using {threads} of {default_threads()} threads: {describe_load(busy)}; set OMP_NUM_THREADS to choose another number"
    ]


def free_memory() -> int:
    """Return the bytes of memory available to this process, within the limit of its control group; 0 if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 0
    try:
        group = Path("/sys/fs/cgroup")
        return max(min(free, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())), 0)
    except (OSError, ValueError):  # no control group, or "max": no limit
        return free
