"""What a training says beforehand of its speed and time, and what it reaches: whole trainings, each in a process of its own.

    python benchmarks/forecast.py --rounds 3
    python benchmarks/forecast.py --rounds 3 --processes 2 -- --shard
    python benchmarks/forecast.py --rounds 1 -- photos/ --recipe small --epochs 5

What follows `--` is given to `vitrail train`; without it the built-in digits are trained for ten epochs. The time is that of the
steps and validations; reached images/s are the median of those logged, after the first.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from asking import positive, run_program
from timing import machine

from vitrail.errors import UserError

SAID = re.compile(r"steps, about (?:(\d+) days?, )?(\d+):(\d+):(\d+) at ([\d.,e+-]+) images/s")


def trained(words: list[str], processes: int) -> tuple[float, float, float, float]:
    """Said and reached images/s, said and reached seconds."""
    start = [sys.executable, "-m"]
    start += ["torch.distributed.run", "--nproc-per-node", str(processes), "-m"] if processes > 1 else []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        done = subprocess.run([*start, "vitrail", "train", *words, "--out", folder], capture_output=True, text=True, check=False)
        found = SAID.search(done.stderr)
        if done.returncode or not found:
            raise UserError(f"vitrail train says: {done.stderr.strip() or 'nothing'}")
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        seconds = json.loads((folder / "run.json").read_text())["seconds"]
    days, hours, minutes, rest = (int(part or 0) for part in found.groups()[:4])
    paces = [line["speed"]["images_per_second"] for line in lines if line["kind"] == "train"]
    said = float(found[5].replace(",", ""))
    return said, statistics.median(paces[1:] or paces), 60.0 * (60 * (24 * days + hours) + minutes) + rest, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--processes", type=positive, default=1, help="so many by torchrun")
    parser.add_argument("words", nargs="*", help="after --: what vitrail train is given")
    given = parser.parse_args()
    words = given.words or []
    if not words or words[0].startswith("-"):
        words = ["digits", *words]
    if "--epochs" not in words:
        words += ["--epochs", "10"]
    print(f"vitrail train {' '.join(words)}; {given.processes} process(es), n = {given.rounds}")
    print(machine("cuda" if torch.cuda.is_available() else "cpu"))
    ratios = []
    for number in range(given.rounds):
        said, reached, forecast, seconds = trained(words, given.processes)
        ratios.append(said / reached)
        times = f"{forecast:.0f} s said, {seconds:.1f} s reached"
        print(f"round {number + 1}: {said:,.5g} images/s said, {reached:,.5g} reached; {times}", flush=True)
    print(f"said / reached: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    run_program(main)
