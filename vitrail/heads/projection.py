"""The projection head of DINO (arXiv 2104.14294)."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ProjectionHead(nn.Module):
    """An MLP to a bottleneck, whose normalized output is compared with `outputs` normalized vectors.

    The last layer is F.linear(x, gain * direction / ||direction||) without bias. Directions and gains are plain parameters, so an
    EMA of this module is the EMA of both, as in the released code, and not that of their product.
    """

    def __init__(self, width: int, outputs: int, hidden: int, bottleneck: int, layers: int, fixed_gain: bool) -> None:
        """`layers`: linear layers of the MLP; `fixed_gain`: the gains stay 1."""
        super().__init__()
        sizes = [width, *[hidden] * (layers - 1), bottleneck]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))
        self.direction = nn.Parameter(torch.empty(outputs, bottleneck))
        self.gain = nn.Parameter(torch.ones(outputs, 1), requires_grad=not fixed_gain)
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        nn.init.uniform_(self.direction, -(bottleneck**-0.5), bottleneck**-0.5)  # that of nn.Linear; the norm is divided out

    def forward(self, x: Tensor) -> Tensor:
        """Features [B, D] to outputs [B, K]."""
        return self.compare(self.project(x))

    def project(self, x: Tensor) -> Tensor:
        """Features [B, D] to normalized vectors [B, bottleneck], in float32 or float64."""
        for index, layer in enumerate(self.layers):
            x = layer(x if index == 0 else F.gelu(x))
        return F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)

    def compare(self, x: Tensor) -> Tensor:
        """The last layer: normalized vectors [B, bottleneck] to outputs [B, K]."""
        return F.linear(x, torch._weight_norm(self.direction, self.gain, 0))
