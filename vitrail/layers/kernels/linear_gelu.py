"""gelu(x W^T + b) as one cuBLAS call, for inference."""

import torch
from torch import Tensor


@torch.library.custom_op("vitrail::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """gelu(x W^T + b) with the tanh approximation of cuBLAS: an error of at most 5e-4."""
    return torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True).view(*x.shape[:-1], -1)


@linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))
