"""Norms of tokens [B, T, D] and of feature maps [B, K, height, width], and activations."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TOKEN_NORMS = ("layer", "affine", "batch", "group", "none")
MAP_NORMS = ("none", "batch", "layer")
ACTIVATIONS = ("none", "gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "hardswish", "tanh")


class Affine(nn.Module):
    """ResMLP's replacement for a norm: a learned scale and shift per channel, no statistics."""

    def __init__(self, width: int, scale: float = 1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), scale))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.bias, self.weight, x)


class TokenBatchNorm(nn.BatchNorm1d):
    """BatchNorm per channel over all tokens of all images."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, 1)).view_as(x)


class TokenGroupNorm(nn.GroupNorm):
    """GroupNorm within each token; with one group it is LayerNorm."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, 1)).view_as(x)


PER_TOKEN_NORMS = (nn.LayerNorm, TokenGroupNorm, Affine, nn.Identity)  # each token is normalized by itself


class MapLayerNorm(nn.LayerNorm):
    """LayerNorm over the channels of each location of a feature map."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


def token_norm(kind: str, width: int, eps: float, groups: int = 1) -> nn.Module:
    match kind:
        case "layer":
            return nn.LayerNorm(width, eps=eps)
        case "affine":
            return Affine(width)
        case "batch":
            return TokenBatchNorm(width)
        case "group":
            return TokenGroupNorm(groups, width, eps=eps)
        case "none":
            return nn.Identity()
    raise ValueError(f"norm {kind!r} is not one of {', '.join(TOKEN_NORMS)}")


def map_norm(kind: str, channels: int) -> nn.Module:
    match kind:
        case "none":
            return nn.Identity()
        case "batch":
            return nn.BatchNorm2d(channels)
        case "layer":
            return MapLayerNorm(channels, eps=1e-6)
    raise ValueError(f"stem norm {kind!r} is not one of {', '.join(MAP_NORMS)}")


class QuickGelu(nn.Module):
    """x * sigmoid(1.702 x), the approximation of GELU in CLIP."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


def activation(kind: str) -> nn.Module:
    match kind:
        case "none":
            return nn.Identity()
        case "gelu":
            return nn.GELU()
        case "gelu_tanh":
            return nn.GELU(approximate="tanh")
        case "quick_gelu":
            return QuickGelu()
        case "relu":
            return nn.ReLU()
        case "silu":
            return nn.SiLU()
        case "hardswish":
            return nn.Hardswish()
        case "tanh":
            return nn.Tanh()
    raise ValueError(f"activation {kind!r} is not one of {', '.join(ACTIVATIONS)}")
