"""What a block costs the host when nobody compiles: ours beside one written as timm writes it, in one process and in turns.

    python benchmarks/overhead.py --device cpu --rounds 21       # the figures in docs/performance.md
    python benchmarks/overhead.py --device cuda --batch 4
    python benchmarks/overhead.py --device cuda --own            # the model's own sizes: the device may be the slower one
    python benchmarks/overhead.py cait_xxs24 --device cpu --precision fp32

The stack of a model's blocks, with a stochastic depth of 0.1 in each, runs forward and backward on tokens so small that all the
time is Python, autograd and launches; one thread. On a GPU the clock stops when the work is handed over, not when it is done.
The plain block is a norm, a qkv product, torch's attention and a product, then a norm and two products around GELU, each half
dropped for each image. Printed are microseconds for each block, forward and backward, median ± half the interquartile range,
the median of the rounds' ratios, and the operators that a block hands to the device, those that compute and views. Triton's
kernels are no operators: they are not counted.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from asking import positive, run_program
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from vitrail.bench.output import headline
from vitrail.bench.timing import machine, summarize, wait
from vitrail.models.config import Architecture
from vitrail.models.registry import build, lookup
from vitrail.training.distributed import begin, choose_device

SMALL = {"width": 32, "heads": 2, "image_size": (32, 32)}
DROP = 0.1
PASSES = ("forward", "backward")


class PlainAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
        self.attn_drop, self.proj_drop = nn.Dropout(0.0), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, self.head_width).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        query, key = self.q_norm(query), self.k_norm(key)
        x = F.scaled_dot_product_attention(query, key, value, dropout_p=self.attn_drop.p if self.training else 0.0)
        return self.proj_drop(self.proj(x.transpose(1, 2).reshape(batch, tokens, width)))


class PlainMlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.act, self.drop1, self.drop2 = nn.GELU(), nn.Dropout(0.0), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop2(self.fc2(self.drop1(self.act(self.fc1(x)))))


class PlainDropPath(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if self.rate == 0.0 or not self.training:
            return x
        keep = 1.0 - self.rate
        coins = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        return x * coins.div_(keep)


class PlainBlock(nn.Module):
    """As timm writes it, without its options."""

    def __init__(self, width: int, heads: int, hidden: int, rate: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn, self.mlp = PlainAttention(width, heads), PlainMlp(width, hidden)
        self.ls1, self.ls2 = nn.Identity(), nn.Identity()
        self.drop_path1, self.drop_path2 = PlainDropPath(rate), PlainDropPath(rate)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class Stack:
    """Blocks one after the other, and what they are called with beside the tokens."""

    def __init__(self, blocks: Sequence[nn.Module], others: tuple[Any, ...], tokens: Tensor, precision: str) -> None:
        self.blocks, self.others, self.precision = [block.to(tokens.device).train() for block in blocks], others, precision
        self.tokens, self.gradient = tokens.requires_grad_(), torch.randn_like(tokens)
        self.parameters = [parameter for block in blocks for parameter in block.parameters()]

    def forward(self) -> Tensor:
        x = self.tokens
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            for block in self.blocks:
                x = block(x, *self.others)
        return x

    def forget(self) -> None:
        for parameter in (self.tokens, *self.parameters):
            parameter.grad = None

    def seconds(self) -> tuple[float, float]:
        """Of the host, for each block: forward and backward, from an idle device until everything is handed over."""
        wait(self.tokens.device)
        start = time.perf_counter()
        out = self.forward()
        between = time.perf_counter()
        wait(self.tokens.device)
        again = time.perf_counter()
        out.backward(self.gradient)
        end = time.perf_counter()
        self.forget()
        return (between - start) / len(self.blocks), (end - again) / len(self.blocks)

    def operators(self) -> list[tuple[float, float]]:
        """Forward and backward: operators for each block that compute something, and views."""
        counts = []
        out = None
        for _ in PASSES:
            with Counted() as counted:
                if out is None:
                    out = self.forward()
                else:
                    out.backward(self.gradient)
            counts.append((counted.working / len(self.blocks), counted.views / len(self.blocks)))
        self.forget()
        return counts


class Counted(TorchDispatchMode):
    """Counts operators on their way to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.working = self.views = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.is_view or func._schema.name in ("aten::_unsafe_view", "aten::detach"):
            self.views += 1
        elif not func._schema.name.startswith(("aten::empty", "aten::new_empty")):
            self.working += 1
        return func(*args, **(kwargs or {}))


def stacks(architecture: Architecture, name: str, batch: int, precision: str, device: torch.device) -> dict[str, Stack]:
    model = build(architecture, name, device)
    tokens, layout = model._start(
        *model.embed(torch.zeros(batch, architecture.channels, *architecture.image_size, device=device))
    )
    ours = [model.block(index) for index in range(len(model.blocks))]
    hidden = round(architecture.width * architecture.mlp_ratio)
    plain = [PlainBlock(architecture.width, architecture.heads, hidden, DROP) for _ in ours]
    return {
        "ours": Stack(ours, (layout, None), torch.randn_like(tokens), precision),
        "plain": Stack(plain, (), torch.randn_like(tokens), precision),
    }


def measure(both: dict[str, Stack], rounds: int, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """For each of the two, medians of each round."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in both}
    for number in range(-1, rounds):  # the first to warm up
        names = list(both) if number % 2 else list(both)[::-1]
        for name in names:
            runs = [both[name].seconds() for _ in range(repeats)]
            if number >= 0:
                forward, backward = (statistics.median(column) for column in zip(*runs, strict=True))
                found[name].append((forward, backward))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="deit_small_patch16")
    parser.add_argument("--batch", type=positive, default=1)
    parser.add_argument("--own", action="store_true", help="the model's own sizes instead of the smallest")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--rounds", type=positive, default=11)
    parser.add_argument("--repeats", type=positive, default=20, help="passes in a round")
    parser.add_argument("--device", default=None)
    options = parser.parse_args()
    device = begin(choose_device(options.device))
    torch.set_num_threads(1)
    name, architecture = lookup(options.name)
    changes: dict[str, Any] = {} if options.own else SMALL
    architecture = architecture.replace(**changes, drop_path=DROP, drop_path_schedule="uniform", drop_path_kind="each")
    both = stacks(architecture, name, options.batch, options.precision, device)
    times = measure(both, options.rounds, options.repeats)
    how = f"n = {options.rounds} rounds of {options.repeats} in turns; median ± half the interquartile range"
    print(f"{headline(machine(device))}; {name}, {options.precision}, batch {options.batch}; {how}\n")
    print("| a block's | ours, µs | plain, µs | ours / plain | operators, ours / plain | views |")
    print("| --- | --- | --- | --- | --- | --- |")
    counts = {name: stack.operators() for name, stack in both.items()}
    for place, which in enumerate(PASSES):
        columns = {name: [each[place] for each in found] for name, found in times.items()}
        cells = [f"{1e6 * found.median:.1f} ±{found.spread:.1%}" for found in map(summarize, columns.values())]
        ratio = summarize([one / other for one, other in zip(columns["ours"], columns["plain"], strict=True)])
        cells += [f"{ratio.median:.2f} ±{ratio.spread:.1%}"]
        cells += [" / ".join(f"{found[place][kind]:.1f}" for found in counts.values()) for kind in (0, 1)]
        print(f"| {which} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    run_program(main)
