"""A rewritten training path and the plain one, timed in turns in one process; prints a Markdown table.

    python benchmarks/fused_paths.py branches                             # parallel branches, sequential and joined
    python benchmarks/fused_paths.py branches vit_small_patch16_18x2 --drop-path 0.1 --batch-size 256
    python benchmarks/fused_paths.py skip cait_s24 --drop-path 0.2        # dropped images multiplied by zero, and skipped
    python benchmarks/fused_paths.py scales                               # channel scales, separate and folded into products
    python benchmarks/fused_paths.py branches vit_tiny_patch16_12x2 --device cpu --batch-size 2 --size 64 --depth 2 --mode eager
    python benchmarks/fused_paths.py branches vit_tiny_patch16_12x2_ls --errors --device cpu --size 64 --depth 6 --drop-path 0.1

A step is forward, backward and fused AdamW in bfloat16, with the loss and the stochastic depth of the model's paper (or
`--drop-path`: the same rate in every block). Mode `native` compiles blocks and, on a GPU, captures forward and backward of a
step as one CUDA graph. The table has medians, half the interquartile range, and the median of the rounds' ratios.

With `--errors` nothing is timed: logits and all gradients of a step in bfloat16, on both paths, are compared with the same step
in float64, with the same drop-path masks. Each round has other weights.
"""

import argparse
import copy
import dataclasses
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from arguments import check_file, positive, run_program
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.bench.candidates import Candidate, open_candidate
from vitrail.bench.measurement import make_groups, measure_groups, speedup
from vitrail.bench.output import describe_machine, write_json
from vitrail.bench.settings import MODES, PRECISIONS, Setting
from vitrail.bench.timing import machine
from vitrail.devices import choose_device, use_device
from vitrail.errors import UserError
from vitrail.layers.fused import fold_scales, fuse_branches


class Comparison(NamedTuple):
    """Two paths: their names, and how to change a network or an architecture from one to the other."""

    first: str
    second: str
    models: tuple[tuple[str, float | None], ...]  # with drop-path rates; None: the paper's
    change: Callable[[nn.Module, bool], nn.Module] | None = None  # of a network, with the same outputs
    architecture: tuple[dict[str, Any], dict[str, Any]] = ({"drop_path_kind": "each"}, {"drop_path_kind": "each"})
    missing: Callable[[Any], str] = lambda architecture: ""  # why the two paths do not differ


COMPARISONS = {
    "branches": Comparison(
        "sequential",
        "joined",
        (("vit_small_patch16_18x2", None), ("vit_base_patch16_18x2", None), ("vit_small_patch16_18x2_ls", 0.1)),
        fuse_branches,
        missing=lambda architecture: "" if architecture.branches > 1 else "has no parallel branches: use vit_small_patch16_18x2",
    ),
    "skip": Comparison(
        "multiplied by zero",
        "skipped",
        (("cait_s24", 0.2), ("patchconvnet_s60", 0.3), ("deit3_base_patch16", 0.2)),
        missing=lambda architecture: "" if architecture.drop_path else "has no drop-path: pass --drop-path 0.2",
        architecture=({"drop_path_kind": "each"}, {"drop_path_kind": "skip"}),
    ),
    "scales": Comparison(
        "separate",
        "folded",
        (("cait_s24", None), ("deit3_base_patch16", None), ("resmlp_s24", None), ("patchconvnet_s60", None)),
        fold_scales,
        architecture=({}, {}),  # as their recipes train them
    ),
}


@dataclasses.dataclass(frozen=True)
class Changed(Candidate):
    """A candidate on the first or the second path."""

    change: Callable[[nn.Module, bool], nn.Module] | None = None
    second: bool = False

    def network(self, setting: Setting, device: torch.device) -> nn.Module:
        network = super().network(setting, device)
        return self.change(network, self.second) if self.change is not None else network


def both(comparison: Comparison, name: str, drop_path: float | None) -> list[Candidate]:
    candidate = open_candidate(name)
    depths = {} if drop_path is None else {"drop_path": drop_path, "drop_path_schedule": "uniform"}
    first, second = (
        dataclasses.replace(candidate, architecture=candidate.architecture.replace(**depths, **a))
        for a in comparison.architecture
    )
    if comparison.missing(first.architecture):
        raise UserError(f"{name} {comparison.missing(first.architecture)}.")
    return [Changed(**vars(each), change=comparison.change, second=each is second) for each in (first, second)]


def run_step(model: nn.Module, images: Tensor, targets: Tensor, autocast: bool) -> list[Tensor]:
    """Logits and gradients of a step; the drop-path masks are the same in every call."""
    torch.manual_seed(0)
    with torch.autocast(images.device.type, torch.bfloat16, enabled=autocast):
        logits = model(images)
    loss = F.mse_loss(logits.double(), targets.double())
    return [logits.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def errors(candidate: Candidate, change: Callable, setting: Setting, seed: int, device: torch.device) -> list[float]:
    """Relative error to float64 on both paths: the mean over tensors of the norm of the difference divided by the tensor's norm.

    Gradients that are zero except for rounding, as of biases before a softmax or a batch norm, are left out.
    """
    torch.manual_seed(seed)
    model = candidate.network(setting, device).train()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # initialized with ones and zeros, which would hide errors of folding
            nn.init.normal_(parameter, 1.0 if "norm.weight" in name else 0.1 if "scale" in name else 0.0, 0.1)
    images = torch.randn(setting.batch_size, 3, *candidate.at(setting).image_size, device=device)
    targets = torch.randn(setting.batch_size, candidate.architecture.classes, device=device)
    reference = run_step(copy.deepcopy(model).double(), images.double(), targets, False)
    results, min_norm = [], 1e-9 * max(exact.norm() for exact in reference)
    for second in (False, True):
        network = change(copy.deepcopy(model), second)
        values = run_step(network, images, targets, True)
        pairs = [(ours, exact) for ours, exact in zip(values, reference, strict=True) if exact.norm() > min_norm]
        results.append(statistics.mean(((ours - exact).norm() / exact.norm()).item() for ours, exact in pairs))
    return results


def print_errors(
    comparison: Comparison, name: str, drop_path: float | None, setting: Setting, rounds: int, device: torch.device
) -> None:
    assert comparison.change is not None
    rows = [errors(both(comparison, name, drop_path)[0], comparison.change, setting, seed, device) for seed in range(rounds)]
    ratios = [second / first for first, second in rows]
    first, second = (statistics.median(column) for column in zip(*rows, strict=True))
    text = f"{comparison.first} {first:.2e}, {comparison.second} {second:.2e}; ratio {statistics.median(ratios):.2f}"
    print(f"{name}: {text} ({min(ratios):.2f} to {max(ratios):.2f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", choices=COMPARISONS)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--drop-path", type=float, default=None, help="default: the paper's")
    parser.add_argument("--batch-size", type=positive, default=128)
    parser.add_argument("--size", type=positive, default=None, help="of images; default: the model's")
    parser.add_argument("--depth", type=positive, default=0, help="in blocks; default: the model's")
    parser.add_argument("--mode", choices=MODES, help="default: native")
    parser.add_argument("--precision", choices=PRECISIONS, help="default: bf16")
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--device", default=None)
    parser.add_argument("--errors", action="store_true", help="compare both paths with float64 instead of timing them")
    parser.add_argument("--out", type=Path, help="write every round as JSON")
    options = parser.parse_args()
    comparison = COMPARISONS[options.comparison]
    if options.errors and comparison.change is None:
        parser.error(f"{options.comparison}: the two paths draw different masks, so that their errors cannot be compared.")
    if options.errors and (options.mode or options.precision or options.out):
        parser.error("--errors compares one eager step in bfloat16: remove --mode, --precision and --out.")
    check_file(options.out)
    device = use_device(choose_device(options.device))
    info = machine(device)
    size = (options.size, options.size) if options.size else None
    setting = Setting("train", options.precision or "bf16", options.mode or "native", options.batch_size, size, options.depth)
    chosen = [(name, None) for name in options.names] or comparison.models
    models = [(name, rate if options.drop_path is None else options.drop_path) for name, rate in chosen]
    groups = [make_groups(both(comparison, name, drop_path), [], [setting]) for name, drop_path in models]
    if options.errors:
        print(f"{describe_machine(info)}; batch size {options.batch_size}; n = {options.rounds}; median (min to max)")
        for name, drop_path in models:
            print_errors(comparison, name, drop_path, setting, options.rounds, device)
        return
    method = f"n = {options.rounds} interleaved rounds; median ± half the interquartile range"
    print(f"{describe_machine(info)}; {setting.describe()}; {method}")
    columns = ["model", "drop-path", "batch size", f"{comparison.first}, ms", f"{comparison.second}, ms", "speedup (min to max)"]
    columns += ["memory", "compile"]
    print("\n| " + " | ".join(columns) + " |")
    print("| --- " * len(columns) + "|", flush=True)
    rows = []
    for (name, _), group in zip(models, groups, strict=True):
        (first, second), *_ = measure_groups(group, options.rounds, device, None)
        rate = f"{group[0][0].candidate.architecture.drop_path:g}"
        if not first.seconds or not second.seconds:
            print(f"| `{name}` | {rate} | {options.batch_size} | {first.error} | {second.error} | | | |", flush=True)
            continue
        ratios = [one / other for one, other in zip(first.seconds, second.seconds, strict=True)]
        both_paths = (first, second)
        texts = [f"{1e3 * each.median:.2f} ±{each.spread:.1%}" for each in both_paths]
        texts += [f"{speedup(second, first).median:.3f} ({min(ratios):.3f} to {max(ratios):.3f})"]
        texts += [" / ".join(f"{each.memory / 1e9:.2f} GB" for each in both_paths if each.memory)]
        texts += [" / ".join(f"{each.compile_seconds:.0f} s" for each in both_paths if each.compile_seconds is not None)]
        print(f"| `{name}` | {rate} | {options.batch_size} | {' | '.join(texts)} |", flush=True)
        rows.append({"comparison": options.comparison, "drop_path": rate, "first": first.to_dict(), "second": second.to_dict()})
        if options.out:
            write_json(options.out, {"machine": info, "rounds": options.rounds, "models": rows})


if __name__ == "__main__":
    run_program(main)
