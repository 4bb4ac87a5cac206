"""From an `Architecture` to modules: which field selects which layer."""

from collections.abc import Callable
from typing import Any

from torch import nn

from vitrail.layers import patch_embed
from vitrail.layers.attention import Attention, AxialAttention, TalkingHeads
from vitrail.layers.bit_resnet import ResNetStem
from vitrail.layers.block import Block, Branch, Residual
from vitrail.layers.convnet import ConvNetStem
from vitrail.layers.drop_path import DropPath, drop_path_rates
from vitrail.layers.fused import SubsetDropPath, SubsetResidual
from vitrail.layers.layer_scale import ShiftedLinear, residual_scale
from vitrail.layers.layout import Grid
from vitrail.layers.mlp import FeedForward
from vitrail.layers.norm import token_norm
from vitrail.layers.pooling import ClassAttention, ClassAttentionBlock, ClassMlpBlock, QueryPooling
from vitrail.layers.token_mixers import ConvMixer, PatchConv, PatchLinear, PatchMlp
from vitrail.models.config import Architecture

Stem = (
    patch_embed.LinearStem
    | patch_embed.ConvStem
    | patch_embed.TowerStem
    | patch_embed.BasicStem
    | patch_embed.HmlpStem
    | patch_embed.LocalTransformerStem
    | ResNetStem
    | ConvNetStem
)


def make_stem(a: Architecture) -> Stem:
    match a.stem:
        case "linear":
            return patch_embed.LinearStem(a.channels, a.width, a.patch_size, a.stem_norm, a.stem_activation)
        case "conv":
            return patch_embed.ConvStem(a.channels, a.width, a.patch_size, a.stem_norm, a.stem_activation)
        case "tower":
            options = (a.stem_width, a.stem_kernels, a.stem_strides, a.stem_norm, a.stem_activation)
            return patch_embed.TowerStem(a.channels, a.width, *options)
        case "basic":
            size = (a.stem_width, a.stem_layers, a.stem_strides)
            return patch_embed.BasicStem(a.channels, a.width, *size, a.stem_norm, a.stem_activation)
        case "hmlp":
            return patch_embed.HmlpStem(a.channels, a.width, a.stem_strides, a.stem_norm, a.stem_activation)
        case "local_transformer":
            return patch_embed.LocalTransformerStem(a.channels, a.width, a.patch_size)
    if a.convnet is not None:
        return ConvNetStem(a.channels, a.convnet, drop_path_rates(a.drop_path, sum(a.convnet.depths), a.drop_path_schedule))
    patch = a.patch_size // a.backbone_stride if a.stem == "resnet" else 0
    return ResNetStem(a.channels, a.width, a.stem_layers, a.stem_width, patch, a.stem_eps)


def make_block(a: Architecture, index: int, grid: Grid) -> Block:
    rate = drop_path_rates(a.drop_path, a.depth, a.drop_path_schedule)[index]
    subset = rate > 0.0 and a.drop_path_kind == "skip"
    linear = ShiftedLinear if a.residual == "fixup" else nn.Linear

    def norm(place: str) -> nn.Module:
        return token_norm(a.norm if a.norm_place == place else "none", a.width, a.norm_eps, a.norm_groups)

    def branch(make_body: Callable[[], nn.Module]) -> Branch:
        scale = residual_scale(a.residual, a.width, a.layerscale_init, a.layerscale_init_mode, a.layerscale_frozen)
        return Branch(norm("pre"), make_body(), scale, SubsetDropPath(rate) if subset else DropPath(rate))

    def residual(make_body: Callable[[], nn.Module]) -> Residual:
        kind = SubsetResidual if subset else Residual
        return kind([branch(make_body) for _ in range(a.branches)], norm("post"))

    mix = None if a.mixer == "none" else residual(lambda: make_mixer(a, index, grid, linear))
    ffn = residual(lambda: FeedForward(a.width, a.hidden, a.activation, a.dropout, linear)) if a.mlp_ratio else None
    return Block(mix, ffn)


def make_mixer(a: Architecture, index: int, grid: Grid, linear: type[nn.Linear]) -> nn.Module:
    shared: dict[str, Any] = {
        "qkv_bias": a.qkv_bias,
        "dropout": a.dropout,
        "attention_dropout": a.attention_dropout,
        "linear": linear,
    }
    match a.mixer:
        case "attention":
            return Attention(a.width, a.heads, **shared)
        case "talking_heads":
            return TalkingHeads(a.width, a.heads, **shared)
        case "axial":
            return AxialAttention(a.width, a.heads, ("row", "column")[index % 2], **shared)
        case "linear":
            return PatchLinear(grid)
        case "mlp":
            return PatchMlp(grid, a.activation)
        case "patchconv":
            return PatchConv(a.width, a.activation)
    return ConvMixer(a.width, a.mixer)


def make_pooling(a: Architecture, grid: Grid) -> QueryPooling | None:
    """The query pooling; None for the class token and the mean, which need no module."""
    if a.pooling in ("class", "mean"):
        return None

    def norm() -> nn.Module:
        return token_norm(a.pooling_norm, a.width, a.norm_eps, a.norm_groups)

    def scale() -> nn.Module:
        kind = a.residual if a.pooling_scale else "plain"
        return residual_scale(kind, a.width, a.layerscale_init, a.layerscale_init_mode, a.layerscale_frozen)

    blocks: list[nn.Module] = []
    for _ in range(a.pooling_depth):
        ffn = FeedForward(a.width, a.pooling_hidden, a.activation)
        if a.pooling == "class_mlp":
            blocks.append(ClassMlpBlock(grid, ffn, norm, scale))
        else:
            class_attention = ClassAttention(a.width, a.pooling_heads, a.qkv_bias, a.pooling_keys)
            blocks.append(ClassAttentionBlock(class_attention, ffn, norm, scale))
    queries = a.classes if a.pooling == "per_class" else 2 if a.distillation else 1
    return QueryPooling(queries, a.width, blocks)
