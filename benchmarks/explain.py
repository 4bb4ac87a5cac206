"""The cost of relevance maps and of the command, in units of plain forward passes, and their memory; prints Markdown tables.

    python benchmarks/explain.py cost --model vit_base_patch16 --rounds 5
    python benchmarks/explain.py memory --model vit_base_patch16 --size 1024

`cost` divides the CPU time of one method, for one image, by that of a forward pass, both on one thread and in turn, so that other
programs on the machine matter little; with more --threads it is the elapsed time, for idle machines. The last two rows are the
default methods of `vitrail explain` in one call, and the same with the figures of the papers; those of the weights are drawn too,
once per report. `memory` is the peak of a process that explains one image, each row in a process of its own.
`vitrail explain WEIGHTS --score DATA` prints the scores of the methods.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time

import torch
from arguments import positive, run_program
from timing import machine

import vitrail
from vitrail.interpret.attention import record
from vitrail.interpret.figures import PaperFigures
from vitrail.interpret.maps import available_methods, compute_map, default_methods, needs_gradients
from vitrail.models.vision_transformer import VisionTransformer

PLAIN = "a forward pass"
COMMAND = "the default methods in one call"
WITH_FIGURES = "the same and the figures of the papers"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "memory", "peak"))
    parser.add_argument(
        "--methods", nargs="+", help="rows of the table; default: all of the model but occlusion, and the command"
    )
    parser.add_argument("--model", default="vit_base_patch16")
    parser.add_argument("--size", type=positive, default=224)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--threads", type=positive, default=1, help="of `cost`")
    options = parser.parse_args()
    print(f"{machine('cpu')}, {torch.get_num_threads()} threads", flush=True)
    {"cost": print_cost, "memory": print_memory, "peak": print_peak}[options.what](options)


def open_pair(options: argparse.Namespace) -> tuple[VisionTransformer, torch.Tensor]:
    """A model without training, whose cost is that of a trained one, and one image."""
    model = vitrail.create(options.model, image_size=(options.size, options.size)).eval()
    return model, torch.randn(1, 3, options.size, options.size)


def list_rows(options: argparse.Namespace, model: VisionTransformer) -> list[str]:
    """What is measured, a forward pass first."""
    fast = [name for name in available_methods(model) if name != "occlusion"]
    return [PLAIN, *(options.methods or [*fast, COMMAND, WITH_FIGURES])]


def run_row(model: VisionTransformer, image: torch.Tensor, row: str) -> None:
    """A forward pass, or the methods and figures of a row from one recorded pass."""
    if row == PLAIN:
        with torch.inference_mode():
            model(image)
        return
    methods = default_methods(model) if row in (COMMAND, WITH_FIGURES) else [row]
    recording = record(model, image, any(map(needs_gradients, methods)))
    for method in methods:
        compute_map(recording, method)
    if row == WITH_FIGURES:
        PaperFigures().add(recording)


def print_cost(options: argparse.Namespace) -> None:
    """The median over the rounds of the time of each method over that of a forward pass in the same round."""
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    model, image = open_pair(options)
    rows = list_rows(options, model)
    times: dict[str, list[float]] = {row: [] for row in rows}
    for turn in range(options.rounds + 1):  # the first is not counted
        for row in rows:
            started = clock()
            run_row(model, image, row)
            if turn:
                times[row].append(clock() - started)
    print(f"\n{options.model}, one image of {options.size} pixels, {options.threads} thread(s), n = {options.rounds} rounds\n")
    print("| method | forward passes (lowest to highest) |\n| --- | --- |")
    for row in rows[1:]:
        ratios = [own / plain for own, plain in zip(times[row], times[PLAIN], strict=True)]
        print(f"| {row} | {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |")


def print_memory(options: argparse.Namespace) -> None:
    """The peak memory of each method, in a process of its own."""
    model = vitrail.create(options.model)
    rows = list_rows(options, model)
    print(
        f"\n{options.model}, one image of {options.size} pixels\n\n| method | peak memory of the process |\n| --- | --- |",
        flush=True,
    )
    for row in rows:
        command = [sys.executable, __file__, "peak", "--model", options.model, "--size", str(options.size), "--methods", row]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        print(f"| {row} | {done.stdout.splitlines()[-1]} |", flush=True)


def print_peak(options: argparse.Namespace) -> None:
    """The peak memory of this process after one image was explained."""
    run_row(*open_pair(options), options.methods[0])
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    run_program(main)
