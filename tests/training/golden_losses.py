"""Miniatures of every recipe and the first losses they gave: `python -m tests.training.golden_losses` writes them again.

A miniature is a recipe with a tiny network of the same structure, 16 images a step and 32 digits, so that an epoch has two
steps and twenty steps see the warm-up and what comes after it. Recipes whose miniatures are alike share one list of losses.

Where a recipe wants a teacher, an untrained network with strong opinions is asked; where it wants labels of patches, it gets the
maps that this network has made of the same digits.
"""

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

import vitrail
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.feed import Feed
from vitrail.data.source import Subset
from vitrail.models.config import Architecture
from vitrail.models.registry import create
from vitrail.models.registry import lookup as find_model
from vitrail.recipes import Recipe, list_recipes, lookup
from vitrail.recipes.schema import parse_span
from vitrail.runs.display import Display
from vitrail.runs.train import build
from vitrail.teachers.annotation import Wanted, annotate
from vitrail.teachers.lookup import open_teacher
from vitrail.training.distributed import Devices
from vitrail.training.throughput import Speed
from vitrail.training.trainer import Options, Trainer

FILE = Path(__file__).with_suffix(".json")
STEPS, BATCH, IMAGES = 20, 16, 32
WARMUP = 10  # steps, of a warm-up that a recipe gives in steps: thousands of them would never be passed here
# What no loss of the training depends on when it starts from scratch.
NO_MATTER = (
    "name",
    "about",
    "average",
    "testing",
    "init.pretrained_recipe",
    "init.weights",
    "init.zero_head",
    "architecture.dense_weight",
)
SURE = 1.0  # deviation of the teacher's classifier, which would start at zero


def shrink(a: Architecture) -> Architecture:
    """Fewer blocks, channels, heads and patches; every part stays what it is."""
    changes: dict[str, Any] = {
        "width": 32,
        "depth": min(a.depth, 2),
        "heads": min(a.heads, 2),
        "pooling_heads": min(a.pooling_heads, 2),
        "pre_logits": min(a.pre_logits, 32),
        "patch_size": 4,
        "image_size": (16, 16),
    }
    if a.stem == "tower":
        changes |= {"stem_width": 16, "stem_kernels": (*a.stem_kernels[:-1], 2), "stem_strides": (*a.stem_strides[:-1], 2)}
    if a.stem == "basic":
        changes["stem_width"] = 16
    if a.stem == "hmlp":
        changes |= {"patch_size": 16, "image_size": (32, 32), "stem_strides": a.stem_strides}
    if a.stem == "local_transformer":
        changes["patch_size"] = 8
    if a.stem == "resnet":  # the stages after the first halve the image, so that fewer of them leave more of it
        changes |= {"stem_width": 32, "stem_layers": (1, 1), "patch_size": 8, "image_size": (32, 32)}
    if a.stem == "resnet_features":
        changes |= {"stem_width": 32, "stem_layers": (1, 1), "patch_size": 8, "image_size": (32, 32), "width": 256}
    return a.replace(**changes)


def miniature(recipe: Recipe) -> Recipe:
    small = shrink(find_model(recipe.model)[1].replace(**recipe.architecture)).to_dict()
    size = small.pop("image_size")
    del small["classes"], small["channels"]
    changes: dict[str, Any] = {
        "name": f"a little {recipe.name}",
        "model": "vit_base_patch16",  # of which every field is replaced: the same network is the same whatever it was called
        "batch_size": BATCH,
        "precision": "fp32",
        "augmentation.image_size": size,
        "init.weights": "",
        "init.pretrained_recipe": "",
    }
    # The rate stays what it is at the recipe's own batch.
    changes["optimizer.lr_batch_size"] = round(recipe.optimizer.lr_batch_size * BATCH / recipe.batch_size)
    warmup, micro_batch = parse_span(recipe.schedule.warmup)
    if micro_batch == "step":
        changes["schedule.warmup"] = f"{WARMUP} steps"
        length, micro_batch = parse_span(recipe.schedule.length)
        if micro_batch == "step":
            changes["schedule.length"] = f"{round(length * WARMUP / warmup)} steps"
    changes |= {f"architecture.{field}": value for field, value in small.items()}
    little = recipe.set(changes)
    assert abs(little.lr / recipe.lr - 1) < 1e-9, recipe.name
    return little


def key_of(little: Recipe) -> str:
    """The same for miniatures that give the same losses, also when a leaf is added that is as it was by default."""
    usual = Recipe().leaves() | {f"architecture.{field}": value for field, value in Architecture().to_dict().items()}
    leaves = {
        name: value for name, value in little.leaves().items() if not name.startswith(NO_MATTER) and value != usual.get(name)
    }
    return hashlib.sha256(json.dumps(leaves, sort_keys=True).encode()).hexdigest()[:12]


@cache
def miniatures() -> tuple[dict[str, str], dict[str, Recipe]]:
    """Name of a recipe -> key; key -> miniature."""
    names, found = {}, {}
    for name in list_recipes():
        little = miniature(lookup(name))
        names[name] = key_of(little)
        found.setdefault(names[name], little)
    return names, found


@cache
def digits() -> Feed:
    return Feed(Subset(open_splits("digits").train, np.arange(IMAGES)), workers=0, say=lambda sentence: None)


@cache
def speed() -> Speed:
    """One for all, though it counts the operations of another network: what it says is not looked at, and counting takes time."""
    return Speed(create("vit_base_patch16", 10, 32, depth=1), torch.device("cpu"), 1)


@cache
def beside() -> tempfile.TemporaryDirectory[str]:
    """A folder that goes with the process."""
    return tempfile.TemporaryDirectory()


@cache
def teacher() -> str:
    """A file with a network that is as sure of its answers as a trained one."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = create("vitrail_mini", len(digits().source.classes), 16, width=32, depth=1)
        model.head.weight.normal_(0.0, SURE)
    path = Path(beside().name, "teacher.safetensors")
    vitrail.save(model, path)
    return str(path)


@cache
def labels() -> str:
    """A store with the three best classes of every cell of its maps."""
    path = Path(beside().name, "maps")
    annotate(open_teacher(teacher(), "cpu"), digits().source, path, Wanted(what=("tokens",), top_k=3), workers=0)
    return str(path)


def guided(little: Recipe) -> Recipe:
    """The recipe with what it learns from."""
    changes = {}
    if little.distillation.kind != "none":
        changes["distillation.teacher"] = teacher()
    if little.token_labels.weight > 0 or little.token_labels.target != "labels":
        changes["token_labels.store"] = labels()
    return little.set(changes)


class Enough(Exception):
    """Ends a training before it would test and save its weights, which takes longer than its steps."""


class Losses:
    """What a training writes its numbers to."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def write(self, kind: str, step: int, epoch: float, values: Mapping[str, Any]) -> None:
        self.values.append(float(f"{values['loss']:.8g}"))
        if step == STEPS:
            raise Enough


def first_losses(little: Recipe) -> list[float]:
    little, feed, devices, losses = guided(little), digits(), Devices(torch.device("cpu")), Losses()
    model = build(little, feed.source)
    training = Trainer(little, model, devices, feed, feed, Path("nowhere"), Options(log_steps=1))
    training.total = training.test_every = STEPS + 1
    display = Display(STEPS, training.order.steps, BATCH, console=Console(quiet=True))
    with contextlib.suppress(Enough):
        training.run(display, losses, speed())  # type: ignore[arg-type]
    return losses.values


def read() -> dict[str, Any]:
    return json.loads(FILE.read_text())


def main() -> None:
    torch.set_num_threads(1)
    names, found = miniatures()
    losses = {key: first_losses(little) for key, little in found.items()}
    rows = ",\n".join(f'  "{key}": {json.dumps(values)}' for key, values in losses.items())
    FILE.write_text(f'{{\n "recipes": {json.dumps(names, indent=2)},\n "losses": {{\n{rows}\n }}\n}}\n')
    print(f"{len(names)} recipes, {len(losses)} miniatures: {FILE}")


if __name__ == "__main__":
    main()
