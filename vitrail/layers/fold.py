"""Folding: channel-wise affine maps become part of the linear layers before and after them, parallel layers become one.

    W(γx + β) + b = (Wγ)x + (Wβ + b)        γ(Wx + b) + β = (γW)x + (γb + β)

Training (`layers.fused`) folds in every forward pass, differentiably and in the precision of the weights. Inference
(`deploy.fold`) folds once, in float64, and rounds when the result becomes the weight of a layer again.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitrail.layers.layer_scale import ConstantScale, LayerScale, ScalarScale, ShiftedLinear
from vitrail.layers.norm import Affine, TokenBatchNorm, TokenGroupNorm


class ChannelAffine(NamedTuple):
    """x -> scale * x + shift for each channel; scale and shift are [D], [1], or None for 1 and 0."""

    scale: Tensor | None = None
    shift: Tensor | None = None

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Scale and shift of a map that has both."""
        assert self.scale is not None
        assert self.shift is not None
        return self.scale, self.shift

    def multiply(self, factor: Tensor, like: Tensor) -> "ChannelAffine":
        """This map times a factor; `like` [D] gives dtype and device where there is no scale."""
        scale = (torch.ones_like(like[:1]) if self.scale is None else self.scale) * factor
        return ChannelAffine(scale, None if self.shift is None else self.shift * factor)


class LinearMap(NamedTuple):
    """x -> weight [outputs, inputs] x + bias [outputs]; a bias of None is zero."""

    weight: Tensor
    bias: Tensor | None

    def after(self, affine: ChannelAffine) -> "LinearMap":
        """x -> self(affine(x))."""
        weight, bias = self
        shift = None if affine.shift is None else (weight * affine.shift).sum(1)  # no matrix product: autocast would round it
        if affine.scale is not None:
            weight = weight * affine.scale
        return LinearMap(weight, add(bias, shift))

    def then(self, affine: ChannelAffine) -> "LinearMap":
        """x -> affine(self(x))."""
        weight, bias = self
        if affine.scale is not None:
            bias = None if bias is None else bias * affine.scale
        bias = add(bias, affine.shift)
        return LinearMap(weight if affine.scale is None else weight * affine.scale[:, None], bias)

    def layer(self, like: Tensor) -> nn.Linear:
        """A frozen linear layer in the precision and on the device of `like`."""
        layer = nn.Linear(self.weight.shape[1], self.weight.shape[0], bias=self.bias is not None, device="meta")
        layer.weight = frozen_parameter(self.weight.to(like))
        if self.bias is not None:
            layer.bias = frozen_parameter(self.bias.to(like))
        return layer


def add(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The sum, where None is zero."""
    return other if one is None else one if other is None else one + other


def frozen_parameter(values: Tensor) -> nn.Parameter:
    """A parameter without gradient: it is moved and cast with its module."""
    return nn.Parameter(values.detach(), requires_grad=False)


def scale_affine(scale: nn.Module, like: Tensor) -> ChannelAffine:
    """A residual scale as an affine map; `like` [D] gives dtype and device of a constant."""
    if isinstance(scale, nn.Identity):
        return ChannelAffine()
    if isinstance(scale, ConstantScale):
        return ChannelAffine(torch.full_like(like[:1], scale.factor))
    if isinstance(scale, LayerScale | ScalarScale):
        return ChannelAffine(scale.weight.view(-1))
    if isinstance(scale, Affine):
        return ChannelAffine(scale.weight, scale.bias)
    raise TypeError(f"{type(scale).__name__} is not a residual scale that can be folded")


def concat_outputs(maps: Sequence[LinearMap]) -> LinearMap:
    """One map of the same input with the outputs of all maps, concatenated."""
    return LinearMap(torch.cat([weight for weight, _ in maps]), torch.cat([bias for _, bias in maps if bias is not None]))


def concat_inputs(maps: Sequence[LinearMap]) -> LinearMap:
    """One map of all inputs, concatenated, whose output is the sum of the outputs of the maps."""
    biases = torch.stack([bias for _, bias in maps if bias is not None])
    return LinearMap(torch.cat([weight for weight, _ in maps], 1), biases.sum(0))


def concat_qkv(maps: Sequence[LinearMap]) -> LinearMap:
    """The query, key and value projections of several attentions as that of one with all heads, [3, branches, D] outputs."""
    weights = torch.cat([weight.unflatten(0, (3, -1)) for weight, _ in maps], 1)
    biases = torch.cat([bias.unflatten(0, (3, -1)) for _, bias in maps if bias is not None], 1)
    return LinearMap(weights.flatten(0, 1), biases.flatten())


# What follows is for inference: in float64, and every map has a bias.


def identity_affine(width: int, device: torch.device) -> ChannelAffine:
    ones = torch.ones(width, dtype=torch.float64, device=device)
    return ChannelAffine(ones, torch.zeros_like(ones))


def linear_map(layer: nn.Linear) -> LinearMap:
    weight = layer.weight.double()
    bias = weight.new_zeros(weight.shape[0]) if layer.bias is None else layer.bias.double()
    if isinstance(layer, ShiftedLinear):
        bias = bias + layer.shift.double() * weight.sum(1)
    return LinearMap(weight, bias)


def split_norm(norm: nn.Module, width: int, device: torch.device) -> tuple[nn.Module, ChannelAffine]:
    """A norm without its weights, and its weights as an affine map."""
    if isinstance(norm, nn.Identity):
        return norm, identity_affine(width, device)
    if isinstance(norm, TokenBatchNorm):
        return nn.Identity(), batch_norm_affine(norm)
    plain: nn.Module = nn.Identity()
    if isinstance(norm, nn.LayerNorm):
        plain = nn.LayerNorm(width, eps=norm.eps, elementwise_affine=False).eval()
    elif isinstance(norm, TokenGroupNorm):
        plain = TokenGroupNorm(norm.num_groups, width, eps=norm.eps, affine=False).eval()
    elif not isinstance(norm, Affine):
        raise TypeError(f"{type(norm).__name__} is not a norm that can be folded")
    return plain, ChannelAffine(norm.weight.double(), norm.bias.double())


def batch_norm_affine(norm: nn.BatchNorm1d | nn.BatchNorm2d) -> ChannelAffine:
    """Batch norm in evaluation mode, with its running statistics."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    return ChannelAffine(scale, norm.bias.double() - scale * norm.running_mean.double())


def full_scale_affine(scale: nn.Module, width: int, device: torch.device) -> ChannelAffine:
    """A residual scale as an affine map with a scale and a shift [D]."""
    ones, zeros = identity_affine(width, device).tensors()
    factor, shift = scale_affine(scale, ones)
    return ChannelAffine(ones if factor is None else ones * factor.double(), zeros if shift is None else shift.double())


def scale_queries(projection: LinearMap, queries: int, head_width: int) -> LinearMap:
    """A projection whose first `queries` outputs are divided by sqrt(head_width), for attention with scale=1."""
    factor = projection.weight.new_ones(len(projection.weight))
    factor[:queries] = 1 / math.sqrt(head_width)
    return projection.then(ChannelAffine(factor))


def fold_into_conv(conv: nn.Conv2d, affine: ChannelAffine) -> None:
    """Make an affine map of the output channels part of a convolution."""
    (scale, shift), like, weight = affine.tensors(), conv.weight, conv.weight.double()
    bias = weight.new_zeros(weight.shape[0]) if conv.bias is None else conv.bias.double()
    conv.bias = frozen_parameter((scale * bias + shift).to(like))
    conv.weight = frozen_parameter((weight * scale[:, None, None, None]).to(like))
