"""Tensor names of timm's current models where they differ from the DeiT repository's: LayerScale, ResMLP, parallel
blocks, hybrids, ViTs with average pooling. CaiT and plain or distilled ViTs have the same names in both.
"""

import dataclasses
from typing import Any

from vitrail.checkpoints.codecs import (
    CHANNELS,
    SAME,
    Hints,
    Pair,
    Shapes,
    UnsupportedByFormat,
    count_members,
    infer_image_size,
    infer_num_heads,
    pair,
)
from vitrail.checkpoints.formats import convnets, deit
from vitrail.models.config import Architecture, resnet_stride
from vitrail.models.preprocessing import Preprocessing
from vitrail.models.vit import VIT

# The first convolution of a hybrid, with and without residual stages.
ROOTS = ("patch_embed.backbone.stem.conv.weight", "patch_embed.backbone.conv.weight")


def recognizes(shapes: Shapes) -> bool:
    """Whether there are names that only timm uses."""
    marks = ("blocks.0.ls1.gamma", "stem.proj.weight", "blocks.0.attns.0.norm.weight", *ROOTS, "fc_norm.weight")
    return any(mark in shapes for mark in marks) or ("pos_embed" in shapes and "cls_token" not in shapes)


def to_pair(key: str, a: Architecture) -> Pair:
    if a.convnet is not None:
        return convnets.to_pair(key, a)
    if a.mixer == "linear":
        return resmlp_pair(key, a)
    parts = {"mixer": ("attention", "talking_heads"), "stem": ("linear", "resnet"), "dense_head": (False,)}
    missing = [f"{name}={getattr(a, name)}" for name, known in parts.items() if getattr(a, name) not in known]
    if missing:
        raise UnsupportedByFormat(f"timm has no model with {', '.join(missing)}")
    match key.split("."):
        case ["stem", *path] if a.stem == "resnet":
            return pair(key, f"patch_embed.{resnet_name(path, a)}")
        case ["stem", "proj", leaf] if a.stem == "linear":
            return pair(key, f"patch_embed.proj.{leaf}")
        case ["blocks", index, half, "branches", branch, *path] if a.branches > 1:
            return pair(key, f"blocks.{index}.{parallel_name(half, branch, path, a)}")
        case ["blocks", index, half, "branches", "0", "scale", "weight"] if a.mixer == "attention" and a.residual == "layerscale":
            return pair(key, f"blocks.{index}.ls{1 if half == 'mix' else 2}.gamma")
        case ["norm", leaf] if a.pool_norm:
            return pair(key, f"fc_norm.{leaf}")
    try:
        return deit.to_pair(key, a)
    except UnsupportedByFormat as error:
        raise UnsupportedByFormat(str(error).replace("the DeiT format", "timm")) from None


def parallel_name(half: str, branch: str, path: list[str], a: Architecture) -> str:
    root = f"{'attns' if half == 'mix' else 'ffns'}.{branch}"
    match path:
        case ["norm", leaf]:
            return f"{root}.norm.{leaf}"
        case ["scale", "weight"] if a.residual == "layerscale":
            return f"{root}.ls.gamma"
        case ["body", *rest, leaf] if a.mixer == "attention" and leaf != "shift":
            return f"{root}.{'attn' if half == 'mix' else 'mlp'}.{'.'.join(rest)}.{leaf}"
    raise UnsupportedByFormat(f"timm has no parallel block with mixer={a.mixer}, residual={a.residual}")


def resnet_name(path: list[str], a: Architecture) -> str:
    match path:
        case ["root", leaf] if not a.stem_layers:
            return f"backbone.conv.{leaf}"
        case ["root_norm", leaf] if not a.stem_layers:
            return f"backbone.norm.{leaf}"
        case ["root", leaf]:
            return f"backbone.stem.conv.{leaf}"
        case ["root_norm", leaf]:
            return f"backbone.stem.norm.{leaf}"
        case ["stages", stage, unit, "shortcut", part, leaf]:
            return f"backbone.stages.{stage}.blocks.{unit}.downsample.{('conv', 'norm')[int(part)]}.{leaf}"
        case ["stages", stage, unit, name, leaf]:
            return f"backbone.stages.{stage}.blocks.{unit}.{name}.{leaf}"
    return ".".join(path)


def resmlp_pair(key: str, a: Architecture) -> Pair:
    match key.split("."):
        case ["stem", "proj", leaf] if a.stem == "linear":
            return pair(key, f"stem.proj.{leaf}")
        case ["blocks", index, half, "branches", "0", *path]:
            block, number = f"blocks.{index}", 1 if half == "mix" else 2
            match path:
                case ["norm", leaf]:
                    codec = CHANNELS if a.norm == "affine" else SAME
                    return pair(key, f"{block}.norm{number}.{deit.norm_leaf(leaf, a)}", codec)
                case ["scale", "weight"] if a.residual == "layerscale":
                    return pair(key, f"{block}.ls{number}")
                case ["body", "map", leaf]:
                    return pair(key, f"{block}.linear_tokens.{leaf}")
                case ["body", name, leaf] if half == "ffn":
                    return pair(key, f"{block}.mlp_channels.{name}.{leaf}")
        case ["norm", leaf]:
            return pair(key, f"norm.{deit.norm_leaf(leaf, a)}", CHANNELS if a.norm == "affine" else SAME)
        case ["head", leaf] if a.pooling == "mean":
            return pair(key, f"head.{leaf}")
    raise UnsupportedByFormat(f"timm cannot represent {key} ({deit.part_of(key, a)})")


def infer(shapes: Shapes, hints: Hints | None = None) -> Architecture:
    hints = hints or {}
    if "stem.proj.weight" in shapes:
        return deit.infer_resmlp(shapes, hints, "stem.proj", "linear_tokens", "mlp_channels")
    if "blocks.0.attn.proj_l.weight" in shapes or not recognizes(shapes):
        return deit.infer(shapes, hints)
    parallel = count_members(shapes, "blocks.0.attns.")
    width = shapes["patch_embed.proj.weight"][0]
    root = next((name for name in ROOTS if name in shapes), None)
    hybrid = infer_hybrid(shapes, root) if root else {}
    patch = hybrid.get("patch_size", shapes["patch_embed.proj.weight"][-1])
    tokens = ("cls_token" in shapes) + ("dist_token" in shapes)
    size, rows = infer_image_size(shapes["pos_embed"][1], sorted({tokens, 0}, reverse=True), patch, hints)
    mlp = "blocks.0.ffns.0.mlp.fc1.weight" if parallel else "blocks.0.mlp.fc1.weight"
    scaled = "blocks.0.ls1.gamma" in shapes or "blocks.0.attns.0.ls.gamma" in shapes
    options = {
        "width": width,
        "depth": count_members(shapes, "blocks."),
        "heads": infer_num_heads(width, hints),
        "mlp_ratio": shapes[mlp][0] / width,
        "branches": parallel or 1,
        "patch_size": patch,
        "channels": shapes[root or "patch_embed.proj.weight"][1],
        "image_size": size,
        "qkv_bias": any(name.endswith("qkv.bias") for name in shapes),
        "residual": "layerscale" if scaled else "plain",
        "pos_embed_prefix": rows > 0 or tokens == 0,
        "pos_embed_resample": "bicubic_antialias",
        "distillation": "dist_token" in shapes,
        "pooling": "class" if tokens else "mean",
        "pool_norm": "fc_norm.weight" in shapes,
    }
    return dataclasses.replace(Architecture(), **(options | hybrid | deit.infer_classifiers(shapes)))


def infer_hybrid(shapes: Shapes, root: str) -> dict[str, Any]:
    """Fields of a hybrid's ResNet stem; its GroupNorm has an epsilon of 1e-5."""
    stages = "patch_embed.backbone.stages."
    layers = tuple(count_members(shapes, f"{stages}{stage}.blocks.") for stage in range(count_members(shapes, stages)))
    return {
        "stem": "resnet",
        "stem_layers": layers,
        "stem_width": shapes[root][0],
        "stem_eps": 1e-5,
        "patch_size": resnet_stride(len(layers)) * shapes["patch_embed.proj.weight"][-1],
        "weight_init": VIT.weight_init,
    }


def read_preprocessing(config: dict[str, Any], size: tuple[int, int]) -> Preprocessing:
    """Preprocessing from the `pretrained_cfg` of a timm folder."""
    plain = Preprocessing()
    return Preprocessing(
        image_size=size,
        crop_ratio=float(config.get("crop_pct") or plain.crop_ratio),
        resize="square" if config.get("crop_mode") == "squash" else "shorter",
        interpolation=str(config.get("interpolation", plain.interpolation)),
        mean=tuple(map(float, config.get("mean") or plain.mean)),
        std=tuple(map(float, config.get("std") or plain.std)),
    )
