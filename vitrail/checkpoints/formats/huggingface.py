"""ViT and DeiT of Hugging Face `transformers`: tensor names, `config.json`, `preprocessor_config.json`."""

import re
from typing import Any

from vitrail.checkpoints.codecs import (
    LEADING,
    STACKED,
    TOKENS,
    Hints,
    Pair,
    Shapes,
    UnsupportedByFormat,
    count_members,
    infer_image_size,
    infer_num_heads,
    pair,
)
from vitrail.models.config import Architecture, as_size
from vitrail.models.preprocessing import Preprocessing

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
}
EPS = 1e-12  # the default of transformers
PATCHES = "embeddings.patch_embeddings.projection.weight"
# Names since 2026 on the left, those of files on the hub on the right; both are read, the hub's are written.
MODERN = (
    (re.compile(r"^layers\."), "encoder.layer."),
    (re.compile(r"^(encoder\.layer\.\d+\.attention)\.q_proj\."), r"\1.attention.query."),
    (re.compile(r"^(encoder\.layer\.\d+\.attention)\.k_proj\."), r"\1.attention.key."),
    (re.compile(r"^(encoder\.layer\.\d+\.attention)\.v_proj\."), r"\1.attention.value."),
    (re.compile(r"^(encoder\.layer\.\d+\.attention)\.o_proj\."), r"\1.output.dense."),
    (re.compile(r"^(encoder\.layer\.\d+)\.mlp\.fc1\."), r"\1.intermediate.dense."),
    (re.compile(r"^(encoder\.layer\.\d+)\.mlp\.fc2\."), r"\1.output.dense."),
)


def recognizes(keys: list[str]) -> bool:
    return any(key.endswith(PATCHES) for key in keys)


def plain_names(keys: list[str]) -> dict[str, str]:
    """Names in the file -> names on the hub, without the prefix `vit.` or `deit.`."""
    names = {}
    for key in keys:
        plain = re.sub(r"^(vit|deit)\.", "", key)
        for modern, hub in MODERN:
            plain = modern.sub(hub, plain)
        names[key] = plain
    return names


def to_pair(key: str, a: Architecture) -> Pair:
    if a.pooling != "class" or a.class_token_at:
        raise UnsupportedByFormat(
            f"the Hugging Face format cannot represent pooling={a.pooling}, class_token_at={a.class_token_at}"
        )
    match key.split("."):
        case ["stem", "proj", leaf] if a.stem == "linear":
            return pair(key, f"embeddings.patch_embeddings.projection.{leaf}")
        case ["prefix"]:
            return pair(key, ["embeddings.cls_token", "embeddings.distillation_token"][: a.num_prefix_tokens], TOKENS)
        case ["pos_embed", "0", "table"] if a.pos_embed == "learned" and a.pos_embed_place == "stem":
            return pair(key, "embeddings.position_embeddings", LEADING)
        case ["blocks", index, half, "branches", "0", *path] if a.branches == 1:
            return block_pair(key, f"encoder.layer.{index}", half, path, a)
        case ["norm", leaf]:
            return pair(key, f"layernorm.{leaf}")
        case ["pre_logits", "0", leaf] if not a.classes:
            return pair(key, f"pooler.dense.{leaf}")
        case ["head", leaf]:
            return pair(key, f"{'cls_classifier' if a.distillation and a.distillation_head else 'classifier'}.{leaf}")
        case ["head_distillation", leaf]:
            return pair(key, f"distillation_classifier.{leaf}")
    raise UnsupportedByFormat(f"the Hugging Face format cannot represent {key}")


def block_pair(key: str, layer: str, half: str, path: list[str], a: Architecture) -> Pair:
    match half, path:
        case _, ["norm", leaf]:
            return pair(key, f"{layer}.layernorm_{'before' if half == 'mix' else 'after'}.{leaf}")
        case "mix", ["body", "qkv", "weight" | "bias" as leaf] if a.mixer == "attention":
            return pair(key, [f"{layer}.attention.attention.{part}.{leaf}" for part in ("query", "key", "value")], STACKED)
        case "mix", ["body", "proj", "weight" | "bias" as leaf] if a.mixer == "attention":
            return pair(key, f"{layer}.attention.output.dense.{leaf}")
        case "ffn", ["body", "fc1" | "fc2" as name, "weight" | "bias" as leaf]:
            return pair(key, f"{layer}.{'intermediate' if name == 'fc1' else 'output'}.dense.{leaf}")
    raise UnsupportedByFormat(f"the Hugging Face format cannot represent {key} (mixer={a.mixer}, residual={a.residual})")


def infer(shapes: Shapes, hints: Hints | None = None, config: dict[str, Any] | None = None) -> Architecture:
    """The architecture from names and shapes, and from `config.json`: heads, epsilon, activation, a rectangular size."""
    config, hints = config or {}, dict(hints or {})
    width, channels, patch, _ = shapes[PATCHES]
    distilled = "embeddings.distillation_token" in shapes
    if config.get("image_size") is not None:
        hints.setdefault("image_size", as_size(config["image_size"]))
    size, _ = infer_image_size(shapes["embeddings.position_embeddings"][1], [2 if distilled else 1], patch, hints)
    head = next((name for name in ("classifier.weight", "cls_classifier.weight") if name in shapes), None)
    act = config.get("hidden_act", "gelu")
    if act not in ACTIVATIONS:
        raise UnsupportedByFormat(f"the activation {act!r} of config.json is not supported")
    return Architecture(
        width=width,
        depth=count_members(shapes, "encoder.layer."),
        heads=config.get("num_attention_heads") or infer_num_heads(width, hints),
        mlp_ratio=shapes["encoder.layer.0.intermediate.dense.weight"][0] / width,
        classes=shapes[head][0] if head else 0,
        image_size=size,
        channels=channels,
        patch_size=patch,
        qkv_bias="encoder.layer.0.attention.attention.query.bias" in shapes,
        activation=ACTIVATIONS[act],
        norm_eps=config.get("layer_norm_eps", EPS),
        distillation=distilled,
        distillation_head="distillation_classifier.weight" in shapes or not distilled,
        pre_logits=shapes["pooler.dense.weight"][0] if "pooler.dense.weight" in shapes and not head else 0,
        drop_path_schedule="linear",
    )


def write_config(a: Architecture, names: list[str] | None) -> dict[str, Any]:
    kind = "deit" if a.distillation else "vit"
    teacher = a.distillation and a.distillation_head
    title = "DeiT" if a.distillation else "ViT"
    suffix = ("ForImageClassificationWithTeacher" if teacher else "ForImageClassification") if a.classes else "VisionTransformer"
    labels = names or [f"LABEL_{index}" for index in range(a.classes)]
    return {
        "architectures": [title + suffix],
        "model_type": kind,
        "hidden_size": a.width,
        "num_hidden_layers": a.depth,
        "num_attention_heads": a.heads,
        "intermediate_size": a.hidden,
        "hidden_act": {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}.get(a.activation, a.activation),
        "layer_norm_eps": a.norm_eps,
        "hidden_dropout_prob": a.dropout,
        "attention_probs_dropout_prob": a.attention_dropout,
        "image_size": a.image_size[0] if a.image_size[0] == a.image_size[1] else list(a.image_size),
        "patch_size": a.patch_size,
        "num_channels": a.channels,
        "qkv_bias": a.qkv_bias,
        "encoder_stride": a.patch_size,
        "id2label": {str(index): label for index, label in enumerate(labels)},
        "label2id": {label: index for index, label in enumerate(labels)},
        "torch_dtype": "float32",
    }


RESAMPLING = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3}


def write_preprocessing(p: Preprocessing) -> dict[str, Any]:
    height, width = p.image_size
    config: dict[str, Any] = {
        # The processor for DeiT would change the aspect ratio; this one keeps it.
        "image_processor_type": "CLIPImageProcessor" if p.resize == "shorter" else "ViTImageProcessor",
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "rescale_factor": 1 / 255,
        "image_mean": list(p.mean),
        "image_std": list(p.std),
        "resample": RESAMPLING.get(p.interpolation.removesuffix("_no_antialias"), 3),  # these processors always apply antialias
        "size": {"height": height, "width": width},
    }
    if p.resize == "shorter":
        resized = {"shortest_edge": int(min(height, width) / p.crop_ratio)}
        config |= {"do_center_crop": True, "crop_size": {"height": height, "width": width}, "size": resized}
        config |= {"do_convert_rgb": True, "crop_ratio": p.crop_ratio}
    return config


def read_preprocessing(config: dict[str, Any], size: tuple[int, int]) -> Preprocessing:
    """Preprocessing from `preprocessor_config.json`; with a center crop, the shorter side is resized."""
    named = {value: name for name, value in RESAMPLING.items()} | {name: name for name in RESAMPLING}
    crop = bool(config.get("do_center_crop"))
    resized = config.get("size") or size[0]
    side = resized if isinstance(resized, int) else resized.get("shortest_edge", resized.get("height", size[0]))
    plain = config.get("do_normalize", True) is False
    return Preprocessing(
        image_size=size,
        crop_ratio=float(config.get("crop_ratio", size[0] / side)) if crop else 1.0,
        resize="shorter" if crop else "square",
        interpolation=named.get(config.get("resample", 2), "bilinear"),
        mean=(0.0, 0.0, 0.0) if plain else tuple(map(float, config.get("image_mean", (0.5, 0.5, 0.5)))),
        std=(1.0, 1.0, 1.0) if plain else tuple(map(float, config.get("image_std", (0.5, 0.5, 0.5)))),
    )


def class_names(config: dict[str, Any], classes: int) -> list[str] | None:
    labels = dict(config.get("id2label") or {})
    names = [str(labels.get(str(index), f"LABEL_{index}")) for index in range(classes)]
    return names if any(name != f"LABEL_{index}" for index, name in enumerate(names)) else None
