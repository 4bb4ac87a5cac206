"""Faster equivalents of blocks for compiled training, and stochastic depth that skips computation.

`optimize_for_training(model)` replaces classes of modules in place: modules, parameters, their names and registered hooks stay,
and `restore(model)` undoes it. The fused classes run while training and fall back to the plain ones in evaluation mode, for
export, and where a hook is registered on a module whose call they would skip.

- `FusedBranch` folds the weights of the norm and the residual scale into the linear layers next to them. The gradient of a scale
  by itself is a sum over all tokens, for which the output of the layer must be stored; folded, it is a sum over the gradient of
  a weight.
- `FusedResidual` runs parallel branches as one: one norm, one wide linear layer, one attention with all heads.
- `FusedFeedForward` adds the bias and applies GELU in one kernel (`kernels.bias_gelu`).

Folding is repeated in every forward pass, in the precision of the weights: under autocast in float32, and the folded weights are
rounded once. Without torch.compile all of this is more small kernels to launch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.layers.attention import Attention, TalkingHeads, scaled_dot_product_attention
from vitrail.layers.block import Branch, Residual
from vitrail.layers.drop_path import DropPath
from vitrail.layers.fold import ChannelAffine, LinearMap, concat_inputs, concat_outputs, concat_qkv, scale_affine
from vitrail.layers.kernels import exporting, has_hooks, select_bias_gelu
from vitrail.layers.layer_scale import ConstantScale, LayerScale, ScalarScale
from vitrail.layers.layout import Layout, check_grid
from vitrail.layers.mlp import FeedForward
from vitrail.layers.norm import ACTIVATIONS, Affine, activation
from vitrail.layers.token_mixers import PatchConv, PatchLinear, TokenLinear

Model = TypeVar("Model", bound=nn.Module)


def optimize_for_training(model: Model) -> Model:
    """Replace the blocks' classes by the fused ones, in place. For models that are compiled."""
    return fuse_bias_gelu(fold_scales(fuse_branches(model)))


def restore(model: Model) -> Model:
    """Undo `optimize_for_training`."""
    return fuse_bias_gelu(fold_scales(fuse_branches(model, False), False), False)


def fuse_branches(model: Model, enabled: bool = True) -> Model:
    """Run parallel branches as one while training, or one after the other."""
    return _replace_class(model, Residual, FusedResidual, enabled)


def fold_scales(model: Model, enabled: bool = True) -> Model:
    """Fold norm weights and residual scales into linear layers while training, or not."""
    return _replace_class(model, Branch, FusedBranch, enabled)


def fuse_bias_gelu(model: Model, enabled: bool = True) -> Model:
    """Add biases and apply GELU in one kernel, or not."""
    return _replace_class(model, FeedForward, FusedFeedForward, enabled)


def _replace_class(model: Model, plain: type[nn.Module], fused: type[nn.Module], enabled: bool) -> Model:
    old, new = (plain, fused) if enabled else (fused, plain)
    for module in model.modules():
        if type(module) is old:
            module.__class__ = new
    return model


class FusedFeedForward(FeedForward):
    """`FeedForward` with bias and GELU in one kernel where there is one for the input."""

    def forward(self, x: Tensor, layout: Layout | None = None, relative: nn.Module | None = None) -> Tensor:
        out: Tensor = self.dropout(self.fc2(self.dropout(self.hidden(x))))
        return out

    def hidden(self, x: Tensor, linear: LinearMap | None = None) -> Tensor:
        """activation(fc1(x)) [B, T, hidden]; `linear` is used instead of the weights of fc1."""
        fc1, act = self.fc1, self.activation
        weight, bias = linear or (fc1.weight, fc1.bias)
        exact = type(act) is nn.GELU and act.approximate == "none"
        if exact and bias is not None and type(fc1) is nn.Linear and not has_hooks(fc1, act):
            kernel = select_bias_gelu(x)
            if kernel is not None:
                return kernel(F.linear(x, weight), bias)
        out: Tensor = act(fc1(x) if linear is None else F.linear(x, *linear))
        return out


# Folded scales

LEARNED_SCALES = (LayerScale, ScalarScale, Affine)  # nothing is stored for the gradient of a constant
FIRST_AND_LAST = {Attention: ("qkv", "proj"), TalkingHeads: ("qkv", "proj"), PatchConv: ("enter", "leave")}
FIRST_AND_LAST |= dict.fromkeys((FeedForward, FusedFeedForward), ("fc1", "fc2"))  # linear layers of the bodies


class FusedBranch(Branch):
    """`Branch` with the norm's weights and the residual scale folded into the linear layers next to them while training."""

    def forward(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        folded = folded_branch(self, x, layout, relative) if self.training else None
        return super().forward(x, layout, relative) if folded is None else self.drop_path(folded)


def folded_branch(branch: Branch, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor | None:
    """scale(body(norm(x))) for tokens [B, T, D] with folded weights; None where nothing can be folded."""
    norm, body, scale = branch.norm, branch.body, branch.scale
    if is_float16(x) or has_hooks(body) or exporting():
        return None
    if type(body) is PatchLinear:
        return folded_patch_linear(branch, body, x, layout)
    if type(body) not in FIRST_AND_LAST:
        return None
    first, last = (getattr(body, name) for name in FIRST_AND_LAST[type(body)])
    fold_norm, fold_scale = can_fold_norm(norm, first), can_fold_scale(body, last, scale)
    if not (fold_norm or fold_scale):
        return None
    linear = norm_folded(norm, first) if fold_norm else None
    inner = apply_inner(body, normalize(norm, x) if fold_norm else norm(x), layout, relative, linear)
    if fold_scale:
        return promote(F.linear(inner, *scale_folded(scale, last)), [branch])
    out = last(inner)
    scaled: Tensor = scale(body.dropout(out) if isinstance(body, Attention | FeedForward) else out)
    return scaled


def apply_inner(
    body: nn.Module, x: Tensor, layout: Layout, relative: nn.Module | None, linear: LinearMap | None = None
) -> Tensor:
    """Everything in a body up to the input of its last linear layer; `linear` is used instead of its first one."""
    if isinstance(body, FeedForward):
        out: Tensor = body.dropout(mlp_hidden(body, x, linear))
        return out
    first = getattr(body, FIRST_AND_LAST[type(body)][0])
    x = first(x) if linear is None else F.linear(x, *linear)
    if isinstance(body, PatchConv):
        return body.convolve(x, layout)
    assert isinstance(body, Attention)
    return body.attend(x, layout, relative)


def mlp_hidden(mlp: FeedForward, x: Tensor, linear: LinearMap | None = None) -> Tensor:
    """activation(fc1(x)); `linear` is used instead of the weights of fc1."""
    if isinstance(mlp, FusedFeedForward):
        return mlp.hidden(x, linear)
    out: Tensor = mlp.activation(mlp.fc1(x) if linear is None else F.linear(x, *linear))
    return out


def can_fold_norm(norm: nn.Module, layer: nn.Module) -> bool:
    """Whether the weights of a norm can be folded into the layer after it, and are trained: else there is nothing to gain."""
    if type(norm) not in (nn.LayerNorm, Affine) or type(layer) is not nn.Linear or has_hooks(norm, layer):
        return False
    return norm.weight is not None and norm.bias is not None and are_trained(norm, layer)


def can_fold_scale(body: nn.Module, layer: nn.Module, scale: nn.Module) -> bool:
    """Whether a residual scale can be folded into the layer before it, and is trained; dropout between them prevents that."""
    if type(scale) not in LEARNED_SCALES or type(layer) is not nn.Linear or layer.bias is None or has_hooks(scale, layer):
        return False
    dropout = getattr(body, "dropout", None)
    return are_trained(scale, layer) and (dropout is None or is_identity(dropout))


def are_trained(*modules: nn.Module) -> bool:
    return all(module.weight.requires_grad for module in modules)


def is_identity(module: nn.Module) -> bool:
    """Whether a module returns its input and has no hooks."""
    kind = type(module)
    return (kind is nn.Identity or (kind is nn.Dropout and (module.p == 0.0 or not module.training))) and not has_hooks(module)


def is_float16(x: Tensor) -> bool:
    """Whether linear layers compute in float16, in which weights times a LayerScale of 1e-6 would be zero."""
    autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    return (torch.get_autocast_dtype(x.device.type) if autocast else x.dtype) == torch.float16


def normalize(norm: nn.Module, x: Tensor) -> Tensor:
    """A norm without its weights."""
    return F.layer_norm(x, norm.normalized_shape, eps=norm.eps) if isinstance(norm, nn.LayerNorm) else x


def norm_folded(norm: nn.Module, layer: nn.Linear) -> LinearMap:
    """A linear layer with the weights of the norm before it."""
    assert isinstance(norm, nn.LayerNorm | Affine)
    return LinearMap(layer.weight, layer.bias).after(ChannelAffine(norm.weight, norm.bias))


def scale_folded(scale: nn.Module, layer: nn.Linear, drop_path: DropPath | None = None) -> LinearMap:
    """A linear layer with the residual scale after it, and with the factor of stochastic depth."""
    affine = scale_affine(scale, layer.bias)
    if drop_path is not None and drop_path.active:
        affine = affine.multiply(drop_path.scales[drop_path.keep_prob.dtype], layer.bias)
    return LinearMap(layer.weight, layer.bias).then(affine)


def promote(out: Tensor, branches: Sequence[Branch]) -> Tensor:
    """The output in the precision that the residual scales would have given it by type promotion; scalars do not promote."""
    for branch in branches:
        if isinstance(branch.scale, LayerScale | Affine):
            out = out.to(torch.promote_types(out.dtype, branch.scale.weight.dtype))
    return out


def folded_patch_linear(branch: Branch, body: PatchLinear, x: Tensor, layout: Layout) -> Tensor | None:
    """γ(P(αx + β) + b) = P(γαx + γβ) + bγ for ResMLP's cross-patch layer P; None where that is not possible.

    A map over patches commutes with scales of channels, so both scales become one before the map.
    """
    norm, scale, linear = branch.norm, branch.scale, body.map
    if type(norm) is not Affine or type(linear) is not TokenLinear or type(scale) not in LEARNED_SCALES:
        return None
    if not are_trained(norm, scale) or has_hooks(norm, linear, scale):
        return None
    if body.interpolate and layout.grid != body.grid:
        return None
    check_grid(layout, body.grid)
    factor = scale.weight.view(-1)  # type: ignore[operator]
    shift = linear.bias[:, None] * factor
    if isinstance(scale, Affine):
        shift = shift + scale.bias
    out = linear.product(torch.addcmul(factor * norm.bias, factor * norm.weight, x))
    return promote(out + shift.to(out.dtype), [branch])


# Parallel branches as one

SCALES = (nn.Identity, LayerScale, ScalarScale, ConstantScale, Affine)
PLAIN_ACTIVATIONS = frozenset(type(activation(kind)) for kind in ACTIVATIONS)  # without parameters


class FusedResidual(Residual):
    """`Residual` with its parallel branches as one while training."""

    def update(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        fused = None
        if self.training and relative is None and len(self.branches) > 1:
            fused = fused_branches([branch for branch in self.branches if isinstance(branch, Branch)], x)
        return super().update(x, layout, relative) if fused is None else fused


def fused_branches(branches: Sequence[Branch], x: Tensor) -> Tensor | None:
    """The sum of parallel branches of tokens [B, T, D]; None where they must run one after the other.

    Stochastic depth draws the same random numbers as it would for separate branches.
    """
    if not all(can_fuse(branch, branches[0]) for branch in branches) or is_float16(x) or exporting():
        return None
    body, normed = branches[0].body, normalize(branches[0].norm, x)
    first, last = FIRST_AND_LAST[type(body)]
    inputs = [norm_folded(branch.norm, getattr(branch.body, first)) for branch in branches]
    if isinstance(body, FeedForward):
        inner = mlp_hidden(body, normed, concat_outputs(inputs))
    else:
        assert isinstance(body, Attention)
        qkv = F.linear(normed, *concat_qkv(inputs)).unflatten(-1, (3, len(branches) * body.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        inner = scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
    outputs = [scale_folded(branch.scale, getattr(branch.body, last), branch.drop_path) for branch in branches]
    if not branches[0].drop_path.active:
        return promote(F.linear(inner, *concat_inputs(outputs)), branches)
    keep = torch.cat([branch.drop_path.sample_mask(x) for branch in branches], -1).unsqueeze(-1)  # [B, 1, branches, 1]
    inner = (inner.unflatten(-1, (len(branches), -1)) * keep.to(inner.dtype)).flatten(-2)
    out = promote(F.linear(inner, torch.cat([weight for weight, _ in outputs], 1)), branches)
    biases = torch.stack([bias for _, bias in outputs if bias is not None])
    return out + (keep * biases).sum(-2).to(torch.promote_types(out.dtype, x.dtype))


def can_fuse(branch: Branch, first: Branch) -> bool:
    """Whether a branch can run together with the first one.

    Both have a LayerNorm, plain attention or an MLP of the same kind, a residual scale, no dropout and no hooks.
    """
    body, norm, drop_path = branch.body, branch.norm, branch.drop_path
    if type(body) is not type(first.body) or type(norm) is not nn.LayerNorm or type(branch.scale) not in SCALES:
        return False
    if norm.weight is None or norm.bias is None or norm.eps != getattr(first.norm, "eps", None):
        return False
    modules: tuple[nn.Module, ...]
    if type(body) is Attention:
        layers, modules = (body.qkv, body.proj), ()
        alike = body.heads == getattr(first.body, "heads", None) and not body.attention_dropout
    elif isinstance(body, FeedForward) and type(body) in FIRST_AND_LAST:
        layers, modules = (body.fc1, body.fc2), (body.activation,)
        alike = same_activation(body.activation, first.body.activation)  # type: ignore[arg-type]
    else:
        return False
    if not alike or not is_identity(body.dropout) or any(type(layer) is not nn.Linear for layer in layers):
        return False
    alike = drop_path.active == first.drop_path.active and (drop_path.training or not drop_path.active)
    return alike and not has_hooks(branch, norm, body, branch.scale, drop_path, *layers, *modules)


def same_activation(one: nn.Module, other: nn.Module) -> bool:
    alike = type(one) is type(other) and getattr(one, "approximate", None) == getattr(other, "approximate", None)
    return alike and type(one) in PLAIN_ACTIVATIONS


# Stochastic depth that computes a branch for the images that keep it only (drop_path_kind="skip")


class Subset(NamedTuple):
    """Some rows of a batch: their `rows` [k], ascending, and the `position` [B] of each row of the batch among them, or -1."""

    rows: Tensor
    position: Tensor


class SubsetDropPath(DropPath):
    """Keeps the branch for a fixed number of images of every group, chosen at random; `SubsetResidual` calls its methods.

    The trainer sets `group_size`, `num_kept` and `is_part` together with `noise`. For a batch that is a part of a group, noise
    has the ranks of its images in the group, divided by `group_size`.
    """

    group_size: int = 0  # 0: the batch
    num_kept: int = 0  # of a group
    is_part: bool = False

    def forward(self, x: Tensor) -> Tensor:
        return x

    def count_kept(self, group_size: int) -> int:
        return max(round(group_size * (1.0 - self.rate)), 1)

    def sample_subset(self, x: Tensor) -> Subset:
        """The images of a batch [B, ...] of whole groups that keep the branch."""
        if not self.group_size or len(x) % self.group_size:
            return choose_subset(self.uniform(x).view(1, -1), self.count_kept(len(x)))
        return choose_subset(self.uniform(x).view(-1, self.group_size), self.num_kept)

    def sample_part(self, x: Tensor) -> Tensor:
        """Factors [B, 1, ...] of the branch for a part of a group: zero for the images that do not keep it."""
        share = self.num_kept / self.group_size
        return (self.uniform(x) < share) / share


class SubsetResidual(Residual):
    """`Residual` that computes each branch while training only for the images that keep it.

    A batch that is a part of a group has any number of these: then the branch is computed for all images and masked.
    """

    def forward(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        if not self.training:
            return super().forward(x, layout, relative)
        total = x
        for branch in self.branches:
            assert isinstance(branch, Branch)
            drop_path = branch.drop_path
            assert isinstance(drop_path, SubsetDropPath)
            if drop_path.is_part:
                update = branch(x, layout, relative)
                total = total + (update * drop_path.sample_part(x)).to(total.dtype)
                continue
            subset = drop_path.sample_subset(x)
            update = branch(gather_rows(x, subset), layout, relative)
            total = total + scatter_rows(update * (x.shape[0] / subset.rows.shape[0]), subset).to(total.dtype)
        out: Tensor = self.post(total)
        return out


def choose_subset(noise: Tensor, count: int) -> Subset:
    """The `count` images of each group with the lowest of the random numbers [groups, images]."""
    groups, size = noise.shape
    rows = noise.argsort(1)[:, :count].sort(1).values
    rows = (rows + size * torch.arange(groups, device=noise.device)[:, None]).flatten()
    order = torch.arange(len(rows), device=noise.device)
    return Subset(rows, rows.new_full((groups * size,), -1).scatter(0, rows, order))


# Each function is the gradient of the other. Both read by index and write in order: nothing is zeroed first or added atomically,
# and torch.compile can fuse them with what comes before and after.


def gather_rows(x: Tensor, subset: Subset) -> Tensor:
    """[B, ...] to [k, ...]."""
    out: Tensor = GatherRows.apply(x, *subset)  # type: ignore[no-untyped-call]
    return out


def scatter_rows(x: Tensor, subset: Subset) -> Tensor:
    """[k, ...] to [B, ...], zero in the other rows."""
    out: Tensor = ScatterRows.apply(x, *subset)  # type: ignore[no-untyped-call]
    return out


def scatter_by_position(x: Tensor, position: Tensor) -> Tensor:
    inside = (position >= 0).view(-1, *[1] * (x.ndim - 1))
    return torch.where(inside, x.index_select(0, position.clamp_min(0)), 0)


class GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, position: Tensor) -> Tensor:
        ctx.save_for_backward(position)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return scatter_by_position(gradient, *ctx.saved_tensors), None, None


class ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, position: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return scatter_by_position(x, position)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, *ctx.saved_tensors), None, None
