"""Estimated and actual speed and duration of whole trainings, each in its own process.

    python benchmarks/forecast.py --rounds 3
    python benchmarks/forecast.py --rounds 3 --processes 2 -- --shard
    python benchmarks/forecast.py --rounds 1 -- photos/ --recipe small --epochs 5
    python benchmarks/forecast.py --busy 1                          # beside a program that uses one core
    OMP_NUM_THREADS=1 python benchmarks/forecast.py --busy 1        # the same with one thread

Arguments after `--` are passed to `vitrail train`; the default is to train the built-in digits for ten epochs. The time is that
of steps and validations; actual images/s are the median of the logged values after the first.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from arguments import positive, run_program
from timing import machine

from vitrail.errors import UserError

ESTIMATE = re.compile(r"steps?, about ([\w ]+) at ([\d.,e+-]+) images/s")


def run_training(args: list[str], processes: int) -> tuple[float, float, str, float]:
    """Estimated and actual images/s, the estimated time as it was printed, and the actual seconds."""
    command = [sys.executable, "-m"]
    command += ["torch.distributed.run", "--nproc-per-node", str(processes), "-m"] if processes > 1 else []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        result = subprocess.run(
            [*command, "vitrail", "train", *args, "--out", folder], capture_output=True, text=True, check=False
        )
        match = ESTIMATE.search(result.stderr)
        if result.returncode or not match:
            raise UserError(f"vitrail train failed: {result.stderr.strip() or 'no message'}")
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        seconds = json.loads((folder / "run.json").read_text())["seconds"]
    speeds = [line["speed"]["images_per_second"] for line in lines if line["kind"] == "train"]
    estimated = float(match[2].replace(",", ""))
    return estimated, statistics.median(speeds[1:] or speeds), match[1], seconds


@contextmanager
def other_programs(count: int) -> Iterator[None]:
    """`count` programs that use a core each."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for program in running:
            program.kill()
            program.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--processes", type=positive, default=1, help="number of processes of torchrun")
    parser.add_argument("--busy", type=int, default=0, help="number of other programs that use a core each at the same time")
    parser.add_argument("args", nargs="*", help="after --: arguments of vitrail train")
    options = parser.parse_args()
    args = options.args or []
    if not args or args[0].startswith("-"):
        args = ["digits", *args]
    if "--epochs" not in args:
        args += ["--epochs", "10"]
    print(f"vitrail train {' '.join(args)}; {options.processes} process(es), n = {options.rounds}")
    print(machine("cuda" if torch.cuda.is_available() else "cpu"))
    ratios = []
    for number in range(options.rounds):
        with other_programs(options.busy):
            estimated, actual, estimated_time, seconds = run_training(args, options.processes)
        ratios.append(estimated / actual)
        times = f"{estimated_time} estimated, {seconds:.1f} s actual"
        print(f"round {number + 1}: {estimated:,.5g} images/s estimated, {actual:,.5g} actual; {times}", flush=True)
    print(f"estimated / actual: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    run_program(main)
