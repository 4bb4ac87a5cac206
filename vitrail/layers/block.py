"""Transformer blocks: x = x + drop_path(scale(body(norm(x)))), once for the token mixer and once for the MLP.

`layers.fused` replaces these classes by equivalent ones that train faster when they are compiled.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from vitrail.layers.drop_path import DropPath
from vitrail.layers.layout import Layout


class Branch(nn.Module):
    """drop_path(scale(body(norm(x)))) for tokens [B, T, D]; `body` is a token mixer or an MLP."""

    def __init__(self, norm: nn.Module, body: nn.Module, scale: nn.Module, drop_path: DropPath):
        super().__init__()
        self.norm, self.body, self.scale, self.drop_path = norm, body, scale, drop_path

    def forward(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        out: Tensor = self.drop_path(self.scale(self.body(self.norm(x), layout, relative)))
        return out


class Residual(nn.Module):
    """post(x + the sum of its parallel branches); `post` is the norm of post-norm blocks, else the identity."""

    def __init__(self, branches: Sequence[Branch], post: nn.Module | None = None):
        super().__init__()
        self.branches = nn.ModuleList(branches)
        self.post = post if post is not None else nn.Identity()

    def forward(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        out: Tensor = self.post(x + self.update(x, layout, relative))
        return out

    def update(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        """The sum of the branches."""
        first, *others = self.branches
        total: Tensor = first(x, layout, relative)
        for branch in others:
            total = total + branch(x, layout, relative)
        return total


class Block(nn.Module):
    """A token-mixing residual, then an MLP residual; either may be missing."""

    def __init__(self, mix: Residual | None, ffn: Residual | None):
        super().__init__()
        self.mix, self.ffn = mix, ffn

    def forward(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        if self.mix is not None:
            x = self.mix(x, layout, relative)
        if self.ffn is not None:
            x = self.ffn(x, layout, relative)
        return x

    def residuals(self) -> dict[str, Residual]:
        return {name: residual for name, residual in (("mix", self.mix), ("ffn", self.ffn)) if residual is not None}
