"""Parts of a recipe that can be left out, and the leaves that say so: what an ablation drops."""

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any

from vitrail.data.transforms.pipeline import Augmentation
from vitrail.errors import UserError
from vitrail.models.registry import lookup
from vitrail.recipes.schema import Recipe, parse_span

NO_JITTER = [0.0, 0.0, 0.0, 0.0]
STILL = ("center", "squash")  # crops without chance, which are not turned round either


@dataclass(frozen=True)
class Part:
    """A part: what it is, and the leaves without it."""

    what: str
    without: dict[str, Any]


PARTS = {
    "mixing": Part("Mixup and CutMix together", {"mixing.mixup": 0.0, "mixing.cutmix": 0.0}),
    "mixup": Part("Mixup; with CutMix on as well, every mixed step is CutMix", {"mixing.mixup": 0.0}),
    "cutmix": Part("CutMix; with Mixup on as well, every mixed step is Mixup", {"mixing.cutmix": 0.0}),
    "augmentation": Part(
        "everything that is done to an image but its crop: policy, color, erasing, mirror images",
        {
            "augmentation.policy": "none",
            "augmentation.color_jitter": NO_JITTER,
            "augmentation.random_erasing": 0.0,
            "augmentation.hflip": 0.0,
        },
    ),
    "policy": Part("the policy: RandAugment, AutoAugment, 3-Augment, …", {"augmentation.policy": "none"}),
    "jitter": Part("color jitter", {"augmentation.color_jitter": NO_JITTER}),
    "erasing": Part("random erasing", {"augmentation.random_erasing": 0.0}),
    "flip": Part("mirror images", {"augmentation.hflip": 0.0}),
    "crop": Part(
        "the random crop, and mirror images with it; the view of the validation instead", {"augmentation.crop": "center"}
    ),
    "smoothing": Part("label smoothing", {"loss.label_smoothing": 0.0}),
    "binary": Part("the binary loss; cross-entropy instead", {"loss.kind": "cross_entropy", "loss.binary_sum": False}),
    "ema": Part("the running mean of the weights", {"ema.decay": 0.0, "ema.evaluate": False}),
    "repeats": Part("repeated augmentation; an epoch keeps its length", {"data.repeats": 1}),
    "balanced": Part("class balance", {"data.class_balanced": False}),
    "drop_path": Part("stochastic depth", {"architecture.drop_path": 0.0}),
    "dropout": Part("dropout, also in the attention", {"architecture.dropout": 0.0, "architecture.attention_dropout": 0.0}),
    "layer_scale": Part("LayerScale or another scale of the residuals; plain ones instead", {"architecture.residual": "plain"}),
    "decay": Part("weight decay", {"optimizer.weight_decay": 0.0}),
    "clip": Part("gradient clipping", {"optimizer.clip_grad_norm": 0.0}),
    "layer_decay": Part("smaller rates in lower layers", {"optimizer.layer_decay": 1.0}),
    "warmup": Part("the warm-up", {"schedule.warmup": "0 epochs"}),
    "schedule": Part("the fall of the rate; constant after the warm-up", {"schedule.kind": "constant"}),
    "cooldown": Part("the cool-down; the training is as much shorter", {"schedule.cooldown": "0 epochs"}),
}
# A leaf's own name stands for the part that is nothing but that leaf.
BY_LEAF = {next(iter(part.without)): name for name, part in PARTS.items() if len(part.without) == 1} | {
    "ema.decay": "ema",
    "loss.kind": "binary",
    "architecture.dropout": "dropout",
}


def part_named(name: str) -> str:
    """The key in PARTS for what a user has written: a part's name, or the dotted name of its leaf."""
    found = BY_LEAF.get(name, name)
    if found in PARTS:
        return found
    near = difflib.get_close_matches(name.rsplit(".", 1)[-1], PARTS, n=1, cutoff=0.6)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise UserError(f"--drop {name}: there is no such part{hint}; choose from {', '.join(PARTS)}.")


def without(recipe: Recipe, name: str) -> dict[str, Any]:
    """The leaves to set so that a recipe is without a part; {} where it never had it."""
    leaves, augmentation = dict(PARTS[name].without), recipe.augmentation
    absent = {
        "policy": augmentation.policy == "none",
        "crop": augmentation.crop in STILL,
        "jitter": not jitters(augmentation),
        "flip": augmentation.crop in STILL,
        "binary": recipe.loss.kind != "binary",
        "warmup": not parse_span(recipe.schedule.warmup)[0],
        "cooldown": not parse_span(recipe.schedule.cooldown)[0],
    }
    if absent.get(name):
        return {}
    if name == "crop":
        leaves["augmentation.crop"] = "squash" if recipe.validation.resize == "square" else "center"
        leaves["augmentation.crop_ratio"] = recipe.validation.crop_ratio
    if name == "policy" and augmentation.policy != "three":
        leaves["augmentation.color_jitter"] = NO_JITTER  # it is a part of the policy, or was asleep under it and would wake up
    known, before = dataclasses.asdict(lookup(recipe.model)[1]), recipe.leaves()
    changed = any(plain(before.get(leaf, known.get(leaf.split(".")[-1]))) != plain(value) for leaf, value in leaves.items())
    return leaves if changed else {}


def jitters(augmentation: Augmentation) -> bool:
    """Whether colors are jittered: RandAugment and its kin do without."""
    return any(augmentation.color_jitter) and augmentation.policy in ("none", "three", "dino")


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
