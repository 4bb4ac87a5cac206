"""Products of what stands next to each other: norms, linear maps and residual scales as plain matrices, in float64.

Everything is computed in float64 and rounded once, when it becomes the weight of a layer again.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitrail.deploy.folded_layers import frozen
from vitrail.layers.block import ConstantScale, LayerScale, ScalarScale, ShiftedLinear
from vitrail.layers.norm import Affine, TokenBatchNorm, TokenGroupNorm


class PerChannel(NamedTuple):
    """x -> scale [D] * x + shift [D]."""

    scale: Tensor
    shift: Tensor


class Map(NamedTuple):
    """x -> weight [outputs, inputs] x + bias [outputs]."""

    weight: Tensor
    bias: Tensor

    def after(self, before: PerChannel) -> "Map":
        """This map of what `before` gives."""
        return Map(self.weight * before.scale, self.bias + self.weight @ before.shift)

    def then(self, behind: PerChannel) -> "Map":
        """What `behind` makes of this map's answer."""
        return Map(self.weight * behind.scale[:, None], behind.scale * self.bias + behind.shift)

    def layer(self, like: Tensor) -> nn.Linear:
        """As a layer, in the precision and on the device of `like`."""
        layer = nn.Linear(self.weight.shape[1], self.weight.shape[0], device="meta")
        layer.weight, layer.bias = frozen(self.weight.to(like)), frozen(self.bias.to(like))
        return layer


def map_of(linear: nn.Linear) -> Map:
    weight = linear.weight.double()
    bias = weight.new_zeros(weight.shape[0]) if linear.bias is None else linear.bias.double()
    if isinstance(linear, ShiftedLinear):
        bias = bias + linear.shift.double() * weight.sum(1)
    return Map(weight, bias)


def split_norm(norm: nn.Module, width: int, device: torch.device) -> tuple[nn.Module, PerChannel]:
    """A norm as its statistics, which stay, and what it learned, which moves."""
    if isinstance(norm, nn.Identity):
        return norm, unchanged(width, device)
    if isinstance(norm, TokenBatchNorm):
        return nn.Identity(), channels_of(norm)
    core: nn.Module = nn.Identity()
    if isinstance(norm, nn.LayerNorm):
        core = nn.LayerNorm(width, eps=norm.eps, elementwise_affine=False).eval()
    elif isinstance(norm, TokenGroupNorm):
        core = TokenGroupNorm(norm.num_groups, width, eps=norm.eps, affine=False).eval()
    elif not isinstance(norm, Affine):
        raise TypeError(f"{type(norm).__name__} is not a norm that can be taken apart")
    return core, PerChannel(norm.weight.double(), norm.bias.double())


def unchanged(width: int, device: torch.device) -> PerChannel:
    ones = torch.ones(width, dtype=torch.float64, device=device)
    return PerChannel(ones, torch.zeros_like(ones))


def channels_of(norm: nn.BatchNorm1d | nn.BatchNorm2d) -> PerChannel:
    """Batch norm in evaluation: its running statistics are constants."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    return PerChannel(scale, norm.bias.double() - scale * norm.running_mean.double())


def split_scale(scale: nn.Module, width: int, device: torch.device) -> PerChannel:
    """A residual scale as factors and shifts."""
    ones, zeros = unchanged(width, device)
    if isinstance(scale, nn.Identity):
        return PerChannel(ones, zeros)
    if isinstance(scale, ConstantScale):
        return PerChannel(ones * scale.factor, zeros)
    if isinstance(scale, LayerScale | ScalarScale):
        return PerChannel(ones * scale.weight.double(), zeros)
    if isinstance(scale, Affine):
        return PerChannel(scale.weight.double(), scale.bias.double())
    raise TypeError(f"{type(scale).__name__} is not a scale that can be taken apart")


def joined_attention(qkvs: list[Map], projs: list[Map], heads: int, scaled: bool) -> tuple[Map, Map]:
    """Branches side by side: queries, keys, values [3, branches * D], and an output map whose inputs are all of them.

    `scaled`: the queries are divided by the square root of a head's width, which attention then leaves out.
    """
    weights = torch.cat([qkv.weight.unflatten(0, (3, -1)) for qkv in qkvs], 1)
    biases = torch.cat([qkv.bias.unflatten(0, (3, -1)) for qkv in qkvs], 1)
    if scaled:
        factor = 1 / math.sqrt(qkvs[0].weight.shape[0] / 3 / heads)
        weights[0] *= factor
        biases[0] *= factor
    return Map(weights.flatten(0, 1), biases.flatten()), joined_inputs(projs)


def joined_inputs(maps: list[Map]) -> Map:
    """One map of all inputs whose answer is the sum of the maps' answers."""
    return Map(torch.cat([each.weight for each in maps], 1), torch.stack([each.bias for each in maps]).sum(0))


def joined_outputs(maps: list[Map]) -> Map:
    """One map with all answers, one after the other."""
    return Map(torch.cat([each.weight for each in maps]), torch.cat([each.bias for each in maps]))


def follow_convolution(conv: nn.Conv2d, behind: PerChannel) -> None:
    """Put what comes after a convolution into it."""
    weight = conv.weight.double()
    bias = weight.new_zeros(weight.shape[0]) if conv.bias is None else conv.bias.double()
    like = conv.weight
    conv.bias = frozen((behind.scale * bias + behind.shift).to(like))
    conv.weight = frozen((weight * behind.scale[:, None, None, None]).to(like))
