"""The parts of a network that only answers: what was multiplied out by `folding` runs here, and nothing else.

Bodies are called as in `layers`: body(x, layout, relative), with x [B, T, D] already brought to zero mean and unit deviation
where the network has a norm; what a norm learned is inside the body's weights.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.layers.attention import check_grid
from vitrail.layers.kernels import linear_gelu_for
from vitrail.layers.layout import Layout
from vitrail.layers.pos_embed import Grid
from vitrail.layers.sdpa import attend
from vitrail.models.vision_transformer import Features, VisionTransformer


class WideAttention(nn.Module):
    """All branches of a residual as one attention of branches x heads; the output product sums the branches.

    With `only` = S the answers of the first S tokens alone are computed, to keys and values of all.
    """

    def __init__(self, qkv: nn.Linear, proj: nn.Linear, heads: int, branches: int, scale: float | None, axis: str = ""):
        super().__init__()
        self.qkv, self.proj = qkv, proj
        self.heads, self.branches, self.scale, self.axis = heads, branches, scale, axis
        self.only = 0

    def forward(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        if not self.axis:
            return self._attend(x, layout, relative)
        lines = x.unflatten(1, layout.grid)  # [B, height, width, D]
        lines = lines if self.axis == "row" else lines.transpose(1, 2)
        mixed = self._attend(lines.flatten(0, 1), layout, None).unflatten(0, lines.shape[:2])
        return (mixed if self.axis == "row" else mixed.transpose(1, 2)).flatten(1, 2)

    def _attend(self, x: Tensor, layout: Layout, relative: nn.Module | None) -> Tensor:
        heads = self.branches * self.heads
        if self.only:
            inner = self.proj.in_features
            weight, shift = self.qkv.weight, self.qkv.bias
            query = F.linear(x[:, : self.only], weight[:inner], shift[:inner]).unflatten(-1, (heads, -1)).transpose(1, 2)
            pair = F.linear(x, weight[inner:], shift[inner:])
            key, value = pair.unflatten(-1, (2, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            query, key, value = self.qkv(x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        bias = relative(query, layout) if relative is not None else None
        if bias is not None and bias.shape[1] != heads:  # one number per head, the same in every branch
            bias = bias.repeat(1, self.branches, 1, 1)
        mixed = attend(query, key, value, bias, scale=self.scale)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class WideFeedForward(nn.Module):
    """All branches of a residual as one MLP of branches x hidden units; the second product sums the branches."""

    def __init__(self, fc1: nn.Linear, activation: nn.Module, fc2: nn.Linear):
        super().__init__()
        self.fc1, self.activation, self.fc2 = fc1, activation, fc2
        self.exact = type(activation) is nn.GELU and activation.approximate == "none"

    def forward(self, x: Tensor, layout: Layout | None = None, relative: nn.Module | None = None) -> Tensor:
        fused = linear_gelu_for(x, self.fc1.weight) if self.exact and type(self.fc1) is nn.Linear else None
        if fused is not None:
            return self.fc2(fused(x.to(torch.bfloat16), self.fc1.weight, self.fc1.bias))
        return self.fc2(self.activation(self.fc1(x)))


class FoldedPatches(nn.Module):
    """ResMLP's cross-patch layer with both affine maps: scale [D] * (map [N, N] x) + shift [N, D].

    A factor per channel passes through a map over patches but not into it, so the two factors become one.
    """

    def __init__(self, map: Tensor, scale: Tensor, shift: Tensor, grid: Grid):
        super().__init__()
        self.grid, self.patches = grid, len(map)
        self.spare = -self.patches % 8  # zeros, with which lines of all matrices begin where a wide load may
        self.map = frozen(F.pad(map, (0, self.spare, 0, self.spare)))
        self.scale, self.shift = frozen(scale), frozen(shift)

    def forward(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        check_grid(layout, self.grid)
        map = self.map[: self.patches, : self.patches]
        if x.is_cuda and torch.compiler.is_compiling():
            map, x = self.map, F.pad(x, (0, 0, 0, self.spare))
        mixed = torch.bmm(map.expand(x.shape[0], -1, -1), x)[:, : self.patches]  # in memory order, unlike a transposed product
        return torch.addcmul(self.shift.to(mixed.dtype), self.scale.to(mixed.dtype), mixed)


class FoldedResidual(nn.Module):
    """x plus its bodies, which share one norm; with `only` = S nothing but the first S tokens goes on."""

    def __init__(self, norm: nn.Module, bodies: Sequence[nn.Module], post: nn.Module):
        super().__init__()
        self.norm, self.bodies, self.post = norm, nn.ModuleList(bodies), post
        self.only = 0

    def forward(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        normed = self.norm(x)
        x = x[:, : self.only] if self.only else x
        for body in self.bodies:
            x = x + body(normed, layout, relative)
        return self.post(x)


class FixedPositions(nn.Module):
    """A table of positions computed once for one grid; other grids are resampled as ever."""

    def __init__(self, positions: nn.Module, layout: Layout, device: torch.device):
        super().__init__()
        self.pos_embed, self.grid = positions, layout.grid
        self.table = frozen(positions(layout, device))

    def forward(self, layout: Layout, device: torch.device | None = None) -> Tensor:
        return self.table if layout.grid == self.grid else self.pos_embed(layout, device).to(self.table.dtype)


class FixedBias(nn.Module):
    """The biases [1, H, T, T] of attention scores, computed once for one layout."""

    def __init__(self, positions: nn.Module, layout: Layout, like: Tensor):
        super().__init__()
        self.pos_embed, self.layout = positions, layout
        self.bias = frozen(positions(like, layout).contiguous())

    def forward(self, query: Tensor, layout: Layout) -> Tensor:
        return self.bias.to(query.dtype) if layout == self.layout else self.pos_embed(query, layout)


class FoldedClassAttention(nn.Module):
    """One block of the pooling; keys and values of the patches come from one product for all blocks."""

    def __init__(self, q: nn.Linear, proj: nn.Linear, heads: int, reads_itself: bool, norm2: nn.Module, ffn: WideFeedForward):
        super().__init__()
        self.q, self.proj, self.heads, self.reads_itself = q, proj, heads, reads_itself
        self.norm2, self.ffn = norm2, ffn

    def forward(self, query: Tensor, normed: Tensor, pair: Tensor) -> Tensor:
        """query and normed query [B, S, D]; pair [B, N, 2D] of the patches, or [B, S + N, 2D] with those of the queries."""
        key, value = pair.unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        asked = self.q(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        mixed = attend(asked, key, value, scale=1.0)
        query = query + self.proj(mixed.transpose(1, 2).flatten(2))
        return query + self.ffn(self.norm2(query))


class AttentionReadout(nn.Module):
    """Class-attention blocks over patches that do not change: they are normed once and projected once, for all blocks."""

    def __init__(self, queries: Tensor, norm: nn.Module, pairs: nn.Linear, blocks: list[FoldedClassAttention]):
        super().__init__()
        self.queries, self.norm, self.pairs, self.blocks = frozen(queries), norm, pairs, nn.ModuleList(blocks)

    def forward(self, patches: Tensor, layout: Layout) -> Tensor:
        query, count = self.queries.expand(patches.shape[0], -1, -1), self.queries.shape[0]
        itself = any(block.reads_itself for block in self.blocks)  # or none does
        tokens = F.pad(self.norm(patches), (0, 0, count, 0)) if itself else self.norm(patches)  # the queries come to lie there
        pairs = self.pairs(tokens).chunk(len(self.blocks), -1)
        weights, biases = self.pairs.weight.chunk(len(self.blocks)), self.pairs.bias.chunk(len(self.blocks))
        for block, pair, weight, bias in zip(self.blocks, pairs, weights, biases, strict=True):
            normed = self.norm(query)
            if itself:
                pair[:, :count] = F.linear(normed, weight, bias)
            query = block(query, normed, pair)
        return query


class MlpReadout(nn.Module):
    """Class-MLP blocks over patches that do not change: they are normed once and gathered once, for all blocks."""

    def __init__(
        self,
        queries: Tensor,
        norm: nn.Module,
        grid: Grid,
        gather: Tensor,  # [L, 1 + N], the query's own weight first
        scale: Tensor,  # [L, D]
        shift: Tensor,  # [L, D]
        norms: list[nn.Module],
        ffns: list[WideFeedForward],
    ):
        super().__init__()
        self.queries, self.norm, self.grid = frozen(queries), norm, grid
        self.gather, self.scale, self.shift = frozen(gather), frozen(scale), frozen(shift)
        self.norms, self.ffns = nn.ModuleList(norms), nn.ModuleList(ffns)

    def forward(self, patches: Tensor, layout: Layout) -> Tensor:
        check_grid(layout, self.grid)
        query = self.queries.expand(patches.shape[0], -1, -1)
        gathered = torch.bmm(self.gather[:, 1:].expand(patches.shape[0], -1, -1), self.norm(patches))  # [B, L, D]
        for index, (norm, ffn) in enumerate(zip(self.norms, self.ffns, strict=True)):
            seen = self.gather[index, 0] * self.norm(query) + gathered[:, index, None]
            query = query + self.scale[index] * seen + self.shift[index]
            query = query + ffn(norm(query))
        return query


class Folded(nn.Module):
    """A rewritten network: [B, K, height, width] to logits [B, C], and no other answer.

    `trunk` is a model whose parts were replaced; `pooling` is the rewritten one (None: class token or mean).
    """

    def __init__(self, trunk: VisionTransformer, pooling: nn.Module | None):
        super().__init__()
        self.trunk, self.pooling = trunk, pooling

    def forward(self, image: Tensor) -> Tensor:
        return self.trunk.classify(self.read(*self.trunk.encode(*self.trunk.embed(image)))).logits

    def read(self, x: Tensor, layout: Layout) -> Features:
        """As the model reads to classify, with a pooling of its own."""
        trunk, dense = self.trunk, self.trunk.head_dense is not None
        if self.pooling is None:
            return trunk.read(x, layout, patches=dense)
        query = trunk.norm(self.pooling(x, layout))
        tokens = trunk.norm(x) if dense else x[:, :0]
        return Features(tokens, layout.grid, query, query if trunk.architecture.pooling == "per_class" else query[:, 0])


def frozen(values: Tensor) -> nn.Parameter:
    """A parameter that moves and is cast with its module, and never learns."""
    return nn.Parameter(values.detach(), requires_grad=False)
