"""Parallel branches as one, while training: one norm, one wide product, one attention of branches x heads, one product that sums.

Modules, parameters and their names stay what they are. Every pass folds what norms and scales learned into the products and lays
the branches' weights side by side, and gradients go back the same way. Folding is done in the precision of the weights (single
precision under autocast, which rounds the folded weights once, as it would the others).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.layers.attention import Attention, FeedForward
from vitrail.layers.block import Branch, ConstantScale, LayerScale, Residual, ScalarScale
from vitrail.layers.fused_scales import bare, entering, keeps_small_numbers, leaving, scaled
from vitrail.layers.kernels import exporting
from vitrail.layers.norm import ACTIVATIONS, Affine, activation
from vitrail.layers.passing import idle, watched
from vitrail.layers.sdpa import attend

SCALES = (nn.Identity, LayerScale, ScalarScale, ConstantScale, Affine)
PLAIN = frozenset(type(activation(kind)) for kind in ACTIVATIONS)  # they learn nothing


def join_branches(model: nn.Module, join: bool = True) -> nn.Module:
    """Let the parallel branches of a model run as one while it trains, or one after the other again."""
    for part in model.modules():
        if isinstance(part, Residual):
            part.together = together if join and len(part.branches) > 1 else None
    return model


def together(branches: Sequence[Branch], x: Tensor) -> Tensor | None:
    """The sum of what the branches add to x [B, T, D]; None where they have to run one after the other.

    The coins of stochastic depth are drawn as they would draw them: the same images drop the same branches.
    """
    if not (all(fits(branch, branches[0]) for branch in branches) and keeps_small_numbers(x)) or exporting():
        return None
    body, normed = branches[0].body, bare(branches[0].norm, x)
    if isinstance(body, Attention):
        inner = mixed(branches, normed, body.heads)
        outputs = [leaving(branch.scale, branch.body.proj, gain(branch)) for branch in branches]  # type: ignore[arg-type]
    else:
        assert isinstance(body, FeedForward)
        inner = hidden(branches, body, normed)
        outputs = [leaving(branch.scale, branch.body.fc2, gain(branch)) for branch in branches]  # type: ignore[arg-type]
    weight = torch.cat([each for each, _ in outputs], 1)
    biases = torch.stack([each for _, each in outputs])
    if not branches[0].drop.active:
        return scaled(F.linear(inner, weight, biases.sum(0)), branches)
    chosen = torch.cat([branch.drop.chosen(x) for branch in branches], -1).unsqueeze(-1)  # [B, 1, branches, 1]
    inner = (inner.unflatten(-1, (len(branches), -1)) * chosen.to(inner.dtype)).flatten(-2)
    out = scaled(F.linear(inner, weight), branches)
    return out + (chosen * biases).sum(-2).to(torch.promote_types(out.dtype, x.dtype))


def fits(branch: Branch, first: Branch) -> bool:
    """Whether a branch is a LayerNorm, plain attention or an MLP, and a scale, like the first, without dropout or onlookers."""
    body, norm, drop = branch.body, branch.norm, branch.drop
    if type(body) is not type(first.body) or type(norm) is not nn.LayerNorm or type(branch.scale) not in SCALES:
        return False
    if norm.weight is None or norm.bias is None or norm.eps != getattr(first.norm, "eps", None):
        return False
    others: tuple[nn.Module, ...]
    if type(body) is Attention:
        layers, others = (body.qkv, body.proj), ()
        alike = body.heads == getattr(first.body, "heads", None) and not body.attention_dropout
    elif type(body) is FeedForward:
        layers, others = (body.fc1, body.fc2), (body.activation,)
        alike = same_activation(body, first.body)
    else:
        return False
    if not alike or not idle(body.dropout) or any(type(layer) is not nn.Linear for layer in layers) or drop.skip:
        return False
    parts = (branch, norm, body, branch.scale, drop, *layers, *others)
    alike = drop.active == first.drop.active and (drop.training or not drop.active)
    return alike and not any(watched(part) for part in parts)


def same_activation(body: FeedForward, first: nn.Module) -> bool:
    ours, theirs = body.activation, first.activation
    alike = type(ours) is type(theirs) and getattr(ours, "approximate", None) == getattr(theirs, "approximate", None)
    return alike and type(ours) in PLAIN


def mixed(branches: Sequence[Branch], x: Tensor, heads: int) -> Tensor:
    """All branches' heads, [B, T, D] to [B, T, branches * D]."""
    inputs = [entering(branch.norm, branch.body.qkv) for branch in branches]  # type: ignore[arg-type]
    weight = torch.cat([each.unflatten(0, (3, -1)) for each, _ in inputs], 1).flatten(0, 1)
    bias = torch.cat([each.unflatten(0, (3, -1)) for _, each in inputs], 1).flatten()
    query, key, value = F.linear(x, weight, bias).unflatten(-1, (3, len(branches) * heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return attend(query, key, value).transpose(1, 2).flatten(2)


def hidden(branches: Sequence[Branch], body: FeedForward, x: Tensor) -> Tensor:
    """All branches' hidden units, [B, T, D] to [B, T, branches * hidden], as the first one's body computes its own."""
    inputs = [entering(branch.norm, branch.body.fc1) for branch in branches]  # type: ignore[arg-type]
    return body.inner(x, product=(torch.cat([each for each, _ in inputs]), torch.cat([each for _, each in inputs])))


def gain(branch: Branch) -> Tensor | None:
    """What survivors of stochastic depth are multiplied by."""
    return branch.drop.gain if branch.drop.active else None
