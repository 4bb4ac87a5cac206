"""Rewrite a network for inference: what stands next to each other is multiplied out, branches become one.

Exact up to rounding. `fold` says what it did and what it had to leave.
"""

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vitrail.deploy.fold_algebra import (
    Map,
    PerChannel,
    channels_of,
    follow_convolution,
    joined_attention,
    joined_inputs,
    joined_outputs,
    map_of,
    split_norm,
    split_scale,
)
from vitrail.deploy.folded_layers import (
    AttentionReadout,
    FixedBias,
    FixedPositions,
    Folded,
    FoldedClassAttention,
    FoldedPatches,
    FoldedResidual,
    MlpReadout,
    WideAttention,
    WideFeedForward,
    frozen,
)
from vitrail.layers.attention import Attention, AxialAttention, ConvMixer, FeedForward, PatchConv, PatchLinear, TalkingHeads
from vitrail.layers.bit_resnet import ResNetStem, StandardizedConv, pad_same
from vitrail.layers.block import Branch, Residual
from vitrail.layers.layout import Layout
from vitrail.layers.patch_embed import BasicBlock, BasicStem, LinearStem, LocalTransformerStem, TowerStem
from vitrail.layers.pooling import ClassAttentionBlock, ClassMlpBlock, PerClassHead, QueryPooling
from vitrail.layers.pos_embed import ABSOLUTE, RelativeBias, RelativePositions
from vitrail.models.vision_transformer import VisionTransformer

# The first and the last product of a body.
ENDS: dict[type, tuple[str, str]] = dict.fromkeys((Attention, AxialAttention, TalkingHeads), ("qkv", "proj"))
ENDS |= {FeedForward: ("fc1", "fc2"), PatchConv: ("enter", "leave")}

NORMS = "norms folded into the product behind them"
SCALES = "residual scales folded into the product before them"
ATTENTION_SCALES = "attention scales folded into the queries"


@dataclass
class Notes:
    """What was rewritten and how often, and what was left with the reason."""

    done: Counter[str] = field(default_factory=Counter)
    left: dict[str, None] = field(default_factory=dict)  # in order, each once

    def leave(self, sentence: str) -> None:
        self.left[sentence] = None


def fold(model: VisionTransformer) -> tuple[Folded, Notes]:
    """Take a model apart (it is changed: give a copy) and make of it one that only answers."""
    notes = Notes()
    with torch.no_grad():
        model.eval().requires_grad_(False)
        model.recompute = False
        model.dropout = nn.Identity()  # type: ignore[assignment]
        fold_stem(model.stem, notes)
        fix_positions(model, notes)
        scaled = not any(isinstance(table, RelativePositions) for table in model.pos_embed)
        for index in range(len(model.blocks)):
            block = model.block(index)
            for name, residual in block.residuals().items():
                setattr(block, name, fold_residual(residual, model.architecture.width, scaled, notes))
        keep_only_what_is_read(model, notes)
        pooling = fold_readout(model.pooling, notes) if isinstance(model.pooling, QueryPooling) else None
        model.pooling = None
        fold_heads(model, notes)
    return Folded(model, pooling), notes


def fold_residual(residual: Residual, width: int, scaled: bool, notes: Notes) -> FoldedResidual:
    """The branches of a residual as one body where that is possible, else as bodies that share a norm."""
    branches = [branch for branch in residual.branches if isinstance(branch, Branch)]
    kind, like = type(branches[0].body), next(residual.parameters())
    norms = [split_norm(branch.norm, width, like.device) for branch in branches]
    core, before = norms[0][0], [learned for _, learned in norms]
    behind = [split_scale(branch.scale, width, like.device) for branch in branches]
    if not isinstance(residual.post, nn.Identity):
        notes.leave("norms behind the sum (post-norm): the stream itself goes through them")
    bodies: list[nn.Module]
    if kind in ENDS:
        enter, leave = ENDS[kind]
        first = [map_of(getattr(branch.body, enter)).after(each) for branch, each in zip(branches, before, strict=True)]
        last = [map_of(getattr(branch.body, leave)).then(each) for branch, each in zip(branches, behind, strict=True)]
        bodies = fold_bodies([branch.body for branch in branches], first, last, scaled, like, notes)
    elif kind is PatchLinear:
        bodies = [fold_patches(branch.body, one, two, like) for branch, one, two in zip(branches, before, behind, strict=True)]
    else:
        return FoldedResidual(
            nn.Identity(), [fold_branch(*pair, notes) for pair in zip(branches, behind, strict=True)], residual.post
        )
    for branch in branches:
        notes.done[NORMS] += not isinstance(branch.norm, nn.Identity)
        notes.done[SCALES] += not isinstance(branch.scale, nn.Identity)
    return FoldedResidual(core, bodies, residual.post)


def fold_bodies(
    bodies: list[nn.Module], first: list[Map], last: list[Map], scaled: bool, like: Tensor, notes: Notes
) -> list[nn.Module]:
    """Bodies with the folded maps: one for all branches, or one each where heads are mixed or patches convolved."""
    body, kind = bodies[0], type(bodies[0])
    if kind in (Attention, AxialAttention, FeedForward):
        notes.done["residuals whose parallel branches became one"] += len(bodies) > 1
    if isinstance(body, FeedForward):
        return [WideFeedForward(joined_outputs(first).layer(like), body.activation, joined_inputs(last).layer(like))]
    if isinstance(body, Attention) and kind is not TalkingHeads:
        qkv, proj = joined_attention(first, last, body.heads, scaled)
        notes.done[ATTENTION_SCALES] += scaled
        if not scaled:
            notes.leave("attention's scale: relative positions are scores of unscaled queries")
        axis = body.axis if isinstance(body, AxialAttention) else ""
        return [WideAttention(qkv.layer(like), proj.layer(like), body.heads, len(bodies), 1.0 if scaled else None, axis)]
    for each, enter, leave in zip(bodies, first, last, strict=True):
        setattr(each, ENDS[kind][0], enter.layer(like))
        setattr(each, ENDS[kind][1], leave.layer(like))
        if isinstance(each, TalkingHeads):
            each.dropout = nn.Identity()  # type: ignore[assignment]
    if kind is TalkingHeads:
        notes.leave("talking heads: the maps between heads stand around a softmax; their branches run one after the other")
    else:
        notes.leave("the convolution and the gates between the two products of PatchConvNet's branches")
    return bodies


def fold_patches(body: nn.Module, before: PerChannel, behind: PerChannel, like: Tensor) -> FoldedPatches:
    """Both affine maps around a map over patches: one factor per channel, one shift per patch and channel."""
    assert isinstance(body, PatchLinear)
    weight, bias = map_of(body.map)
    shift = behind.scale * (weight.sum(1)[:, None] * before.shift + bias[:, None]) + behind.shift
    return FoldedPatches(weight.to(like), (before.scale * behind.scale).to(like), shift.to(like), body.grid)


def fold_branch(branch: Branch, behind: PerChannel, notes: Notes) -> Branch:
    """A branch whose norm stays; a convolution takes the scale behind it."""
    branch.drop, body = nn.Identity(), branch.body  # type: ignore[assignment]
    if not isinstance(body, ConvMixer):
        notes.leave("norms and scales around cross-patch MLPs: factors per channel do not pass an activation over patches")
        return branch
    if isinstance(body.point, nn.Linear):
        body.point = map_of(body.point).then(behind).layer(body.point.weight)
    else:
        follow_convolution(body.spatial, behind)
    notes.done[SCALES] += not isinstance(branch.scale, nn.Identity)
    branch.scale = nn.Identity()
    if not isinstance(branch.norm, nn.Identity):
        notes.leave("norms before padded convolutions: the padding is not shifted, so a shift is no bias")
    return branch


def keep_only_what_is_read(model: VisionTransformer, notes: Notes) -> None:
    """Behind the last attention only the prefix tokens are read, so only theirs is computed."""
    a = model.architecture
    if a.pooling != "class" or model.head_dense is not None or not len(model.blocks):
        return
    mix = model.block(-1).mix
    if not isinstance(mix, FoldedResidual) or not isinstance(mix.bodies[0], WideAttention):
        return
    if any(not isinstance(table, FixedPositions) for table in model.pos_embed):
        notes.leave("the last block computes all tokens: its relative positions are those of all pairs")
        return
    mix.only = mix.bodies[0].only = a.trunk_tokens
    notes.done["last blocks that compute only the tokens that are read"] += 1


def fold_readout(pooling: QueryPooling, notes: Notes) -> nn.Module:
    """The pooling's blocks read patches that do not change: what they have in common is computed once."""
    like = pooling.queries
    width = like.shape[-1]
    ffns, norms, entrances = [], [], []
    for block in pooling.blocks:
        assert isinstance(block, ClassAttentionBlock | ClassMlpBlock)
        (norm1, before1), (norm2, before2) = (split_norm(norm, width, like.device) for norm in (block.norm1, block.norm2))
        behind1, behind2 = (split_scale(scale, width, like.device) for scale in (block.scale1, block.scale2))
        fc1, fc2 = map_of(block.ffn.fc1).after(before2), map_of(block.ffn.fc2).then(behind2)
        ffns.append(WideFeedForward(fc1.layer(like), block.ffn.activation, fc2.layer(like)))
        norms.append(norm2)
        entrances.append((block, norm1, before1, behind1))
        notes.done[NORMS] += 2 * (not isinstance(block.norm1, nn.Identity))
        notes.done[SCALES] += 2 * (not isinstance(block.scale1, nn.Identity))
    notes.done["pooling layers that norm and read the patches once for all blocks"] += 1
    core = entrances[0][1]
    if isinstance(entrances[0][0], ClassMlpBlock):
        gathers = [map_of(block.gather) for block, *_ in entrances if isinstance(block, ClassMlpBlock)]
        scale = torch.stack([before.scale * behind.scale for *_, before, behind in entrances])
        shift = torch.stack(
            [
                behind.scale * (before.shift * gather.weight.sum() + gather.bias) + behind.shift
                for (*_, before, behind), gather in zip(entrances, gathers, strict=True)
            ]
        )
        rows = torch.cat([gather.weight for gather in gathers]).to(like)
        return MlpReadout(pooling.queries, core, entrances[0][0].grid, rows, scale.to(like), shift.to(like), norms, ffns)
    blocks, pairs = [], []
    for (block, _, before, behind), norm, ffn in zip(entrances, norms, ffns, strict=True):
        assert isinstance(block, ClassAttentionBlock)
        attention = block.attention
        query = map_of(attention.q).after(before)
        factor = torch.full_like(query.bias, (width / attention.heads) ** -0.5)
        query = query.then(PerChannel(factor, torch.zeros_like(factor)))
        notes.done[ATTENTION_SCALES] += 1
        pairs += [map_of(attention.k).after(before), map_of(attention.v).after(before)]
        proj = map_of(attention.proj).then(behind).layer(like)
        blocks.append(FoldedClassAttention(query.layer(like), proj, attention.heads, attention.keys == "all", norm, ffn))
    return AttentionReadout(pooling.queries, core, joined_outputs(pairs).layer(like), blocks)


def fold_heads(model: VisionTransformer, notes: Notes) -> None:
    """What the final norm learned goes into the layers that read it."""
    a = model.architecture
    readers = [model.pre_logits[0]] if isinstance(model.pre_logits, nn.Sequential) else [model.head, model.head_distillation]
    if model.head_dense is not None and not a.pool_norm:
        readers.append(model.head_dense)
    if isinstance(model.norm, nn.Identity) or any(isinstance(reader, nn.Identity) for reader in readers):
        if not isinstance(model.norm, nn.Identity):
            notes.leave("the final norm: the model has no classifier")
        return
    like = next(model.norm.parameters())
    core, learned = split_norm(model.norm, a.width, like.device)
    for reader in readers:
        if isinstance(reader, nn.Linear):
            new = map_of(reader).after(learned).layer(like)
            reader.weight, reader.bias = new.weight, new.bias
        elif isinstance(reader, PerClassHead):
            weight = reader.weight.double()
            reader.bias = frozen((reader.bias.double() + weight @ learned.shift).to(like))
            reader.weight = frozen((weight * learned.scale).to(like))
    model.norm = core
    notes.done[NORMS] += 1


def fix_positions(model: VisionTransformer, notes: Notes) -> None:
    """Tables of positions computed for the model's own size."""
    a = model.architecture
    layout = Layout(*model.grid, a.trunk_tokens)
    like = next(model.parameters())
    for index, table in enumerate(model.pos_embed):
        if a.pos_embed in ABSOLUTE:
            model.pos_embed[index] = FixedPositions(table, layout, like.device)
        elif isinstance(table, RelativeBias):
            model.pos_embed[index] = FixedBias(table, layout, like)
        else:
            notes.leave("relative positions: their scores depend on the queries")
            continue
        notes.done["tables of positions computed for the model's size"] += 1


class FixedConv(nn.Conv2d):
    """A standardized convolution whose filters no longer change; padded as before."""

    def __init__(self, conv: StandardizedConv):
        super().__init__(conv.in_channels, conv.out_channels, conv.kernel_size[0], conv.stride[0], bias=False, device="meta")
        weight = conv.weight.double()
        mean = weight.mean((1, 2, 3), keepdim=True)
        deviation = weight.std((1, 2, 3), keepdim=True, correction=0)
        self.weight = frozen(((weight - mean) / (deviation + 1e-5)).to(conv.weight))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(pad_same(x, self.kernel_size[0], self.stride[0]))


def fold_stem(stem: nn.Module, notes: Notes) -> None:
    """Batch norms go into the convolutions before them; standardized filters are computed once; inner blocks are folded."""
    if isinstance(stem, LocalTransformerStem):
        for index, residual in enumerate(stem.blocks):
            assert isinstance(residual, Residual)
            stem.blocks[index] = fold_residual(residual, stem.position.shape[-1], True, notes)
        return
    if isinstance(stem, ResNetStem):
        for module in list(stem.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, StandardizedConv):
                    setattr(module, name, FixedConv(child))
                    notes.done["standardized filters computed once"] += 1
        notes.leave("the ResNet stem's group norms: their statistics are the image's")
        return
    for conv, home, name in norms_behind(stem):
        norm = getattr(home, name)
        if isinstance(norm, nn.BatchNorm2d):
            follow_convolution(conv, channels_of(norm))
            setattr(home, name, nn.Identity())
            notes.done["batch norms folded into the stem's convolutions"] += 1
        elif not isinstance(norm, nn.Identity):
            notes.leave("layer norms of the stem: an activation or the tokens follow, not a product")


def norms_behind(stem: nn.Module) -> list[tuple[nn.Conv2d, nn.Module, str]]:
    """(convolution, where the norm behind it lives, under which name) for the stems made of such pairs."""
    if isinstance(stem, LinearStem):
        return [(stem.proj, stem, "norm")]
    if isinstance(stem, BasicStem):
        inner = [pair for block in stem.stages.modules() if isinstance(block, BasicBlock) for pair in side_by_side(block)]
        return side_by_side(stem) + inner
    if isinstance(stem, TowerStem):
        return side_by_side(stem)
    layers = stem.layers
    assert isinstance(layers, nn.Sequential)
    return [(conv, layers, str(index + 1)) for index, conv in enumerate(layers) if isinstance(conv, nn.Conv2d)]


def side_by_side(home: TowerStem | BasicStem | BasicBlock) -> list[tuple[nn.Conv2d, nn.Module, str]]:
    return [(conv, home.norms, str(index)) for index, conv in enumerate(home.convs) if isinstance(conv, nn.Conv2d)]
