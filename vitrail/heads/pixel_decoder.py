"""The decoder of a discrete autoencoder: from codes of the patches to pixels."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MIN_CHANNELS = 32


class ResidualConv(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.convs(x)
        return out


class PixelDecoder(nn.Module):
    """A vector per code, residual convolutions over the grid, then stages that double the resolution and halve the channels.

    The last layer writes what remains of the patch size, where it is not a power of two.
    """

    def __init__(self, codes: int, width: int, patch_size: int, layers: int = 2) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(codes, width))
        self.start = nn.Sequential(*(ResidualConv(width) for _ in range(layers)))
        self.stages = nn.ModuleList()
        while patch_size % 2 == 0:
            narrower = max(width // 2, min(width, MIN_CHANNELS))
            self.stages.append(nn.Sequential(nn.Conv2d(width, narrower, 3, padding=1), ResidualConv(narrower)))
            width, patch_size = narrower, patch_size // 2
        self.remaining = patch_size
        self.proj = nn.Conv2d(width, 3 * patch_size**2, 3, padding=1)

    def forward(self, weights: Tensor, grid: tuple[int, int]) -> Tensor:
        """Weights of the codes [B, N, codes], one-hot or soft, to images [B, 3, height, width]."""
        x = self.start((weights @ self.vectors.to(weights.dtype)).transpose(1, 2).unflatten(2, grid))
        for stage in self.stages:
            x = stage(F.interpolate(x, scale_factor=2.0))
        return F.pixel_shuffle(self.proj(x.relu()), self.remaining)
