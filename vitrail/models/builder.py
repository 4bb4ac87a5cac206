"""From an architecture to its modules: the one place that knows which field makes which part."""

from typing import Any

from torch import nn

from vitrail.layers import attention, patch_embed
from vitrail.layers.bit_resnet import ResNetStem
from vitrail.layers.block import Block, Branch, Residual, ShiftedLinear, drop_path_rates, residual_scale
from vitrail.layers.norm import token_norm
from vitrail.layers.pooling import ClassAttention, ClassAttentionBlock, ClassMlpBlock, QueryPooling
from vitrail.layers.pos_embed import Grid
from vitrail.models.config import Architecture

Stem = (
    patch_embed.LinearStem
    | patch_embed.ConvStem
    | patch_embed.TowerStem
    | patch_embed.BasicStem
    | patch_embed.HmlpStem
    | patch_embed.LocalTransformerStem
    | ResNetStem
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
    patch = a.patch_size // a.backbone_stride if a.stem == "resnet" else 0
    return ResNetStem(a.channels, a.width, a.stem_layers, a.stem_width, patch, a.stem_eps)


def make_block(a: Architecture, index: int, grid: Grid) -> Block:
    drop = drop_path_rates(a.drop_path, a.depth, a.drop_path_schedule)[index]
    linear = ShiftedLinear if a.residual == "fixup" else nn.Linear

    def norm(place: str) -> nn.Module:
        return token_norm(a.norm if a.norm_place == place else "none", a.width, a.norm_eps, a.norm_groups)

    def residual(body) -> Residual:
        def branch() -> Branch:
            scale = residual_scale(a.residual, a.width, a.layerscale_init, a.layerscale_init_mode, a.layerscale_frozen)
            return Branch(norm("pre"), body(), scale, drop, a.drop_path_kind == "skip")

        return Residual(a.branches, branch, norm("post"))

    def feed_forward() -> nn.Module:
        return attention.FeedForward(a.width, a.hidden, a.activation, a.dropout, linear)

    mix = None if a.mixer == "none" else residual(lambda: make_mixer(a, index, grid, linear))
    return Block(mix, residual(feed_forward) if a.mlp_ratio else None)


def make_mixer(a: Architecture, index: int, grid: Grid, linear: type[nn.Linear]) -> nn.Module:
    shared: dict[str, Any] = {
        "qkv_bias": a.qkv_bias,
        "dropout": a.dropout,
        "attention_dropout": a.attention_dropout,
        "linear": linear,
    }
    match a.mixer:
        case "attention":
            return attention.Attention(a.width, a.heads, **shared)
        case "talking_heads":
            return attention.TalkingHeads(a.width, a.heads, **shared)
        case "axial":
            return attention.AxialAttention(a.width, a.heads, ("row", "column")[index % 2], **shared)
        case "linear":
            return attention.PatchLinear(grid)
        case "mlp":
            return attention.PatchMlp(grid, a.activation)
        case "patchconv":
            return attention.PatchConv(a.width, a.activation)
    return attention.ConvMixer(a.width, a.mixer)


def make_pooling(a: Architecture, grid: Grid) -> QueryPooling | None:
    """Blocks with queries of their own; the class token and the mean need no module."""
    if a.pooling in ("class", "mean"):
        return None

    def norm() -> nn.Module:
        return token_norm(a.pooling_norm, a.width, a.norm_eps, a.norm_groups)

    def scale() -> nn.Module:
        kind = a.residual if a.pooling_scale else "plain"
        return residual_scale(kind, a.width, a.layerscale_init, a.layerscale_init_mode, a.layerscale_frozen)

    blocks: list[nn.Module] = []
    for _ in range(a.pooling_depth):
        ffn = attention.FeedForward(a.width, a.pooling_hidden, a.activation)
        if a.pooling == "class_mlp":
            blocks.append(ClassMlpBlock(grid, ffn, norm, scale))
        else:
            class_attention = ClassAttention(a.width, a.pooling_heads, a.qkv_bias, a.pooling_keys)
            blocks.append(ClassAttentionBlock(class_attention, ffn, norm, scale))
    queries = a.classes if a.pooling == "per_class" else 2 if a.distillation else 1
    return QueryPooling(queries, a.width, blocks)
