"""Two ways to train the same network, in one process and in turns; prints a table in Markdown.

    python benchmarks/ways.py branches                             # parallel branches one after the other, and as one
    python benchmarks/ways.py branches vit_small_patch16_18x2 --drop-path 0.1 --batch 256
    python benchmarks/ways.py skip cait_s24 --drop-path 0.2        # dropped images times zero, and left out
    python benchmarks/ways.py scales                               # scales of channels by themselves, and inside products
    python benchmarks/ways.py branches vit_tiny_patch16_12x2 --device cpu --batch 2 --size 64 --depth 2 --mode eager --rounds 3
    python benchmarks/ways.py branches vit_tiny_patch16_12x2_ls --errors --device cpu --size 64 --depth 6 --drop-path 0.1

A step is forward, backward and fused AdamW in bfloat16, with the loss and the stochastic depth of the model's paper (or
`--drop-path`: the same rate in every block). `own` compiles blocks and, on a GPU, captures the passes of a step as one CUDA
graph. Printed are medians, half the interquartile range, and the median of the rounds' ratios.

With `--errors` nothing is timed: logits and all gradients of a step in bfloat16, either way, are compared with the same step in
float64, with the same coins. Each round has other weights.
"""

import argparse
import copy
import dataclasses
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from asking import check_file, positive, run_program
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.bench.candidates import Contender, open_contender
from vitrail.bench.measurement import make_heats, run_heats, times_as_fast
from vitrail.bench.output import headline, write_json
from vitrail.bench.settings import MODES, PRECISIONS, Setting
from vitrail.bench.timing import machine
from vitrail.errors import UserError
from vitrail.layers.fused_branches import join_branches
from vitrail.layers.fused_scales import fold_scales
from vitrail.training.distributed import begin, choose_device


class Way(NamedTuple):
    """What is compared: words for the first and the second way, what makes a network or an architecture the one or the other."""

    first: str
    second: str
    models: tuple[tuple[str, float | None], ...]  # and their drop-path rates; None: the paper's
    change: Callable[[nn.Module, bool], nn.Module] | None = None  # of a network, whose answers stay the same
    architecture: tuple[dict[str, Any], dict[str, Any]] = ({"drop_path_kind": "each"}, {"drop_path_kind": "each"})
    lacks: Callable[[Any], str] = lambda architecture: ""  # what there would have to be for the two to differ


WAYS = {
    "branches": Way(
        "one after the other",
        "as one",
        (("vit_small_patch16_18x2", None), ("vit_base_patch16_18x2", None), ("vit_small_patch16_18x2_ls", 0.1)),
        join_branches,
        lacks=lambda found: "" if found.branches > 1 else "has no parallel branches: vit_small_patch16_18x2 has",
    ),
    "skip": Way(
        "each image's coin",
        "left out",
        (("cait_s24", 0.2), ("patchconvnet_s60", 0.3), ("deit3_base_patch16", 0.2)),
        lacks=lambda found: "" if found.drop_path else "drops no images: give --drop-path 0.2",
        architecture=({"drop_path_kind": "each"}, {"drop_path_kind": "skip"}),
    ),
    "scales": Way(
        "by themselves",
        "inside products",
        (("cait_s24", None), ("deit3_base_patch16", None), ("resmlp_s24", None), ("patchconvnet_s60", None)),
        fold_scales,
        architecture=({}, {}),  # as their recipes train them
    ),
}


@dataclasses.dataclass(frozen=True)
class Changed(Contender):
    """A network the first way or the second."""

    change: Callable[[nn.Module, bool], nn.Module] | None = None
    second: bool = False

    def network(self, setting: Setting, device: torch.device) -> nn.Module:
        made = super().network(setting, device)
        return self.change(made, self.second) if self.change is not None else made


def both(way: Way, name: str, drop_path: float | None) -> list[Contender]:
    known = open_contender(name)
    depths = {} if drop_path is None else {"drop_path": drop_path, "drop_path_schedule": "uniform"}
    first, second = (dataclasses.replace(known, architecture=known.architecture.replace(**depths, **a)) for a in way.architecture)
    if way.lacks(first.architecture):
        raise UserError(f"{name} {way.lacks(first.architecture)}.")
    return [Changed(**vars(each), change=way.change, second=each is second) for each in (first, second)]


def passes(model: nn.Module, images: Tensor, wanted: Tensor, rounding: bool) -> list[Tensor]:
    """Logits and gradients of a step; the coins are the same every time."""
    torch.manual_seed(0)
    with torch.autocast(images.device.type, torch.bfloat16, enabled=rounding):
        logits = model(images)
    loss = F.mse_loss(logits.double(), wanted.double())
    return [logits.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def errors(contender: Contender, change: Callable, setting: Setting, seed: int, device: torch.device) -> list[float]:
    """How far from float64, either way: the mean over tensors of the difference's norm by the tensor's.

    Left out are gradients that are zero but for rounding, as those of biases before a softmax or a batch norm.
    """
    torch.manual_seed(seed)
    model = contender.network(setting, device).train()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # started as ones and zeros, which would hide what folding does
            nn.init.normal_(parameter, 1.0 if "norm.weight" in name else 0.1 if "scale" in name else 0.0, 0.1)
    images = torch.randn(setting.batch, 3, *contender.at(setting).image_size, device=device)
    wanted = torch.randn(setting.batch, contender.architecture.classes, device=device)
    right = passes(copy.deepcopy(model).double(), images.double(), wanted, False)
    found, least = [], 1e-9 * max(exact.norm() for exact in right)
    for second in (False, True):
        network = change(copy.deepcopy(model), second)
        values = passes(network, images, wanted, True)
        pairs = [(ours, exact) for ours, exact in zip(values, right, strict=True) if exact.norm() > least]
        found.append(statistics.mean(((ours - exact).norm() / exact.norm()).item() for ours, exact in pairs))
    return found


def print_errors(way: Way, name: str, drop_path: float | None, setting: Setting, rounds: int, device: torch.device) -> None:
    assert way.change is not None
    rows = [errors(both(way, name, drop_path)[0], way.change, setting, seed, device) for seed in range(rounds)]
    ratios = [second / first for first, second in rows]
    first, second = (statistics.median(column) for column in zip(*rows, strict=True))
    text = f"{way.first} {first:.2e}, {way.second} {second:.2e}; ratio {statistics.median(ratios):.2f}"
    print(f"{name}: {text} ({min(ratios):.2f} to {max(ratios):.2f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--drop-path", type=float, default=None, help="the paper's by default")
    parser.add_argument("--batch", type=positive, default=128)
    parser.add_argument("--size", type=positive, default=None, help="of images, the model's own by default")
    parser.add_argument("--depth", type=positive, default=0, help="in blocks, the model's own by default")
    parser.add_argument("--mode", choices=MODES, help="of a step, own by default")
    parser.add_argument("--precision", choices=PRECISIONS, help="of a step, bf16 by default")
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--device", default=None)
    parser.add_argument("--errors", action="store_true", help="compare both ways with float64 instead of timing them")
    parser.add_argument("--out", type=Path, help="write every round as JSON")
    options = parser.parse_args()
    way = WAYS[options.way]
    if options.errors and way.change is None:
        parser.error(f"{options.way}: the two ways draw other coins, so that there is nothing to compare.")
    if options.errors and (options.mode or options.precision or options.out):
        parser.error("--errors compares one eager step in bfloat16 and prints: leave --mode, --precision and --out out.")
    check_file(options.out)
    device = begin(choose_device(options.device))
    facts = machine(device)
    size = (options.size, options.size) if options.size else None
    setting = Setting("train", options.precision or "bf16", options.mode or "own", options.batch, size, options.depth)
    known = [(name, None) for name in options.names] or way.models
    models = [(name, rate if options.drop_path is None else options.drop_path) for name, rate in known]
    heats = [make_heats(both(way, name, drop_path), [], [setting]) for name, drop_path in models]
    if options.errors:
        print(f"{headline(facts)}; batch {options.batch}; n = {options.rounds}; median (least to most)")
        for name, drop_path in models:
            print_errors(way, name, drop_path, setting, options.rounds, device)
        return
    how = f"n = {options.rounds} rounds in turns; median, ± half the interquartile range"
    print(f"{headline(facts)}; {setting.describe()}; {how}")
    columns = ["model", "drop-path", "batch", f"{way.first}, ms", f"{way.second}, ms", "times as fast (least to most)"]
    columns += ["memory", "compiling"]
    print("\n| " + " | ".join(columns) + " |")
    print("| --- " * len(columns) + "|", flush=True)
    kept = []
    for (name, _), heat in zip(models, heats, strict=True):
        (first, second), *_ = run_heats(heat, options.rounds, device, None)
        rate = f"{heat[0][0].contender.architecture.drop_path:g}"
        if not first.seconds or not second.seconds:
            print(f"| `{name}` | {rate} | {options.batch} | {first.trouble} | {second.trouble} | | | |", flush=True)
            continue
        ratios = [one / other for one, other in zip(first.seconds, second.seconds, strict=True)]
        cells = [f"{1e3 * cell.median:.2f} ±{cell.spread:.1%}" for cell in (first, second)]
        cells += [f"{times_as_fast(second, first).median:.3f} ({min(ratios):.3f} to {max(ratios):.3f})"]
        cells += [" / ".join(f"{cell.memory / 1e9:.2f} GB" for cell in (first, second) if cell.memory)]
        cells += [" / ".join(f"{cell.compile_seconds:.0f} s" for cell in (first, second) if cell.compile_seconds is not None)]
        print(f"| `{name}` | {rate} | {options.batch} | {' | '.join(cells)} |", flush=True)
        kept.append({"way": options.way, "drop_path": rate, "first": first.to_dict(), "second": second.to_dict()})
        if options.out:
            write_json(options.out, {"machine": facts, "rounds": options.rounds, "models": kept})


if __name__ == "__main__":
    run_program(main)
