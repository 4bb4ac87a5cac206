"""Pooling: from the tokens of the last block to the vector (or vectors) that the classifier takes."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from vitrail.layers.attention import scaled_dot_product_attention
from vitrail.layers.layout import Grid, Layout, check_grid
from vitrail.layers.mlp import FeedForward
from vitrail.layers.pos_embed import resample

POOLINGS = ("class", "mean", "class_attention", "per_class", "class_mlp")


class ClassAttention(nn.Module):
    """Queries [B, S, D] attend to themselves and the patches, or to the patches alone."""

    def __init__(self, width: int, heads: int, qkv_bias: bool = True, keys: str = "all"):
        super().__init__()
        self.heads, self.keys = heads, keys
        self.q = nn.Linear(width, width, bias=qkv_bias)
        self.k = nn.Linear(width, width, bias=qkv_bias)
        self.v = nn.Linear(width, width, bias=qkv_bias)
        self.proj = nn.Linear(width, width)

    def split_heads(self, query: Tensor, patches: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        source = torch.cat([query, patches], 1) if self.keys == "all" else patches
        projections = (self.q(query), self.k(source), self.v(source))
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in projections)
        return q, k, v

    def forward(self, query: Tensor, patches: Tensor) -> Tensor:
        q, k, v = self.split_heads(query, patches)
        out: Tensor = self.proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out

    def maps(self, query: Tensor, patches: Tensor) -> Tensor:
        """Attention weights [B, H, S, S + N] (or [B, H, S, N] with patch keys only); rows sum to one."""
        q, k, _ = self.split_heads(query, patches)
        return self.weights(q, k)

    @staticmethod
    def weights(query: Tensor, key: Tensor) -> Tensor:
        """softmax(query key^T / sqrt(D/H)) for [B, H, S, D/H] and [B, H, keys, D/H]."""
        return (query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])).softmax(-1)


class ClassAttentionBlock(nn.Module):
    """Class attention of CaiT and PatchConvNet: the queries are updated, the patches are not."""

    def __init__(
        self, attention: ClassAttention, ffn: FeedForward, norm: Callable[[], nn.Module], scale: Callable[[], nn.Module]
    ):
        super().__init__()
        self.norm1, self.attention, self.scale1 = norm(), attention, scale()
        self.norm2, self.ffn, self.scale2 = norm(), ffn, scale()

    def forward(self, query: Tensor, patches: Tensor) -> Tensor:
        query = query + self.scale1(self.attention(self.norm1(query), self.norm1(patches)))
        out: Tensor = query + self.scale2(self.ffn(self.norm2(query)))
        return out

    def maps(self, query: Tensor, patches: Tensor) -> Tensor:
        return self.attention.maps(self.norm1(query), self.norm1(patches))


class ClassMlpBlock(nn.Module):
    """ResMLP's class-MLP: one linear layer over the class vector and the patches updates the class vector."""

    def __init__(self, grid: Grid, ffn: FeedForward, norm: Callable[[], nn.Module], scale: Callable[[], nn.Module]):
        super().__init__()
        self.grid = grid
        self.norm1, self.gather, self.scale1 = norm(), nn.Linear(grid[0] * grid[1] + 1, 1), scale()
        self.norm2, self.ffn, self.scale2 = norm(), ffn, scale()

    def forward(self, query: Tensor, patches: Tensor) -> Tensor:
        tokens = self.norm1(torch.cat([query, patches], 1))
        query = query + self.scale1(self.gather(tokens.transpose(1, 2)).transpose(1, 2))
        out: Tensor = query + self.scale2(self.ffn(self.norm2(query)))
        return out

    def resize(self, grid: Grid) -> None:
        with torch.no_grad():
            old = self.gather.weight  # [1, 1 + N], the weight of the class vector first
            share = self.grid[0] * self.grid[1] / (grid[0] * grid[1])
            patches = resample(old[:, 1:].T, self.grid, grid).T * share
            self.gather.weight = nn.Parameter(torch.cat([old[:, :1], patches], 1), old.requires_grad)
        self.gather.in_features = grid[0] * grid[1] + 1
        self.grid = grid


class QueryPooling(nn.Module):
    """Learned queries [S, D] updated by blocks that attend to the patches; `per_class` has one query per class."""

    def __init__(self, queries: int, width: int, blocks: list[nn.Module]):
        super().__init__()
        self.queries = nn.Parameter(torch.empty(queries, width))
        nn.init.trunc_normal_(self.queries, std=0.02)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, patches: Tensor, layout: Layout) -> Tensor:
        query = self.expand_queries(patches)
        for block in self.blocks:
            if isinstance(block, ClassMlpBlock):
                check_grid(layout, block.grid)
            query = block(query, patches)
        return query

    def expand_queries(self, patches: Tensor) -> Tensor:
        """The learned queries for each image, [B, S, D]."""
        return self.queries.expand(patches.shape[0], -1, -1)


class PerClassHead(nn.Module):
    """The logit of each class from the vector of its own query: [B, C, D] to [B, C]."""

    def __init__(self, width: int, classes: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, width))
        self.bias = nn.Parameter(torch.zeros(classes))
        nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum(-1) + self.bias
