"""Rewrite a model for inference: norms and scales are folded into linear layers, parallel branches become one.

Exact up to rounding. `fold` also returns what was rewritten and what was not, with the reason.
"""

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vitrail.deploy.folded_layers import (
    FoldedAttention,
    FoldedAttentionPooling,
    FoldedClassAttention,
    FoldedFeedForward,
    FoldedMlpPooling,
    FoldedModel,
    FoldedPatchLinear,
    FoldedResidual,
    PrecomputedPosBias,
    PrecomputedPosEmbed,
)
from vitrail.layers.attention import Attention, AxialAttention, TalkingHeads
from vitrail.layers.bit_resnet import ResNetStem, StandardizedConv, pad_same, standardize
from vitrail.layers.block import Branch, Residual
from vitrail.layers.convnet import ConvNetStem
from vitrail.layers.fold import (
    ChannelAffine,
    LinearMap,
    batch_norm_affine,
    concat_inputs,
    concat_outputs,
    concat_qkv,
    fold_into_conv,
    frozen_parameter,
    full_scale_affine,
    linear_map,
    scale_queries,
    split_norm,
)
from vitrail.layers.fused import restore
from vitrail.layers.layout import Layout
from vitrail.layers.mlp import FeedForward
from vitrail.layers.patch_embed import BasicBlock, BasicStem, LinearStem, LocalTransformerStem, TowerStem
from vitrail.layers.pooling import ClassAttentionBlock, ClassMlpBlock, PerClassHead, QueryPooling
from vitrail.layers.pos_embed import ABSOLUTE, RelativePosBias, RelativePosEmbed
from vitrail.layers.token_mixers import ConvMixer, PatchConv, PatchLinear
from vitrail.models.vision_transformer import VisionTransformer

# The first and the last linear layer of a body.
FIRST_AND_LAST: dict[type, tuple[str, str]] = dict.fromkeys((Attention, AxialAttention, TalkingHeads), ("qkv", "proj"))
FIRST_AND_LAST |= {FeedForward: ("fc1", "fc2"), PatchConv: ("enter", "leave")}

NORMS = "norms folded into the linear layer after them"
SCALES = "residual scales folded into the linear layer before them"
ATTENTION_SCALES = "attention scales folded into the queries"


@dataclass
class Notes:
    """What was rewritten and how often, and what was not, with the reason."""

    done: Counter[str] = field(default_factory=Counter)
    left: dict[str, None] = field(default_factory=dict)  # in order, each once

    def leave(self, reason: str) -> None:
        self.left[reason] = None


def fold(model: VisionTransformer) -> tuple[FoldedModel, Notes]:
    """A model for inference, made of the layers of `model`, which is changed: pass a copy."""
    notes = Notes()
    with torch.no_grad():
        restore(model).eval().requires_grad_(False)
        model.recompute = False
        model.dropout = nn.Identity()  # type: ignore[assignment]
        fold_stem(model.stem, notes)
        precompute_pos_embed(model, notes)
        scaled = not any(isinstance(table, RelativePosEmbed) for table in model.pos_embed)
        for index in range(len(model.blocks)):
            block = model.block(index)
            for name, residual in block.residuals().items():
                setattr(block, name, fold_residual(residual, model.architecture.width, scaled, notes))
        compute_only_prefix_tokens(model, notes)
        pooling = fold_pooling(model.pooling, notes) if isinstance(model.pooling, QueryPooling) else None
        model.pooling = None
        fold_heads(model, notes)
    return FoldedModel(model, pooling), notes


def fold_residual(residual: Residual, width: int, scaled: bool, notes: Notes) -> FoldedResidual:
    """The branches of a residual as one body where possible, else as several bodies that share a norm."""
    branches = [branch for branch in residual.branches if isinstance(branch, Branch)]
    kind, like = type(branches[0].body), next(residual.parameters())
    norms = [split_norm(branch.norm, width, like.device) for branch in branches]
    norm, before = norms[0][0], [affine for _, affine in norms]
    after = [full_scale_affine(branch.scale, width, like.device) for branch in branches]
    if not isinstance(residual.post, nn.Identity):
        notes.leave("norms after the sum (post-norm): no linear layer follows that is the only reader")
    bodies: list[nn.Module]
    if kind in FIRST_AND_LAST:
        name, last_name = FIRST_AND_LAST[kind]
        first = [linear_map(getattr(branch.body, name)).after(each) for branch, each in zip(branches, before, strict=True)]
        last = [linear_map(getattr(branch.body, last_name)).then(each) for branch, each in zip(branches, after, strict=True)]
        bodies = fold_bodies([branch.body for branch in branches], first, last, scaled, like, notes)
    elif kind is PatchLinear:
        bodies = [
            fold_patch_linear(branch.body, one, two, like) for branch, one, two in zip(branches, before, after, strict=True)
        ]
    else:
        kept = [fold_branch(branch, each, notes) for branch, each in zip(branches, after, strict=True)]
        return FoldedResidual(nn.Identity(), kept, residual.post)
    for branch in branches:
        notes.done[NORMS] += not isinstance(branch.norm, nn.Identity)
        notes.done[SCALES] += not isinstance(branch.scale, nn.Identity)
    return FoldedResidual(norm, bodies, residual.post)


def fold_bodies(
    bodies: list[nn.Module], first: list[LinearMap], last: list[LinearMap], scaled: bool, like: Tensor, notes: Notes
) -> list[nn.Module]:
    """Bodies with folded linear layers: one for all branches, or one per branch for talking heads and PatchConvNet."""
    body, kind = bodies[0], type(bodies[0])
    if kind in (Attention, AxialAttention, FeedForward):
        notes.done["residuals whose parallel branches became one"] += len(bodies) > 1
    if isinstance(body, FeedForward):
        return [FoldedFeedForward(concat_outputs(first).layer(like), body.activation, concat_inputs(last).layer(like))]
    if isinstance(body, Attention) and kind is not TalkingHeads:
        qkv, proj = concat_qkv(first), concat_inputs(last)
        if scaled:
            inner = len(qkv.weight) // 3
            qkv = scale_queries(qkv, inner, inner // (len(bodies) * body.heads))
        notes.done[ATTENTION_SCALES] += scaled
        if not scaled:
            notes.leave("attention scales: relative position scores are computed from unscaled queries")
        axis = body.axis if isinstance(body, AxialAttention) else ""
        return [FoldedAttention(qkv.layer(like), proj.layer(like), body.heads, len(bodies), 1.0 if scaled else None, axis)]
    for each, one, two in zip(bodies, first, last, strict=True):
        setattr(each, FIRST_AND_LAST[kind][0], one.layer(like))
        setattr(each, FIRST_AND_LAST[kind][1], two.layer(like))
        if isinstance(each, TalkingHeads):
            each.dropout = nn.Identity()
    if kind is TalkingHeads:
        notes.leave("talking heads: their linear maps are separated by a softmax, and their branches run one after the other")
    else:
        notes.leave("the depthwise convolution and the gates of PatchConvNet")
    return bodies


def fold_patch_linear(body: nn.Module, before: ChannelAffine, after: ChannelAffine, like: Tensor) -> FoldedPatchLinear:
    """A cross-patch layer with the affine maps before and after it: a factor per channel, a shift per patch and channel."""
    assert isinstance(body, PatchLinear)
    (scale, shift), (after_scale, after_shift) = before.tensors(), after.tensors()
    weight, bias = linear_map(body.map)
    assert bias is not None
    total_shift = after_scale * (weight.sum(1)[:, None] * shift + bias[:, None]) + after_shift
    return FoldedPatchLinear(weight.to(like), (scale * after_scale).to(like), total_shift.to(like), body.grid)


def fold_branch(branch: Branch, after: ChannelAffine, notes: Notes) -> Branch:
    """A branch that keeps its norm; the scale after a convolution is folded into it."""
    branch.drop_path, body = nn.Identity(), branch.body  # type: ignore[assignment]
    if not isinstance(body, ConvMixer):
        notes.leave("norms and scales of cross-patch MLPs: scales of channels do not commute with the activation")
        return branch
    if isinstance(body.point, nn.Linear):
        body.point = linear_map(body.point).then(after).layer(body.point.weight)
    else:
        fold_into_conv(body.spatial, after)
    notes.done[SCALES] += not isinstance(branch.scale, nn.Identity)
    branch.scale = nn.Identity()
    if not isinstance(branch.norm, nn.Identity):
        notes.leave("norms before padded convolutions: the padding has no shift")
    return branch


def compute_only_prefix_tokens(model: VisionTransformer, notes: Notes) -> None:
    """In the last block, compute the prefix tokens only: the class token pooling uses no others."""
    a = model.architecture
    if a.pooling != "class" or model.head_dense is not None or not len(model.blocks):
        return
    mix = model.block(-1).mix
    if not isinstance(mix, FoldedResidual) or not isinstance(mix.bodies[0], FoldedAttention):
        return
    if any(not isinstance(table, PrecomputedPosEmbed) for table in model.pos_embed):
        notes.leave("the last block computes all tokens: relative positions need all pairs of tokens")
        return
    mix.num_output_tokens = mix.bodies[0].num_output_tokens = a.num_prefix_tokens
    notes.done["last blocks that compute the prefix tokens only"] += 1


def fold_pooling(pooling: QueryPooling, notes: Notes) -> nn.Module:
    """The pooling with one norm, and with keys and values of the patches (or their sums) computed once for all blocks."""
    like = pooling.queries
    width = like.shape[-1]
    ffns, norms, inputs = [], [], []
    for block in pooling.blocks:
        assert isinstance(block, ClassAttentionBlock | ClassMlpBlock)
        (norm1, before1), (norm2, before2) = (split_norm(norm, width, like.device) for norm in (block.norm1, block.norm2))
        after1, after2 = (full_scale_affine(scale, width, like.device) for scale in (block.scale1, block.scale2))
        fc1, fc2 = linear_map(block.ffn.fc1).after(before2), linear_map(block.ffn.fc2).then(after2)
        ffns.append(FoldedFeedForward(fc1.layer(like), block.ffn.activation, fc2.layer(like)))
        norms.append(norm2)
        inputs.append((block, norm1, before1, after1))
        notes.done[NORMS] += 2 * (not isinstance(block.norm1, nn.Identity))
        notes.done[SCALES] += 2 * (not isinstance(block.scale1, nn.Identity))
    notes.done["pooling layers that process the patches once for all blocks"] += 1
    first_norm = inputs[0][1]
    if isinstance(inputs[0][0], ClassMlpBlock):
        rows, scales, shifts = [], [], []
        for block, _, before, after in inputs:
            assert isinstance(block, ClassMlpBlock)
            weight, bias = linear_map(block.gather)
            assert bias is not None
            (scale, shift), (after_scale, after_shift) = before.tensors(), after.tensors()
            rows.append(weight)
            scales.append(scale * after_scale)
            shifts.append(after_scale * (shift * weight.sum() + bias) + after_shift)
        tensors = (torch.cat(rows).to(like), torch.stack(scales).to(like), torch.stack(shifts).to(like))
        return FoldedMlpPooling(pooling.queries, first_norm, inputs[0][0].grid, *tensors, norms, ffns)
    blocks, pairs = [], []
    for (block, _, before, after), norm, ffn in zip(inputs, norms, ffns, strict=True):
        assert isinstance(block, ClassAttentionBlock)
        attention = block.attention
        query = scale_queries(linear_map(attention.q).after(before), width, width // attention.heads)
        notes.done[ATTENTION_SCALES] += 1
        pairs += [linear_map(attention.k).after(before), linear_map(attention.v).after(before)]
        proj = linear_map(attention.proj).then(after).layer(like)
        blocks.append(FoldedClassAttention(query.layer(like), proj, attention.heads, attention.keys == "all", norm, ffn))
    return FoldedAttentionPooling(pooling.queries, first_norm, concat_outputs(pairs).layer(like), blocks)


def fold_heads(model: VisionTransformer, notes: Notes) -> None:
    """Fold the weights of the final norm into the layers after it."""
    a = model.architecture
    readers = [model.pre_logits[0]] if isinstance(model.pre_logits, nn.Sequential) else [model.head, model.head_distillation]
    if model.head_dense is not None and not a.pool_norm:
        readers.append(model.head_dense)
    if isinstance(model.norm, nn.Identity) or any(isinstance(reader, nn.Identity) for reader in readers):
        if not isinstance(model.norm, nn.Identity):
            notes.leave("the final norm: there is no classifier after it")
        return
    like = next(model.norm.parameters())
    norm, affine = split_norm(model.norm, a.width, like.device)
    for reader in readers:
        if isinstance(reader, nn.Linear):
            new = linear_map(reader).after(affine).layer(like)
            reader.weight, reader.bias = new.weight, new.bias
        elif isinstance(reader, PerClassHead):
            weight = reader.weight.double()
            scale, shift = affine.tensors()
            reader.bias = frozen_parameter((reader.bias.double() + weight @ shift).to(like))
            reader.weight = frozen_parameter((weight * scale).to(like))
    model.norm = norm
    notes.done[NORMS] += 1


def precompute_pos_embed(model: VisionTransformer, notes: Notes) -> None:
    """Compute the position embeddings for the image size of the model in advance."""
    a = model.architecture
    layout = Layout(*model.grid, a.num_prefix_tokens)
    like = next(model.parameters())
    for index, table in enumerate(model.pos_embed):
        if a.pos_embed in ABSOLUTE:
            model.pos_embed[index] = PrecomputedPosEmbed(table, layout, like.device)
        elif isinstance(table, RelativePosBias):
            model.pos_embed[index] = PrecomputedPosBias(table, layout, like)
        else:
            notes.leave("relative position embeddings: their scores depend on the queries")
            continue
        notes.done["position embeddings computed in advance for the image size"] += 1


class PrecomputedConv(nn.Conv2d):
    """A `StandardizedConv` with filters standardized in advance."""

    def __init__(self, conv: StandardizedConv):
        super().__init__(conv.in_channels, conv.out_channels, conv.kernel_size[0], conv.stride[0], bias=False, device="meta")
        self.weight = frozen_parameter(standardize(conv.weight.double()).to(conv.weight))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(pad_same(x, self.kernel_size[0], self.stride[0]))


def fold_stem(stem: nn.Module, notes: Notes) -> None:
    """Fold batch norms into the convolutions before them, standardize filters in advance, fold the blocks of a stem."""
    if isinstance(stem, LocalTransformerStem):
        for index, residual in enumerate(stem.blocks):
            assert isinstance(residual, Residual)
            stem.blocks[index] = fold_residual(residual, stem.position.shape[-1], True, notes)
        return
    if isinstance(stem, ResNetStem):
        for module in list(stem.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, StandardizedConv):
                    setattr(module, name, PrecomputedConv(child))
                    notes.done["filters standardized in advance"] += 1
        notes.leave("group norms of the ResNet stem: their statistics depend on the image")
        return
    for conv, parent, name in norms_after_convs(stem):
        norm = getattr(parent, name)
        if isinstance(norm, nn.BatchNorm2d):
            fold_into_conv(conv, batch_norm_affine(norm))
            setattr(parent, name, nn.Identity())
            notes.done["batch norms folded into the convolutions before them"] += 1
        elif not isinstance(norm, nn.Identity):
            notes.leave("layer norms of the stem: no linear layer follows directly")


def norms_after_convs(stem: nn.Module) -> list[tuple[nn.Conv2d, nn.Module, str]]:
    """Each convolution of a stem with the parent and the name of the norm after it."""
    if isinstance(stem, LinearStem):
        return [(stem.proj, stem, "norm")]
    if isinstance(stem, BasicStem):
        inner = [pair for block in stem.stages.modules() if isinstance(block, BasicBlock) for pair in paired_norms(block)]
        return paired_norms(stem) + inner
    if isinstance(stem, TowerStem):
        return paired_norms(stem)
    if isinstance(stem, ConvNetStem):
        return [
            (layer, parent, name.replace("conv", "norm"))
            for parent in stem.modules()
            for name, layer in parent.named_children()
            if isinstance(layer, nn.Conv2d) and name.startswith("conv")
        ]
    layers = stem.layers
    assert isinstance(layers, nn.Sequential)
    return [(conv, layers, str(index + 1)) for index, conv in enumerate(layers) if isinstance(conv, nn.Conv2d)]


def paired_norms(parent: TowerStem | BasicStem | BasicBlock) -> list[tuple[nn.Conv2d, nn.Module, str]]:
    return [(conv, parent.norms, str(index)) for index, conv in enumerate(parent.convs) if isinstance(conv, nn.Conv2d)]
