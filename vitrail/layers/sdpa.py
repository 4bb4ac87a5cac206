"""Attention by torch's fused kernels, all but one that cannot be trusted everywhere."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitrail.layers.kernels import exporting

FEW = 64  # tokens; there the memory-efficient kernels take two thirds of Flash's time
FOR_FEW = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
ALL_BUT_CUDNN = [SDPBackend.FLASH_ATTENTION, *FOR_FEW]
SWITCHES = {  # of a kind of kernel: whether it is on, and how it is switched
    SDPBackend.FLASH_ATTENTION: (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    SDPBackend.EFFICIENT_ATTENTION: (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    SDPBackend.MATH: (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    SDPBackend.CUDNN_ATTENTION: (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
}


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, dropout: float = 0.0, scale: float | None = None
) -> Tensor:
    """[B, H, T, D] each; softmax(query key^T * scale + bias) value.

    cuDNN's kernels, the fastest on Hopper GPUs, give gradients that are no numbers where tokens fill an odd number of half tiles:
    64, 192, … of them, with far negative scores (torch 2.11 to 2.13). They are left out there, with a bias or
    dropout, and for few tokens.
    """
    if not query.is_cuda or exporting():
        return F.scaled_dot_product_attention(query, key, value, bias, dropout, scale=scale)
    asking, asked = query.shape[-2], key.shape[-2]
    if bias is None and not dropout and asking % 128 != 64 and asked % 128 != 64 and asked > FEW:
        return F.scaled_dot_product_attention(query, key, value, scale=scale)
    kinds = FOR_FEW if asked <= FEW else ALL_BUT_CUDNN
    if torch.compiler.is_compiling():
        with sdpa_kernel(kinds):
            return F.scaled_dot_product_attention(query, key, value, bias, dropout, scale=scale)
    changed = allow_only(kinds)
    try:
        return F.scaled_dot_product_attention(query, key, value, bias, dropout, scale=scale)
    finally:
        for switch, before in changed:
            switch(before)


def allow_only(kinds: list[SDPBackend]) -> list[tuple[Callable[[bool], None], bool]]:
    """Switches as `sdpa_kernel` does, which takes the host longer than an operator; returns what is to be switched back."""
    changed: list[tuple[Callable[[bool], None], bool]] = []
    for kind, (is_on, switch) in SWITCHES.items():
        before, wanted = is_on(), kind in kinds
        if before != wanted:
            switch(wanted)
            changed.append((switch, before))
    return changed
