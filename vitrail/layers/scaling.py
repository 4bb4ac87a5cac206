"""Scales of channels inside the products beside them, while training: γ(Wx + b) = (γW)x + γb, and W(αx + β) = (Wα)x + Wβ.

The gradient of a scale behind a product is a sum over all that the product gave, which is kept for that alone. Inside, it is
a sum over the gradient of a weight. So it is with ResMLP's Affine before a product; its maps over patches commute with scales of
channels, and the one behind them becomes part of the Affine before. Modules, parameters and their names stay what they are, and
every pass folds anew, in the precision of the weights, as `joining` does.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.layers.joining import hidden, keeps_small_numbers, leaving
from vitrail.layers.kernels import exporting
from vitrail.layers.layout import Layout
from vitrail.layers.mixers import Attention, FeedForward, PatchConv, PatchLinear, TalkingHeads, check_grid
from vitrail.layers.norms import Affine
from vitrail.layers.passing import watched
from vitrail.layers.residual import Branch, LayerScale, ScalarScale

LEARNED = (LayerScale, ScalarScale, Affine)  # for a constant nothing is kept
LAST = {Attention: "proj", TalkingHeads: "proj", FeedForward: "fc2", PatchConv: "leave"}


def fold_scales(model: nn.Module, fold: bool = True) -> nn.Module:
    """Let scales be part of the products beside them while a model trains, or stand by themselves again."""
    for part in model.modules():
        if isinstance(part, Branch):
            part.folded = folded if fold else None
    return model


def folded(branch: Branch, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor | None:
    """scale(body(norm(x))) for tokens [B, T, D]; None where the scale has to stand by itself."""
    body, scale = branch.body, branch.scale
    if type(scale) not in LEARNED or not scale.weight.requires_grad or not keeps_small_numbers(x) or exporting():
        return None
    if type(body) is PatchLinear:
        out = across_patches(branch, body, x, layout)
    else:
        layer = getattr(body, LAST.get(type(body), ""), None)
        if layer is None or not fits(body, layer, scale):
            return None
        out = F.linear(entered(branch, x, layout, relative), *leaving(scale, layer))
    if out is None:
        return None
    return out.to(torch.promote_types(out.dtype, scale.weight.dtype))  # type: ignore[arg-type]  # as the scale would have it


def fits(body: nn.Module, layer: nn.Module, scale: nn.Module) -> bool:
    """Whether a scale is right behind a product that learns: no dropout between them, nobody who waits for a call."""
    if type(layer) is not nn.Linear or layer.bias is None or not layer.weight.requires_grad:  # less is kept as it is
        return False
    dropout = getattr(body, "dropout", None)
    if isinstance(dropout, nn.Dropout) and (dropout.p > 0 or watched(dropout)):
        return False
    return not any(watched(part) for part in (body, layer, scale))


def entered(branch: Branch, x: Tensor, layout: Layout, relative: nn.Module | None) -> Tensor:
    """All of a body but its last product; an Affine before an MLP is part of its first."""
    norm, body = branch.norm, branch.body
    if type(norm) is Affine and type(body) is FeedForward and type(body.fc1) is nn.Linear:
        learned = norm.weight.requires_grad and body.fc1.weight.requires_grad
        if learned and not any(watched(part) for part in (norm, body.fc1, body.activation)):
            return hidden([branch], x)
    return body.inner(norm(x), layout, relative)  # type: ignore[operator]


def across_patches(branch: Branch, body: PatchLinear, x: Tensor, layout: Layout) -> Tensor | None:
    """γ(P(αx + β) + b) = P(γαx + γβ) + bγ; None where there is no Affine, or somebody waits for a call."""
    norm, scale = branch.norm, branch.scale
    if type(norm) is not Affine or not norm.weight.requires_grad:
        return None
    if any(watched(part) for part in (norm, body, body.map, scale)):
        return None
    check_grid(layout, body.grid)
    factor = scale.weight.view(-1)  # type: ignore[operator]
    shift = body.map.bias[:, None] * factor
    if isinstance(scale, Affine):
        shift = shift + scale.bias
    out = body.map.product(torch.addcmul(factor * norm.bias, factor * norm.weight, x))
    return out + shift.to(out.dtype)
