"""Attention by torch's fused kernels, all but one that cannot be trusted everywhere."""

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitrail.layers.kernels import exporting

ALL_BUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, dropout: float = 0.0, scale: float | None = None
) -> Tensor:
    """[B, H, T, D] each; softmax(query key^T * scale + bias) value.

    cuDNN's kernels, the fastest on Hopper GPUs, give gradients that are no numbers where tokens fill an odd number of half tiles:
    64, 192, … of them, with far negative scores (torch 2.11 to 2.13). They are left out there, and with a bias or dropout.
    """
    if not query.is_cuda or exporting():
        return F.scaled_dot_product_attention(query, key, value, bias, dropout, scale=scale)
    if bias is None and not dropout and query.shape[-2] % 128 != 64 and key.shape[-2] % 128 != 64:
        return F.scaled_dot_product_attention(query, key, value, scale=scale)
    with sdpa_kernel(ALL_BUT_CUDNN):
        return F.scaled_dot_product_attention(query, key, value, bias, dropout, scale=scale)
