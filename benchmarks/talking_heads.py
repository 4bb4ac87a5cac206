"""Talking-heads attention, fused kernels and plain path: milliseconds and peak memory of one layer, bfloat16.

    python benchmarks/talking_heads.py                                  # CaiT-S24 at 224 and 384 pixels, batch sizes 256 and 64
    python benchmarks/talking_heads.py --shape 128,196,16,48            # batch size, tokens, heads, channels per head
    python benchmarks/talking_heads.py --tiling backward=8,stages=3 --tiling part_bytes=16777216    # other tilings of the kernels

A row is the attention alone, without its projections: the plain path, eager and compiled, and the kernels with their default
tiling and with each `--tiling`, which changes fields of `Tiling` in `vitrail/layers/kernels/talking_heads.py`. `infer` is a
forward pass without gradients, `train` forward and backward, each as one CUDA graph, as in a training step. The candidates
are timed in turns in every round; the table has the median of the rounds, half the range, and the peak memory beyond the
inputs. Needs a GPU.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from arguments import positive, run_program
from timing import half_range, machine, time_rounds
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.layers import attention, kernels
from vitrail.layers.kernels import select_talking_heads
from vitrail.layers.layout import Layout

if TYPE_CHECKING:
    from vitrail.layers.kernels.talking_heads import Tiling

SHAPES = ("256,196,8,48", "64,576,8,48")


class Candidate:
    """One layer of the given shape; it uses the kernels if it has a tiling."""

    def __init__(self, shape: list[int], train: bool, tiling: "Tiling | None" = None, compiled: bool = False):
        batch_size, tokens, heads, width = shape
        torch.manual_seed(0)
        layer = attention.TalkingHeads(heads * width, heads)
        layer.qkv, layer.proj = nn.Identity(), nn.Identity()  # type: ignore[assignment]
        self.layer, self.tiling, self.train, self.layout = layer.cuda(), tiling, train, Layout(1, tokens)
        self.body = torch.compile(self.layer, fullgraph=True) if compiled else self.layer
        self.x = torch.randn(batch_size, tokens, 3 * heads * width, device="cuda").bfloat16().requires_grad_(train)
        self.gradient = torch.randn(batch_size, tokens, heads * width, device="cuda").bfloat16()

    def __call__(self) -> None:
        attention.select_talking_heads = no_kernel if self.tiling is None else select_talking_heads
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
        """Peak memory of a run in megabytes, minus the memory before it."""
        self()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        self()
        return (torch.cuda.max_memory_allocated() - start) / 1e6

    def capture(self) -> Callable[[], None]:
        """A run as a CUDA graph, so that host time is not measured."""
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


def parse_tilings(texts: list[str]) -> "dict[str, Tiling]":
    """The default tiling, and those given as `name=value,name=value`."""
    from vitrail.layers.kernels.talking_heads import Tiling

    tilings = {"fused": Tiling()}
    for text in texts:
        try:
            fields = dict(part.split("=") for part in text.split(","))
            tilings[f"fused, {text}"] = Tiling()._replace(**{name: int(value) for name, value in fields.items()})
        except ValueError as error:
            raise UserError(f"--tiling {text}: {error}; the fields are {Tiling()}.") from None
    return tilings


def parse_shape(text: str) -> list[int]:
    shape = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if len(shape) != 4 or min(shape) < 1:
        raise UserError(f"--shape {text} is not batch size, tokens, heads and channels per head, such as {SHAPES[0]}.")
    return shape


def measure(shape: list[int], train: bool, options: argparse.Namespace) -> dict:
    if select_talking_heads(torch.empty(1, *shape[1:2], 3, *shape[2:], device="cuda", dtype=torch.bfloat16)) is None:
        raise UserError(f"There is no kernel for {shape[1]} tokens and {shape[2]} heads of {shape[3]} channels on this device.")
    candidates = {"plain": Candidate(shape, train)}
    candidates |= {name: Candidate(shape, train, tiling) for name, tiling in parse_tilings(options.tiling).items()}
    if options.compile:
        candidates["plain, compiled"] = Candidate(shape, train, compiled=True)
    sizes = {name: round(candidate.memory(), 1) for name, candidate in candidates.items()}
    runs = {name: candidate.capture() for name, candidate in candidates.items()}
    times = time_rounds(runs, "cuda", options.rounds, options.repeats)
    return {
        "shape": shape,
        "step": "train" if train else "infer",
        "milliseconds": {name: round(1e3 * statistics.median(each), 3) for name, each in times.items()},
        "half_range": {name: round(half_range(each), 3) for name, each in times.items()},
        "megabytes": sizes,
    }


def main() -> None:
    kernels.ENABLED = frozenset(("talking_heads",))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", help="batch size,tokens,heads,channels; repeatable")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--repeats", type=positive, default=20)
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="also time the compiled plain path"
    )
    parser.add_argument("--tiling", action="append", default=[], help="name=value,…: see `Tiling`; repeatable")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    shapes = [parse_shape(text) for text in options.shape or SHAPES]
    if not torch.cuda.is_available():
        raise UserError("This benchmark needs a GPU, and torch finds none.")
    if not options.json:
        print(f"{machine('cuda')}; n = {options.rounds} rounds of {options.repeats} runs")
        print("| batch size, tokens, heads, channels | step | path | ms | MB |\n| --- | --- | --- | --- | --- |")
    for shape in shapes:
        for train in (False, True):
            row = measure(shape, train, options)
            if options.json:
                print(json.dumps(row | {"machine": machine("cuda"), "rounds": options.rounds}), flush=True)
                continue
            for name, time in row["milliseconds"].items():
                spread, size = row["half_range"][name], row["megabytes"][name]
                label = ", ".join(map(str, shape))
                print(f"| {label} | {row['step']} | {name} | {time:.3f} ±{100 * spread:.1f}% | {size:,.0f} |", flush=True)


if __name__ == "__main__":
    run_program(main)
