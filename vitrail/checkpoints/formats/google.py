"""Google's `.npz` archives: the original ViT and AugReg files, hybrids, and big_vision dumps.

Original files number the parts of a block 0, 1, 2, 3; newer dumps number them per kind. Both are read; the original
numbering is written, which all readers support.
"""

import dataclasses
import re
from typing import Any

from torch import Tensor

from vitrail.checkpoints.codecs import (
    CONV,
    LEADING,
    SAME,
    TRANSPOSED,
    VECTOR,
    Hints,
    Pair,
    Shapes,
    UnsupportedByFormat,
    flax_proj,
    flax_qkv,
    flax_qkv_bias,
    infer_image_size,
    pair,
)
from vitrail.errors import UserError
from vitrail.models.config import Architecture, resnet_stride
from vitrail.models.vit import VIT

POSITIONS = "Transformer/posembed_input/pos_embedding"
PREFIXES = ("params/img/", "params/", "opt/target/", "img/")
BLOCK = re.compile(r"^Transformer/encoderblock_(\d+)/(.*)$")
PARTS = (
    (re.compile(r"MultiHeadDotProductAttention_\d+"), "MultiHeadDotProductAttention_1"),
    (re.compile(r"MlpBlock_\d+"), "MlpBlock_3"),
    (re.compile(r"LayerNorm_[12]"), "LayerNorm_2"),
)


def recognizes(keys: list[str]) -> bool:
    return any("embedding/kernel" in key for key in keys)


def normalize(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of any dump under the original names: without prefixes, stacked blocks split, original numbering."""
    prefix = next((p for p in PREFIXES if any(key.startswith(p + "embedding/") for key in tensors)), "")
    renamed: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if not key.startswith(prefix):
            continue  # optimizer state
        name = key[len(prefix) :]
        if name.startswith("Transformer/encoderblock/"):
            for index, layer in enumerate(tensor):
                renamed[block_name(f"Transformer/encoderblock_{index}/{name.split('/', 2)[2]}")] = layer
        else:
            renamed[block_name(name)] = tensor
    if "cls" not in renamed and POSITIONS in renamed:
        renamed["pos_embedding"] = renamed.pop(POSITIONS)
    if any(name.startswith("MAPHead") for name in renamed):
        raise UserError("This big_vision checkpoint has a MAP head, which is not supported.")
    return renamed


def block_name(name: str) -> str:
    if BLOCK.match(name):
        for pattern, original in PARTS:
            name = pattern.sub(original, name)
    return name


def to_pair(key: str, a: Architecture) -> Pair:
    if a.pooling not in ("class", "mean") or a.class_token_at or a.distillation or a.dense_head or a.pool_norm:
        raise UnsupportedByFormat(f"the Google format cannot represent pooling={a.pooling}, distillation={a.distillation}")
    match key.split("."):
        case ["stem", *path] if a.stem in ("linear", "resnet"):
            return stem_pair(key, path)
        case ["prefix"]:
            return pair(key, "cls", LEADING)
        case ["pos_embed", "0", "table"] if a.pos_embed == "learned" and a.pos_embed_place == "stem":
            return pair(key, POSITIONS if a.pos_embed_prefix_rows else "pos_embedding", LEADING)
        case ["blocks", index, half, "branches", "0", *path] if a.branches == 1:
            return block_pair(key, f"Transformer/encoderblock_{index}", half, path, a)
        case ["norm", leaf]:
            return pair(key, f"Transformer/encoder_norm/{scale_or_bias(leaf)}")
        case ["pre_logits", "0", leaf]:
            return dense(key, "pre_logits", leaf)
        case ["head", leaf]:
            return dense(key, "head", leaf)
    raise UnsupportedByFormat(
        f"the Google format cannot represent {key} (branches={a.branches}, pos_embed={a.pos_embed}, stem={a.stem})"
    )


def dense(key: str, name: str, leaf: str) -> Pair:
    return pair(key, f"{name}/kernel", TRANSPOSED) if leaf == "weight" else pair(key, f"{name}/bias")


def scale_or_bias(leaf: str) -> str:
    return {"weight": "scale", "bias": "bias"}[leaf]


def stem_pair(key: str, path: list[str]) -> Pair:
    match path:
        case ["proj", "weight"]:
            return pair(key, "embedding/kernel", CONV)
        case ["proj", "bias"]:
            return pair(key, "embedding/bias")
        case ["root", "weight"]:
            return pair(key, "conv_root/kernel", CONV)
        case ["root_norm", leaf]:
            return pair(key, f"gn_root/{scale_or_bias(leaf)}", VECTOR)
        case ["stages", stage, unit, "shortcut", part, leaf]:
            root = f"block{int(stage) + 1}/unit{int(unit) + 1}"
            return (
                pair(key, f"{root}/conv_proj/kernel", CONV)
                if part == "0"
                else pair(key, f"{root}/gn_proj/{scale_or_bias(leaf)}", VECTOR)
            )
        case ["stages", stage, unit, name, leaf]:
            root = f"block{int(stage) + 1}/unit{int(unit) + 1}"
            if name.startswith("conv"):
                return pair(key, f"{root}/{name}/kernel", CONV)
            return pair(key, f"{root}/gn{name[-1]}/{scale_or_bias(leaf)}", VECTOR)
    raise UnsupportedByFormat(f"the Google format cannot represent {key}")


def block_pair(key: str, block: str, half: str, path: list[str], a: Architecture) -> Pair:
    attention = f"{block}/MultiHeadDotProductAttention_1"
    match half, path:
        case _, ["norm", leaf] if a.norm == "layer":
            return pair(key, f"{block}/LayerNorm_{0 if half == 'mix' else 2}/{scale_or_bias(leaf)}")
        case "mix", ["body", "qkv", leaf] if a.mixer == "attention" and leaf in ("weight", "bias"):
            parts = [f"{attention}/{name}/{'kernel' if leaf == 'weight' else 'bias'}" for name in ("query", "key", "value")]
            return pair(key, parts, flax_qkv(a.heads) if leaf == "weight" else flax_qkv_bias(a.heads))
        case "mix", ["body", "proj", leaf] if a.mixer == "attention" and leaf in ("weight", "bias"):
            return (
                pair(key, f"{attention}/out/kernel", flax_proj(a.heads))
                if leaf == "weight"
                else pair(key, f"{attention}/out/bias", SAME)
            )
        case "ffn", ["body", "fc1" | "fc2" as name, "weight" | "bias" as leaf]:
            return dense(key, f"{block}/MlpBlock_3/Dense_{0 if name == 'fc1' else 1}", leaf)
    raise UnsupportedByFormat(f"the Google format cannot represent {key} (mixer={a.mixer}, residual={a.residual}, norm={a.norm})")


def infer(shapes: Shapes, hints: Hints | None = None) -> Architecture:
    hints = hints or {}
    depth = 1 + max((int(match[1]) for name in shapes if (match := BLOCK.match(name))), default=-1)
    if not depth:
        raise UserError("The archive has a patch embedding but no encoder blocks: it is not a ViT.")
    first = "Transformer/encoderblock_0"
    width, heads, _ = shapes[f"{first}/MultiHeadDotProductAttention_1/query/kernel"]
    stem: dict[str, Any] = {"patch_size": shapes["embedding/kernel"][0], "channels": shapes["embedding/kernel"][2]}
    if "conv_root/kernel" in shapes:
        stem = infer_resnet(shapes)
    token = int("cls" in shapes)
    modern = "pos_embedding" in shapes  # big_vision adds the position embedding before the class token
    rows = shapes["pos_embedding" if modern else POSITIONS][1]
    size, prefix = infer_image_size(rows, [0] if modern else [token], stem["patch_size"], hints)
    return dataclasses.replace(
        VIT,
        width=width,
        depth=depth,
        heads=heads,
        mlp_ratio=shapes[f"{first}/MlpBlock_3/Dense_0/kernel"][1] / width,
        image_size=size,
        qkv_bias=f"{first}/MultiHeadDotProductAttention_1/query/bias" in shapes,
        pos_embed_prefix=prefix > 0 or not token,
        pooling="class" if token else "mean",
        classes=shapes["head/kernel"][1] if "head/kernel" in shapes else 0,
        pre_logits=shapes["pre_logits/kernel"][1] if "pre_logits/kernel" in shapes else 0,
        **stem,
    )


def infer_resnet(shapes: Shapes) -> dict[str, Any]:
    layers: list[int] = []
    while f"block{len(layers) + 1}/unit1/conv1/kernel" in shapes:
        stage, units = len(layers) + 1, 0
        while f"block{stage}/unit{units + 1}/conv1/kernel" in shapes:
            units += 1
        layers.append(units)
    return {
        "stem": "resnet",
        "stem_layers": tuple(layers),
        "stem_width": shapes["conv_root/kernel"][3],
        "patch_size": resnet_stride(len(layers)) * shapes["embedding/kernel"][0],
        "channels": shapes["conv_root/kernel"][2],
    }
