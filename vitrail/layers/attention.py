"""Self-attention: plain, talking-heads and axial. All are called as attention(x, layout, relative)."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import cuda
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitrail.layers.kernels import exporting, has_hooks, select_talking_heads
from vitrail.layers.layout import Layout

ATTENTION = ("attention", "talking_heads")

SHORT = 64  # tokens, up to which the memory-efficient backend takes two thirds of FlashAttention's time
SHORT_BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
BACKENDS_WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, *SHORT_BACKENDS]
SWITCHES: dict[SDPBackend, tuple[Callable[[], bool], Callable[[bool], None]]] = {  # backend: is it enabled, enable it
    SDPBackend.FLASH_ATTENTION: (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    SDPBackend.EFFICIENT_ATTENTION: (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    SDPBackend.MATH: (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    SDPBackend.CUDNN_ATTENTION: (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
}


class Attention(nn.Module):
    """Multi-head self-attention by torch's fused kernels; `maps` recomputes the attention weights on request."""

    def __init__(
        self,
        width: int,
        heads: int,
        qkv_bias: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        linear: type[nn.Linear] = nn.Linear,
    ):
        super().__init__()
        self.heads, self.attention_dropout = heads, attention_dropout
        self.qkv = linear(width, 3 * width, bias=qkv_bias)
        self.proj = linear(width, width)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        out: Tensor = self.dropout(self.proj(self.attend(self.qkv(x), layout, relative)))
        return out

    def attend(self, qkv: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        """Queries, keys and values [B, T, 3D] to the concatenated outputs of the heads [B, T, D]."""
        query, key, value = self.split_heads(qkv)
        bias = relative(query, layout) if relative is not None else None
        dropout = self.attention_dropout if self.training else 0.0
        return scaled_dot_product_attention(query, key, value, bias, dropout).transpose(1, 2).flatten(2)

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, 3D] to query, key, value [B, H, T, D/H]."""
        query, key, value = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return query, key, value

    def scores(
        self, query: Tensor, key: Tensor, layout: Layout, relative: nn.Module | None, rows: Tensor | None = None
    ) -> Tensor:
        """Attention scores before the softmax [B, H, Q, T]; the queries are those of all tokens, or of the tokens `rows` [Q]."""
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        return scores if relative is None else scores + relative(query, layout, rows)

    def weights(
        self, query: Tensor, key: Tensor, layout: Layout, relative: nn.Module | None, rows: Tensor | None = None
    ) -> Tensor:
        """The attention weights [B, H, Q, T] that `forward` uses, of the queries of all tokens or of `rows`; rows sum to one."""
        return self.scores(query, key, layout, relative, rows).softmax(-1)

    def weight_gradient(self, output_gradient: Tensor, value: Tensor) -> Tensor:
        """The gradient of `weights` [B, H, Q, T] from the gradient of the outputs of the heads [B, H, Q, D/H]."""
        return output_gradient @ value.transpose(-2, -1)

    def maps(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        """The attention weights [B, H, T, T] that `forward` uses; rows sum to one."""
        query, key, _ = self.split_heads(self.qkv(x))
        return self.weights(query, key, layout, relative)


class TalkingHeads(Attention):
    """Attention with linear maps between the heads before and after the softmax (CaiT)."""

    def __init__(self, width: int, heads: int, **options: Any):
        super().__init__(width, heads, **options)
        self.before = nn.Linear(heads, heads)
        self.after = nn.Linear(heads, heads)

    def attend(self, qkv: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        packed = qkv.unflatten(-1, (3, self.heads, -1))
        dropout = self.training and self.attention_dropout > 0
        kernel = None
        if not dropout and relative is None and not has_hooks(self.before, self.after):
            kernel = select_talking_heads(packed)
        if kernel is not None:
            return kernel(packed, self.before.weight, self.before.bias, self.after.weight, self.after.bias).flatten(2)
        query, key, value = self.split_heads(qkv)
        attention = self.mix_heads(self.after, self.weights(query, key, layout, relative))
        attention = F.dropout(attention, self.attention_dropout, self.training)
        return (attention @ value).transpose(1, 2).flatten(2)

    def weights(
        self, query: Tensor, key: Tensor, layout: Layout, relative: nn.Module | None, rows: Tensor | None = None
    ) -> Tensor:
        """The softmax between the two maps of heads [B, H, Q, T]; rows sum to one."""
        return self.mix_heads(self.before, self.scores(query, key, layout, relative, rows)).softmax(-1)

    def weight_gradient(self, output_gradient: Tensor, value: Tensor) -> Tensor:
        mixed = super().weight_gradient(output_gradient, value)
        return torch.einsum("oh,boqk->bhqk", self.after.weight.to(mixed.dtype), mixed)

    @staticmethod
    def mix_heads(linear: nn.Module, x: Tensor) -> Tensor:
        """A linear map over the heads of [B, H, T, T]."""
        out: Tensor = linear(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return out


class AxialAttention(Attention):
    """Self-attention within each row, or within each column, of the patch grid."""

    def __init__(self, width: int, heads: int, axis: str, **options: Any):
        super().__init__(width, heads, **options)
        self.axis = axis

    def attend(self, qkv: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        lines = qkv.unflatten(1, layout.grid)  # [B, height, width, 3D]
        lines = lines if self.axis == "row" else lines.transpose(1, 2)
        mixed = super().attend(lines.flatten(0, 1), layout).unflatten(0, lines.shape[:2])
        out: Tensor = (mixed if self.axis == "row" else mixed.transpose(1, 2)).flatten(1, 2)
        return out

    def weights(
        self, query: Tensor, key: Tensor, layout: Layout, relative: nn.Module | None, rows: Tensor | None = None
    ) -> Tensor:
        """Attention weights [B, H, Q, T], zero between tokens of different rows (or columns)."""
        index = torch.arange(layout.patches, device=query.device)
        line = index // layout.width if self.axis == "row" else index % layout.width
        other = (line if rows is None else line[rows])[:, None] != line[None, :]
        return self.scores(query, key, layout, None).masked_fill(other, -torch.inf).softmax(-1)


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, dropout: float = 0.0, scale: float | None = None
) -> Tensor:
    """softmax(query key^T * scale + bias) value for tensors [B, H, T, D/H].

    As torch's function of this name, with a choice of backends on CUDA. cuDNN's kernels are the fastest on Hopper GPUs but return
    NaN gradients for lengths of 64 modulo 128 with large negative scores (torch 2.11 to 2.13). They are disabled for these
    lengths, with a bias or dropout, and for short sequences.
    """
    if not query.is_cuda or exporting():
        return F.scaled_dot_product_attention(query, key, value, bias, dropout, scale=scale)
    queries, keys = query.shape[-2], key.shape[-2]
    if bias is None and not dropout and queries % 128 != 64 and keys % 128 != 64 and keys > SHORT:
        return F.scaled_dot_product_attention(query, key, value, scale=scale)
    backends = SHORT_BACKENDS if keys <= SHORT else BACKENDS_WITHOUT_CUDNN
    if torch.compiler.is_compiling():
        with sdpa_kernel(backends):
            return F.scaled_dot_product_attention(query, key, value, bias, dropout, scale=scale)
    changed = enable_only(backends)
    try:
        return F.scaled_dot_product_attention(query, key, value, bias, dropout, scale=scale)
    finally:
        for enable, previous in changed:
            enable(previous)


def enable_only(backends: list[SDPBackend]) -> list[tuple[Callable[[bool], None], bool]]:
    """Enable these backends and disable the others; returns the changed switches with their previous values.

    `sdpa_kernel` does the same, but its host time is longer than that of an operator.
    """
    changed: list[tuple[Callable[[bool], None], bool]] = []
    for backend, (is_enabled, enable) in SWITCHES.items():
        previous, enabled = is_enabled(), backend in backends
        if previous != enabled:
            enable(enabled)
            changed.append((enable, previous))
    return changed
