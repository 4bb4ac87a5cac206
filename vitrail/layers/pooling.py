"""Readouts: from the trunk's tokens to the vector (or the vectors) that the classifier sees."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from vitrail.layers.attention import FeedForward, check_grid
from vitrail.layers.layout import Layout
from vitrail.layers.pos_embed import Grid, resample
from vitrail.layers.sdpa import attend

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

    def _heads(self, query: Tensor, patches: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        source = torch.cat([query, patches], 1) if self.keys == "all" else patches
        parts = (self.q(query), self.k(source), self.v(source))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        return q, k, v

    def forward(self, query: Tensor, patches: Tensor) -> Tensor:
        q, k, v = self._heads(query, patches)
        return self.proj(attend(q, k, v).transpose(1, 2).flatten(2))

    def maps(self, query: Tensor, patches: Tensor) -> Tensor:
        """Attention weights [B, H, S, S + N] (or [B, H, S, N] with patch keys only); rows sum to one."""
        q, k, _ = self._heads(query, patches)
        return (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1)


class ClassAttentionBlock(nn.Module):
    """CaiT's second stage, PatchConvNet's pooling: the queries change, the patches stay as they are."""

    def __init__(
        self, attention: ClassAttention, ffn: FeedForward, norm: Callable[[], nn.Module], scale: Callable[[], nn.Module]
    ):
        super().__init__()
        self.norm1, self.attention, self.scale1 = norm(), attention, scale()
        self.norm2, self.ffn, self.scale2 = norm(), ffn, scale()

    def forward(self, query: Tensor, patches: Tensor) -> Tensor:
        query = query + self.scale1(self.attention(self.norm1(query), self.norm1(patches)))
        return query + self.scale2(self.ffn(self.norm2(query)))

    def maps(self, query: Tensor, patches: Tensor) -> Tensor:
        return self.attention.maps(self.norm1(query), self.norm1(patches))


class ClassMlpBlock(nn.Module):
    """ResMLP's class-MLP: a class vector gathers the frozen patches with one linear map over tokens."""

    def __init__(self, grid: Grid, ffn: FeedForward, norm: Callable[[], nn.Module], scale: Callable[[], nn.Module]):
        super().__init__()
        self.grid = grid
        self.norm1, self.gather, self.scale1 = norm(), nn.Linear(grid[0] * grid[1] + 1, 1), scale()
        self.norm2, self.ffn, self.scale2 = norm(), ffn, scale()

    def forward(self, query: Tensor, patches: Tensor) -> Tensor:
        tokens = self.norm1(torch.cat([query, patches], 1))
        query = query + self.scale1(self.gather(tokens.transpose(1, 2)).transpose(1, 2))
        return query + self.scale2(self.ffn(self.norm2(query)))

    def resize(self, grid: Grid) -> None:
        with torch.no_grad():
            old = self.gather.weight  # [1, 1 + N], the class vector's own weight first
            share = self.grid[0] * self.grid[1] / (grid[0] * grid[1])
            patches = resample(old[:, 1:].T, self.grid, grid).T * share
            self.gather.weight = nn.Parameter(torch.cat([old[:, :1], patches], 1), old.requires_grad)
        self.gather.in_features = grid[0] * grid[1] + 1
        self.grid = grid


class QueryPooling(nn.Module):
    """Learned queries [S, D] refined by blocks that read the patches; for `per_class` there is one query per class."""

    def __init__(self, queries: int, width: int, blocks: list[nn.Module]):
        super().__init__()
        self.queries = nn.Parameter(torch.empty(queries, width))
        nn.init.trunc_normal_(self.queries, std=0.02)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, patches: Tensor, layout: Layout) -> Tensor:
        query = self.start(patches)
        for block in self.blocks:
            if isinstance(block, ClassMlpBlock):
                check_grid(layout, block.grid)
            query = block(query, patches)
        return query

    def start(self, patches: Tensor) -> Tensor:
        return self.queries.expand(patches.shape[0], -1, -1)


class PerClassHead(nn.Module):
    """One linear map to one number per class, each on its own query's vector: [B, C, D] to [B, C]."""

    def __init__(self, width: int, classes: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, width))
        self.bias = nn.Parameter(torch.zeros(classes))
        nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum(-1) + self.bias
