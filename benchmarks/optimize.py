"""Milliseconds per batch and images per second of `vitrail.optimize`, compared with the original model, eager and compiled.

    python benchmarks/optimize.py --out optimize.json                        # bfloat16, on a GPU if available
    python benchmarks/optimize.py vit_tiny_patch16_12x2 --device cpu --dtype float32 --batch-sizes 1 4 --rounds 3

The variants are timed in turns in every round; each line has the median of the rounds, half the range, and the speedup over the
eager original. All weights and images are in `--dtype`, without autocast. Small batches are optimized for latency, others for
throughput; on a Hopper GPU also in float8.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from arguments import check_file, positive, run_program
from timing import half_range, machine, time_rounds

import vitrail
from vitrail.atomic_files import atomic_write
from vitrail.deploy.float8 import has_fp8
from vitrail.deploy.inference_graphs import MAX_GRAPH_BATCH
from vitrail.devices import choose_device
from vitrail.models.registry import lookup

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


def make_runs(name: str, batch_size: int, options: argparse.Namespace) -> tuple[dict[str, Callable[[], object]], dict]:
    """Functions to time by name, and the report of the optimized model."""
    torch.compiler.reset()  # graphs of the previous model count towards the recompile limit
    dtype, cuda = getattr(torch, options.dtype), options.device == "cuda"
    goal = "latency" if batch_size <= MAX_GRAPH_BATCH else "throughput"
    model = vitrail.create(name).to(options.device).eval()
    randomize_scales(model)
    optimized = vitrail.optimize(model, goal, batch_size=batch_size, dtype=dtype, compile=cuda or options.compile)
    runs: dict[str, Callable] = {"eager": model}
    if cuda or options.compile:
        folded = vitrail.optimize(model, goal, dtype=dtype, compile=False, graph=False)
        runs |= {"compiled": torch.compile(model), "folded": folded}
    if cuda and goal == "latency":
        runs["compiled, graphs"] = torch.compile(model, mode="reduce-overhead")
    runs["optimized"] = optimized
    if dtype == torch.bfloat16 and has_fp8(torch.device(options.device)):
        runs["optimized, fp8"] = vitrail.optimize(model, goal, batch_size=batch_size, precision="fp8")
    model.to(dtype)
    image = torch.randn(
        batch_size, model.architecture.channels, *model.architecture.image_size, device=options.device, dtype=dtype
    )

    def runner(network: Callable) -> Callable[[], object]:
        def run() -> object:
            with torch.inference_mode():
                return network(image)

        return run

    return {key: runner(network) for key, network in runs.items()}, optimized.report.to_dict()


def randomize_scales(model: vitrail.VisionTransformer) -> None:
    """Randomize scales and heads: with their initial values near zero, every rewrite would look exact."""
    torch.manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "scale" in key or "head" in key:
                parameter.normal_(0.0, 0.5)


def measure(name: str, batch_size: int, options: argparse.Namespace) -> list[dict]:
    runs, report = make_runs(name, batch_size, options)
    times = time_rounds(runs, options.device, options.rounds, options.repeats)
    eager = statistics.median(times["eager"])
    rows = []
    for key, values in times.items():
        median = statistics.median(values)
        row = {"model": name, "batch_size": batch_size, "dtype": options.dtype, "variant": key, "milliseconds": 1e3 * median}
        row |= {"images_per_second": batch_size / median, "half_range": half_range(values), "speedup": eager / median}
        row |= {"rounds": options.rounds, "repeats": options.repeats}
        rows.append(row | ({"report": report} if key == "optimized" else {}))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--batch-sizes", type=positive, nargs="+", default=[1, 256])
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--repeats", type=positive, default=10)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--compile", action="store_true", help="also on a CPU, where it takes minutes")
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
        for batch_size in options.batch_sizes:
            for row in measure(name, batch_size, options):
                rows.append(row)
                text = f"{name:28} batch size {batch_size:3}  {row['variant']:16} {row['milliseconds']:9.3f} ms"
                print(f"{text} ±{row['half_range']:.1%}  {row['images_per_second']:8.0f}/s  x{row['speedup']:.2f}", flush=True)
            if options.out:
                text = json.dumps({"device": device, "rows": rows}, indent=1)
                atomic_write(options.out, lambda path, text=text: path.write_text(text))


if __name__ == "__main__":
    run_program(main)
