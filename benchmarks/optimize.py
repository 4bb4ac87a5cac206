"""Milliseconds per batch and images per second of `vitrail.optimize` beside the model it was made from, eager and compiled.

    python benchmarks/optimize.py --out optimize.json                        # bfloat16 on the GPU if there is one
    python benchmarks/optimize.py vit_tiny_patch16_12x2 --device cpu --dtype float32 --batches 1 4 --rounds 3

The contenders take turns in every round; printed are the median of the rounds, the spread (half the distance between the
extremes) and the gain over the eager original. All weights and images are in `--dtype`, without autocast. Small batches are
optimized for latency, others for throughput; on a Hopper GPU in float8, too.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from asking import check_file, positive, run_program
from timing import half_spread, in_turns, machine

import vitrail
from vitrail.atomic_files import write_aside
from vitrail.deploy.float8 import can_multiply
from vitrail.deploy.inference_graphs import LARGEST
from vitrail.models.registry import lookup
from vitrail.training.distributed import choose_device

NAMES = [
    "deit_small_patch16",
    "vit_base_patch16",
    "vit_small_patch16_18x2",
    "vit_small_patch16_18x2_ls",
    "vit_base_patch16_18x2",
    "vit_small_patch16_9x4",
    "cait_s24",
    "resmlp_s24",
    "lvvit_s",
]


def contenders(name: str, batch: int, options: argparse.Namespace) -> tuple[dict[str, Callable[[], object]], dict]:
    """What is run, and the optimized model's report."""
    torch.compiler.reset()  # graphs of the previous model count against the limit of recompilations
    dtype, cuda = getattr(torch, options.dtype), options.device == "cuda"
    aim = "latency" if batch <= LARGEST else "throughput"
    model = vitrail.create(name).to(options.device).eval()
    start_everywhere(model)
    optimized = vitrail.optimize(model, aim, batch=batch, dtype=dtype, compile=cuda or options.compile)
    runs: dict[str, Callable] = {"eager": model}
    if cuda or options.compile:
        folded = vitrail.optimize(model, aim, dtype=dtype, compile=False, graph=False)
        runs |= {"compiled": torch.compile(model), "folded": folded}
    if cuda and aim == "latency":
        runs["compiled, graphs"] = torch.compile(model, mode="reduce-overhead")
    runs["optimized"] = optimized
    if dtype == torch.bfloat16 and can_multiply(torch.device(options.device)):
        runs["optimized, fp8"] = vitrail.optimize(model, aim, batch=batch, precision="fp8")
    model.to(dtype)
    image = torch.randn(batch, model.architecture.channels, *model.architecture.image_size, device=options.device, dtype=dtype)

    def runner(network: Callable) -> Callable[[], object]:
        def run() -> object:
            with torch.inference_mode():
                return network(image)

        return run

    return {key: runner(network) for key, network in runs.items()}, optimized.report.to_dict()


def start_everywhere(model: vitrail.VisionTransformer) -> None:
    """Branches that start at almost nothing would make every rewriting look exact."""
    torch.manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "scale" in key or "head" in key:
                parameter.normal_(0.0, 0.5)


def measure(name: str, batch: int, options: argparse.Namespace) -> list[dict]:
    runs, report = contenders(name, batch, options)
    times = in_turns(runs, options.device, options.rounds, options.repeats)
    eager = statistics.median(times["eager"])
    rows = []
    for key, values in times.items():
        middle = statistics.median(values)
        row = {"model": name, "batch": batch, "dtype": options.dtype, "way": key, "milliseconds": 1e3 * middle}
        row |= {"images_per_second": batch / middle, "spread": half_spread(values), "gain": eager / middle}
        row |= {"rounds": options.rounds, "repeats": options.repeats}
        rows.append(row | ({"report": report} if key == "optimized" else {}))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--batches", type=positive, nargs="+", default=[1, 256])
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--repeats", type=positive, default=10)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--compile", action="store_true", help="also on a processor, where it takes minutes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    choose_device(options.device)
    for name in options.names:
        lookup(name)
    check_file(options.out)
    device = machine(options.device)
    print(f"{device}; n = {options.rounds} rounds of {options.repeats}; {options.dtype}")
    rows = []
    for name in options.names:
        for batch in options.batches:
            for row in measure(name, batch, options):
                rows.append(row)
                text = f"{name:28} batch {batch:3}  {row['way']:16} {row['milliseconds']:9.3f} ms ±{row['spread']:.1%}"
                print(f"{text}  {row['images_per_second']:8.0f}/s  x{row['gain']:.2f}", flush=True)
            if options.out:
                text = json.dumps({"device": device, "rows": rows}, indent=1)
                write_aside(options.out, lambda path, text=text: path.write_text(text))


if __name__ == "__main__":
    run_program(main)
