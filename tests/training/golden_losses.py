"""Golden losses: the first losses of a miniature of every recipe. `python -m tests.training.golden_losses` writes them again.

A miniature is a recipe with a tiny model of the same structure, batch size 16 and 32 digits, so that an epoch has two steps and
twenty steps cover the warmup and what follows. Recipes with equal miniatures share one list of losses.

Recipes with a teacher use an untrained model with confident predictions; recipes with token labels use the maps of that model on
the same digits; BEiT predicts the codes of an untrained tokenizer; the masks of segmentations are the strokes of the
digits, and the objects of detections are the boxes around them.
"""

import contextlib
import hashlib
import io
import json
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console

import vitrail
from tests.trainers import make_trainer
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.decode import decode
from vitrail.data.image_loader import ImageLoader
from vitrail.data.instance_masks import encode_rle
from vitrail.data.mask_classes import numbered_classes
from vitrail.data.objects import Objects, make_objects
from vitrail.data.source import Subset
from vitrail.models.config import Architecture
from vitrail.models.registry import create
from vitrail.models.registry import lookup as find_model
from vitrail.recipes import Recipe, list_recipes, lookup
from vitrail.recipes.schema import parse_duration
from vitrail.runs.display import Display
from vitrail.teachers.annotation import AnnotationRequest, annotate
from vitrail.teachers.lookup import open_teacher
from vitrail.training.throughput import Throughput
from vitrail.training.trainer import Options

FILE = Path(__file__).with_suffix(".json")
STEPS, BATCH, GROUP, IMAGES = 20, 16, 4, 32
WARMUP = 10  # steps; replaces a warmup given in steps, which would be longer than the miniature
# Recipe keys without effect on the training losses from scratch.
IGNORED = (
    "name",
    "about",
    "ema",
    "validation",
    "init.pretrained_recipe",
    "init.weights",
    "init.zero_head",
    "init.probe_head",
    "architecture.dense_weight",
)
# Task options that would make a miniature slow, or do not fit its size.
SMALL_OPTIONS = {"outputs": 64, "hidden": 32, "bottleneck": 16, "local_crops": 2, "local_size": 0, "codes": 16}
SMALL_OPTIONS |= {"channels": 8, "auxiliary": 4, "views": 2, "clusters": 16}
SMALL_OPTIONS |= {"max_objects": 4, "candidates": 20, "proposals": 10, "anchors_sampled": 16, "boxes_sampled": 8}
HEAD_STD = 1.0  # of the teacher's head, which is initialized with zeros otherwise


def shrink(a: Architecture) -> Architecture:
    """The architecture with fewer blocks, channels, heads and patches, and the same kinds of parts."""
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
    if a.stem == "resnet":  # every stage after the first halves the resolution
        changes |= {"stem_width": 32, "stem_layers": (1, 1), "patch_size": 8, "image_size": (32, 32)}
    if a.convnet:
        changes["convnet"] = a.convnet.replace(
            depths=(2, 1),
            widths=(32, 32),
            inner_widths=(32, 32) if a.convnet.block == "basic" else (8, 8),
            groups=(1, 1),
            root_widths=(8,) * len(a.convnet.root_widths),
        )
        changes |= {"patch_size": changes["convnet"].stride, "image_size": (32, 32)}
    if a.stem == "resnet_features":
        changes |= {"stem_width": 32, "stem_layers": (1, 1), "patch_size": 8, "image_size": (32, 32), "width": 256}
    return a.replace(**changes)


def miniature(recipe: Recipe) -> Recipe:
    small = shrink(find_model(recipe.model)[1].replace(**recipe.architecture)).to_dict()
    size = small.pop("image_size")
    del small["classes"], small["channels"]
    changes: dict[str, Any] = {
        "name": f"miniature {recipe.name}",
        "model": "vit_base_patch16",  # every field is replaced, so that equal architectures give equal miniatures
        "batch_size": BATCH,
        "group_size": GROUP if recipe.group_size else 0,
        "data.decode_scale": 0.0,  # without effect on the digits
        "precision": "fp32",
        "augmentation.image_size": size,
        "init.weights": "",
        "init.pretrained_recipe": "",
        "validation.at_start": False,
    }
    # Keeps the learning rate of the recipe's own batch size.
    changes["optimizer.lr_batch_size"] = round(recipe.optimizer.lr_batch_size * BATCH / recipe.batch_size)
    warmup, unit = parse_duration(recipe.schedule.warmup)
    if unit == "step":
        changes["schedule.warmup"] = f"{WARMUP} steps"
        length, unit = parse_duration(recipe.schedule.length)
        if unit == "step":
            changes["schedule.length"] = f"{round(length * WARMUP / warmup)} steps"
    changes |= {f"architecture.{field}": value for field, value in small.items()}
    changes |= {f"task_options.{name}": value for name, value in SMALL_OPTIONS.items() if recipe.task_options.get(name)}
    small_recipe = recipe.set(changes)
    assert abs(small_recipe.lr / recipe.lr - 1) < 1e-9, recipe.name
    return small_recipe


def image_key(small_recipe: Recipe) -> str:
    """A key for miniatures with equal losses; it does not change when a recipe key with a default is added."""
    defaults = Recipe().leaves() | {f"architecture.{field}": value for field, value in Architecture().to_dict().items()}
    leaves = {
        name: value
        for name, value in small_recipe.leaves().items()
        if not name.startswith(IGNORED) and value != defaults.get(name)
    }
    return hashlib.sha256(json.dumps(leaves, sort_keys=True).encode()).hexdigest()[:12]


@cache
def miniatures() -> tuple[dict[str, str], dict[str, Recipe]]:
    """Name of a recipe -> key; key -> miniature."""
    names, found = {}, {}
    for name in list_recipes():
        small_recipe = miniature(lookup(name))
        names[name] = image_key(small_recipe)
        found.setdefault(names[name], small_recipe)
    return names, found


@cache
def digits() -> ImageLoader:
    return ImageLoader(Subset(open_splits("digits").train, np.arange(IMAGES)), workers=0, log=lambda message: None)


class Strokes(Subset):
    """Digits with masks: the bright pixels are class 1, the first row is ignored."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.has_masks, self.mask_classes = True, numbered_classes([0, 1])

    def mask(self, index: int) -> bytes:
        mask = (decode(self.encoded(index)).mean(-1) > 100).astype(np.uint8)
        mask[0] = 255
        file = io.BytesIO()
        Image.fromarray(mask).save(file, "PNG")
        return file.getvalue()


@cache
def strokes() -> ImageLoader:
    source = Strokes(open_splits("digits").train, np.arange(IMAGES))
    return ImageLoader(source, workers=0, log=lambda message: None, masks=True)


class StrokeBoxes(Subset):
    """Digits with one object each: the bright pixels and their box, of two classes in turn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.object_classes, self.has_instances = ("even", "odd"), True

    def objects(self, index: int) -> Objects:
        mask = decode(self.encoded(index)).mean(-1) > 100
        (top, bottom), (left, right) = ((int(each.min()), int(each.max()) + 1) for each in np.nonzero(mask))
        return make_objects([{"box": (left, top, right, bottom), "class": index % 2, "shape": encode_rle(mask)}])


@cache
def stroke_boxes() -> ImageLoader:
    source = StrokeBoxes(open_splits("digits").train, np.arange(IMAGES))
    return ImageLoader(source, workers=0, log=lambda message: None, objects=True)


@cache
def throughput() -> Throughput:
    """Shared by all trainings, since counting FLOPs takes time and the result is not used."""
    return Throughput(create("vit_base_patch16", 10, 32, depth=1), torch.device("cpu"), 1)


@cache
def folder() -> tempfile.TemporaryDirectory[str]:
    """A folder that is removed when the process ends."""
    return tempfile.TemporaryDirectory()


@cache
def teacher() -> str:
    """The path of a model with predictions as confident as those of a trained one."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = create("vitrail_mini", len(digits().source.classes), 16, width=32, depth=1)
        model.head.weight.normal_(0.0, HEAD_STD)
    path = Path(folder().name, "teacher.safetensors")
    vitrail.save(model, path)
    return str(path)


@cache
def labels() -> str:
    """The path of a label store with the top 3 classes of every patch."""
    path = Path(folder().name, "maps")
    annotate(open_teacher(teacher(), "cpu"), digits().source, path, AnnotationRequest(outputs=("tokens",), top_k=3), workers=0)
    return str(path)


@cache
def tokenizer() -> str:
    """The path of an untrained tokenizer, whose codes differ enough to be learned."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = create("vitrail_mini", SMALL_OPTIONS["codes"], 16, width=32, depth=1, patch_size=4)
    model.notes["recipe"] = json.dumps({"task": "tokenizer"})
    return str(vitrail.save(model, Path(folder().name, "tokenizer.safetensors")))


def with_teacher(small_recipe: Recipe) -> Recipe:
    """The recipe with a teacher, a label store and a tokenizer, if it needs them."""
    changes = {"task_options.tokenizer": tokenizer()} if small_recipe.task == "beit" else {}
    if small_recipe.distillation.kind != "none":
        changes["distillation.teacher"] = teacher()
    if small_recipe.token_labels.weight > 0 or small_recipe.token_labels.target != "labels":
        changes["token_labels.store"] = labels()
    return small_recipe.set(changes)


class StopTraining(Exception):
    """Ends a training before its validation and checkpoint, which take longer than its steps."""


class Losses:
    """Collects the losses in place of a MetricsWriter."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def write(self, kind: str, step: int, epoch: float, values: Mapping[str, Any]) -> None:
        self.values.append(float(f"{values['loss']:.8g}"))
        if step == STEPS:
            raise StopTraining


def first_losses(small_recipe: Recipe) -> list[float]:
    losses = Losses()
    loader = {"segmentation": strokes, "detection": stroke_boxes}.get(small_recipe.task, digits)()
    training = make_trainer(with_teacher(small_recipe), loader.source, Path("nowhere"), options=Options(log_steps=1))
    training.total = training.validate_every = STEPS + 1
    display = Display(STEPS, training.sampler.steps, BATCH, console=Console(quiet=True))
    with contextlib.suppress(StopTraining):
        training.run(loader, display, losses, throughput())  # type: ignore[arg-type]
    return losses.values


def read() -> dict[str, Any]:
    return json.loads(FILE.read_text())


def main() -> None:
    torch.set_num_threads(1)
    names, found = miniatures()
    losses = {key: first_losses(small_recipe) for key, small_recipe in found.items()}
    rows = ",\n".join(f'  "{key}": {json.dumps(values)}' for key, values in losses.items())
    FILE.write_text(f'{{\n "recipes": {json.dumps(names, indent=2)},\n "losses": {{\n{rows}\n }}\n}}\n')
    print(f"{len(names)} recipes, {len(losses)} miniatures: {FILE}")


if __name__ == "__main__":
    main()
