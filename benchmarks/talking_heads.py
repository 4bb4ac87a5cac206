"""Talking-heads attention with the fused kernels beside the plain path: milliseconds and peak memory of one layer, bfloat16.

    python benchmarks/talking_heads.py                                  # CaiT-S24 at 224 and 384, batch 256 and 64
    python benchmarks/talking_heads.py --shape 128,196,16,48            # batch, tokens, heads, channels of a head
    python benchmarks/talking_heads.py --tiling backward=8,stages=3 --tiling part_bytes=16777216    # other cuts of the kernels

A row is the attention alone, without the projections around it: the plain path eager and compiled, and the kernels, as they are
and once for each `--tiling`, which gives other values to fields of `Tiling` in `vitrail/layers/kernels/talking_heads.py`. `infer`
is a forward without gradients, `train` forward and backward, each as one CUDA graph, as a training's step is. The contenders take
turns in every round; printed are the median of the rounds, half the spread, and the most memory a run held beyond its inputs.
It needs a GPU.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from asking import positive, run_program
from timing import half_spread, in_turns, machine
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.layers import attention, kernels
from vitrail.layers.kernels import talking_heads_for
from vitrail.layers.layout import Layout

if TYPE_CHECKING:
    from vitrail.layers.kernels.talking_heads import Tiling

SHAPES = ("256,196,8,48", "64,576,8,48")


class Contender:
    """One layer of the given shape; it uses the kernels if it has a tiling for them."""

    def __init__(self, shape: list[int], train: bool, tiling: "Tiling | None" = None, compiled: bool = False):
        batch, tokens, heads, width = shape
        torch.manual_seed(0)
        layer = attention.TalkingHeads(heads * width, heads)
        layer.qkv, layer.proj = nn.Identity(), nn.Identity()  # type: ignore[assignment]
        self.layer, self.tiling, self.train, self.layout = layer.cuda(), tiling, train, Layout(1, tokens)
        self.body = torch.compile(self.layer, fullgraph=True) if compiled else self.layer
        self.x = torch.randn(batch, tokens, 3 * heads * width, device="cuda").bfloat16().requires_grad_(train)
        self.gradient = torch.randn(batch, tokens, heads * width, device="cuda").bfloat16()

    def __call__(self) -> None:
        attention.talking_heads_for = no_kernel if self.tiling is None else talking_heads_for
        if self.tiling is not None:
            from vitrail.layers.kernels import talking_heads

            talking_heads.TILING = self.tiling
        with torch.autocast("cuda", torch.bfloat16), torch.set_grad_enabled(self.train):
            out = self.body(self.x, self.layout)
        if self.train:
            out.backward(self.gradient.to(out.dtype))
            self.x.grad = None
            self.layer.zero_grad()

    def memory(self) -> float:
        """Megabytes at the peak of a run, less those before it."""
        self()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        self()
        return (torch.cuda.max_memory_allocated() - start) / 1e6

    def captured(self) -> Callable[[], None]:
        """A run as a graph, whose kernels do not wait for the host."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self()
        return graph.replay


def no_kernel(qkv: Tensor) -> None:
    return None


def tilings(texts: list[str]) -> "dict[str, Tiling]":
    """The kernels' own tiling, and others that are given as `name=value,name=value`."""
    from vitrail.layers.kernels.talking_heads import Tiling

    found = {"fused": Tiling()}
    for text in texts:
        try:
            fields = dict(part.split("=") for part in text.split(","))
            found[f"fused, {text}"] = Tiling()._replace(**{name: int(value) for name, value in fields.items()})
        except ValueError as problem:
            raise UserError(f"--tiling {text}: {problem}; the fields are {Tiling()}.") from None
    return found


def shape_of(text: str) -> list[int]:
    shape = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if len(shape) != 4 or min(shape) < 1:
        raise UserError(f"--shape {text} is not batch, tokens, heads and channels of a head: write {SHAPES[0]}.")
    return shape


def measure(shape: list[int], train: bool, options: argparse.Namespace) -> dict:
    if talking_heads_for(torch.empty(1, *shape[1:2], 3, *shape[2:], device="cuda", dtype=torch.bfloat16)) is None:
        raise UserError(f"There is no kernel for {shape[1]} tokens and {shape[2]} heads of {shape[3]} channels on this device.")
    contenders = {"plain": Contender(shape, train)}
    contenders |= {name: Contender(shape, train, tiling) for name, tiling in tilings(options.tiling).items()}
    if options.compile:
        contenders["plain, compiled"] = Contender(shape, train, compiled=True)
    sizes = {name: round(contender.memory(), 1) for name, contender in contenders.items()}
    runs = {name: contender.captured() for name, contender in contenders.items()}
    times = in_turns(runs, "cuda", options.rounds, options.repeats)
    return {
        "shape": shape,
        "step": "train" if train else "infer",
        "milliseconds": {name: round(1e3 * statistics.median(each), 3) for name, each in times.items()},
        "half_spread": {name: round(half_spread(each), 3) for name, each in times.items()},
        "megabytes": sizes,
    }


def main() -> None:
    kernels.ENABLED = frozenset(("talking_heads",))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", help="batch,tokens,heads,channels; may be given several times")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--repeats", type=positive, default=20)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="the compiled plain path too")
    parser.add_argument("--tiling", action="append", default=[], help="name=value,…: see `Tiling`; may be given several times")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    shapes = [shape_of(text) for text in options.shape or SHAPES]
    if not torch.cuda.is_available():
        raise UserError("There is no GPU that torch can use here, and the kernels need one.")
    if not options.json:
        print(f"{machine('cuda')}; n = {options.rounds} rounds of {options.repeats} runs")
        print("| batch, tokens, heads, channels | step | path | ms | MB |\n| --- | --- | --- | --- | --- |")
    for shape in shapes:
        for train in (False, True):
            row = measure(shape, train, options)
            if options.json:
                print(json.dumps(row | {"machine": machine("cuda"), "rounds": options.rounds}), flush=True)
                continue
            for name, time in row["milliseconds"].items():
                spread, size = row["half_spread"][name], row["megabytes"][name]
                where = ", ".join(map(str, shape))
                print(f"| {where} | {row['step']} | {name} | {time:.3f} ±{100 * spread:.1f}% | {size:,.0f} |", flush=True)


if __name__ == "__main__":
    run_program(main)
