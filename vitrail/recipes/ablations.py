"""Parts of a recipe that an ablation can drop, and the changes that drop them."""

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any

from vitrail.aliases import PARTS as OLD_PARTS
from vitrail.aliases import upgrade_key
from vitrail.data.transforms.config import FIXED_CROPS, Augmentation
from vitrail.errors import UserError
from vitrail.models.registry import lookup
from vitrail.recipes.schema import Recipe, parse_duration

NO_JITTER = [0.0, 0.0, 0.0, 0.0]


@dataclass(frozen=True)
class Part:
    """A part of a recipe: its description, and the values that turn it off."""

    description: str
    off: dict[str, Any]


PARTS = {
    "mixing": Part("Mixup and CutMix", {"mixing.mixup": 0.0, "mixing.cutmix": 0.0}),
    "mixup": Part("Mixup; if CutMix is on as well, every mixed step is CutMix", {"mixing.mixup": 0.0}),
    "cutmix": Part("CutMix; if Mixup is on as well, every mixed step is Mixup", {"mixing.cutmix": 0.0}),
    "augmentation": Part(
        "all augmentation but the crop: policy, color jitter, random erasing, horizontal flip",
        {
            "augmentation.policy": "none",
            "augmentation.color_jitter": NO_JITTER,
            "augmentation.random_erasing": 0.0,
            "augmentation.hflip": 0.0,
        },
    ),
    "policy": Part("the policy: RandAugment, AutoAugment, 3-Augment, …", {"augmentation.policy": "none"}),
    "color_jitter": Part("color jitter", {"augmentation.color_jitter": NO_JITTER}),
    "random_erasing": Part("random erasing", {"augmentation.random_erasing": 0.0}),
    "hflip": Part("horizontal flip", {"augmentation.hflip": 0.0}),
    "crop": Part("random crop and horizontal flip; the validation crop instead", {"augmentation.crop": "center"}),
    "label_smoothing": Part("label smoothing", {"loss.label_smoothing": 0.0}),
    "binary_loss": Part("binary cross-entropy; cross-entropy instead", {"loss.kind": "cross_entropy", "loss.binary_sum": False}),
    "ema": Part("EMA of the weights", {"ema.decay": 0.0, "ema.evaluate": False}),
    "repeats": Part("repeated augmentation; an epoch keeps its length", {"data.repeats": 1}),
    "class_balanced": Part("class-balanced sampling", {"data.class_balanced": False}),
    "drop_path": Part("stochastic depth", {"architecture.drop_path": 0.0}),
    "dropout": Part("dropout, also in the attention", {"architecture.dropout": 0.0, "architecture.attention_dropout": 0.0}),
    "layerscale": Part("LayerScale or another residual scale; plain residuals instead", {"architecture.residual": "plain"}),
    "weight_decay": Part("weight decay", {"optimizer.weight_decay": 0.0}),
    "clip_grad_norm": Part("gradient clipping", {"optimizer.clip_grad_norm": 0.0}),
    "layer_decay": Part("layer-wise learning rate decay", {"optimizer.layer_decay": 1.0}),
    "warmup": Part("warmup", {"schedule.warmup": "0 epochs"}),
    "schedule": Part("learning rate decay; a constant learning rate after the warmup", {"schedule.kind": "constant"}),
    "cooldown": Part("cooldown; the training is shorter by its length", {"schedule.cooldown": "0 epochs"}),
}
# The key of a part that has only one, or its first key.
BY_KEY = {next(iter(part.off)): name for name, part in PARTS.items() if len(part.off) == 1} | {
    "ema.decay": "ema",
    "loss.kind": "binary_loss",
    "architecture.dropout": "dropout",
}


def find_part(name: str) -> str:
    """The key in PARTS for a part's name, its old name, or the recipe key that it turns off."""
    part = OLD_PARTS.get(name, name)
    part = BY_KEY.get(upgrade_key(part), part)
    if part in PARTS:
        return part
    near = difflib.get_close_matches(name.rsplit(".", 1)[-1], PARTS, n=1, cutoff=0.6)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise UserError(f"--drop {name}: there is no such part{hint}; choose from {', '.join(PARTS)}.")


def without(recipe: Recipe, name: str) -> dict[str, Any]:
    """Changes that turn off a part of a recipe; {} if it is off already."""
    changes, augmentation = dict(PARTS[name].off), recipe.augmentation
    is_off = {
        "policy": augmentation.policy == "none",
        "crop": augmentation.crop in FIXED_CROPS,
        "color_jitter": not uses_color_jitter(augmentation),
        "hflip": augmentation.crop in FIXED_CROPS,
        "binary_loss": recipe.loss.kind != "binary",
        "warmup": not parse_duration(recipe.schedule.warmup)[0],
        "cooldown": not parse_duration(recipe.schedule.cooldown)[0],
    }
    if is_off.get(name):
        return {}
    if name == "crop":
        changes["augmentation.crop"] = "squash" if recipe.validation.resize == "square" else "center"
        changes["augmentation.crop_ratio"] = recipe.validation.crop_ratio
    if name == "policy" and augmentation.policy != "three":
        changes["augmentation.color_jitter"] = NO_JITTER  # part of the policy, or without effect under it
    defaults, values = dataclasses.asdict(lookup(recipe.model)[1]), recipe.leaves()
    is_on = any(plain(values.get(key, defaults.get(key.split(".")[-1]))) != plain(value) for key, value in changes.items())
    return changes if is_on else {}


def uses_color_jitter(augmentation: Augmentation) -> bool:
    """Whether color jitter is applied: RandAugment, AutoAugment and TrivialAugment replace it."""
    return any(augmentation.color_jitter) and augmentation.policy in ("none", "three", "dino")


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
