"""How fast a training goes: images per second, share of the device's peak, share of time spent waiting for data."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from vitrail.models.flops import cost
from vitrail.models.vision_transformer import VisionTransformer

# Dense multiply-add peaks of tensor cores in bfloat16, operations per second.
PEAKS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
    "T4": 65e12,
}
Result = TypeVar("Result")


def device_peak(device: torch.device) -> float | None:
    """Operations per second that the device could do at best; None where it is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for key, peak in PEAKS.items() if key in name), None)


def peak_memory() -> float:
    """Bytes that this process has held at most, 0 where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        pass
    try:
        import resource
    except ImportError:
        return 0.0
    most = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return most if sys.platform == "darwin" else 1024 * most  # systems differ in the unit


class Speed:
    """The pace since the last `measure`; pauses (validation, saving) do not count."""

    def __init__(self, model: VisionTransformer, device: torch.device, world: int) -> None:
        self.operations = 6 * cost(model.architecture).macs  # two per multiply-add, forward once and backward twice
        self.device, self.peak = device, (device_peak(device) or 0.0) * world
        self.images, self.waited, self.paused, self.since = 0, 0.0, 0.0, time.perf_counter()

    def count(self, images: int) -> None:
        self.images += images

    def waiting(self, fetch: Callable[[], Result]) -> Result:
        start = time.perf_counter()
        result = fetch()
        self.waited += time.perf_counter() - start
        return result

    def pause(self, other: Callable[[], Result]) -> Result:
        start = time.perf_counter()
        result = other()
        self.paused += time.perf_counter() - start
        return result

    def measure(self) -> dict[str, float]:
        """The pace of the steps since the last time."""
        now = time.perf_counter()
        seconds = max(now - self.since - self.paused, 1e-9)
        rate = self.images / seconds
        pace = {"images_per_second": rate, "flops_per_second": rate * self.operations, "data_wait": self.waited / seconds}
        if self.peak:
            pace["flops_share"] = rate * self.operations / self.peak
        if self.device.type == "cuda":
            pace["memory"] = float(torch.cuda.max_memory_allocated(self.device))
        elif most := peak_memory():
            pace["memory"] = most
        self.images, self.waited, self.paused, self.since = 0, 0.0, 0.0, now
        return pace
