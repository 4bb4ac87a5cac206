"""Host time of a block without compilation: ours and one written like timm's, timed in turns in one process.

    python benchmarks/overhead.py --device cpu --rounds 21       # the figures in docs/performance.md
    python benchmarks/overhead.py --device cuda --batch-size 4
    python benchmarks/overhead.py --device cuda --full-size      # the model's sizes: the device may be the bottleneck
    python benchmarks/overhead.py cait_xxs24 --device cpu --precision fp32

The stack of a model's blocks, with drop-path 0.1 in each, runs forward and backward on tokens so small that all the time is
Python, autograd and kernel launches; one thread. On a GPU the clock stops when the work is queued, not when it is done. The
plain block is norm, qkv, torch's attention and projection, then norm and an MLP with GELU, with drop-path per image. The
table has microseconds per block, forward and backward, median ± half the interquartile range, the median of the rounds'
ratios, and the number of operators per block: those that compute, and views. Triton kernels are not counted.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from arguments import positive, run_program
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from vitrail.bench.output import describe_machine
from vitrail.bench.timing import machine, summarize, synchronize
from vitrail.devices import choose_device, use_device
from vitrail.models.config import Architecture
from vitrail.models.registry import build, lookup

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
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        return x * mask.div_(keep)


class PlainBlock(nn.Module):
    """A pre-norm block as in timm, without its options."""

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
    """A sequence of blocks and the arguments that they take after the tokens."""

    def __init__(self, blocks: Sequence[nn.Module], extra_args: tuple[Any, ...], tokens: Tensor, precision: str) -> None:
        self.blocks, self.extra_args, self.precision = (
            [block.to(tokens.device).train() for block in blocks],
            extra_args,
            precision,
        )
        self.tokens, self.gradient = tokens.requires_grad_(), torch.randn_like(tokens)
        self.parameters = [parameter for block in blocks for parameter in block.parameters()]

    def forward(self) -> Tensor:
        x = self.tokens
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            for block in self.blocks:
                x = block(x, *self.extra_args)
        return x

    def clear_gradients(self) -> None:
        for parameter in (self.tokens, *self.parameters):
            parameter.grad = None

    def seconds(self) -> tuple[float, float]:
        """Host seconds per block, forward and backward, from an idle device until all work is queued."""
        synchronize(self.tokens.device)
        start = time.perf_counter()
        out = self.forward()
        forward_end = time.perf_counter()
        synchronize(self.tokens.device)
        backward_start = time.perf_counter()
        out.backward(self.gradient)
        backward_end = time.perf_counter()
        self.clear_gradients()
        return (forward_end - start) / len(self.blocks), (backward_end - backward_start) / len(self.blocks)

    def operators(self) -> list[tuple[float, float]]:
        """Operators per block that compute something, and views: forward and backward."""
        counts = []
        out = None
        for _ in PASSES:
            with OperatorCounter() as counter:
                if out is None:
                    out = self.forward()
                else:
                    out.backward(self.gradient)
            counts.append((counter.compute / len(self.blocks), counter.views / len(self.blocks)))
        self.clear_gradients()
        return counts


class OperatorCounter(TorchDispatchMode):
    """Counts dispatched operators."""

    def __init__(self) -> None:
        super().__init__()
        self.compute = self.views = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.is_view or func._schema.name in ("aten::_unsafe_view", "aten::detach"):
            self.views += 1
        elif not func._schema.name.startswith(("aten::empty", "aten::new_empty")):
            self.compute += 1
        return func(*args, **(kwargs or {}))


def make_stacks(architecture: Architecture, name: str, batch_size: int, precision: str, device: torch.device) -> dict[str, Stack]:
    model = build(architecture, name, device)
    tokens, layout = model._add_pos_embed(
        *model.embed(torch.zeros(batch_size, architecture.channels, *architecture.image_size, device=device))
    )
    ours = [model.block(index) for index in range(len(model.blocks))]
    hidden = round(architecture.width * architecture.mlp_ratio)
    plain = [PlainBlock(architecture.width, architecture.heads, hidden, DROP) for _ in ours]
    return {
        "ours": Stack(ours, (layout, None), torch.randn_like(tokens), precision),
        "plain": Stack(plain, (), torch.randn_like(tokens), precision),
    }


def measure(both: dict[str, Stack], rounds: int, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Medians of each round for both stacks."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in both}
    for number in range(-1, rounds):  # the first is the warmup
        names = list(both) if number % 2 else list(both)[::-1]
        for name in names:
            runs = [both[name].seconds() for _ in range(repeats)]
            if number >= 0:
                forward, backward = (statistics.median(column) for column in zip(*runs, strict=True))
                times[name].append((forward, backward))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="deit_small_patch16")
    parser.add_argument("--batch-size", type=positive, default=1)
    parser.add_argument("--full-size", action="store_true", help="use the model's width and image size instead of tiny ones")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--rounds", type=positive, default=11)
    parser.add_argument("--repeats", type=positive, default=20, help="passes per round")
    parser.add_argument("--device", default=None)
    options = parser.parse_args()
    device = use_device(choose_device(options.device))
    torch.set_num_threads(1)
    name, architecture = lookup(options.name)
    changes: dict[str, Any] = {} if options.full_size else SMALL
    architecture = architecture.replace(**changes, drop_path=DROP, drop_path_schedule="uniform", drop_path_kind="each")
    both = make_stacks(architecture, name, options.batch_size, options.precision, device)
    times = measure(both, options.rounds, options.repeats)
    method = f"n = {options.rounds} interleaved rounds of {options.repeats}; median ± half the interquartile range"
    print(f"{describe_machine(machine(device))}; {name}, {options.precision}, batch size {options.batch_size}; {method}\n")
    print("| per block | ours, µs | plain, µs | ours / plain | operators, ours / plain | views |")
    print("| --- | --- | --- | --- | --- | --- |")
    counts = {name: stack.operators() for name, stack in both.items()}
    for index, direction in enumerate(PASSES):
        columns = {name: [each[index] for each in values] for name, values in times.items()}
        texts = [f"{1e6 * each.median:.1f} ±{each.spread:.1%}" for each in map(summarize, columns.values())]
        ratio = summarize([one / other for one, other in zip(columns["ours"], columns["plain"], strict=True)])
        texts += [f"{ratio.median:.2f} ±{ratio.spread:.1%}"]
        texts += [" / ".join(f"{each[index][kind]:.1f}" for each in counts.values()) for kind in (0, 1)]
        print(f"| {direction} | {' | '.join(texts)} |", flush=True)


if __name__ == "__main__":
    run_program(main)
