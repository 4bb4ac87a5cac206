"""Attention by torch's fused kernels, all but one that cannot be trusted everywhere."""

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitrail.layers.kernels import exporting

FEW = 64  # tokens; there the memory-efficient kernels take two thirds of Flash's time
FOR_FEW = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
ALL_BUT_CUDNN = [SDPBackend.FLASH_ATTENTION, *FOR_FEW]


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
    with sdpa_kernel(FOR_FEW if asked <= FEW else ALL_BUT_CUDNN):
        return F.scaled_dot_product_attention(query, key, value, bias, dropout, scale=scale)
