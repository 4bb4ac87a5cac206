"""Old names with their current names: recipe keys, architecture fields, run.json, metrics, tensors, models, recipes.

Files that were written before a rename are upgraded when they are read, here and nowhere else; `docs/glossary.md` lists the same
names for users. `USUAL` has the names that other libraries use for a recipe's keys.
"""

import re
from typing import Any

RECIPE = {
    "batch": "batch_size",
    "start": "init",
    "start.after": "init.pretrained_recipe",
    "objective": "loss",
    "objective.loss": "loss.kind",
    "objective.smoothing": "loss.label_smoothing",
    "objective.smooth_over": "loss.smoothing_over",
    "tokens": "token_labels",
    "tokens.labels": "token_labels.store",
    "tokens.mix": "token_labels.mixtoken",
    "tokens.mix_what": "token_labels.mixtoken_on",
    "optimiser": "optimizer",
    "optimiser.rate": "optimizer.lr",
    "optimiser.rate_batch": "optimizer.lr_batch_size",
    "optimiser.decay": "optimizer.weight_decay",
    "optimiser.decay_coupled": "optimizer.weight_decay_coupled",
    "optimiser.decay_on": "optimizer.weight_decay_on",
    "optimiser.clip": "optimizer.clip_grad_norm",
    "optimiser.trust": "optimizer.trust_ratio_on",
    "optimiser.trust_limit": "optimizer.max_trust_ratio",
    "average": "ema",
    "average.report": "ema.evaluate",
    "average.ramp": "ema.warmup",
    "testing": "validation",
    "testing.filter": "validation.interpolation",
    "data.balanced": "data.class_balanced",
    "data.held_out": "data.validation_fraction",
    "data.detail": "data.decode_scale",
    "mixing.switch": "mixing.switch_prob",
    "distillation.smoothing": "distillation.label_smoothing",
    "schedule.warmup_from": "schedule.warmup_lr",
    "schedule.shape": "schedule.kind",
    "schedule.floor": "schedule.min_lr",
    "schedule.shifted": "schedule.warmup_prefix",
    "schedule.lag": "schedule.lag_epochs",
    "schedule.stair_every": "schedule.step_size",
    "schedule.stair_factor": "schedule.gamma",
    "augmentation.size": "augmentation.image_size",
    "augmentation.filter": "augmentation.interpolation",
    "augmentation.deviation": "augmentation.magnitude_std",
    "augmentation.layers": "augmentation.num_ops",
    "augmentation.jitter": "augmentation.color_jitter",
    "augmentation.jitter_chance": "augmentation.color_jitter_prob",
    "augmentation.grey": "augmentation.grayscale",
    "augmentation.solarise": "augmentation.solarize",
    "augmentation.erasing": "augmentation.random_erasing",
    "augmentation.flip": "augmentation.hflip",
    "about.expects": "about.expected",
    "about.tried": "about.lr_grid",
    "about.held_out": "about.validation_fraction",
}
# An old key is also accepted in a group under its new name: optimizer.rate.
_KEYS = dict(RECIPE)
for _key, _new in RECIPE.items():
    _group, _, _leaf = _key.partition(".")
    if _leaf and _group in RECIPE:
        _KEYS[f"{RECIPE[_group]}.{_leaf}"] = _new
RECIPE_VALUES = {
    ("schedule.kind", "stairs"): "step",
    ("augmentation.crop", "centre"): "center",
    ("token_labels.target", "truth"): "labels",
    ("token_labels.mixtoken_on", "answers"): "predictions",
    ("about.paper", "house"): "vitrail",
}
# Names of timm, DeiT and Hugging Face for keys of a recipe.
USUAL = {
    "lr": "optimizer.lr",
    "rate": "optimizer.lr",
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "wd": "optimizer.weight_decay",
    "opt": "optimizer.kind",
    "optim": "optimizer.kind",
    "betas": "optimizer.betas",
    "momentum": "optimizer.momentum",
    "clip_grad": "optimizer.clip_grad_norm",
    "clip_grad_norm": "optimizer.clip_grad_norm",
    "max_grad_norm": "optimizer.clip_grad_norm",
    "layer_decay": "optimizer.layer_decay",
    "epochs": "schedule.length",
    "num_epochs": "schedule.length",
    "num_train_epochs": "schedule.length",
    "max_steps": "schedule.length",
    "min_lr": "schedule.min_lr",
    "warmup": "schedule.warmup",
    "warmup_epochs": "schedule.warmup",
    "warmup_steps": "schedule.warmup",
    "cooldown_epochs": "schedule.cooldown",
    "warmup_lr": "schedule.warmup_lr",
    "sched": "schedule.kind",
    "scheduler": "schedule.kind",
    "lr_scheduler_type": "schedule.kind",
    "image_size": "augmentation.image_size",
    "img_size": "augmentation.image_size",
    "input_size": "augmentation.image_size",
    "tokenizer": "task_options.tokenizer",
    "mixup": "mixing.mixup",
    "cutmix": "mixing.cutmix",
    "label_smoothing": "loss.label_smoothing",
    "smoothing": "loss.label_smoothing",
    "label_smoothing_factor": "loss.label_smoothing",
    "drop_path": "architecture.drop_path",
    "dropout": "architecture.dropout",
    "drop": "architecture.dropout",
    "patch_size": "architecture.patch_size",
    "ema_decay": "ema.decay",
    "model_ema_decay": "ema.decay",
    "reprob": "augmentation.random_erasing",
    "random_erasing": "augmentation.random_erasing",
    "color_jitter": "augmentation.color_jitter",
    "hflip": "augmentation.hflip",
    "crop_pct": "validation.crop_ratio",
    "teacher": "distillation.teacher",
    "scope": "init.scope",
    "weights": "init.weights",
    "from": "init.weights",
    "labels": "token_labels.store",
    "label": "data.label",
    "map": "data.map",
    "patience": "validation.patience",
    "early_stopping_patience": "validation.patience",
}
# Of these, a bare number has this unit.
UNITS = dict.fromkeys(("epochs", "num_epochs", "num_train_epochs", "warmup_epochs", "cooldown_epochs"), "epochs")
UNITS |= dict.fromkeys(("max_steps", "warmup_steps"), "steps")
ARCHITECTURE = {
    "residual_start": "layerscale_init",
    "residual_start_mode": "layerscale_init_mode",
    "residual_frozen": "layerscale_frozen",
    "start": "weight_init",
    "positions": "pos_embed",
    "position_place": "pos_embed_place",
    "position_special": "pos_embed_prefix",
    "position_resample": "pos_embed_resample",
    "readout": "pooling",
    "readout_depth": "pooling_depth",
    "readout_heads": "pooling_heads",
    "readout_mlp_ratio": "pooling_mlp_ratio",
    "readout_keys": "pooling_keys",
    "readout_scale": "pooling_scale",
}
# Parts of a recipe that `vitrail ablate --drop` names.
PARTS = {
    "average": "ema",
    "balanced": "class_balanced",
    "binary": "binary_loss",
    "clip": "clip_grad_norm",
    "decay": "weight_decay",
    "erasing": "random_erasing",
    "flip": "hflip",
    "jitter": "color_jitter",
    "layer_scale": "layerscale",
    "smoothing": "label_smoothing",
}
RUN = {"units": "micro_batches", "bad": "unreadable"}
PROBE_SETTINGS = {"decays": "weight_decays", "share": "held_out"}  # in the files of `vitrail suite`
SKIPPED_IMAGES = {"where": "location"}  # in the manifest of `vitrail data pack`
MISTAKES = {"truth": "label", "guess": "prediction", "where": "location"}
BENCHMARK = {
    "cells": "measurements",
    "ceiling": "peak",
    "ended": "complete",
    "batch": "batch_size",
    "trouble": "error",
    "turns": "interleaved",
    "times_as_fast": "speedup",
    "floor_milliseconds": "lower_bound_milliseconds",
}
METRICS = {"rate": "lr", "pictures": "images"}
LABEL_STORE = {"pictures": "images", "what": "outputs", "batch": "batch_size", "shard": "shard_size", "chosen": "class_subset"}
# First parts of tensor names, and groups of a training checkpoint.
TENSORS = {"special": "prefix", "positions": "pos_embed", "readout": "pooling"}
GROUPS = {"average": "ema", "optimiser": "optimizer"}
MODELS = {f"house_{size}": f"vitrail_{size}" for size in ("mini", "tiny", "small")}
# Recipes; these are now two, of which the first starts from the same weights.
RECIPE_NAMES = {
    f"grafit_r50_to_{data}_384": f"grafit_r50_to_{data}_{epochs}ep"
    for data, epochs in {"flowers": 1000, "cars": 1000, "food101": 300, "inat18": 300, "inat19": 300}.items()
}


def upgrade_key(key: str) -> str:
    """The current dotted key of an old or usual one; other keys are returned unchanged."""
    if key in _KEYS:
        return _KEYS[key]
    group, dot, leaf = key.partition(".")
    if group == "architecture" and dot:
        return f"architecture.{ARCHITECTURE.get(leaf, leaf)}"
    return USUAL.get(key, f"{RECIPE.get(group, group)}{dot}{leaf}")


def upgrade_changes(changes: dict[str, Any]) -> dict[str, Any]:
    """Changes of a recipe with the current keys; `epochs=20` becomes `schedule.length="20 epochs"`."""
    upgraded = {}
    for key, value in changes.items():
        has_unit = key not in UNITS or not re.fullmatch(r"\d+(\.\d+)?", str(value))
        upgraded[upgrade_key(key)] = value if has_unit else f"{value} {UNITS[key]}"
    return upgraded


def upgrade_recipe(tree: dict[str, Any]) -> dict[str, Any]:
    """A recipe saved by `Recipe.to_dict` of any version, with the current keys and values."""
    upgraded: dict[str, Any] = {}
    for group, value in tree.items():
        name = RECIPE.get(group, group)
        if group == "architecture" and isinstance(value, dict):
            value = upgrade_architecture(value)
        elif isinstance(value, dict):
            keys = {leaf: _KEYS.get(f"{group}.{leaf}", f"{name}.{leaf}") for leaf in value}
            value = {keys[leaf].split(".", 1)[1]: upgrade_value(keys[leaf], each) for leaf, each in value.items()}
        upgraded[name] = value
    for group, leaf in (("", "model"), ("init", "weights"), ("distillation", "teacher")):
        node = upgraded.get(group) if group else upgraded
        if isinstance(node, dict) and isinstance(node.get(leaf), str):
            node[leaf] = upgrade_name(node[leaf])
    distillation = upgraded.get("distillation")
    if isinstance(distillation, dict) and "per_class" in distillation:  # a complete recipe, of a version without this key
        distillation.setdefault("without_teacher", "both")
    return upgraded


def upgrade_value(key: str, value: Any) -> Any:
    return RECIPE_VALUES.get((key, value), value) if isinstance(value, str) else value


def upgrade_architecture(fields: dict[str, Any]) -> dict[str, Any]:
    return {ARCHITECTURE.get(name, name): value for name, value in fields.items()}


def upgrade_run(run: dict[str, Any]) -> dict[str, Any]:
    """The content of a run.json."""
    upgraded = {RUN.get(name, name): value for name, value in run.items()}
    for name, upgrade in (
        ("recipe", upgrade_recipe),
        ("architecture", upgrade_architecture),
        ("best", upgrade_metrics),
        ("test", upgrade_metrics),
    ):
        if isinstance(upgraded.get(name), dict):
            upgraded[name] = upgrade(upgraded[name])
    recipe, parts = upgraded.get("recipe"), upgraded.get("micro_batches")
    if isinstance(recipe, dict) and type(recipe.get("batch_size")) is int and type(parts) is int and parts > 0:
        recipe.setdefault("group_size", recipe["batch_size"] // parts)  # a group was a micro-batch
    if isinstance(recipe, dict) and isinstance(recipe.get("distillation"), dict):
        recipe["distillation"].setdefault("teacher_size", "student")
    if isinstance(upgraded.get("mistakes"), list):
        upgraded["mistakes"] = upgrade_mistakes(upgraded["mistakes"])
    if isinstance(upgraded.get("confusion"), dict) and isinstance(upgraded["confusion"].get("pairs"), list):
        upgraded["confusion"] = upgraded["confusion"] | {"pairs": upgrade_mistakes(upgraded["confusion"]["pairs"])}
    if isinstance(upgraded.get("model"), dict) and isinstance(upgraded["model"].get("name"), str):
        upgraded["model"] = upgraded["model"] | {"name": upgrade_name(upgraded["model"]["name"])}
    return upgraded


def upgrade_skipped(entry: dict[str, Any]) -> dict[str, Any]:
    """A skipped image in the manifest of `vitrail data pack`."""
    return {SKIPPED_IMAGES.get(name, name): value for name, value in entry.items()}


def upgrade_mistakes(entries: list[Any]) -> list[Any]:
    """The mistakes of a run.json, or the pairs of its confusion."""
    return [{MISTAKES.get(key, key): value for key, value in row.items()} if isinstance(row, dict) else row for row in entries]


def upgrade_manifest(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest of a label store."""
    upgraded = {LABEL_STORE.get(name, name): value for name, value in manifest.items()}
    if upgraded.get("covers") == "centre":
        upgraded["covers"] = "center"
    if isinstance(upgraded.get("shards"), list):
        upgraded["shards"] = [
            {LABEL_STORE.get(name, name): value for name, value in shard.items()} for shard in upgraded["shards"]
        ]
    return upgraded


def upgrade_metrics(values: dict[str, Any]) -> dict[str, Any]:
    return {METRICS.get(name, name): value for name, value in values.items()}


def upgrade_tensor(name: str) -> str:
    """The name of a model's tensor."""
    first = name.replace("/", ".").partition(".")[0]
    return TENSORS.get(first, first) + name[len(first) :]


def old_tensor_name(name: str) -> str:
    """The inverse of `upgrade_tensor`: deltas contain a hash of the names of that time."""
    old = {new: first for first, new in TENSORS.items()}
    first = name.partition(".")[0]
    return old.get(first, first) + name[len(first) :]


def upgrade_checkpoint_key(key: str) -> str:
    """The key of a tensor of a training checkpoint: group:name, or group:name/buffer for optimizer state."""
    group, colon, name = key.partition(":")
    return f"{GROUPS.get(group, group)}{colon}{upgrade_tensor(name)}"


def upgrade_name(name: str) -> str:
    """The name of a model or of bundled weights; "house_tiny with depth=4" is accepted too."""
    first, space, rest = name.partition(" ")
    return f"{MODELS.get(first, first)}{space}{rest}"


def upgrade_benchmark(document: dict[str, Any]) -> dict[str, Any]:
    """The content of a file of `vitrail bench --json`."""
    upgraded = {BENCHMARK.get(name, name): value for name, value in document.items()}
    rows = upgraded.get("measurements", [])
    return upgraded | {"measurements": [{BENCHMARK.get(key, key): value for key, value in row.items()} for row in rows]}
