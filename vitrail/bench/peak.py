"""What the device can do at best, measured rather than read from a data sheet: a large matrix product and a large copy."""

from typing import NamedTuple

import torch

from vitrail.bench.timing import Summary, enough_repeats, in_turns, summarize, timed

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SIDE = {"cuda": 8192, "cpu": 1024}  # of the matrices
COPIED = {"cuda": 1 << 30, "cpu": 1 << 27}  # bytes, more than any cache holds
ROUNDS = 5
WARM = 1.0  # seconds at full load before a GPU's clock is the one it can hold


class Ceiling(NamedTuple):
    """Operations per second of a product of two square matrices, for each precision; bytes per second read and written."""

    side: int
    operations: dict[str, float]
    operations_spread: dict[str, float]
    bandwidth: float
    bandwidth_spread: float


def measure_ceiling(
    device: torch.device, precisions: list[str], side: int | None = None, copied: int | None = None, rounds: int = ROUNDS
) -> Ceiling:
    side, copied = side or SIDE[device.type], copied or COPIED[device.type]
    operations: dict[str, float] = {}
    spreads: dict[str, float] = {}
    for precision in precisions:
        left, right = (torch.randn(side, side, device=device).to(DTYPES[precision]) for _ in range(2))
        product = torch.empty(side, side, device=device, dtype=DTYPES[precision])
        found = steady(lambda a=left, b=right, out=product: torch.mm(a, b, out=out), device, rounds)  # type: ignore[misc]
        operations[precision], spreads[precision] = 2.0 * side**3 / found.median, found.spread
    source = torch.zeros(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found = steady(lambda: target.copy_(source), device, rounds)
    return Ceiling(side, operations, spreads, 2.0 * copied / found.median, found.spread)


def steady(run, device: torch.device, rounds: int) -> Summary:
    """Seconds of one run once the device is warm."""
    timed(run, device)
    once = timed(run, device)
    if device.type == "cuda":
        timed(run, device, max(round(WARM / max(once, 1e-6)), 1))
    times: list[float] = []
    in_turns([run], [enough_repeats(once)], [times], rounds, device)
    return summarize(times)
