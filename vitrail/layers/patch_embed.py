"""Stems (patch embeddings): from an image [B, K, height, width] to patch tokens [B, N, D].

`stem.grid(height, width)` returns the patch grid of an image of that size.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.layers.attention import Attention
from vitrail.layers.block import Branch, Residual
from vitrail.layers.drop_path import DropPath
from vitrail.layers.layout import Grid, Layout, to_tokens
from vitrail.layers.mlp import FeedForward
from vitrail.layers.norm import activation, map_norm
from vitrail.layers.pos_embed import resize_patch_kernel

STEMS = ("linear", "conv", "tower", "basic", "hmlp", "local_transformer", "resnet", "resnet_features", "convnet")


class PatchProjection(nn.Conv2d):
    """A convolution with stride = kernel size as a linear layer: convolution kernels are slow for few input channels."""

    def __init__(self, channels: int, width: int, patch: int):
        super().__init__(channels, width, patch, patch)

    def forward(self, x: Tensor) -> Tensor:
        patch = self.kernel_size[0]
        height, width = x.shape[-2] // patch, x.shape[-1] // patch
        tokens = F.linear(unfold_patches(x, patch), self.weight.flatten(1), self.bias)
        out: Tensor = tokens.transpose(1, 2).unflatten(2, (height, width))
        return out


class LinearStem(nn.Module):
    """Non-overlapping P x P patches, one linear layer; optionally a norm and an activation after it."""

    def __init__(self, channels: int, width: int, patch: int, norm: str = "none", act: str = "none"):
        super().__init__()
        self.patch = patch
        self.proj = PatchProjection(channels, width, patch)
        self.norm = map_norm(norm, width)
        self.activation = activation(act)

    def grid(self, height: int, width: int) -> Grid:
        return height // self.patch, width // self.patch

    def forward(self, image: Tensor) -> Tensor:
        return to_tokens(self.activation(self.norm(self.proj(image))))

    def resize_patch(self, patch: int) -> None:
        with torch.no_grad():
            self.proj.weight = nn.Parameter(resize_patch_kernel(self.proj.weight, patch), self.proj.weight.requires_grad)
        self.proj.kernel_size = self.proj.stride = (patch, patch)
        self.patch = patch


class ConvStem(nn.Module):
    """LeViT's stem: 3x3 stride-2 convolutions that double the width, with activations between them."""

    def __init__(self, channels: int, width: int, patch: int, norm: str = "none", act: str = "gelu"):
        super().__init__()
        steps = int(math.log2(patch))
        self.steps = steps
        widths = [channels, *(width >> (steps - 1 - step) for step in range(steps))]
        layers: list[nn.Module] = []
        for step in range(steps):
            layers += [nn.Conv2d(widths[step], widths[step + 1], 3, 2, 1, bias=False), map_norm(norm, widths[step + 1])]
            layers += [activation(act)] if step < steps - 1 else []
        self.layers = nn.Sequential(*layers)

    def grid(self, height: int, width: int) -> Grid:
        for _ in range(self.steps):
            height, width = (height + 1) // 2, (width + 1) // 2
        return height, width

    def forward(self, image: Tensor) -> Tensor:
        return to_tokens(self.layers(image))


class TowerStem(nn.Module):
    """LV-ViT's stem: convolutions with norms at half resolution, then a strided convolution to the tokens."""

    def __init__(
        self,
        channels: int,
        width: int,
        inner: int = 64,
        kernels: tuple[int, ...] = (7, 3, 3, 8),
        strides: tuple[int, ...] = (2, 1, 1, 8),
        norm: str = "batch",
        act: str = "relu",
    ):
        super().__init__()
        self.convs, self.norms = nn.ModuleList(), nn.ModuleList()
        for index, (kernel, stride) in enumerate(zip(kernels[:-1], strides[:-1], strict=True)):
            self.convs.append(nn.Conv2d(channels if index == 0 else inner, inner, kernel, stride, kernel // 2, bias=False))
            self.norms.append(map_norm(norm, inner))
        self.activation = activation(act)
        last = inner if self.convs else channels
        self.proj = nn.Conv2d(last, width, kernels[-1], strides[-1], (kernels[-1] - strides[-1]) // 2)

    def grid(self, height: int, width: int) -> Grid:
        for conv in (*self.convs, self.proj):
            height, width = conv_output_size(conv, height, width)
        return height, width

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = self.activation(norm(conv(x)))
        return to_tokens(self.proj(x))


class BasicBlock(nn.Module):
    """ResNet's basic block: two 3x3 convolutions and a shortcut; the weight of the second norm is initialized to zero."""

    def __init__(self, width: int, norm: str, act: str):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, bias=norm == "none") for _ in range(2))
        self.norms = nn.ModuleList(map_norm(norm, width) for _ in range(2))
        self.activation = activation(act)
        if norm != "none":
            nn.init.zeros_(self.norms[1].weight)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        inner = self.activation(self.norms[0](self.convs[0](x)))
        out: Tensor = self.activation(x + self.norms[1](self.convs[1](inner)))
        return out


class BasicStem(nn.Module):
    """Stages of basic blocks, each twice as wide as the one before, then a strided convolution to the tokens.

    `strides` are those of the first convolution of each stage and of the last convolution.
    """

    def __init__(
        self, channels: int, width: int, inner: int, layers: tuple[int, ...], strides: tuple[int, ...], norm: str, act: str
    ):
        super().__init__()
        self.convs, self.norms, self.stages = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        self.activation = activation(act)
        for stage, count in enumerate(layers):
            outer, stride = inner << stage, strides[stage]
            kernel = 2 * max(stride, 2) - 1
            self.convs.append(nn.Conv2d(channels, outer, kernel, stride, kernel // 2, bias=norm == "none"))
            self.norms.append(map_norm(norm, outer))
            self.stages.append(nn.Sequential(*(BasicBlock(outer, norm, act) for _ in range(count))))
            channels = outer
        kernel = 2 * strides[-1] if strides[-1] > 1 else 1
        self.proj = nn.Conv2d(channels, width, kernel, strides[-1], (kernel - strides[-1]) // 2)

    def grid(self, height: int, width: int) -> Grid:
        for conv in (*self.convs, self.proj):
            height, width = conv_output_size(conv, height, width)
        return height, width

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm, stage in zip(self.convs, self.norms, self.stages, strict=True):
            x = stage(self.activation(norm(conv(x))))
        return to_tokens(self.proj(x))


def basic_strides(patch: int, stages: int) -> tuple[int, ...]:
    """Strides of `BasicStem` whose product is the patch size, a power of two.

    Factors of 2 go to the later stages first, then to the last convolution; the first stage has the remaining stride.
    """
    later = []
    for _ in range(stages - 1):
        later.append(min(patch, 2))
        patch //= later[-1]
    last = min(patch, 2)
    return (patch // last, *reversed(later), last)


def conv_output_size(conv: nn.Module, height: int, width: int) -> Grid:
    """Height and width of a convolution's output."""
    assert isinstance(conv, nn.Conv2d)
    kernel, stride, padding = conv.kernel_size[0], conv.stride[0], int(conv.padding[0])
    height, width = ((side + 2 * padding - kernel) // stride + 1 for side in (height, width))
    return height, width


class HmlpStem(nn.Module):
    """hMLP: linear layers on growing patches without overlap, so that a token depends on the pixels of its patch only."""

    def __init__(self, channels: int, width: int, strides: tuple[int, ...], norm: str = "batch", act: str = "gelu"):
        super().__init__()
        self.patch = math.prod(strides)
        widths = [channels, *[width // 4] * (len(strides) - 1), width]
        layers: list[nn.Module] = []
        for step, stride in enumerate(strides):
            layers += [PatchProjection(widths[step], widths[step + 1], stride), map_norm(norm, widths[step + 1])]
            layers += [activation(act)] if step < len(strides) - 1 else []
        self.layers = nn.Sequential(*layers)

    def grid(self, height: int, width: int) -> Grid:
        return height // self.patch, width // self.patch

    def forward(self, image: Tensor) -> Tensor:
        return to_tokens(self.layers(image))


def hmlp_strides(patch: int) -> tuple[int, ...]:
    """Strides of `HmlpStem`: the released 4-2-2 for 16-pixel patches, and similar ones for other sizes."""
    strides: tuple[int, ...] = ()
    for step in (4, 2, 2, 2):
        if patch % step == 0 and patch > 1:
            strides, patch = (*strides, step), patch // step
    return strides if patch == 1 else (patch, *strides)


class LocalTransformerStem(nn.Module):
    """TNT-like stem: a small transformer over the 4x4-pixel pieces of each patch, then one linear layer.

    Its layers were not published; a width of D/8 and four blocks give the published FLOPs.
    """

    def __init__(self, channels: int, width: int, patch: int, piece: int = 4, depth: int = 4):
        super().__init__()
        self.patch, self.pieces = patch, patch // piece
        inner = max(width // 8, 8)
        heads = max(inner // 32, 1)
        self.embed = nn.Conv2d(channels, inner, piece, piece)
        self.position = nn.Parameter(torch.empty(self.pieces**2, inner))
        nn.init.trunc_normal_(self.position, std=0.02)
        self.blocks = nn.ModuleList()
        for _ in range(depth):
            for body in (Attention(inner, heads), FeedForward(inner, 4 * inner)):
                self.blocks.append(Residual([Branch(nn.LayerNorm(inner, eps=1e-6), body, nn.Identity(), DropPath(0.0))]))
        self.proj = nn.Linear(self.pieces**2 * inner, width)

    def grid(self, height: int, width: int) -> Grid:
        return height // self.patch, width // self.patch

    def forward(self, image: Tensor) -> Tensor:
        height, width = self.grid(image.shape[-2], image.shape[-1])
        x = self.embed(image[..., : height * self.patch, : width * self.patch])
        side = self.pieces
        # [B, d, h*s, w*s] -> [B*h*w, s*s, d]
        x = x.unflatten(-1, (width, side)).unflatten(-3, (height, side)).permute(0, 2, 4, 3, 5, 1)
        batch = x.shape[0]
        x = x.flatten(0, 2).flatten(1, 2) + self.position
        for block in self.blocks:
            x = block(x, Layout(side, side))
        out: Tensor = self.proj(x.flatten(1)).unflatten(0, (batch, height * width))
        return out


def unfold_patches(image: Tensor, patch: int) -> Tensor:
    """The pixels of each patch [B, N, K*P*P], in the order of the weight of a convolution."""
    height, width = image.shape[-2] // patch, image.shape[-1] // patch
    image = image[..., : height * patch, : width * patch]
    pieces = image.unflatten(3, (width, patch)).unflatten(2, (height, patch))  # [B, K, height, P, width, P]
    out: Tensor = pieces.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    return out
