"""Training throughput: images per second, MFU, share of time spent waiting for data, peak memory."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from vitrail.models.flops import cost
from vitrail.models.vision_transformer import VisionTransformer

# Peak FLOP/s of dense bfloat16 matrix products.
PEAK_FLOPS = {
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


def peak_flops(device: torch.device) -> float | None:
    """Peak FLOP/s of the device; None if unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)


def peak_memory() -> float:
    """Peak resident memory of this process in bytes; 0 if the system does not report it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        pass
    try:
        import resource
    except ImportError:
        return 0.0
    peak = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return peak if sys.platform == "darwin" else 1024 * peak  # macOS reports bytes, Linux kilobytes


class Throughput:
    """Measures the throughput since the last `measure`; excluded time (validation, saving) does not count."""

    def __init__(self, model: VisionTransformer, device: torch.device, world_size: int, relative_cost: float = 1.0) -> None:
        """`relative_cost`: forward and backward passes per training image, see `Task.relative_cost`."""
        macs = cost(model.architecture).macs * relative_cost
        self.flops_per_image = 6 * macs  # 2 per multiply-add, in 1 forward and 2 backward products
        self.device, self.peak = device, (peak_flops(device) or 0.0) * world_size
        self.images, self.data_wait, self.excluded, self.since = 0, 0.0, 0.0, time.perf_counter()

    def count(self, images: int) -> None:
        self.images += images

    def measure_data_wait(self, fetch: Callable[[], Result]) -> Result:
        """Call `fetch` and add its duration to the data wait."""
        start = time.perf_counter()
        result = fetch()
        self.data_wait += time.perf_counter() - start
        return result

    def exclude(self, function: Callable[[], Result]) -> Result:
        """Call a function without counting its duration."""
        start = time.perf_counter()
        result = function()
        self.excluded += time.perf_counter() - start
        return result

    def measure(self) -> dict[str, float]:
        """The throughput since the last call, under the names that metrics.jsonl uses."""
        now = time.perf_counter()
        seconds = max(now - self.since - self.excluded, 1e-9)
        rate = self.images / seconds
        flops = rate * self.flops_per_image
        metrics = {"images_per_second": rate, "flops_per_second": flops, "data_wait": self.data_wait / seconds}
        if self.peak:
            metrics["flops_share"] = flops / self.peak
        if self.device.type == "cuda":
            metrics["memory"] = float(torch.cuda.max_memory_allocated(self.device))
        elif memory := peak_memory():
            metrics["memory"] = memory
        self.images, self.data_wait, self.excluded, self.since = 0, 0.0, 0.0, now
        return metrics
