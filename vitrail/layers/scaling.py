"""Residual scales inside the last product of their branch, while training: γ(Wx + b) = (γW)x + γb.

The gradient of a scale behind the product is a sum over all that the product gave, which is kept for that alone. Inside, it is
a sum over the gradient of a weight. Modules, parameters and their names stay what they are, and every pass folds anew, in the
precision of the weights, as `joining` does.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.layers.joining import keeps_small_numbers, leaving, watched
from vitrail.layers.kernels import exporting
from vitrail.layers.layout import Layout
from vitrail.layers.mixers import Attention, FeedForward, PatchConv, TalkingHeads
from vitrail.layers.norms import Affine
from vitrail.layers.residual import Branch, LayerScale, ScalarScale

LEARNED = (LayerScale, ScalarScale, Affine)  # for a constant nothing is kept
LAST = {Attention: "proj", TalkingHeads: "proj", FeedForward: "fc2", PatchConv: "leave"}


def fold_scales(model: nn.Module, fold: bool = True) -> nn.Module:
    """Let residual scales be part of the product before them while a model trains, or stand by themselves again."""
    for part in model.modules():
        if isinstance(part, Branch):
            part.folded = folded if fold else None
    return model


def folded(branch: Branch, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor | None:
    """scale(body(x)) for normed tokens [B, T, D]; None where the scale has to stand by itself."""
    body, scale = branch.body, branch.scale
    layer = getattr(body, LAST.get(type(body), ""), None)
    if layer is None or not fits(body, layer, scale) or not keeps_small_numbers(x) or exporting():
        return None
    out = F.linear(body.inner(x, layout, relative), *leaving(scale, layer))  # type: ignore[operator]
    return out.to(torch.promote_types(out.dtype, scale.weight.dtype))  # type: ignore[arg-type]  # as the scale would have it


def fits(body: nn.Module, layer: nn.Module, scale: nn.Module) -> bool:
    """Whether a product and its scale are both learned, with nothing between them: no dropout, nobody who waits for a call."""
    if type(layer) is not nn.Linear or layer.bias is None or type(scale) not in LEARNED:
        return False
    if not (layer.weight.requires_grad and scale.weight.requires_grad):  # less is kept as it is
        return False
    dropout = getattr(body, "dropout", None)
    if isinstance(dropout, nn.Dropout) and (dropout.p > 0 or watched(dropout)):
        return False
    return not any(watched(part) for part in (body, layer, scale))
