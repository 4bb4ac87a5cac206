"""Milliseconds per step of the optimizers, on the parameters of one model with made-up gradients.

    python benchmarks/optimizers.py                          # DeiT-S, on the GPU if there is one
    python benchmarks/optimizers.py --device cpu --rounds 7

Rows: AdamW as `make_optimizer` makes it, torch's fused AdamW on the bare list of parameters, LAMB in its variants, SGD, clipping
by the global norm, the running mean. The optimizers take turns in every round; printed are the median of the rounds and the
spread (largest minus smallest, over two), and for the GPU also the time that the processor needs to hand the step over.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
from asking import positive, run_program

import vitrail
from vitrail.models.registry import lookup
from vitrail.recipes.schema import OptimizerConfig
from vitrail.training.distributed import choose_device
from vitrail.training.ema import ModelEma
from vitrail.training.optimizers import clip_gradients, make_optimizer


def stepping(optimizer: torch.optim.Optimizer, device: str) -> Callable[[], object]:
    optimizer.found_inf = torch.zeros((), device=device)  # type: ignore[attr-defined]
    return optimizer.step


def contenders(name: str, device: str) -> dict[str, Callable[[], object]]:
    model = vitrail.create(name).to(device)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    rules = {
        "adamw": OptimizerConfig("adamw"),
        "lamb (apex)": OptimizerConfig("lamb", clip_grad_norm=1.0),
        "lamb (no clip)": OptimizerConfig("lamb", clip_grad_norm=0.0),
        "lamb (trust all)": OptimizerConfig("lamb", clip_grad_norm=1.0, trust_ratio_on="all"),
        "sgd": OptimizerConfig("sgd", weight_decay_coupled=True),
    }
    runs = {"torch adamw, fused": stepping(torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True), device)}
    runs |= {rule: stepping(make_optimizer(model, how, 1e-6), device) for rule, how in rules.items()}
    runs["clip_gradients"] = lambda: clip_gradients(model.parameters(), 1e9)
    average, flag = ModelEma(model, 0.99996), torch.zeros((), device=device)
    runs["running mean"] = lambda: average.update(flag)
    count = sum(1 for _ in model.parameters())
    print(f"{name}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters in {count} tensors")
    return runs


def timed(run: Callable[[], object], device: str, repeats: int) -> tuple[float, float]:
    """Milliseconds per call until the device is done, and until the processor is."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    handed = time.perf_counter()
    wait()
    return 1e3 * (time.perf_counter() - start) / repeats, 1e3 * (handed - start) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="deit_small_patch16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument("--repeats", type=positive, default=0, help="steps per round; by default 50 on a GPU, 5 on a processor")
    options = parser.parse_args()
    choose_device(options.device)
    lookup(options.name)
    repeats = options.repeats or (50 if options.device == "cuda" else 5)
    device = (
        torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {torch.get_num_threads()}/{os.cpu_count()} threads"
    )
    print(f"{device}; torch {torch.__version__}; n = {options.rounds} rounds of {repeats} steps")
    runs = contenders(options.name, options.device)
    times: dict[str, list[tuple[float, float]]] = {key: [] for key in runs}
    for run in runs.values():
        timed(run, options.device, 3)
    for _ in range(options.rounds):
        for key, run in runs.items():
            times[key].append(timed(run, options.device, repeats))
    for key, values in times.items():
        whole = [each for each, _ in values]
        text = f"{key:20} {statistics.median(whole):8.3f} ms ±{(max(whole) - min(whole)) / 2:.3f}"
        handed = statistics.median(each for _, each in values)
        print(text + (f"   processor {handed:.3f} ms" if options.device == "cuda" else ""), flush=True)


if __name__ == "__main__":
    run_program(main)
