"""Milliseconds per step of the optimizers, on the parameters of one model with random gradients.

    python benchmarks/optimizers.py                          # DeiT-S, on a GPU if available
    python benchmarks/optimizers.py --device cpu --rounds 7

Rows: AdamW of `make_optimizer`, torch's fused AdamW on the plain list of parameters, variants of LAMB, SGD, clipping by the
global norm, and EMA. They are timed in turns in every round; each line has the median of the rounds and half the range, and
on a GPU also the host time to queue the step.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
from arguments import positive, run_program

import vitrail
from vitrail.devices import choose_device
from vitrail.models.registry import lookup
from vitrail.recipes.schema import OptimizerConfig
from vitrail.training.ema import ModelEma
from vitrail.training.optimizers import clip_gradients, make_optimizer


def make_step(optimizer: torch.optim.Optimizer, device: str) -> Callable[[], object]:
    optimizer.found_inf = torch.zeros((), device=device)  # type: ignore[attr-defined]
    return optimizer.step


def make_runs(name: str, device: str) -> dict[str, Callable[[], object]]:
    model = vitrail.create(name).to(device)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    configs = {
        "adamw": OptimizerConfig("adamw"),
        "lamb (apex)": OptimizerConfig("lamb", clip_grad_norm=1.0),
        "lamb (no clip)": OptimizerConfig("lamb", clip_grad_norm=0.0),
        "lamb (trust all)": OptimizerConfig("lamb", clip_grad_norm=1.0, trust_ratio_on="all"),
        "sgd": OptimizerConfig("sgd", weight_decay_coupled=True),
    }
    runs = {"torch adamw, fused": make_step(torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True), device)}
    runs |= {label: make_step(make_optimizer(model, config, 1e-6), device) for label, config in configs.items()}
    runs["clip_gradients"] = lambda: clip_gradients(model.parameters(), 1e9)
    ema, found_inf = ModelEma(model, 0.99996), torch.zeros((), device=device)
    runs["ema"] = lambda: ema.update(found_inf)
    count = sum(1 for _ in model.parameters())
    print(f"{name}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters in {count} tensors")
    return runs


def time_run(run: Callable[[], object], device: str, repeats: int) -> tuple[float, float]:
    """Milliseconds per call until the device is done, and until the work is queued."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    queued = time.perf_counter()
    synchronize()
    return 1e3 * (time.perf_counter() - start) / repeats, 1e3 * (queued - start) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="deit_small_patch16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument("--repeats", type=positive, default=0, help="steps per round; default: 50 on a GPU, 5 on a CPU")
    options = parser.parse_args()
    choose_device(options.device)
    lookup(options.name)
    repeats = options.repeats or (50 if options.device == "cuda" else 5)
    device = (
        torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {torch.get_num_threads()}/{os.cpu_count()} threads"
    )
    print(f"{device}; torch {torch.__version__}; n = {options.rounds} rounds of {repeats} steps")
    runs = make_runs(options.name, options.device)
    times: dict[str, list[tuple[float, float]]] = {key: [] for key in runs}
    for run in runs.values():
        time_run(run, options.device, 3)
    for _ in range(options.rounds):
        for key, run in runs.items():
            times[key].append(time_run(run, options.device, repeats))
    for key, values in times.items():
        total = [each for each, _ in values]
        text = f"{key:20} {statistics.median(total):8.3f} ms ±{(max(total) - min(total)) / 2:.3f}"
        queued = statistics.median(each for _, each in values)
        print(text + (f"   host {queued:.3f} ms" if options.device == "cuda" else ""), flush=True)


if __name__ == "__main__":
    run_program(main)
