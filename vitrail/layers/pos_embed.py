"""Positions: tables added to tokens, and biases added to attention scores. All follow a change of grid."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.layers.layout import Layout

Grid = tuple[int, int]

ABSOLUTE = ("learned", "learned2d", "sincos")
RELATIVE = ("relative", "relative_bias")
POS_EMBEDS = ("none", *ABSOLUTE, *RELATIVE)
RESAMPLE = ("bicubic", "bicubic_antialias", "bilinear", "aligned")


def resample(grid_values: Tensor, old: Grid, new: Grid, method: str = "bicubic") -> Tensor:
    """[h*w, D] on one grid to [h'*w', D] on another, in raster order.

    `bicubic` is the DeiT family's rule, `aligned` (bilinear, corners on corners) that of the Google checkpoints.
    """
    if not torch.compiler.is_exporting() and old == new:
        return grid_values
    image = grid_values.float().reshape(1, *old, -1).permute(0, 3, 1, 2)
    mode, _, antialias = method.partition("_")
    if mode == "aligned":
        image = F.interpolate(image, size=new, mode="bilinear", align_corners=True)
    else:
        image = F.interpolate(image, size=new, mode=mode, align_corners=False, antialias=bool(antialias))
    return image.flatten(2)[0].T.to(grid_values.dtype)


class LearnedPositions(nn.Module):
    """One vector per patch, preceded by one per prefix token when `prefix` > 0."""

    def __init__(self, grid: Grid, width: int, prefix: int, method: str):
        super().__init__()
        self.grid, self.prefix, self.method = grid, prefix, method
        self.table = nn.Parameter(torch.empty(prefix + grid[0] * grid[1], width))
        nn.init.trunc_normal_(self.table, std=0.02)

    def forward(self, layout: Layout, device: torch.device | None = None) -> Tensor:
        if not torch.compiler.is_exporting() and layout.grid == self.grid:
            return self.table
        patches = resample(self.table[self.prefix :], self.grid, layout.grid, self.method)
        return torch.cat([self.table[: self.prefix], patches]) if self.prefix else patches

    def resize(self, grid: Grid) -> None:
        with torch.no_grad():
            self.table = nn.Parameter(self(Layout(*grid, self.prefix)).clone(), self.table.requires_grad)
        self.grid = grid


class LearnedPositions2d(nn.Module):
    """A row table and a column table of half the width each; a patch gets [row, column]."""

    def __init__(self, grid: Grid, width: int, prefix: int, method: str):
        super().__init__()
        self.grid, self.prefix, self.method = grid, prefix, method
        self.rows = nn.Parameter(torch.empty(grid[0], width // 2))
        self.columns = nn.Parameter(torch.empty(grid[1], width - width // 2))
        self.table = nn.Parameter(torch.empty(prefix, width)) if prefix else None
        for parameter in self.parameters():
            nn.init.trunc_normal_(parameter, std=0.02)

    def _axes(self, grid: Grid) -> tuple[Tensor, Tensor]:
        rows = resample(self.rows, (self.grid[0], 1), (grid[0], 1), self.method)
        columns = resample(self.columns, (self.grid[1], 1), (grid[1], 1), self.method)
        return rows, columns

    def forward(self, layout: Layout, device: torch.device | None = None) -> Tensor:
        height, width = layout.grid
        rows, columns = self._axes(layout.grid)
        patches = torch.cat([rows[:, None].expand(-1, width, -1), columns[None].expand(height, -1, -1)], -1).flatten(0, 1)
        return patches if self.table is None else torch.cat([self.table, patches])

    def resize(self, grid: Grid) -> None:
        with torch.no_grad():
            rows, columns = self._axes(grid)
            self.rows = nn.Parameter(rows.clone(), self.rows.requires_grad)
            self.columns = nn.Parameter(columns.clone(), self.columns.requires_grad)
        self.grid = grid


class SincosPositions(nn.Module):
    """Fixed 2-D sines and cosines (temperature 10,000); prefix tokens get zeros. No parameters, any grid."""

    def __init__(self, grid: Grid, width: int, prefix: int, method: str):
        super().__init__()
        if width % 4:
            raise ValueError(f"sincos positions need a width divisible by 4, not {width}")
        self.width, self.prefix = width, prefix

    def forward(self, layout: Layout, device: torch.device | None = None) -> Tensor:
        quarter = self.width // 4
        frequency = 10_000 ** -(torch.arange(quarter, device=device) / max(quarter - 1, 1))
        y = torch.arange(layout.height, device=device)[:, None] * frequency
        x = torch.arange(layout.width, device=device)[:, None] * frequency
        down = torch.cat([y.sin(), y.cos()], -1)[:, None].expand(-1, layout.width, -1)
        across = torch.cat([x.sin(), x.cos()], -1)[None].expand(layout.height, -1, -1)
        patches = torch.cat([across, down], -1).flatten(0, 1)
        return torch.cat([patches.new_zeros(self.prefix, self.width), patches]) if self.prefix else patches

    def resize(self, grid: Grid) -> None:
        pass


class RelativePositions(nn.Module):
    """ViT's 1-D relative attention: the offset of raster indices picks an embedding, and query . embedding is added to the score.

    The 2N-1 offsets are followed by three rows for pairs with a prefix token: prefix->patch, patch->prefix,
    prefix->prefix. Shared by the heads of a layer, scaled like the content scores.
    """

    def __init__(self, grid: Grid, head_width: int, heads: int):
        super().__init__()
        self.grid = grid
        self.table = nn.Parameter(torch.empty(2 * grid[0] * grid[1] - 1 + 3, head_width))
        nn.init.trunc_normal_(self.table, std=0.02)

    def _table(self, grid: Grid) -> Tensor:
        size = 2 * grid[0] * grid[1] - 1
        offsets = resample(self.table[:-3], (self.table.shape[0] - 3, 1), (size, 1), "aligned")
        return torch.cat([offsets, self.table[-3:]])

    def forward(self, query: Tensor, layout: Layout) -> Tensor:
        """query [B, H, T, D/H] to score biases [B, H, T, T]."""
        table = self._table(layout.grid)
        index = torch.arange(layout.patches, device=query.device)
        pairs = index[:, None] - index[None, :] + layout.patches - 1
        pairs = with_prefix(pairs, layout.prefix, table.shape[0])
        scores = torch.einsum("bhqd,rd->bhqr", query, table.to(query.dtype)) / math.sqrt(query.shape[-1])
        return scores.gather(-1, pairs.expand(*query.shape[:2], -1, -1))

    def resize(self, grid: Grid) -> None:
        with torch.no_grad():
            self.table = nn.Parameter(self._table(grid).clone(), self.table.requires_grad)
        self.grid = grid


class RelativeBias(nn.Module):
    """BEiT's 2-D bias: one number per head and offset (dy, dx), and three for pairs with a prefix token; zeros at the start."""

    def __init__(self, grid: Grid, head_width: int, heads: int):
        super().__init__()
        self.grid = grid
        self.table = nn.Parameter(torch.zeros((2 * grid[0] - 1) * (2 * grid[1] - 1) + 3, heads))

    def _table(self, grid: Grid) -> Tensor:
        old = (2 * self.grid[0] - 1, 2 * self.grid[1] - 1)
        offsets = resample(self.table[:-3], old, (2 * grid[0] - 1, 2 * grid[1] - 1), "bicubic")
        return torch.cat([offsets, self.table[-3:]])

    def forward(self, query: Tensor, layout: Layout) -> Tensor:
        """Score biases [1, H, T, T], whatever the query."""
        table = self._table(layout.grid)
        y = torch.arange(layout.height, device=query.device)
        x = torch.arange(layout.width, device=query.device)
        dy = (y[:, None] - y[None, :] + layout.height - 1)[:, None, :, None]
        dx = (x[:, None] - x[None, :] + layout.width - 1)[None, :, None, :]
        pairs = (dy * (2 * layout.width - 1) + dx).reshape(layout.patches, layout.patches)
        pairs = with_prefix(pairs, layout.prefix, table.shape[0])
        return table[pairs].permute(2, 0, 1)[None].to(query.dtype)

    def resize(self, grid: Grid) -> None:
        with torch.no_grad():
            self.table = nn.Parameter(self._table(grid).clone(), self.table.requires_grad)
        self.grid = grid


def with_prefix(pairs: Tensor, prefix: int, rows: int) -> Tensor:
    """Patch-pair indices [N, N] widened to [T, T] with the last three table rows for the prefix tokens."""
    if not prefix:
        return pairs
    pairs = F.pad(pairs, (prefix, 0, prefix, 0))
    pairs[:prefix, prefix:] = rows - 3
    pairs[prefix:, :prefix] = rows - 2
    pairs[:prefix, :prefix] = rows - 1
    return pairs


def absolute_positions(kind: str, grid: Grid, width: int, prefix: int, method: str) -> nn.Module:
    makers = {"learned": LearnedPositions, "learned2d": LearnedPositions2d, "sincos": SincosPositions}
    return makers[kind](grid, width, prefix, method)


def relative_positions(kind: str, grid: Grid, head_width: int, heads: int) -> nn.Module:
    makers = {"relative": RelativePositions, "relative_bias": RelativeBias}
    return makers[kind](grid, head_width, heads)


def patch_kernel_resize(kernel: Tensor, size: int) -> Tensor:
    """A patch projection [D, K, P, P] for patches of another size, by the pseudo-inverse of image resizing.

    The new kernel gives, on a bilinearly resized patch, the old kernel's answer on the original one whenever
    that is possible (enlarging), and the least-squares nearest answer otherwise.
    """
    old = kernel.shape[-1]
    if old == size:
        return kernel
    basis = torch.eye(old * old, dtype=torch.float64).reshape(old * old, 1, old, old)
    resized = F.interpolate(basis, size=(size, size), mode="bilinear", antialias=size < old)
    inverse = torch.linalg.pinv(resized.flatten(1)).to(kernel.device)
    flat = kernel.double().flatten(2) @ inverse.T
    return flat.reshape(*kernel.shape[:2], size, size).to(kernel.dtype)
