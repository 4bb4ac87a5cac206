"""Training with parallel branches one after the other and as one, in one process and in turns; prints a table in Markdown.

    python benchmarks/branches.py                                  # the models below, batch 128, as `vitrail train` runs them
    python benchmarks/branches.py vit_small_patch16_18x2 --drop-path 0.1 --batch 256
    python benchmarks/branches.py vit_tiny_patch16_12x2 --device cpu --batch 2 --size 64 --depth 2 --mode compiled --rounds 3

A step is forward, backward and fused AdamW in bfloat16, with the loss and the stochastic depth of the model's paper (or
`--drop-path`: coins for each picture, the same rate in every block). `own` compiles blocks and, on a GPU, captures the passes of
a step as one CUDA graph. Printed are medians, half the interquartile range, and the median of the rounds' ratios.
"""

import argparse
import dataclasses
from pathlib import Path

import torch
from torch import nn

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
    parser.add_argument("--out", type=Path, help="write every round as JSON")
    options = parser.parse_args()
    device = begin(choose_device(options.device))
    facts = machine(device)
    size = (options.size, options.size) if options.size else None
    setting = Setting("train", options.precision, options.mode, options.batch, size, options.depth)
    print(
        f"{headline(facts)}; {setting.describe()}; n = {options.rounds} rounds in turns; median, ± half the interquartile range"
    )
    print("\n| " + " | ".join(COLUMNS) + " |")
    print("| --- " * len(COLUMNS) + "|", flush=True)
    kept = []
    for name, drop_path in [(name, options.drop_path) for name in options.names] or MODELS:
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
