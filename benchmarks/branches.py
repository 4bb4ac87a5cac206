"""Training with parallel branches one after the other and as one, in one process and in turns; prints a table in Markdown.

    python benchmarks/branches.py                                  # the models below, batch 128, as `vitrail train` runs them
    python benchmarks/branches.py vit_small_patch16_18x2 --drop-path 0.1 --batch 256
    python benchmarks/branches.py vit_tiny_patch16_12x2 --device cpu --batch 2 --size 64 --depth 2 --mode compiled --rounds 3
    python benchmarks/branches.py vit_tiny_patch16_12x2_ls --errors --device cpu --batch 8 --size 64 --depth 6 --drop-path 0.1

A step is forward, backward and fused AdamW in bfloat16, with the loss and the stochastic depth of the model's paper (or
`--drop-path`: coins for each picture, the same rate in every block). `own` compiles blocks and, on a GPU, captures the passes of
a step as one CUDA graph. Printed are medians, half the interquartile range, and the median of the rounds' ratios.

With `--errors` nothing is timed: logits and all gradients of a step in bfloat16, either way, are compared with the same step in
float64, with the same coins. Each round has other weights.
"""

import argparse
import copy
import dataclasses
import statistics
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.benching.contenders import Contender, open_contender
from vitrail.benching.measuring import make_heats, run_heats, times_as_fast
from vitrail.benching.report import headline, write_json
from vitrail.benching.settings import MODES, PRECISIONS, Setting
from vitrail.benching.timing import machine
from vitrail.layers.joining import join_branches
from vitrail.training.devices import begin, choose_device

MODELS = (("vit_small_patch16_18x2", None), ("vit_base_patch16_18x2", None), ("vit_small_patch16_18x2_ls", 0.1))
COLUMNS = ("model", "drop-path", "batch", "one after the other, ms", "as one, ms", "times as fast (least to most)")
COLUMNS += ("memory", "compiling")


class Joined(Contender):
    """The same network with its branches as one."""

    def network(self, setting: Setting, device: torch.device) -> nn.Module:
        return join_branches(super().network(setting, device))


def both(name: str, drop_path: float | None) -> list[Contender]:
    plain = open_contender(name)
    if drop_path is not None:
        depths = {"drop_path": drop_path, "drop_path_schedule": "uniform", "drop_path_kind": "each"}
        plain = dataclasses.replace(plain, architecture=plain.architecture.replace(**depths))
    return [plain, Joined(**vars(plain))]


def passes(model: nn.Module, images: Tensor, wanted: Tensor, rounding: bool) -> list[Tensor]:
    """Logits and gradients of a step; the coins are the same every time."""
    torch.manual_seed(0)
    with torch.autocast(images.device.type, torch.bfloat16, enabled=rounding):
        logits = model(images)
    loss = F.mse_loss(logits.double(), wanted.double())
    return [logits.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def errors(contender: Contender, setting: Setting, seed: int, device: torch.device) -> list[float]:
    """How far from float64, one after the other and as one: the mean over tensors of the difference's norm by the tensor's."""
    torch.manual_seed(seed)
    model = contender.network(setting, device).train()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # started as ones and zeros, which would hide what folding does
            nn.init.normal_(parameter, 1.0 if "norm.weight" in name else 0.1 if "scale" in name else 0.0, 0.1)
    images = torch.randn(setting.batch, 3, *contender.at(setting).image_size, device=device)
    wanted = torch.randn(setting.batch, contender.architecture.classes, device=device)
    right = passes(copy.deepcopy(model).double(), images.double(), wanted, False)
    found = []
    for join in (False, True):
        values = passes(join_branches(model, join), images, wanted, True)
        shares = [((ours - exact).norm() / exact.norm()).item() for ours, exact in zip(values, right, strict=True)]
        found.append(statistics.mean(shares))
    return found


def print_errors(name: str, contender: Contender, setting: Setting, rounds: int, device: torch.device) -> None:
    rows = [errors(contender, setting, seed, device) for seed in range(rounds)]
    ratios = [joined / plain for plain, joined in rows]
    plain, joined = (statistics.median(column) for column in zip(*rows, strict=True))
    text = f"one after the other {plain:.2e}, as one {joined:.2e}; ratio {statistics.median(ratios):.2f}"
    print(f"{name}: {text} ({min(ratios):.2f} to {max(ratios):.2f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--drop-path", type=float, default=None, help="the paper's by default")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--size", type=int, default=None, help="of pictures, the model's own by default")
    parser.add_argument("--depth", type=int, default=0, help="in blocks, the model's own by default")
    parser.add_argument("--mode", choices=MODES, default="own")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default=None)
    parser.add_argument("--errors", action="store_true", help="compare both ways with float64 instead of timing them")
    parser.add_argument("--out", type=Path, help="write every round as JSON")
    options = parser.parse_args()
    device = begin(choose_device(options.device))
    facts = machine(device)
    size = (options.size, options.size) if options.size else None
    setting = Setting("train", options.precision, options.mode, options.batch, size, options.depth)
    models = [(name, options.drop_path) for name in options.names] or MODELS
    if options.errors:
        print(f"{headline(facts)}; batch {options.batch}; n = {options.rounds}; median (least to most)")
        for name, drop_path in models:
            print_errors(name, both(name, drop_path)[0], setting, options.rounds, device)
        return
    how = f"n = {options.rounds} rounds in turns; median, ± half the interquartile range"
    print(f"{headline(facts)}; {setting.describe()}; {how}")
    print("\n| " + " | ".join(COLUMNS) + " |")
    print("| --- " * len(COLUMNS) + "|", flush=True)
    kept = []
    for name, drop_path in models:
        contenders = both(name, drop_path)
        (plain, joined), *_ = run_heats(make_heats(contenders, [], [setting]), options.rounds, device, None)
        a = contenders[0].architecture
        drop = f"{a.drop_path:g} {a.drop_path_kind}" if a.drop_path else "0"
        if not plain.seconds or not joined.seconds:
            print(f"| `{name}` | {drop} | {options.batch} | {plain.trouble} | {joined.trouble} | | | |", flush=True)
            continue
        ratios = [one / other for one, other in zip(plain.seconds, joined.seconds, strict=True)]
        cells = [f"{1e3 * cell.median:.2f} ±{cell.spread:.1%}" for cell in (plain, joined)]
        cells += [f"{times_as_fast(joined, plain).median:.3f} ({min(ratios):.3f} to {max(ratios):.3f})"]
        cells += [" / ".join(f"{cell.memory / 1e9:.2f} GB" for cell in (plain, joined) if cell.memory)]
        cells += [" / ".join(f"{cell.compile_seconds:.0f} s" for cell in (plain, joined) if cell.compile_seconds is not None)]
        print(f"| `{name}` | {drop} | {options.batch} | {' | '.join(cells)} |", flush=True)
        kept.append({"drop_path": drop, "one_after_the_other": plain.to_dict(), "as_one": joined.to_dict()})
        if options.out:
            write_json(options.out, {"machine": facts, "rounds": options.rounds, "models": kept})


if __name__ == "__main__":
    main()
