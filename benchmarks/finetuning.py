"""Peak memory and step time of fine-tuning all weights, those of the attention, or those of the MLPs, side by side in one run.

    python benchmarks/finetuning.py                                        # ViT-B at 384 pixels, needs a GPU
    python benchmarks/finetuning.py --model deit_tiny_patch16 --size 64 --device cpu --batch 4 --rounds 2

A step is what `vitrail train` does with a batch that is there already: forward and backward pass of the loss in bfloat16 with
blocks compiled one by one (on a GPU), clipping, AdamW, gradients let go. Scopes take turns, round by round; the table gives the
medians, half the spread, and in brackets the ratio to the first. Each scope has a model and an optimizer of its own, made before
its turn and dropped after it, so that the peak is what one such training needs; on a CPU, where nobody counts allocations, it is
the sum of weights, what the backward pass keeps, gradients and the optimizer's state.
"""

import argparse
import gc
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from asking import check_file, positive, run_program
from timing import half_spread, machine, timed

import vitrail
from vitrail.atomic_files import write_aside
from vitrail.errors import UserError
from vitrail.models.registry import lookup as lookup_model
from vitrail.recipes import lookup
from vitrail.recipes.schema import Recipe, parse_scope
from vitrail.tasks.classification import Supervised
from vitrail.tasks.targets import Targets
from vitrail.training.compile import compile_blocks, for_compiling
from vitrail.training.optimizers import clip_gradients, make_optimizer
from vitrail.training.scope import apply_scope

ON_A_PROCESSOR = "--device cpu --model deit_tiny_patch16 --size 64 --batch 4 --rounds 2"
SCOPES = ("full", "attention", "ffn")


class Tuning:
    """A model at the start of a fine-tuning, and its step on one fixed batch."""

    def __init__(self, recipe: Recipe, scope: str, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.device = torch.device(options.device)
        self.recipe = recipe
        with self.device:
            self.model = vitrail.create(recipe.model, options.classes, options.size).to(self.device).train()
            self.images = torch.randn(options.batch, 3, options.size, options.size)
            self.targets = Targets(torch.eye(options.classes)[torch.arange(options.batch) % options.classes])
        self.trained = apply_scope(self.model, scope)
        self.model.recompute = options.recompute
        if options.compile:
            compile_blocks(for_compiling(self.model))
        self.task = Supervised(self.model, recipe)
        self.optimizer = make_optimizer(self.model, recipe.optimizer, recipe.lr)

    def loss(self) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.task(self.images, self.targets)

    def step(self) -> None:
        self.loss().backward()
        clip_gradients(self.model.parameters(), self.recipe.optimizer.clip_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def kept_bytes(self) -> int:
        """Weights, what the backward pass keeps beside them, and gradients and optimizer's state of what is trained."""
        own = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}
        kept: dict[tuple[int, int], torch.Tensor] = {}  # held until counted: memory that is free again has the same address

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in own:
                kept[tensor.data_ptr(), tensor.numel()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self.loss()
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        tensors = [*self.model.parameters(), *kept.values(), *state]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors) + 4 * self.trained


def measure(make: Callable[[], Tuning], options: argparse.Namespace) -> tuple[float, float, int]:
    """Seconds per step, peak bytes, trained parameters."""
    cuda = options.device == "cuda"
    if cuda:
        torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() if cuda else 0
    tuning = make()
    timed(tuning.step, options.device, 3)  # compiles, and makes what the optimizer keeps
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = timed(tuning.step, options.device, options.repeats)
    peak = torch.cuda.max_memory_allocated() - before if cuda else tuning.kept_bytes()
    trained = tuning.trained
    del tuning
    gc.collect()
    return seconds, float(peak), trained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit3_base_patch16")
    parser.add_argument("--size", type=positive, default=384)
    parser.add_argument("--batch", type=positive, default=64)
    parser.add_argument("--classes", type=positive, default=1000)
    parser.add_argument("--scopes", nargs="+", default=list(SCOPES))
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--repeats", type=positive, default=10)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None, help="on where there is a GPU")
    parser.add_argument("--recompute", action="store_true", help="gradient checkpointing, as vitrail train --recompute")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError(f"There is no GPU that torch can use here, for which this is made: give {ON_A_PROCESSOR}, or alike.")
    lookup_model(options.model)
    for scope in options.scopes:
        parse_scope(scope)
    check_file(options.out)
    options.compile = options.device == "cuda" if options.compile is None else options.compile
    recipe = lookup("finetune").set({"model": options.model})
    what = f"{options.model} at {options.size} pixels, batch {options.batch}, bfloat16, {recipe.optimizer.kind}"
    if options.compile:
        what += ", blocks compiled"
    print(f"{machine(options.device)}\n{what}; n = {options.rounds} rounds of {options.repeats} steps, scopes in turn")
    found: dict[str, list[tuple[float, float, int]]] = {scope: [] for scope in options.scopes}
    for _ in range(options.rounds):
        for scope in options.scopes:
            found[scope].append(measure(lambda scope=scope: Tuning(recipe, scope, options), options))  # type: ignore[misc]
    rows: list[dict[str, Any]] = []
    for scope, rounds in found.items():
        times, peaks = [seconds for seconds, _, _ in rounds], [peak for _, peak, _ in rounds]
        row: dict[str, Any] = {
            "scope": scope,
            "trained": rounds[0][2],
            "seconds": statistics.median(times),
            "seconds_spread": half_spread(times),
        }
        rows.append(row | {"peak_bytes": statistics.median(peaks), "peak_spread": half_spread(peaks)})
    first = rows[0]
    for row in rows:
        row["time_ratio"], row["memory_ratio"] = row["seconds"] / first["seconds"], row["peak_bytes"] / first["peak_bytes"]
        time = f"{row['seconds'] * 1e3:9.1f} ms/step ±{row['seconds_spread']:.1%} ({row['time_ratio']:.3f})"
        peak = f"peak {row['peak_bytes'] / 1e9:7.3f} GB ±{row['peak_spread']:.1%} ({row['memory_ratio']:.3f})"
        print(f"{row['scope']:10} {row['trained'] / 1e6:8.2f} M trained   {time}   {peak}")
    if options.out:
        content = {"machine": machine(options.device), "what": what, "rounds": options.rounds, "repeats": options.repeats}
        text = json.dumps(content | {"rows": rows}, indent=1)
        write_aside(options.out, lambda side: side.write_text(text))


if __name__ == "__main__":
    run_program(main)
