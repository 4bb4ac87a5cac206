"""The layout of a token sequence: prefix tokens first, then the patches of a grid in raster order."""

from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

Grid = tuple[int, int]  # height, width


@runtime_checkable
class Resizable(Protocol):
    """A module with weights tied to the patch grid, which it can resample for another grid."""

    def resize(self, grid: Grid) -> None: ...


class Layout(NamedTuple):
    """`prefix` prefix tokens, then `height` x `width` patches in raster order."""

    height: int
    width: int
    prefix: int = 0

    @property
    def grid(self) -> Grid:
        return self.height, self.width

    @property
    def patches(self) -> int:
        return self.height * self.width


def to_map(x: Tensor, layout: Layout) -> Tensor:
    """Tokens [B, N, D] as a channels-last feature map [B, D, height, width], without a copy."""
    out: Tensor = x.transpose(1, 2).unflatten(2, layout.grid)
    return out


def to_tokens(x: Tensor) -> Tensor:
    """A feature map [B, D, height, width] as tokens [B, N, D], contiguous as norms and residual sums need them."""
    return x.flatten(2).transpose(1, 2).contiguous()


def check_grid(layout: Layout, grid: Grid) -> None:
    """Raise ValueError if the patches are not on the grid that a module's weights were made for."""
    if layout.grid != grid:
        raise ValueError(
            f"the weights are for a grid of {grid[0]} x {grid[1]} patches, the input has {layout.height} x {layout.width}; "
            "call model.resize(height, width) first"
        )
