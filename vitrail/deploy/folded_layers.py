"""Layers of a model that was rewritten for inference by `deploy.fold`.

Bodies of residuals are called as in `layers`: body(x, layout, relative). Norms come without weights, which are folded into the
bodies.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.layers.attention import scaled_dot_product_attention
from vitrail.layers.fold import frozen_parameter
from vitrail.layers.kernels import select_linear_gelu
from vitrail.layers.layout import Grid, Layout, check_grid
from vitrail.models.vision_transformer import Features, VisionTransformer


class FoldedAttention(nn.Module):
    """The parallel branches of a residual as one attention with branches x heads; the output projection sums the branches.

    With `num_output_tokens` = S > 0 only the first S tokens are queries; keys and values are those of all tokens.
    """

    def __init__(self, qkv: nn.Linear, proj: nn.Linear, heads: int, branches: int, scale: float | None, axis: str = ""):
        super().__init__()
        self.qkv, self.proj = qkv, proj
        self.heads, self.branches, self.scale, self.axis = heads, branches, scale, axis
        self.num_output_tokens = 0

    def forward(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        if not self.axis:
            return self._attend(x, layout, relative)
        lines = x.unflatten(1, layout.grid)  # [B, height, width, D]
        lines = lines if self.axis == "row" else lines.transpose(1, 2)
        mixed = self._attend(lines.flatten(0, 1), layout, None).unflatten(0, lines.shape[:2])
        out: Tensor = (mixed if self.axis == "row" else mixed.transpose(1, 2)).flatten(1, 2)
        return out

    def _attend(self, x: Tensor, layout: Layout, relative: nn.Module | None) -> Tensor:
        heads = self.branches * self.heads
        if self.num_output_tokens:
            inner = self.proj.in_features
            weight, shift = self.qkv.weight, self.qkv.bias
            query = (
                F.linear(x[:, : self.num_output_tokens], weight[:inner], shift[:inner]).unflatten(-1, (heads, -1)).transpose(1, 2)
            )
            pair = F.linear(x, weight[inner:], shift[inner:])
            key, value = pair.unflatten(-1, (2, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            query, key, value = self.qkv(x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        bias = relative(query, layout) if relative is not None else None
        if bias is not None and bias.shape[1] != heads:  # the same bias in every branch
            bias = bias.repeat(1, self.branches, 1, 1)
        mixed = scaled_dot_product_attention(query, key, value, bias, scale=self.scale)
        out: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return out


class FoldedFeedForward(nn.Module):
    """The parallel branches of a residual as one MLP with branches x hidden units; the second layer sums the branches."""

    def __init__(self, fc1: nn.Linear, activation: nn.Module, fc2: nn.Linear):
        super().__init__()
        self.fc1, self.activation, self.fc2 = fc1, activation, fc2
        self.exact = type(activation) is nn.GELU and activation.approximate == "none"

    def forward(self, x: Tensor, layout: Layout | None = None, relative: nn.Module | None = None) -> Tensor:
        fused = select_linear_gelu(x, self.fc1.weight) if self.exact and type(self.fc1) is nn.Linear else None
        if fused is not None:
            hidden = fused(x.to(torch.bfloat16), self.fc1.weight, self.fc1.bias)
        else:
            hidden = self.activation(self.fc1(x))
        out: Tensor = self.fc2(hidden)
        return out


class FoldedPatchLinear(nn.Module):
    """ResMLP's cross-patch layer with both affine maps: scale [D] * (map [N, N] x) + shift [N, D].

    A map over patches commutes with factors of channels, so the two factors become one.
    """

    def __init__(self, map: Tensor, scale: Tensor, shift: Tensor, grid: Grid):
        super().__init__()
        self.grid, self.patches = grid, len(map)
        self.padding = -self.patches % 8  # aligned rows for vectorized loads
        self.map = frozen_parameter(F.pad(map, (0, self.padding, 0, self.padding)))
        self.scale, self.shift = frozen_parameter(scale), frozen_parameter(shift)

    def forward(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        check_grid(layout, self.grid)
        map = self.map[: self.patches, : self.patches]
        if x.is_cuda and torch.compiler.is_compiling():
            map, x = self.map, F.pad(x, (0, 0, 0, self.padding))
        mixed = torch.bmm(map.expand(x.shape[0], -1, -1), x)[:, : self.patches]  # contiguous, unlike a transposed product
        return torch.addcmul(self.shift.to(mixed.dtype), self.scale.to(mixed.dtype), mixed)


class FoldedResidual(nn.Module):
    """x plus its bodies, which share one norm; with `num_output_tokens` = S > 0 the output has the first S tokens only."""

    def __init__(self, norm: nn.Module, bodies: Sequence[nn.Module], post: nn.Module):
        super().__init__()
        self.norm, self.bodies, self.post = norm, nn.ModuleList(bodies), post
        self.num_output_tokens = 0

    def forward(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        normed = self.norm(x)
        x = x[:, : self.num_output_tokens] if self.num_output_tokens else x
        for body in self.bodies:
            x = x + body(normed, layout, relative)
        out: Tensor = self.post(x)
        return out


class PrecomputedPosEmbed(nn.Module):
    """A position embedding computed in advance for one grid; for other grids it is resampled in each forward pass."""

    def __init__(self, positions: nn.Module, layout: Layout, device: torch.device):
        super().__init__()
        self.pos_embed, self.grid = positions, layout.grid
        self.table = frozen_parameter(positions(layout, device))

    def forward(self, layout: Layout, device: torch.device | None = None) -> Tensor:
        return self.table if layout.grid == self.grid else self.pos_embed(layout, device).to(self.table.dtype)


class PrecomputedPosBias(nn.Module):
    """The biases [1, H, T, T] of attention scores, computed in advance for one layout."""

    def __init__(self, positions: nn.Module, layout: Layout, like: Tensor):
        super().__init__()
        self.pos_embed, self.layout = positions, layout
        self.bias = frozen_parameter(positions(like, layout).contiguous())

    def forward(self, query: Tensor, layout: Layout) -> Tensor:
        return self.bias.to(query.dtype) if layout == self.layout else self.pos_embed(query, layout)


class FoldedClassAttention(nn.Module):
    """A class-attention block whose keys and values were computed for all blocks at once."""

    def __init__(
        self, q: nn.Linear, proj: nn.Linear, heads: int, attends_to_queries: bool, norm2: nn.Module, ffn: FoldedFeedForward
    ):
        super().__init__()
        self.q, self.proj, self.heads, self.attends_to_queries = q, proj, heads, attends_to_queries
        self.norm2, self.ffn = norm2, ffn

    def forward(self, query: Tensor, normed: Tensor, pair: Tensor) -> Tensor:
        """Queries and normed queries [B, S, D]; `pair` [B, N or S + N, 2D]: keys and values of the patches (and queries)."""
        key, value = pair.unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        heads = self.q(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        mixed = scaled_dot_product_attention(heads, key, value, scale=1.0)
        query = query + self.proj(mixed.transpose(1, 2).flatten(2))
        out: Tensor = query + self.ffn(self.norm2(query))
        return out


class FoldedAttentionPooling(nn.Module):
    """Class-attention blocks; norm, keys and values of the patches are computed once for all blocks."""

    def __init__(self, queries: Tensor, norm: nn.Module, pairs: nn.Linear, blocks: list[FoldedClassAttention]):
        super().__init__()
        self.queries, self.norm, self.pairs, self.blocks = frozen_parameter(queries), norm, pairs, nn.ModuleList(blocks)

    def forward(self, patches: Tensor, layout: Layout) -> Tensor:
        query, count = self.queries.expand(patches.shape[0], -1, -1), self.queries.shape[0]
        include_queries = any(block.attends_to_queries for block in self.blocks)  # all or none
        tokens = F.pad(self.norm(patches), (0, 0, count, 0)) if include_queries else self.norm(patches)  # rows for the queries
        pairs = self.pairs(tokens).chunk(len(self.blocks), -1)
        weights, biases = self.pairs.weight.chunk(len(self.blocks)), self.pairs.bias.chunk(len(self.blocks))
        for block, pair, weight, bias in zip(self.blocks, pairs, weights, biases, strict=True):
            normed = self.norm(query)
            if include_queries:
                pair[:, :count] = F.linear(normed, weight, bias)
            query = block(query, normed, pair)
        return query


class FoldedMlpPooling(nn.Module):
    """Class-MLP blocks; the norm and the linear layers over the patches are computed once for all blocks."""

    def __init__(
        self,
        queries: Tensor,
        norm: nn.Module,
        grid: Grid,
        gather: Tensor,  # [L, 1 + N], the weight of the query first
        scale: Tensor,  # [L, D]
        shift: Tensor,  # [L, D]
        norms: list[nn.Module],
        ffns: list[FoldedFeedForward],
    ):
        super().__init__()
        self.queries, self.norm, self.grid = frozen_parameter(queries), norm, grid
        self.gather, self.scale, self.shift = frozen_parameter(gather), frozen_parameter(scale), frozen_parameter(shift)
        self.norms, self.ffns = nn.ModuleList(norms), nn.ModuleList(ffns)

    def forward(self, patches: Tensor, layout: Layout) -> Tensor:
        check_grid(layout, self.grid)
        query = self.queries.expand(patches.shape[0], -1, -1)
        gathered = torch.bmm(self.gather[:, 1:].expand(patches.shape[0], -1, -1), self.norm(patches))  # [B, L, D]
        for index, (norm, ffn) in enumerate(zip(self.norms, self.ffns, strict=True)):
            mixed = self.gather[index, 0] * self.norm(query) + gathered[:, index, None]
            query = query + self.scale[index] * mixed + self.shift[index]
            query = query + ffn(norm(query))
        return query


class FoldedModel(nn.Module):
    """A model rewritten for inference: images [B, K, height, width] to logits [B, C].

    `backbone` is a model whose layers were replaced; `pooling` is the rewritten pooling (None: class token or mean).
    """

    def __init__(self, backbone: VisionTransformer, pooling: nn.Module | None):
        super().__init__()
        self.backbone, self.pooling = backbone, pooling

    def forward(self, image: Tensor) -> Tensor:
        return self.backbone.classify(self.read(*self.backbone.encode(*self.backbone.embed(image)))).logits

    def read(self, x: Tensor, layout: Layout) -> Features:
        """As `VisionTransformer.read`, with the rewritten pooling."""
        backbone, dense = self.backbone, self.backbone.head_dense is not None
        if self.pooling is None:
            return backbone.read(x, layout, patches=dense)
        query = backbone.norm(self.pooling(x, layout))
        tokens = backbone.norm(x) if dense else x[:, :0]
        return Features(tokens, layout.grid, query, query if backbone.architecture.pooling == "per_class" else query[:, 0])
