"""Measured peak of the device: the throughput of a large matrix product and of a large copy."""

from typing import NamedTuple

import torch

from vitrail.bench.timing import Run, Summary, choose_repeats, summarize, time_interleaved, time_run

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MATRIX_SIZE = {"cuda": 8192, "cpu": 1024}
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}  # larger than any cache
ROUNDS = 5
WARMUP_SECONDS = 1.0  # of full load until the clock of a GPU is stable


class Peak(NamedTuple):
    """FLOP/s of a product of two square matrices in each precision; bandwidth in bytes per second, reads plus writes."""

    matrix_size: int
    flops: dict[str, float]
    flops_spread: dict[str, float]
    bandwidth: float
    bandwidth_spread: float


def measure_peak(
    device: torch.device,
    precisions: list[str],
    matrix_size: int | None = None,
    copy_bytes: int | None = None,
    rounds: int = ROUNDS,
) -> Peak:
    size, copied = matrix_size or MATRIX_SIZE[device.type], copy_bytes or COPY_BYTES[device.type]
    flops: dict[str, float] = {}
    spreads: dict[str, float] = {}
    for precision in precisions:
        left, right = (torch.randn(size, size, device=device).to(DTYPES[precision]) for _ in range(2))
        product = torch.empty(size, size, device=device, dtype=DTYPES[precision])
        summary = time_when_warm(lambda a=left, b=right, out=product: torch.mm(a, b, out=out), device, rounds)  # type: ignore[misc]
        flops[precision], spreads[precision] = 2.0 * size**3 / summary.median, summary.spread
    source = torch.zeros(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    summary = time_when_warm(lambda: target.copy_(source), device, rounds)
    return Peak(size, flops, spreads, 2.0 * copied / summary.median, summary.spread)


def time_when_warm(run: Run, device: torch.device, rounds: int) -> Summary:
    """Seconds per run after a warmup."""
    time_run(run, device)
    once = time_run(run, device)
    if device.type == "cuda":
        time_run(run, device, max(round(WARMUP_SECONDS / max(once, 1e-6)), 1))
    times: list[float] = []
    time_interleaved([run], [choose_repeats(once)], [times], rounds, device)
    return summarize(times)
