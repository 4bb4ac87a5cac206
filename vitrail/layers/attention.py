"""Token mixers and the per-token MLP: bodies of residual branches, all called as body(x, layout, relative).

Those that begin and end with a product over channels are outer(inner(x)): the last product, and all before it, whose first
product may be given other weights (`Product`).
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.layers.kernels import bias_gelu_for, talking_heads_for
from vitrail.layers.layout import Layout
from vitrail.layers.norm import activation
from vitrail.layers.passing import through, watched
from vitrail.layers.pos_embed import Grid, resample
from vitrail.layers.sdpa import attend

ATTENTION = ("attention", "talking_heads")
SPATIAL = ("axial", "linear", "mlp", "conv", "depthwise", "separable", "patchconv")  # these need a bare grid of patches
MIXERS = (*ATTENTION, *SPATIAL, "none")
Product = tuple[Tensor, Tensor]  # weight and bias


def multiply(layer: nn.Module, x: Tensor, product: Product | None) -> Tensor:
    """layer(x), or another product in its place."""
    return layer(x) if product is None else F.linear(x, *product)


class FeedForward(nn.Module):
    """Two linear layers per token with an activation between."""

    def __init__(self, width: int, hidden: int, act: str = "gelu", dropout: float = 0.0, linear: type[nn.Linear] = nn.Linear):
        super().__init__()
        self.fc1 = linear(width, hidden)
        self.activation = activation(act)
        self.fc2 = linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, layout: Layout | None = None, relative: nn.Module | None = None) -> Tensor:
        return self.outer(self.inner(x))

    def inner(
        self, x: Tensor, layout: Layout | None = None, relative: nn.Module | None = None, product: Product | None = None
    ) -> Tensor:
        fc1, act = self.fc1, self.activation
        exact = type(act) is nn.GELU and act.approximate == "none"
        alone = type(fc1) is nn.Linear and not watched(fc1) and not watched(act)
        fused = bias_gelu_for(x) if exact and alone else None
        if fused is None:
            return act(multiply(fc1, x, product))
        weight, bias = product or (fc1.weight, fc1.bias)
        return fused(F.linear(x, weight), bias)

    def outer(self, x: Tensor) -> Tensor:
        dropout = self.dropout
        return through(dropout, self.fc2(through(dropout, x)))


class Attention(nn.Module):
    """Multi-head self-attention; the kernel is torch's fused one, maps are recomputed on request."""

    def __init__(
        self,
        width: int,
        heads: int,
        qkv_bias: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        linear: type[nn.Linear] = nn.Linear,
    ):
        super().__init__()
        self.heads, self.attention_dropout = heads, attention_dropout
        self.qkv = linear(width, 3 * width, bias=qkv_bias)
        self.proj = linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def _heads(self, x: Tensor, product: Product | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, D] to query, key, value [B, H, T, D/H]."""
        query, key, value = multiply(self.qkv, x, product).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return query, key, value

    def forward(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        return self.outer(self.inner(x, layout, relative))

    def inner(self, x: Tensor, layout: Layout, relative: nn.Module | None = None, product: Product | None = None) -> Tensor:
        """All heads side by side, [B, T, D]."""
        query, key, value = self._heads(x, product)
        bias = relative(query, layout) if relative is not None else None
        rate = self.attention_dropout if self.training else 0.0
        return attend(query, key, value, bias, rate).transpose(1, 2).flatten(2)

    def outer(self, x: Tensor) -> Tensor:
        return through(self.dropout, self.proj(x))

    def _scores(self, query: Tensor, key: Tensor, layout: Layout, relative: nn.Module | None) -> Tensor:
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        return scores if relative is None else scores + relative(query, layout)

    def maps(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        """The attention weights [B, H, T, T] that `forward` uses; rows sum to one."""
        query, key, _ = self._heads(x)
        return self._scores(query, key, layout, relative).softmax(-1)


class TalkingHeads(Attention):
    """Attention whose heads are mixed linearly before and after the softmax."""

    def __init__(self, width: int, heads: int, **options):
        super().__init__(width, heads, **options)
        self.before = nn.Linear(heads, heads)
        self.after = nn.Linear(heads, heads)

    def inner(self, x: Tensor, layout: Layout, relative: nn.Module | None = None, product: Product | None = None) -> Tensor:
        qkv = multiply(self.qkv, x, product).unflatten(-1, (3, self.heads, -1))
        dropping = self.training and self.attention_dropout > 0
        plain = dropping or relative is not None or watched(self.before) or watched(self.after)
        fused = None if plain else talking_heads_for(qkv)
        if fused is not None:
            out = fused(qkv, self.before.weight, self.before.bias, self.after.weight, self.after.bias)
        else:
            query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            weights = self._weights(query, key, layout, relative)
            weights = self.after(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            out = (F.dropout(weights, self.attention_dropout, self.training) @ value).transpose(1, 2)
        return out.flatten(2)

    def _weights(self, query: Tensor, key: Tensor, layout: Layout, relative: nn.Module | None) -> Tensor:
        scores = self._scores(query, key, layout, relative)
        return self.before(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).softmax(-1)

    def maps(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        """The softmax between the two mixings [B, H, T, T]; rows sum to one."""
        query, key, _ = self._heads(x)
        return self._weights(query, key, layout, relative)


class AxialAttention(Attention):
    """Self-attention inside each row, or inside each column, of the patch grid."""

    def __init__(self, width: int, heads: int, axis: str, **options):
        super().__init__(width, heads, **options)
        self.axis = axis

    def forward(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        lines = x.unflatten(1, layout.grid)  # [B, height, width, D]
        lines = lines if self.axis == "row" else lines.transpose(1, 2)
        mixed = super().forward(lines.flatten(0, 1), layout).unflatten(0, lines.shape[:2])
        return (mixed if self.axis == "row" else mixed.transpose(1, 2)).flatten(1, 2)

    def maps(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        """Weights [B, H, T, T], zero between tokens of different lines."""
        query, key, _ = self._heads(x)
        index = torch.arange(layout.patches, device=x.device)
        line = index // layout.width if self.axis == "row" else index % layout.width
        other = line[:, None] != line[None, :]
        return self._scores(query, key, layout, None).masked_fill(other, -torch.inf).softmax(-1)


def check_grid(layout: Layout, grid: Grid) -> None:
    if layout.grid != grid:
        raise ValueError(
            f"this model mixes a fixed grid of {grid[0]} x {grid[1]} patches and was given {layout.height} x {layout.width}; "
            "call model.resize(height, width) first"
        )


class AcrossPatches(nn.Linear):
    """A linear map over the patches of [B, N, D], each channel by itself: one small product for each image, no transposes."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.product(x)
        return out + self.bias.to(out.dtype)[:, None]

    def product(self, x: Tensor) -> Tensor:
        weight, rows = self.weight, self.out_features
        if not x.is_meta and torch.is_autocast_enabled(x.device.type):  # before it is repeated, not after
            weight = weight.to(torch.get_autocast_dtype(x.device.type))
        if x.is_cuda and torch.compiler.is_compiling():  # lines of all matrices begin where a wide load may; zeros cost no pass
            across, down = -weight.shape[1] % 8, -rows % 8
            weight, x = F.pad(weight, (0, across, 0, down)), F.pad(x, (0, 0, 0, across))
        elif x.is_cuda:
            weight = F.pad(weight, (0, -weight.shape[1] % 8))[:, : weight.shape[1]]
        return torch.bmm(weight.expand(x.shape[0], -1, -1), x)[:, :rows]


class PatchLinear(nn.Module):
    """ResMLP's cross-patch layer: one linear map over the patches, shared by all channels."""

    def __init__(self, grid: Grid):
        super().__init__()
        self.grid = grid
        self.map = AcrossPatches(grid[0] * grid[1], grid[0] * grid[1])

    def forward(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        check_grid(layout, self.grid)
        return self.map(x)

    def resize(self, grid: Grid) -> None:
        self.map = resize_patch_map(self.map, self.grid, grid, self.grid, grid)
        self.grid = grid


class PatchMlp(nn.Module):
    """Cross-patch MLP N -> 4N -> N, shared by all channels (ResMLP ablation)."""

    def __init__(self, grid: Grid, act: str = "gelu"):
        super().__init__()
        patches = grid[0] * grid[1]
        self.grid = grid
        self.fc1 = AcrossPatches(patches, 4 * patches)
        self.activation = activation(act)
        self.fc2 = AcrossPatches(4 * patches, patches)

    def forward(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        check_grid(layout, self.grid)
        return self.fc2(self.activation(self.fc1(x)))

    def resize(self, grid: Grid) -> None:
        # The hidden units have no place in the image: read them as four grids, one after the other.
        hidden, new_hidden = (4 * self.grid[0], self.grid[1]), (4 * grid[0], grid[1])
        self.fc1 = resize_patch_map(self.fc1, self.grid, grid, hidden, new_hidden)
        self.fc2 = resize_patch_map(self.fc2, hidden, new_hidden, self.grid, grid)
        self.grid = grid


def resize_patch_map(old: AcrossPatches, grid: Grid, new_grid: Grid, out: Grid, new_out: Grid) -> AcrossPatches:
    """A linear map over patches for another grid: both axes bicubic, row sums kept."""
    with torch.no_grad():
        columns = resample(old.weight.T, grid, new_grid)  # [N', out]
        weight = resample(columns.T, out, new_out) * (grid[0] * grid[1] / (new_grid[0] * new_grid[1]))
        new = AcrossPatches(new_grid[0] * new_grid[1], new_out[0] * new_out[1], device="meta")
        new.weight = nn.Parameter(weight.contiguous(), old.weight.requires_grad)
        new.bias = nn.Parameter(resample(old.bias[:, None], out, new_out)[:, 0].contiguous(), old.bias.requires_grad)
    return new


def to_map(x: Tensor, layout: Layout) -> Tensor:
    """Tokens [B, N, D] as a channels-last feature map [B, D, height, width], without a copy."""
    return x.transpose(1, 2).unflatten(2, layout.grid)


def to_tokens(x: Tensor) -> Tensor:
    """[B, D, height, width] to [B, N, D], token after token in memory: sums keep a stream's order, and norms read along it."""
    return x.flatten(2).transpose(1, 2).contiguous()


class ConvMixer(nn.Module):
    """3x3 convolutions over the patch grid: full, depth-wise, or depth-wise then point-wise (ResMLP ablations)."""

    def __init__(self, width: int, kind: str):
        super().__init__()
        self.spatial = nn.Conv2d(width, width, 3, padding=1, groups=1 if kind == "conv" else width)
        self.point = nn.Linear(width, width) if kind == "separable" else nn.Identity()

    def forward(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        return self.point(to_tokens(self.spatial(to_map(x, layout))))


class SqueezeExcite(nn.Module):
    """Channel gates from the mean token."""

    def __init__(self, width: int, reduction: int = 4):
        super().__init__()
        self.reduce = nn.Linear(width, width // reduction)
        self.expand = nn.Linear(width // reduction, width)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.expand(self.reduce(x.mean(1, keepdim=True)).relu()).sigmoid()


class PatchConv(nn.Module):
    """PatchConvNet's branch: point-wise, GELU, depth-wise 3x3, GELU, squeeze-excite, point-wise.

    The point-wise convolutions are linear layers on tokens, so the sequence stays in memory order throughout.
    """

    def __init__(self, width: int, act: str = "gelu"):
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.spatial = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.excite = SqueezeExcite(width)
        self.leave = nn.Linear(width, width)
        self.activation = activation(act)

    def forward(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        return self.outer(self.inner(x, layout))

    def inner(self, x: Tensor, layout: Layout, relative: nn.Module | None = None, product: Product | None = None) -> Tensor:
        x = self.activation(multiply(self.enter, x, product))
        x = self.activation(to_tokens(self.spatial(to_map(x, layout))))
        return self.excite(x)

    def outer(self, x: Tensor) -> Tensor:
        return self.leave(x)
