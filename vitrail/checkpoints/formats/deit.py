"""Tensor names of the DeiT repository (its five model files) and of TokenLabeling.

{"model": {"cls_token": ..., "pos_embed": ..., "blocks.0.attn.qkv.weight": ..., ...}}
"""

import dataclasses
from typing import Any

from vitrail.checkpoints.codecs import (
    LEADING,
    POINTWISE,
    ROWS,
    SAME,
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
from vitrail.errors import UserError
from vitrail.models import lvvit
from vitrail.models.cait import CAIT
from vitrail.models.config import Architecture
from vitrail.models.lvvit import LVVIT
from vitrail.models.patchconvnet import PATCHCONVNET
from vitrail.models.resmlp import RESMLP

# our name under `body` -> theirs under `attn`
MIXERS = {
    "attention": {"qkv": "qkv", "proj": "proj"},
    "talking_heads": {"qkv": "qkv", "proj": "proj", "before": "proj_l", "after": "proj_w"},
    "linear": {"map": ""},
    "patchconv": {
        "enter": "qkv_pos.0",
        "spatial": "qkv_pos.2",
        "excite.reduce": "qkv_pos.4.conv_reduce",
        "excite.expand": "qkv_pos.4.conv_expand",
        "leave": "qkv_pos.5",
    },
}
STEMS = {"linear": "patch_embed.proj", "hmlp": "patch_embed.proj", "conv": "patch_embed.proj", "tower": "patch_embed"}


def to_pair(key: str, a: Architecture) -> Pair:
    """The name and the conversion of one of our tensors in this format."""
    match key.split("."):
        case ["stem", *path] if a.stem in STEMS:
            return pair(key, stem_name(path, a))
        case ["prefix"]:
            return pair(key, ["cls_token", "dist_token"][: a.num_prefix_tokens], TOKENS)
        case ["pooling", "queries"] if not a.distillation:
            return pair(key, "cls_token", LEADING)
        case ["pos_embed", "0", "table"] if a.pos_embed == "learned" and a.pos_embed_place == "stem":
            return pair(key, "pos_embed", LEADING)
        case ["blocks", index, half, "branches", branch, *path] if int(branch) < 2:
            return block_pair(key, f"blocks.{index}", half, branch, path, a)
        case ["pooling", "blocks", index, *path] if a.pooling in ("class_attention", "per_class"):
            return pair(key, pooling_name(f"blocks_token_only.{index}", path, a))
        case ["norm", leaf]:
            return pair(key, f"norm.{norm_leaf(leaf, a)}")
        case ["pre_logits", "0", leaf]:
            return pair(key, f"pre_logits.fc.{leaf}")
        case ["head", leaf] if a.pooling == "per_class":
            return pair(key, [f"head.{index}.{leaf}" for index in range(a.classes)], ROWS)
        case ["head" | "head_distillation" | "head_dense" as name, leaf]:
            theirs = {"head": "head", "head_distillation": "head_dist", "head_dense": "aux_head"}[name]
            return pair(key, f"{theirs}.{leaf}")
    raise UnsupportedByFormat(f"the DeiT format cannot represent {key} ({part_of(key, a)})")


def part_of(key: str, a: Architecture) -> str:
    """The field of the architecture that a tensor depends on, for error messages."""
    first = key.split(".")[0]
    fields = {
        "stem": "stem",
        "pos_embed": "pos_embed",
        "pooling": "pooling",
        "blocks": "mixer",
        "norm": "norm",
        "prefix": "distillation",
    }
    field = fields.get(first, "classes")
    if field == "mixer":
        middle = key.split(".")
        field = (
            "residual"
            if "scale" in middle or "shift" in middle
            else "branches"
            if a.branches > 2
            else "norm"
            if "post" in middle
            else field
        )
    return f"{field}={getattr(a, field)}"


def norm_leaf(leaf: str, a: Architecture) -> str:
    return {"weight": "alpha", "bias": "beta"}[leaf] if a.norm == "affine" else leaf


def stem_name(path: list[str], a: Architecture) -> str:
    root = STEMS[a.stem]
    match a.stem, path:
        case "linear", ["proj", leaf]:
            return f"{root}.{leaf}"
        case "hmlp", ["layers", index, leaf]:
            return f"{root}.{index}.{leaf}"
        case "conv", ["layers", index, leaf] if a.stem_norm == "none":  # ours has an index for the absent norms
            return f"{root}.{int(index) // 3 * 2}.0.{leaf}"
        case "tower", ["convs" | "norms" as kind, index, leaf]:
            return f"{root}.{'conv' if kind == 'convs' else 'bn'}{int(index) + 1}.{leaf}"
        case "tower", ["proj", leaf]:
            return f"{root}.proj.{leaf}"
    raise UnsupportedByFormat(f"the DeiT format cannot represent stem={a.stem} with stem_norm={a.stem_norm}")


def block_pair(key: str, block: str, half: str, branch: str, path: list[str], a: Architecture) -> Pair:
    number = {"mix": "1", "ffn": "2"}[half]
    second = branch == "1"
    match path:
        case ["norm", leaf]:
            return pair(key, f"{block}.norm{number}{'1' if second else ''}.{norm_leaf(leaf, a)}")
        case ["scale", "weight"] if a.residual == "layerscale":
            return pair(key, f"{block}.gamma_{number}{'_1' if second else ''}")
        case ["body", *rest, leaf] if half == "ffn" and leaf != "shift":
            return pair(key, f"{block}.mlp{'1' if second else ''}.{'.'.join(rest)}.{leaf}")
        case ["body", *rest, leaf] if a.mixer in MIXERS and leaf != "shift":
            name = MIXERS[a.mixer][".".join(rest)]
            pointwise = a.mixer == "patchconv" and leaf == "weight" and rest != ["spatial"]
            theirs = ".".join(part for part in (f"{block}.attn{'1' if second else ''}", name, leaf) if part)
            return pair(key, theirs, POINTWISE if pointwise else SAME)
    raise UnsupportedByFormat(f"the DeiT format cannot represent {key} ({part_of(key, a)})")


def pooling_name(block: str, path: list[str], a: Architecture) -> str:
    match path:
        case ["norm1" | "norm2" as name, leaf]:
            return f"{block}.{name}.{norm_leaf(leaf, a)}"
        case ["scale1" | "scale2" as name, "weight"] if a.residual == "layerscale":
            return f"{block}.gamma_{name[-1]}"
        case ["attention", *rest]:
            return f"{block}.attn.{'.'.join(rest)}"
        case ["ffn", *rest]:
            return f"{block}.mlp.{'.'.join(rest)}"
    raise UnsupportedByFormat(f"the DeiT format cannot represent residual={a.residual} in the pooling")


def infer(shapes: Shapes, hints: Hints | None = None) -> Architecture:
    """The architecture of a state dict, from names and shapes."""
    hints = hints or {}
    if "blocks.0.norm1.alpha" in shapes:
        return infer_resmlp(shapes, hints)
    if "blocks.0.attn.qkv_pos.0.weight" in shapes:
        return infer_patchconvnet(shapes, hints)
    if "patch_embed.conv1.weight" in shapes:
        base = infer_lvvit(shapes, hints)
    elif "blocks.0.attn.proj_l.weight" in shapes:
        base = CAIT.replace(
            pooling_depth=count_members(shapes, "blocks_token_only."), heads=shapes["blocks.0.attn.proj_l.weight"][0]
        )
    else:
        base = Architecture(drop_path_schedule="linear", **infer_stem(shapes))
    width = shapes["norm.weight"][0]
    prefix = [0] if base.pooling == "class_attention" else [1 + ("dist_token" in shapes), 0]
    size, rows = infer_image_size(shapes["pos_embed"][1], prefix, base.patch_size, hints)
    return dataclasses.replace(
        base,
        width=width,
        depth=count_members(shapes, "blocks."),
        heads=base.heads if base.mixer == "talking_heads" or base.stem == "tower" else infer_num_heads(width, hints),
        mlp_ratio=shapes["blocks.0.mlp.fc1.weight"][0] / width,
        branches=2 if "blocks.0.attn1.qkv.weight" in shapes else 1,
        channels=shapes[first_stem_weight(shapes)][1],
        image_size=size,
        qkv_bias="blocks.0.attn.qkv.bias" in shapes,
        residual="layerscale" if "blocks.0.gamma_1" in shapes else base.residual,
        pos_embed_prefix=rows > 0 or base.pooling == "class_attention",
        distillation="dist_token" in shapes,
        distillation_head="head_dist.weight" in shapes or "dist_token" not in shapes,
        **infer_classifiers(shapes),
    )


def infer_classifiers(shapes: Shapes) -> dict[str, Any]:
    return {
        "classes": shapes["head.weight"][0] if "head.weight" in shapes else 0,
        "pre_logits": shapes["pre_logits.fc.weight"][0] if "pre_logits.fc.weight" in shapes else 0,
        "dense_head": "aux_head.weight" in shapes,
    }


def first_stem_weight(shapes: Shapes) -> str:
    names = ("patch_embed.conv1.weight", "patch_embed.proj.weight", "patch_embed.proj.0.weight", "patch_embed.proj.0.0.weight")
    return next(name for name in names if name in shapes)


def infer_stem(shapes: Shapes) -> dict[str, Any]:
    if "patch_embed.proj.0.weight" not in shapes:
        return {"patch_size": shapes["patch_embed.proj.weight"][-1]}
    strides = tuple(shape[-1] for name, shape in shapes.items() if name.startswith("patch_embed.proj.") and len(shape) == 4)
    patch = 1
    for stride in strides:
        patch *= stride
    norm = "batch" if "patch_embed.proj.1.running_mean" in shapes else "layer"
    return {"stem": "hmlp", "stem_norm": norm, "stem_activation": "gelu", "stem_strides": strides, "patch_size": patch}


def infer_resmlp(
    shapes: Shapes, hints: Hints, stem: str = "patch_embed.proj", mixer: str = "attn", mlp: str = "mlp"
) -> Architecture:
    """A ResMLP; `stem`, `mixer` and `mlp` are the names of its modules in the format."""
    width, channels, patch, _ = shapes[f"{stem}.weight"]
    size, _ = infer_image_size(shapes[f"blocks.0.{mixer}.weight"][0], [0], patch, hints)
    return RESMLP.replace(
        width=width,
        depth=count_members(shapes, "blocks."),
        mlp_ratio=shapes[f"blocks.0.{mlp}.fc1.weight"][0] / width,
        patch_size=patch,
        channels=channels,
        image_size=size,
        **infer_classifiers(shapes),
    )


def infer_patchconvnet(shapes: Shapes, hints: Hints) -> Architecture:
    width = shapes["norm.weight"][0]
    queries = shapes["cls_token"][1]
    heads = infer_classifiers(shapes)
    if queries > 1 or "head.0.weight" in shapes:
        heads |= {"pooling": "per_class", "pooling_keys": "patches", "classes": queries}
    stem: dict[str, Any] = {"patch_size": 2 ** sum(name.startswith("patch_embed.proj.") for name in shapes)}
    if "patch_embed.proj.weight" in shapes:
        stem = {"stem": "linear", "stem_activation": "none", "patch_size": shapes["patch_embed.proj.weight"][-1]}
    return PATCHCONVNET.replace(
        width=width,
        depth=count_members(shapes, "blocks."),
        pooling_depth=count_members(shapes, "blocks_token_only."),
        pooling_mlp_ratio=shapes["blocks_token_only.0.mlp.fc1.weight"][0] / width,
        channels=shapes[first_stem_weight(shapes)][1],
        image_size=hints.get("image_size", (224, 224)),
        **stem,
        **heads,
    )


def infer_lvvit(shapes: Shapes, hints: Hints) -> Architecture:
    """Heads and the residual factor are not in the file; they are looked up by width."""
    width, depth = shapes["norm.weight"][0], count_members(shapes, "blocks.")
    factors = {wide: (heads, factor) for wide, _, heads, factor, _, _ in lvvit.SIZES.values()}
    if width not in factors and not {"heads", "layerscale_init"} <= set(hints):
        raise UserError(f"No published LV-ViT has width {width}: load with heads=… and layerscale_init=….")
    heads, factor = factors.get(width) or (hints["heads"], hints["layerscale_init"])
    convs = sum(name.startswith("patch_embed.conv") for name in shapes)
    kernels = (
        *(shapes[f"patch_embed.conv{index + 1}.weight"][-1] for index in range(convs)),
        shapes["patch_embed.proj.weight"][-1],
    )
    return LVVIT.replace(
        width=width,
        depth=depth,
        heads=heads,
        layerscale_init=factor,
        stem_width=shapes["patch_embed.conv1.weight"][0],
        stem_kernels=kernels,
        stem_strides=(2, *[1] * (convs - 1), 8),
    )
