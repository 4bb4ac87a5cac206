"""gelu(x W^T + b) as one call of the library, for inference."""

import torch
from torch import Tensor


@torch.library.custom_op("vitrail::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GELU inside the product, by the library's formula with a tanh: at most 5e-4 off."""
    return torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True).view(*x.shape[:-1], -1)


@linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))
