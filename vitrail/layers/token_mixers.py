"""Token mixers without attention: linear maps and MLPs over the patches, and convolutions over the patch grid.

They take patches only, no prefix tokens, and are called like attention: mixer(x, layout, relative).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.layers.attention import ATTENTION
from vitrail.layers.layout import Grid, Layout, check_grid, to_map, to_tokens
from vitrail.layers.norm import activation
from vitrail.layers.pos_embed import resample

SPATIAL = ("axial", "linear", "mlp", "conv", "depthwise", "separable", "patchconv")  # mixers without prefix tokens
MIXERS = (*ATTENTION, *SPATIAL, "none")


class TokenLinear(nn.Linear):
    """A linear layer over the tokens of [B, N, D], the same for all channels: a batched product without transposes."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.product(x)
        return out + self.bias.to(out.dtype)[:, None]

    def product(self, x: Tensor) -> Tensor:
        """The layer without its bias."""
        return multiply_tokens(self.weight, x)


def multiply_tokens(weight: Tensor, x: Tensor) -> Tensor:
    """The product of a matrix [M, N] with the tokens of [B, N, D]."""
    rows = len(weight)
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):  # cast before `expand`, not once per image
        weight = weight.to(torch.get_autocast_dtype(x.device.type))
    if x.is_cuda and torch.compiler.is_compiling():  # aligned rows for vectorized loads; the compiler fuses the padding
        across, down = -weight.shape[1] % 8, -rows % 8
        weight, x = F.pad(weight, (0, across, 0, down)), F.pad(x, (0, 0, 0, across))
    elif x.is_cuda:
        weight = F.pad(weight, (0, -weight.shape[1] % 8))[:, : weight.shape[1]]
    return torch.bmm(weight.expand(x.shape[0], -1, -1), x)[:, :rows]


class PatchLinear(nn.Module):
    """ResMLP's cross-patch layer: one linear layer over the patches, shared by all channels."""

    interpolate = False  # the weights to the grid of the input in every forward pass; otherwise another grid is an error

    def __init__(self, grid: Grid):
        super().__init__()
        self.grid = grid
        self.map = TokenLinear(grid[0] * grid[1], grid[0] * grid[1])

    def forward(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        if self.interpolate and layout.grid != self.grid:
            weight, bias = resize_weights(self.map, self.grid, layout.grid, self.grid, layout.grid)
            product = multiply_tokens(weight, x)
            return product + bias.to(product.dtype)[:, None]
        check_grid(layout, self.grid)
        out: Tensor = self.map(x)
        return out

    def resize(self, grid: Grid) -> None:
        self.map = resize_token_linear(self.map, self.grid, grid, self.grid, grid)
        self.grid = grid


class PatchMlp(nn.Module):
    """Cross-patch MLP N -> 4N -> N, shared by all channels (ResMLP ablation)."""

    def __init__(self, grid: Grid, act: str = "gelu"):
        super().__init__()
        patches = grid[0] * grid[1]
        self.grid = grid
        self.fc1 = TokenLinear(patches, 4 * patches)
        self.activation = activation(act)
        self.fc2 = TokenLinear(4 * patches, patches)

    def forward(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        check_grid(layout, self.grid)
        out: Tensor = self.fc2(self.activation(self.fc1(x)))
        return out

    def resize(self, grid: Grid) -> None:
        # Hidden units have no position in the image: they are resampled as four grids, one below the other.
        hidden, new_hidden = (4 * self.grid[0], self.grid[1]), (4 * grid[0], grid[1])
        self.fc1 = resize_token_linear(self.fc1, self.grid, grid, hidden, new_hidden)
        self.fc2 = resize_token_linear(self.fc2, hidden, new_hidden, self.grid, grid)
        self.grid = grid


def resize_token_linear(old: TokenLinear, grid: Grid, new_grid: Grid, out: Grid, new_out: Grid) -> TokenLinear:
    """The layer for another grid, with the weights of `resize_weights`."""
    with torch.no_grad():
        weight, bias = resize_weights(old, grid, new_grid, out, new_out)
        new = TokenLinear(new_grid[0] * new_grid[1], new_out[0] * new_out[1], device="meta")
        new.weight = nn.Parameter(weight.contiguous(), old.weight.requires_grad)
        new.bias = nn.Parameter(bias.contiguous(), old.bias.requires_grad)
    return new


def resize_weights(old: TokenLinear, grid: Grid, new_grid: Grid, out: Grid, new_out: Grid) -> tuple[Tensor, Tensor]:
    """Weight and bias for another grid: inputs and outputs are resampled bicubically, row sums are kept."""
    columns = resample(old.weight.T, grid, new_grid)  # [N', out]
    weight = resample(columns.T, out, new_out) * (grid[0] * grid[1] / (new_grid[0] * new_grid[1]))
    return weight, resample(old.bias[:, None], out, new_out)[:, 0]


class ConvMixer(nn.Module):
    """A 3x3 convolution over the patch grid: full, depthwise, or depthwise-separable (ResMLP ablations)."""

    def __init__(self, width: int, kind: str):
        super().__init__()
        self.spatial = nn.Conv2d(width, width, 3, padding=1, groups=1 if kind == "conv" else width)
        self.point = nn.Linear(width, width) if kind == "separable" else nn.Identity()

    def forward(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        out: Tensor = self.point(to_tokens(self.spatial(to_map(x, layout))))
        return out


class SqueezeExcite(nn.Module):
    """Channel gates computed from the mean token."""

    def __init__(self, width: int, reduction: int = 4):
        super().__init__()
        self.reduce = nn.Linear(width, width // reduction)
        self.expand = nn.Linear(width // reduction, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x * self.expand(self.reduce(x.mean(1, keepdim=True)).relu()).sigmoid()
        return out


class PatchConv(nn.Module):
    """PatchConvNet's mixer: pointwise, GELU, depthwise 3x3, GELU, squeeze-and-excitation, pointwise.

    Pointwise convolutions are linear layers on tokens, so the memory order never changes.
    """

    def __init__(self, width: int, act: str = "gelu"):
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.spatial = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.excite = SqueezeExcite(width)
        self.leave = nn.Linear(width, width)
        self.activation = activation(act)

    def forward(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        out: Tensor = self.leave(self.convolve(self.enter(x), layout))
        return out

    def convolve(self, x: Tensor, layout: Layout) -> Tensor:
        """Everything between the two pointwise layers, [B, N, D] to [B, N, D]."""
        x = self.activation(to_tokens(self.spatial(to_map(self.activation(x), layout))))
        out: Tensor = self.excite(x)
        return out
