"""Relevance maps: their scores against masks of objects, and their cost in units of plain forward passes; prints Markdown tables.

    python benchmarks/explain.py scores vitrail_tiny --data oxford-pets/ voc2012/ --images 300
    python benchmarks/explain.py cost --model vit_base_patch16 --rounds 5
    python benchmarks/explain.py memory --model vit_base_patch16 --size 1024

`scores` are those of `vitrail explain WEIGHTS --score DATA`: pointing game and IoU with the objects of the masks, deletion and
insertion, for the predicted classes, with 95 % intervals. `cost` divides the CPU time of one method, for one image, by that of a
forward pass, both on one thread and in turn, so that other programs on the machine matter little; with more --threads it is the
elapsed time, for idle machines. `memory` is the peak
of a process that explains one image, each method in a process of its own.
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
from vitrail.data.datasets.lookup import open_sources
from vitrail.evaluation.model import open_model
from vitrail.formatting import percent
from vitrail.interpret.explanation import check_model
from vitrail.interpret.maps import available_methods, relevance_map
from vitrail.interpret.scores import score_methods
from vitrail.models.vision_transformer import VisionTransformer

PLAIN = "a forward pass"
FAST = ("gradient_attention", "attention", "rollout", "thresholded_heads", "input_gradient", "class_attention", "evidence")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("scores", "cost", "memory", "peak"))
    parser.add_argument("weights", nargs="*", default=["vitrail_tiny"], help="of the scores")
    parser.add_argument("--data", nargs="+", default=[], help="data sets with masks")
    parser.add_argument("--split", help="default: test, else validation")
    parser.add_argument("--images", type=positive, default=300)
    parser.add_argument("--methods", nargs="+", help="default: all of the model")
    parser.add_argument("--model", default="vit_base_patch16")
    parser.add_argument("--size", type=positive, default=224)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--threads", type=positive, default=1, help="of `cost`")
    options = parser.parse_args()
    print(f"{machine('cpu')}, {torch.get_num_threads()} threads", flush=True)
    {"scores": print_scores, "cost": print_cost, "memory": print_memory, "peak": print_peak}[options.what](options)


def print_scores(options: argparse.Namespace) -> None:
    """One row per data set, checkpoint and method."""
    print("\n| data | weights | method | n | pointing game | IoU | deletion | insertion |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for path in options.data:
        sources = open_sources(path)
        name = options.split or next((name for name in ("test", "validation") if name in sources), next(iter(sources)))
        for weights in options.weights:
            model = check_model(open_model(weights, "cpu"))
            for score in score_methods(model, sources[name], options.methods or available_methods(model), options.images):
                low, high = score.pointing_interval
                cells = [f"{percent(score.pointing, 1)} ({100 * low:.1f} to {100 * high:.1f})"]
                for each in (score.iou, score.deletion, score.insertion):
                    cells.append(f"{100 * each.mean:.1f} ± {100 * ((each.high or each.mean) - each.mean):.1f}")
                print(
                    f"| {path.rstrip('/').split('/')[-1]} | {weights} | {score.method} | {score.n} | {' | '.join(cells)} |",
                    flush=True,
                )


def open_pair(options: argparse.Namespace) -> tuple[VisionTransformer, torch.Tensor]:
    """A model without training, whose cost is that of a trained one, and one image."""
    model = vitrail.create(options.model, image_size=(options.size, options.size)).eval()
    return model, torch.randn(1, 3, options.size, options.size)


def run_method(model: VisionTransformer, image: torch.Tensor, method: str) -> None:
    if method == PLAIN:
        with torch.inference_mode():
            model(image)
    else:
        relevance_map(model, image, method)


def print_cost(options: argparse.Namespace) -> None:
    """The median over the rounds of the time of each method over that of a forward pass in the same round."""
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    model, image = open_pair(options)
    methods = [PLAIN, *(options.methods or [name for name in available_methods(model) if name in FAST])]
    times: dict[str, list[float]] = {method: [] for method in methods}
    for turn in range(options.rounds + 1):  # the first is not counted
        for method in methods:
            started = clock()
            run_method(model, image, method)
            if turn:
                times[method].append(clock() - started)
    print(f"\n{options.model}, one image of {options.size} pixels, {options.threads} thread(s), n = {options.rounds} rounds\n")
    print("| method | forward passes (lowest to highest) |\n| --- | --- |")
    for method in methods[1:]:
        ratios = [own / plain for own, plain in zip(times[method], times[PLAIN], strict=True)]
        print(f"| {method} | {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |")


def print_memory(options: argparse.Namespace) -> None:
    """The peak memory of each method, in a process of its own."""
    model = vitrail.create(options.model)
    methods = [PLAIN, *(options.methods or [name for name in available_methods(model) if name in FAST])]
    print(
        f"\n{options.model}, one image of {options.size} pixels\n\n| method | peak memory of the process |\n| --- | --- |",
        flush=True,
    )
    for method in methods:
        command = [sys.executable, __file__, "peak", "--model", options.model, "--size", str(options.size), "--methods", method]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        print(f"| {method} | {done.stdout.splitlines()[-1]} |", flush=True)


def print_peak(options: argparse.Namespace) -> None:
    """The peak memory of this process after one image was explained."""
    run_method(*open_pair(options), options.methods[0])
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    run_program(main)
