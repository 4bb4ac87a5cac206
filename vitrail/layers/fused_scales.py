"""Scales of channels inside the products beside them, while training: W(γx + β) = (Wγ)x + Wβ, and γ(Wx + b) = (γW)x + γb.

The gradient of a scale by itself is a sum over all tokens: before a product over what the norm gave, behind it over what the
product gave, which is kept for that alone. Inside the product it is a sum over the gradient of a weight. A map over patches
commutes with scales of channels, and the one behind it becomes part of the one before. Modules, parameters and their names stay
what they are, and every pass folds anew, in the precision of the weights. `joining` folds by the same functions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.layers.attention import (
    AcrossPatches,
    Attention,
    FeedForward,
    PatchConv,
    PatchLinear,
    Product,
    TalkingHeads,
    check_grid,
)
from vitrail.layers.block import Branch, ConstantScale, LayerScale, ScalarScale
from vitrail.layers.kernels import exporting
from vitrail.layers.layout import Layout
from vitrail.layers.norm import Affine
from vitrail.layers.passing import idle, through, watched

SCALES = (LayerScale, ScalarScale, Affine)  # for a constant nothing is kept
ENDS = {Attention: ("qkv", "proj"), TalkingHeads: ("qkv", "proj"), FeedForward: ("fc1", "fc2"), PatchConv: ("enter", "leave")}


def fold_scales(model: nn.Module, fold: bool = True) -> nn.Module:
    """Let scales be part of the products beside them while a model trains, or stand by themselves again."""
    for part in model.modules():
        if isinstance(part, Branch):
            part.folded = folded if fold else None
    return model


def folded(branch: Branch, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor | None:
    """scale(body(norm(x))) for tokens [B, T, D]; None where there is nothing to fold."""
    norm, body, scale = branch.norm, branch.body, branch.scale
    if not keeps_small_numbers(x) or watched(body) or exporting():
        return None
    if type(body) is PatchLinear:
        return across_patches(branch, body, x, layout)
    if type(body) not in ENDS:
        return None
    first, last = (getattr(body, name) for name in ENDS[type(body)])
    enters, leaves = may_enter(norm, first), may_leave(body, last, scale)
    if not (enters or leaves):
        return None
    product = entering(norm, first) if enters else None
    inner = body.inner(bare(norm, x) if enters else norm(x), layout, relative, product)  # type: ignore[operator]
    if not leaves:
        return through(scale, body.outer(inner))  # type: ignore[operator]
    return scaled(F.linear(inner, *leaving(scale, last)), [branch])


def may_enter(norm: nn.Module, layer: nn.Module) -> bool:
    """Whether a norm's scale and shift can be part of the product behind it; for one that is frozen there is nothing to sum."""
    if type(norm) not in (nn.LayerNorm, Affine) or type(layer) is not nn.Linear or watched(norm) or watched(layer):
        return False
    return norm.weight is not None and norm.bias is not None and learn(norm, layer)


def may_leave(body: nn.Module, layer: nn.Module, scale: nn.Module) -> bool:
    """Whether a scale is right behind a product: no dropout between them, nobody who waits for a call."""
    if type(scale) not in SCALES or type(layer) is not nn.Linear or layer.bias is None or watched(scale) or watched(layer):
        return False
    dropout = getattr(body, "dropout", None)
    return learn(scale, layer) and (dropout is None or idle(dropout))


def learn(*parts: nn.Module) -> bool:
    return all(part.weight.requires_grad for part in parts)


def bare(norm: nn.Module, x: Tensor) -> Tensor:
    """What a norm does before its scale."""
    return F.layer_norm(x, norm.normalized_shape, eps=norm.eps) if isinstance(norm, nn.LayerNorm) else x


def keeps_small_numbers(x: Tensor) -> bool:
    """float16 does not: weights times a LayerScale of 1e-6 would be zeros."""
    rounding = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if rounding else x.dtype
    return dtype != torch.float16


def entering(norm: nn.Module, layer: nn.Linear) -> Product:
    """What a norm learned inside the product behind it: W(γx + β) + b = (Wγ)x + (Wβ + b)."""
    assert isinstance(norm, nn.LayerNorm | Affine)
    shift = (layer.weight * norm.bias).sum(1)  # no product of matrices, which autocast would round
    return layer.weight * norm.weight, shift if layer.bias is None else layer.bias + shift


def leaving(scale: nn.Module, layer: nn.Linear, gain: Tensor | None = None) -> Product:
    """The residual scale, and the gain of stochastic depth, inside the product before them: γ(Wx + b) = (γW)x + γb."""
    if isinstance(scale, LayerScale | Affine | ScalarScale):
        factor = scale.weight.view(-1)
    elif isinstance(scale, ConstantScale):
        factor = torch.full_like(layer.bias[:1], scale.factor)
    elif gain is not None:
        factor = torch.ones_like(layer.bias[:1])
    else:
        return layer.weight, layer.bias
    bias = layer.bias * factor
    if isinstance(scale, Affine):
        bias = bias + scale.bias
    if gain is not None:
        factor, bias = factor * gain, bias * gain
    return layer.weight * factor[:, None], bias


def scaled(out: Tensor, branches: Sequence[Branch]) -> Tensor:
    """In the precision that the branches' scales would have given it: one number for all channels changes none."""
    for branch in branches:
        if isinstance(branch.scale, LayerScale | Affine):
            out = out.to(torch.promote_types(out.dtype, branch.scale.weight.dtype))
    return out


def across_patches(branch: Branch, body: PatchLinear, x: Tensor, layout: Layout) -> Tensor | None:
    """γ(P(αx + β) + b) = P(γαx + γβ) + bγ; None where there is no Affine or another map, or somebody waits for a call."""
    norm, scale = branch.norm, branch.scale
    if type(norm) is not Affine or type(body.map) is not AcrossPatches or type(scale) not in SCALES or not learn(norm, scale):
        return None
    if any(watched(part) for part in (norm, body.map, scale)):
        return None
    check_grid(layout, body.grid)
    factor = scale.weight.view(-1)  # type: ignore[operator]
    shift = body.map.bias[:, None] * factor
    if isinstance(scale, Affine):
        shift = shift + scale.bias
    out = body.map.product(torch.addcmul(factor * norm.bias, factor * norm.weight, x))
    return scaled(out + shift.to(out.dtype), [branch])
