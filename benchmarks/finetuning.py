"""Peak memory and step time of fine-tuning all weights, only the attention, or only the MLPs, timed in turns.

    python benchmarks/finetuning.py                                        # ViT-B at 384 pixels, needs a GPU
    python benchmarks/finetuning.py --model deit_tiny_patch16 --size 64 --device cpu --batch-size 4 --rounds 2

A step is that of `vitrail train` on a fixed batch: forward and backward pass of the loss in bfloat16 with blocks compiled one
by one (on a GPU), gradient clipping, AdamW. Scopes are timed in turns, round by round; each line has the medians, half the
range, and in parentheses the ratio to the first scope. Each scope has its own model and optimizer, created before and deleted
after its turn, so that the peak is that of one training. On a CPU the peak is computed: the sum of weights, saved tensors of
the backward pass, gradients and optimizer state.
"""

import argparse
import gc
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from arguments import check_file, positive, run_program
from timing import half_range, machine

import vitrail
from vitrail.atomic_files import atomic_write
from vitrail.bench.timing import time_run
from vitrail.errors import UserError
from vitrail.layers.fused import optimize_for_training
from vitrail.models.registry import lookup as lookup_model
from vitrail.recipes import lookup
from vitrail.recipes.schema import Recipe, parse_scope
from vitrail.tasks.classification import ClassificationModule
from vitrail.tasks.targets import ClassificationTargets
from vitrail.training.compile import compile_blocks
from vitrail.training.optimizers import clip_gradients, make_optimizer, parameter_groups
from vitrail.training.scope import apply_scope

CPU_OPTIONS = "--device cpu --model deit_tiny_patch16 --size 64 --batch-size 4 --rounds 2"
SCOPES = ("full", "attention", "ffn")


class FineTuning:
    """A model at the start of fine-tuning, and its step on one fixed batch."""

    def __init__(self, recipe: Recipe, scope: str, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.device = torch.device(options.device)
        self.recipe = recipe
        with self.device:
            self.model = vitrail.create(recipe.model, options.classes, options.size).to(self.device).train()
            self.images = torch.randn(options.batch_size, 3, options.size, options.size)
            self.targets = ClassificationTargets(torch.eye(options.classes)[torch.arange(options.batch_size) % options.classes])
        self.trained = apply_scope(self.model, scope)
        self.model.recompute = options.recompute
        if options.compile:
            compile_blocks(optimize_for_training(self.model))
        self.task = ClassificationModule(self.model, recipe)
        self.optimizer = make_optimizer(parameter_groups(self.model, recipe.optimizer), recipe.optimizer, recipe.lr)

    def loss(self) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.task(self.images, self.targets)

    def step(self) -> None:
        self.loss().backward()
        clip_gradients(self.model.parameters(), self.recipe.optimizer.clip_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def memory_bytes(self) -> int:
        """Bytes of weights, saved tensors of the backward pass, gradients and optimizer state."""
        weights = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}
        saved: dict[tuple[int, int], torch.Tensor] = {}  # holds the tensors: freed memory would be reused at the same address

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in weights:
                saved[tensor.data_ptr(), tensor.numel()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self.loss()
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        tensors = [*self.model.parameters(), *saved.values(), *state]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors) + 4 * self.trained


def measure(make: Callable[[], FineTuning], options: argparse.Namespace) -> tuple[float, float, int]:
    """Seconds per step, peak bytes, trained parameters."""
    device, cuda = torch.device(options.device), options.device == "cuda"
    if cuda:
        torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() if cuda else 0
    tuning = make()
    time_run(tuning.step, device, 3)  # compiles, and creates the optimizer state
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = time_run(tuning.step, device, options.repeats)
    peak = torch.cuda.max_memory_allocated() - before if cuda else tuning.memory_bytes()
    trained = tuning.trained
    del tuning
    gc.collect()
    return seconds, float(peak), trained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit3_base_patch16")
    parser.add_argument("--size", type=positive, default=384)
    parser.add_argument("--batch-size", type=positive, default=64)
    parser.add_argument("--classes", type=positive, default=1000)
    parser.add_argument("--scopes", nargs="+", default=list(SCOPES))
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--repeats", type=positive, default=10)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None, help="default: on a GPU")
    parser.add_argument("--recompute", action="store_true", help="gradient checkpointing, as vitrail train --recompute")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError(f"This benchmark is made for a GPU, and torch finds none: pass options such as {CPU_OPTIONS}.")
    lookup_model(options.model)
    for scope in options.scopes:
        parse_scope(scope)
    check_file(options.out)
    options.compile = options.device == "cuda" if options.compile is None else options.compile
    recipe = lookup("finetune").set({"model": options.model})
    setting = f"{options.model} at {options.size} pixels, batch size {options.batch_size}, bfloat16, {recipe.optimizer.kind}"
    if options.compile:
        setting += ", blocks compiled"
    print(f"{machine(options.device)}\n{setting}; n = {options.rounds} interleaved rounds of {options.repeats} steps")
    found: dict[str, list[tuple[float, float, int]]] = {scope: [] for scope in options.scopes}
    for _ in range(options.rounds):
        for scope in options.scopes:
            found[scope].append(measure(lambda scope=scope: FineTuning(recipe, scope, options), options))  # type: ignore[misc]
    rows: list[dict[str, Any]] = []
    for scope, rounds in found.items():
        times, peaks = [seconds for seconds, _, _ in rounds], [peak for _, peak, _ in rounds]
        row: dict[str, Any] = {
            "scope": scope,
            "trained": rounds[0][2],
            "seconds": statistics.median(times),
            "seconds_half_range": half_range(times),
        }
        rows.append(row | {"peak_bytes": statistics.median(peaks), "peak_half_range": half_range(peaks)})
    first = rows[0]
    for row in rows:
        row["time_ratio"], row["memory_ratio"] = row["seconds"] / first["seconds"], row["peak_bytes"] / first["peak_bytes"]
        time = f"{row['seconds'] * 1e3:9.1f} ms/step ±{row['seconds_half_range']:.1%} ({row['time_ratio']:.3f})"
        peak = f"peak {row['peak_bytes'] / 1e9:7.3f} GB ±{row['peak_half_range']:.1%} ({row['memory_ratio']:.3f})"
        print(f"{row['scope']:10} {row['trained'] / 1e6:8.2f} M trained   {time}   {peak}")
    if options.out:
        content = {"machine": machine(options.device), "setting": setting, "rounds": options.rounds, "repeats": options.repeats}
        text = json.dumps(content | {"rows": rows}, indent=1)
        atomic_write(options.out, lambda temporary: temporary.write_text(text))


if __name__ == "__main__":
    run_program(main)
