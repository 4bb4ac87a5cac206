"""Residual branches: x + drop(scale(body(norm(x)))), one or several side by side."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vitrail.layers.layout import Layout
from vitrail.layers.norm import Affine
from vitrail.layers.passing import through
from vitrail.layers.subset import Subset, draw_subset, put, take

SCALES = ("plain", "layerscale", "affine", "constant", "scalar", "rezero", "skipinit", "fixup", "tfixup")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class LayerScale(nn.Module):
    """A learned factor per channel, started small so that a deep stack begins near the identity."""

    def __init__(self, width: int, start: float, mode: str = "constant", frozen: bool = False):
        super().__init__()
        values = {
            "constant": lambda: torch.full((width,), start),
            "zero": lambda: torch.zeros(width),
            "uniform": lambda: torch.rand(width) * 2 * start,
        }[mode]()
        self.weight = nn.Parameter(values, requires_grad=not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class ScalarScale(nn.Module):
    """One learned factor for the whole branch (ReZero, SkipInit, Fixup, T-Fixup)."""

    def __init__(self, start: float, frozen: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(float(start)), requires_grad=not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class ConstantScale(nn.Module):
    """A fixed factor (LV-ViT's residual scale), no parameter."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor

    def extra_repr(self) -> str:
        return f"{self.factor:g}"


def residual_scale(kind: str, width: int, start: float, mode: str = "constant", frozen: bool = False) -> nn.Module:
    match kind:
        case "plain":
            return nn.Identity()
        case "layerscale":
            return LayerScale(width, start, mode, frozen)
        case "affine":
            return Affine(width, start).requires_grad_(not frozen)
        case "constant":
            return ConstantScale(start)
        case "scalar":
            return ScalarScale(start, frozen)
        case "rezero" | "skipinit":
            return ScalarScale(0.0, frozen)
        case "fixup" | "tfixup":
            return ScalarScale(1.0, frozen)
    raise ValueError(f"residual {kind!r} is not one of {', '.join(SCALES)}")


class DropPath(nn.Module):
    """Stochastic depth: a branch is dropped per image, survivors divided by the keep probability.

    `skip`: instead of a coin per image, a random part of the batch of that share is kept, and the branch is computed for it alone
    (`kept`). The probability is a tensor, because the compiler makes one graph for all values of a tensor and one per value of a
    number. `gains` are what survivors are multiplied by, in every precision: nothing has to be divided or rounded in a pass.
    """

    def __init__(self, rate: float, skip: bool = False):
        super().__init__()
        self.rate, self.active, self.skip = rate, rate > 0.0, skip and rate > 0.0
        self._place(torch.device("cpu"))  # no buffers: networks are also built on the meta device

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "DropPath":
        super()._apply(fn, recurse)
        self._place(fn(self.keep).device)  # goes where the weights go, and is never cast
        return self

    def _place(self, device: torch.device) -> None:
        self.keep = torch.tensor(1.0 - self.rate, device=device)
        self.gains = {dtype: (1.0 / self.keep).to(dtype) for dtype in FLOATS}

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.active:
            return x
        if torch.compiler.is_compiling():  # what it makes one kernel of may stay unrounded
            return x * (self.chosen(x) / self.keep).to(x.dtype)
        return x * (self.chosen(x) * self.gains[x.dtype])

    def chosen(self, x: Tensor) -> Tensor:
        """A coin for each image of a batch [B, ...], as [B, 1, ...]: whether it has the branch."""
        return torch.rand(x.shape[0], *(1,) * (x.ndim - 1), device=x.device) < self.keep

    @property
    def gain(self) -> Tensor:
        """What survivors are multiplied by."""
        return self.gains[self.keep.dtype]

    def kept(self, x: Tensor) -> Subset:
        """The images of a batch [B, ...] that keep the branch."""
        return draw_subset(x.shape[0], max(round(x.shape[0] * (1.0 - self.rate)), 1), x.device)

    def extra_repr(self) -> str:
        return f"{self.rate:g}"


def drop_path_rates(rate: float, depth: int, schedule: str) -> list[float]:
    """One rate per block: `uniform`, or `linear` from 0 at the first block to `rate` at the last."""
    if schedule == "uniform":
        return [rate] * depth
    return [rate * index / max(depth - 1, 1) for index in range(depth)]


class ShiftedLinear(nn.Linear):
    """Fixup's linear layer: a learned scalar is added to the input."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True):
        super().__init__(inputs, outputs, bias)
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.shift)


class Branch(nn.Module):
    """What is added to the stream: scale(body(norm(x))), dropped per image while training."""

    def __init__(self, norm: nn.Module, body: nn.Module, scale: nn.Module, drop: float, skip: bool = False):
        super().__init__()
        self.norm, self.body, self.scale = norm, body, scale
        self.drop = DropPath(drop, skip)
        self.folded: Callable[[Branch, Tensor, Layout, nn.Module | None], Tensor | None] | None = None  # see `scaling`

    def forward(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        return self.drop(self.update(x, layout, relative))

    def update(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        if self.folded is not None and self.training:
            folded = self.folded(self, x, layout, relative)
            if folded is not None:
                return folded
        return through(self.scale, self.body(self.norm(x), layout, relative))

    def add(self, total: Tensor, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        """total plus the branch, which is not computed for images that drop it."""
        kept = self.drop.kept(x)
        update = self.update(take(x, kept), layout, relative)
        return total + put(update * (x.shape[0] / kept.rows.shape[0]), kept).to(total.dtype)


class Residual(nn.Module):
    """x plus the sum of its branches, which all read the same x; `post` is the norm of the post-norm control."""

    def __init__(self, branches: int, make_branch: Callable[[], Branch], post: nn.Module | None = None):
        super().__init__()
        self.branches = nn.ModuleList(make_branch() for _ in range(branches))
        self.skips = any(branch.drop.skip for branch in self.branches if isinstance(branch, Branch))
        self.post = post if post is not None else nn.Identity()
        self.together: Callable[[list[Branch], Tensor], Tensor | None] | None = None  # while training; see `joining`

    def forward(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        if not (self.training and self.skips):
            return through(self.post, x + self.update(x, layout, relative))
        total = x
        for branch in self.branches:
            assert isinstance(branch, Branch)
            total = branch.add(total, x, layout, relative)
        return through(self.post, total)

    def update(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        if self.together is not None and self.training and relative is None:
            joined = self.together([branch for branch in self.branches if isinstance(branch, Branch)], x)
            if joined is not None:
                return joined
        first, *others = self.branches
        total = first(x, layout, relative)
        for branch in others:
            total = total + branch(x, layout, relative)
        return total


class Block(nn.Module):
    """A token-mixing residual, then a per-token one; either may be absent."""

    def __init__(self, mix: Residual | None, ffn: Residual | None):
        super().__init__()
        self.mix, self.ffn = mix, ffn

    def residuals(self) -> dict[str, Residual]:
        return {name: part for name, part in (("mix", self.mix), ("ffn", self.ffn)) if part is not None}

    def forward(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        mix, ffn = self.mix, self.ffn
        if mix is not None:
            x = mix(x, layout, relative)
        return ffn(x, layout, relative) if ffn is not None else x
