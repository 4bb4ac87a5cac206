"""BEiT: tensor names of the released code (microsoft/unilm, timm) and of Hugging Face `transformers`; files are read only."""

import math
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from vitrail.checkpoints.codecs import LEADING, Hints, Pair, Shapes, UnsupportedByFormat, count_members, infer_num_heads, pair
from vitrail.checkpoints.formats.huggingface import ACTIVATIONS
from vitrail.errors import UserError
from vitrail.models.config import Architecture, as_size
from vitrail.models.preprocessing import Preprocessing

PREPROCESSING = Preprocessing(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))  # of the released fine-tuned weights
BIAS = "relative_position_bias_table"
# Names of Hugging Face, those since 2026 and those of files on the hub, to the names of the released code.
RENAMED = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^beit\.", ""),
        (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
        (r"^embeddings\.(cls_token|mask_token)$", r"\1"),
        (r"^(encoder\.relative_position_bias|shared_position_bias)\.", "rel_pos_bias."),
        (r"^(encoder\.layer|layers)\.", "blocks."),
        (r"^(blocks\.\d+)\.attention\.attention\.", r"\1.attn."),
        (r"^(blocks\.\d+)\.attention\.(output\.dense|o_proj)\.", r"\1.attn.proj."),
        (r"^(blocks\.\d+)\.attention\.", r"\1.attn."),
        (r"^(blocks\.\d+)\.(?:attn\.)?relative_position_bias\.", r"\1.attn."),
        (r"^(blocks\.\d+\.attn)\.(query|key|value)\.", lambda match: f"{match[1]}.{match[2][0]}_proj."),
        (r"^(blocks\.\d+)\.lambda_(\d)$", r"\1.gamma_\2"),
        (r"^(blocks\.\d+)\.layernorm_before\.", r"\1.norm1."),
        (r"^(blocks\.\d+)\.layernorm_after\.", r"\1.norm2."),
        (r"^(blocks\.\d+)\.intermediate\.dense\.", r"\1.mlp.fc1."),
        (r"^(blocks\.\d+)\.output\.dense\.", r"\1.mlp.fc2."),
        (r"^layernorm\.", "norm."),
        (r"^pooler\.layernorm\.", "fc_norm."),
        (r"^classifier\.", "head."),
    )
]
# The mask token and the predictions of codes belong to the pre-training; indices follow from the grid.
UNUSED = re.compile(r"^mask_token$|^lm_head\.|relative_position_index$")


def recognizes(keys: Iterable[str]) -> bool:
    return any(name in (f"blocks.0.attn.{BIAS}", f"rel_pos_bias.{BIAS}") for name in map(plain_name, keys))


def plain_name(key: str) -> str:
    """The name of a tensor in the released code."""
    for pattern, name in RENAMED:
        key = pattern.sub(name, key)
    return key


def normalize(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a backbone and its classifier under the names of the released code, with one bias for q, k and v.

    That of the keys, which no BEiT has, is zero.
    """
    named: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        name = plain_name(key)
        if name in named:
            raise UnsupportedByFormat(f"The tensors have two {name}, one of which would not be used: load another BEiT model.")
        if not UNUSED.search(name):
            named[name] = tensor
    for start in [key.removesuffix("proj.weight") for key in named if key.endswith(".attn.proj.weight")]:
        if f"{start}q_proj.weight" in named:
            named[f"{start}qkv.weight"] = torch.cat([named.pop(f"{start}{part}_proj.weight") for part in "qkv"])
        for names in (("q_bias", "v_bias"), ("q_proj.bias", "v_proj.bias")):
            if start + names[0] in named:
                query, value = (named.pop(start + name) for name in names)
                named[f"{start}qkv.bias"] = torch.cat([query, torch.zeros_like(query), value])
    return named


def to_pair(key: str, a: Architecture) -> Pair:
    match key.split("."):
        case ["stem", "proj", leaf]:
            return pair(key, f"patch_embed.proj.{leaf}")
        case ["prefix"]:
            return pair(key, "cls_token", LEADING)
        case ["pos_embed", _, "table"] if a.pos_embed_place == "shared":
            return pair(key, f"rel_pos_bias.{BIAS}")
        case ["pos_embed", index, "table"]:
            return pair(key, f"blocks.{index}.attn.{BIAS}")
        case ["blocks", index, half, _, _, *path]:
            number = 1 if half == "mix" else 2
            match path:
                case ["scale", "weight"]:
                    return pair(key, f"blocks.{index}.gamma_{number}")
                case ["norm", leaf]:
                    return pair(key, f"blocks.{index}.norm{number}.{leaf}")
                case ["body", *rest]:
                    return pair(key, f"blocks.{index}.{'attn' if half == 'mix' else 'mlp'}.{'.'.join(rest)}")
        case ["norm", leaf] if a.pool_norm:
            return pair(key, f"fc_norm.{leaf}")
        case ["norm" | "head", _]:
            return pair(key, key)
    raise UnsupportedByFormat(f"BEiT has no {key}")


def infer(shapes: Shapes, hints: Hints | None = None, config: dict[str, Any] | None = None) -> Architecture:
    """The architecture from names and shapes, and from `config.json`: heads, epsilon, activation, a rectangular size."""
    config, hints = config or {}, dict(hints or {})
    width, channels, patch, _ = shapes["patch_embed.proj.weight"]
    shared, mean = f"rel_pos_bias.{BIAS}" in shapes, "fc_norm.weight" in shapes
    act = config.get("hidden_act", "gelu")
    if act not in ACTIVATIONS:
        raise UnsupportedByFormat(f"the activation {act!r} of config.json is not supported")
    return Architecture(
        width=width,
        depth=count_members(shapes, "blocks."),
        heads=config.get("num_attention_heads") or infer_num_heads(width, hints),
        mlp_ratio=shapes["blocks.0.mlp.fc1.weight"][0] / width,
        classes=shapes["head.weight"][0] if "head.weight" in shapes else 0,
        image_size=infer_size(shapes[f"{'rel_pos_bias' if shared else 'blocks.0.attn'}.{BIAS}"][0], patch, config, hints),
        channels=channels,
        patch_size=patch,
        qkv_bias="blocks.0.attn.qkv.bias" in shapes,
        activation=ACTIVATIONS[act],
        norm_eps=config.get("layer_norm_eps", 1e-6),
        residual="layerscale" if "blocks.0.gamma_1" in shapes else "plain",
        layerscale_init=0.1,
        pos_embed="relative_bias",
        pos_embed_place="shared" if shared else "layers",
        pooling="mean" if mean else "class",
        pool_norm=mean,
        keep_class_token=mean,
        weight_init="beit",
        drop_path_schedule="linear",
    )


def infer_size(rows: int, patch: int, config: dict[str, Any], hints: Hints) -> tuple[int, int]:
    """The image size of a table with a row for every offset of patches and three for the class token."""
    size = hints.get("image_size") or config.get("image_size")
    if size is not None:
        return as_size(size)
    side = (math.isqrt(max(rows - 3, 0)) + 1) // 2
    if (2 * side - 1) ** 2 != rows - 3:
        raise UserError(f"The position table of {rows} rows is not that of a square image: load with image_size=(height, width).")
    return side * patch, side * patch
