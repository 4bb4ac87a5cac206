"""Position embeddings, added to tokens (absolute) or to attention scores (relative). All can be resampled to other grids."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.layers.layout import Grid, Layout

ABSOLUTE = ("learned", "learned2d", "sincos")
RELATIVE = ("relative", "relative_bias")
POS_EMBEDS = ("none", *ABSOLUTE, *RELATIVE)
RESAMPLE = ("bicubic", "bicubic_antialias", "bilinear", "aligned")


def resample(grid_values: Tensor, old: Grid, new: Grid, method: str = "bicubic") -> Tensor:
    """[h*w, D] on one grid to [h'*w', D] on another, in raster order.

    `bicubic` is used by the DeiT family, `aligned` (bilinear with aligned corners) by the Google checkpoints.
    """
    if not torch.compiler.is_exporting() and old == new:
        return grid_values
    # Not torch.promote_types, which an exported program would contain as an operator.
    precise = grid_values if grid_values.dtype == torch.float64 else grid_values.float()
    image = precise.reshape(1, *old, -1).permute(0, 3, 1, 2)
    if image.is_cuda and image.requires_grad:
        image = interpolate_by_products(image, new, method)
    else:
        image = interpolate(image, new, method)
    return image.flatten(2)[0].T.to(grid_values.dtype)


def interpolate(image: Tensor, size: Grid, method: str) -> Tensor:
    """[1, D, h, w] to [1, D, h', w']."""
    mode, _, antialias = method.partition("_")
    if mode == "aligned":
        return F.interpolate(image, size=size, mode="bilinear", align_corners=True)
    return F.interpolate(image, size=size, mode=mode, align_corners=False, antialias=bool(antialias))


def interpolate_by_products(image: Tensor, size: Grid, method: str) -> Tensor:
    """`interpolate` as a product with a matrix for each axis: on a GPU its gradient is the same in every run."""
    with torch.autocast(image.device.type, enabled=False):
        rows, columns = (
            interpolate(torch.eye(old, dtype=image.dtype, device=image.device)[None, None], (new, old), method)[0, 0]
            for old, new in zip(image.shape[-2:], size, strict=True)
        )
        return rows @ image @ columns.T


class LearnedPosEmbed(nn.Module):
    """A learned vector for each of `prefix` prefix tokens and for each patch."""

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


class LearnedPosEmbed2d(nn.Module):
    """Learned vectors for rows and for columns, of half the width each, concatenated for each patch."""

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


class SincosPosEmbed(nn.Module):
    """Fixed 2-D sines and cosines (temperature 10,000), zeros for prefix tokens. No parameters."""

    def __init__(self, grid: Grid, width: int, prefix: int, method: str):
        super().__init__()
        if width % 4:
            raise ValueError(f"sincos position embeddings need a width divisible by 4, not {width}")
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


class RelativePosEmbed(nn.Module):
    """ViT's 1-D relative attention: each offset of raster indices has an embedding, and query . embedding is added to the score.

    The rows of the 2N-1 offsets are followed by three rows for pairs with a prefix token: prefix->patch, patch->prefix,
    prefix->prefix. The heads of a layer share the embeddings; the scores are scaled like those of the keys.
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

    def forward(self, query: Tensor, layout: Layout, rows: Tensor | None = None) -> Tensor:
        """query [B, H, T, D/H] to score biases [B, H, T, T]; the queries of the tokens `rows` [Q] alone to [B, H, Q, T]."""
        table = self._table(layout.grid)
        index = torch.arange(layout.patches, device=query.device)
        pairs = index[:, None] - index[None, :] + layout.patches - 1
        pairs = add_prefix_pairs(pairs, layout.prefix, table.shape[0])
        pairs = pairs if rows is None else pairs[rows]
        scores = torch.einsum("bhqd,rd->bhqr", query, table.to(query.dtype)) / math.sqrt(query.shape[-1])
        return scores.gather(-1, pairs.expand(*query.shape[:2], -1, -1))

    def resize(self, grid: Grid) -> None:
        with torch.no_grad():
            self.table = nn.Parameter(self._table(grid).clone(), self.table.requires_grad)
        self.grid = grid


class RelativePosBias(nn.Module):
    """BEiT's 2-D bias: one value per head and offset (dy, dx), and three for pairs with a prefix token; initialized to zero."""

    def __init__(self, grid: Grid, head_width: int, heads: int):
        super().__init__()
        self.grid = grid
        self.table = nn.Parameter(torch.zeros((2 * grid[0] - 1) * (2 * grid[1] - 1) + 3, heads))

    def _table(self, grid: Grid) -> Tensor:
        old = (2 * self.grid[0] - 1, 2 * self.grid[1] - 1)
        offsets = resample(self.table[:-3], old, (2 * grid[0] - 1, 2 * grid[1] - 1), "bicubic")
        return torch.cat([offsets, self.table[-3:]])

    def forward(self, query: Tensor, layout: Layout, rows: Tensor | None = None) -> Tensor:
        """Score biases [1, H, T, T], or [1, H, Q, T] of the tokens `rows`; of the query only dtype and device are used."""
        table = self._table(layout.grid)
        y = torch.arange(layout.height, device=query.device)
        x = torch.arange(layout.width, device=query.device)
        dy = (y[:, None] - y[None, :] + layout.height - 1)[:, None, :, None]
        dx = (x[:, None] - x[None, :] + layout.width - 1)[None, :, None, :]
        pairs = (dy * (2 * layout.width - 1) + dx).reshape(layout.patches, layout.patches)
        pairs = add_prefix_pairs(pairs, layout.prefix, table.shape[0])
        pairs = pairs if rows is None else pairs[rows]
        return table[pairs].permute(2, 0, 1)[None].to(query.dtype)

    def resize(self, grid: Grid) -> None:
        with torch.no_grad():
            self.table = nn.Parameter(self._table(grid).clone(), self.table.requires_grad)
        self.grid = grid


def add_prefix_pairs(pairs: Tensor, prefix: int, rows: int) -> Tensor:
    """Table rows of patch pairs [N, N] extended to [T, T] by the last three rows of the table for pairs with prefix tokens."""
    if not prefix:
        return pairs
    pairs = F.pad(pairs, (prefix, 0, prefix, 0))
    pairs[:prefix, prefix:] = rows - 3
    pairs[prefix:, :prefix] = rows - 2
    pairs[:prefix, :prefix] = rows - 1
    return pairs


def make_absolute_pos_embed(kind: str, grid: Grid, width: int, prefix: int, method: str) -> nn.Module:
    classes = {"learned": LearnedPosEmbed, "learned2d": LearnedPosEmbed2d, "sincos": SincosPosEmbed}
    return classes[kind](grid, width, prefix, method)


def make_relative_pos_embed(kind: str, grid: Grid, head_width: int, heads: int) -> nn.Module:
    classes = {"relative": RelativePosEmbed, "relative_bias": RelativePosBias}
    return classes[kind](grid, head_width, heads)


def resize_patch_kernel(kernel: Tensor, size: int) -> Tensor:
    """A patch projection [D, K, P, P] for patches of another size, by the pseudo-inverse of image resizing (FlexiViT).

    On a bilinearly resized patch the new kernel gives the output of the old kernel on the original patch: exactly for larger
    patches, in the least-squares sense for smaller ones.
    """
    old = kernel.shape[-1]
    if old == size:
        return kernel
    basis = torch.eye(old * old, dtype=torch.float64).reshape(old * old, 1, old, old)
    resized = F.interpolate(basis, size=(size, size), mode="bilinear", antialias=size < old)
    inverse = torch.linalg.pinv(resized.flatten(1)).to(kernel.device)
    flat = kernel.double().flatten(2) @ inverse.T
    out: Tensor = flat.reshape(*kernel.shape[:2], size, size).to(kernel.dtype)
    return out
