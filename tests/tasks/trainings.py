"""Short trainings of all tasks but classification, which are killed, resumed and divided in test_trainings.py.

    python -m tests.tasks.trainings DATA FOLDER dino beit      # FOLDER/dino and FOLDER/beit, in the processes torchrun describes
    python -m tests.tasks.trainings DATA FOLDER dino=6 beit=6  # each in a process that is killed before that step
    python -m tests.tasks.trainings --gpu DATA FOLDER dino     # compiled, in bfloat16 and captured, which the output confirms

DATA is a folder that `write_data` filled.
"""

import argparse
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import vitrail
from tests.images import make_masked_folder
from tests.shapes import make_coco
from tests.trainers import make_trainer
from tests.training.processes import kill_before, one_process, run
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.image_loader import ImageLoader
from vitrail.data.label_choice import choose_labels
from vitrail.data.source import Labels, Splits, Subset
from vitrail.recipes import lookup
from vitrail.recipes.schema import Recipe
from vitrail.tasks.registry import find_task
from vitrail.training.checkpointing import load_checkpoint
from vitrail.training.distributed import init_distributed
from vitrail.training.trainer import Options

SAVED, STEPS = 4, 8  # step of the first checkpoint; steps of a training
IMAGES = 16  # most that are validated
SHORT = {
    "precision": "fp32",
    "optimizer.eps": 1e-5,  # larger than gradients that are only rounding error (those of key biases)
    "schedule.length": f"{STEPS} steps",
    "schedule.warmup": "2 steps",
    "validation.every": f"{STEPS // 2} steps",
}
# A stem with BatchNorm, and drop-path.
TINY = SHORT | {
    "model": "vitrail_mini",
    "architecture.width": 16,
    "architecture.depth": 1,
    "architecture.drop_path": 0.2,
    "architecture.patch_size": 2,
    "augmentation.image_size": [8, 8],
    "batch_size": 16,
}
# Two groups in a batch, so that two processes have one each.
DINO = TINY | {
    "group_size": 8,
    "task_options.knn_images": 64,
    "task_options.outputs": 32,
    "task_options.hidden": 16,
    "task_options.bottleneck": 8,
    "task_options.local_crops": 2,
    "task_options.freeze_last_layer": 0.05,  # four of 80 steps of an epoch
    "task_options.patch_weight": 0.5,
}
# BatchNorm in the stem, the projector and the predictor. All four losses.
GRAFIT = TINY | {
    "task_options.knn_images": 64,
    "task_options.outputs": 8,
    "task_options.hidden": 16,
    "task_options.class_weight": 0.5,
    "task_options.triplet_weight": 0.5,
}
CODES = 16
TOKENIZER = lookup("tokenizer_small").set(
    SHORT
    | {
        "architecture.width": 16,
        "architecture.depth": 1,
        "architecture.patch_size": 2,
        "augmentation.image_size": [8, 8],
        "batch_size": 16,
        "task_options.codes": CODES,
        "task_options.width": 8,
        "task_options.temperature_end": 0.5,
    }
)
BEIT = Recipe(name="tiny", task="beit").set(
    TINY
    | {
        "model": "vit_tiny_patch16_12x1_ls_hmlp_ln",
        "architecture.heads": 2,
        "architecture.pos_embed": "relative_bias",
        "architecture.pos_embed_place": "shared",
        "architecture.drop_path": 0.1,
        "augmentation.scale": [0.5, 1.0],
    }
)
MASKED = SHORT | {
    "architecture.width": 16,
    "architecture.depth": 1,
    "architecture.heads": 2,
    "architecture.patch_size": 4,
    "augmentation.image_size": [16, 16],
    "batch_size": 16,
}
# BatchNorm in the head too; ignored pixels; no dropout, which is drawn for each micro-batch.
SEGMENTATION = TINY | {
    "architecture.patch_size": 4,
    "augmentation.image_size": [16, 16],
    "batch_size": 8,
    "group_size": 4,
    "task_options.channels": 8,
    "task_options.auxiliary": 4,
    "task_options.dropout": 0.0,
}
# BatchNorm in the neck too.
DETECTION = TINY | {
    "architecture.width": 32,
    "architecture.patch_size": 8,
    "augmentation.image_size": [64, 64],
    "batch_size": 4,
    "group_size": 2,
    "task_options.channels": 16,
    "task_options.hidden": 32,
    "task_options.candidates": 60,
    "task_options.proposals": 30,
    "task_options.anchors_sampled": 32,
    "task_options.boxes_sampled": 16,
    "task_options.max_objects": 9,
    "optimizer.layer_decay": 1.0,
}


def open_few_digits() -> Splits:
    """Forty training images, each of which is seen several times, with two coarse classes: even and odd."""
    splits = open_splits("digits")
    for part in splits:
        part.extra = {"parity": Labels(part.label.values % 2, ["even", "odd"])}
    choose_labels(splits, "parity")
    return splits._replace(train=Subset(splits.train, np.arange(40)))


class Training(NamedTuple):
    """A training, and how it is compared with the same one in two processes."""

    recipe: Recipe
    open: Callable[[Path], Splits] = lambda data: open_splits("digits")
    micro_batches: int = 2  # in one process
    tolerance: tuple[float, float] = (1e-4, 2e-5)  # relative and absolute, of the weights; sums are formed in another order
    metric: str = "loss"
    error: float = 1e-3  # largest difference of the metric


LOOSE = (1e-3, 1e-4)
TRAININGS = {
    "dino": Training(lookup("dino_small").set(DINO), metric="knn", error=0.1),
    "grafit": Training(
        lookup("grafit_small").set(GRAFIT | {"group_size": 8}),
        lambda data: open_few_digits(),
        tolerance=LOOSE,
        metric="knn",
        error=0.1,
    ),
    # Statistics of BatchNorm over the images of both processes.
    "grafit_in_one_group": Training(
        lookup("grafit_small").set(GRAFIT | {"task_options.triplet_weight": 0.0}),
        lambda data: open_few_digits(),
        1,
        LOOSE,
        "knn",
        0.1,
    ),
    "tokenizer": Training(TOKENIZER, metric="reconstruction"),
    "beit": Training(BEIT),
    "masked": Training(lookup("masked_small").set(MASKED), micro_batches=4),
    "masked_pixels": Training(lookup("masked_small").set(MASKED | {"task_options.target": "pixels"})),
    "segmentation": Training(lookup("segment").set(SEGMENTATION), lambda data: open_splits(data / "boxes"), metric="miou"),
    "detection": Training(lookup("detect").set(DETECTION), lambda data: open_splits(data / "shapes"), metric="ap", error=0.02),
}


def write_data(data: Path) -> Path:
    """Write a tokenizer, images with masks and images with boxes into a folder."""
    write_tokenizer(data / "tokenizer.safetensors")
    make_masked_folder(data / "boxes", 24)
    make_coco(data / "shapes", 24)
    return data


def write_tokenizer(path: Path, **changes: Any) -> Path:
    """An untrained tokenizer, whose codes are as good as any for a test."""
    model = vitrail.create("vitrail_mini", CODES, (8, 8), **{"patch_size": 2, "width": 16, "depth": 1} | changes)
    model.notes["recipe"] = json.dumps({"task": "tokenizer"})
    return vitrail.save(model, path)


def make(name, data, folder, devices=None, changes=None, options=None):
    """A trainer at its first step, with a few validation images."""
    training = TRAININGS[name]
    tokenizer = {"task_options.tokenizer": str(data / "tokenizer.safetensors")} if name == "beit" else {}
    recipe, splits = training.recipe.set(tokenizer | (changes or {})), training.open(data)
    find_task(recipe.task).complete_data(recipe, splits)
    trainer = make_trainer(recipe, splits.train, folder, devices or one_process(training.micro_batches), options)
    validation = splits.validation
    if len(validation) > IMAGES:
        validation = Subset(validation, np.arange(IMAGES))
    task, device = trainer.task, trainer.devices.device
    trainer.validation = ImageLoader(validation, device, 0, masks=task.reads_masks, objects=task.reads_objects)
    return trainer


def trained(name, data, folder, devices=None, kill_at=None, changes=None):
    """A trainer that has run to its end, from its checkpoint if there is one, or is killed before the step `kill_at`."""
    gpu = devices is not None and devices.device.type == "cuda"
    changes = ({"precision": "bf16"} if gpu else {}) | (changes or {})
    trainer = make(name, data, folder, devices, changes, Options(save_steps=SAVED, compile=gpu))
    load_checkpoint(trainer, print)
    kill_before(kill_at)
    run(trainer)
    return trainer


def train_and_die(name, data, folder, step, device):
    """Train in a child process, which starts faster than another interpreter, until it is killed."""
    child = os.fork()
    if not child:
        try:
            with init_distributed(device) as devices:
                trained(name, data, folder, None if device == "cpu" else devices, step)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
        sys.exit(f"{name} was not killed: {status}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="+", metavar="NAME[=STEP]")
    parser.add_argument("--gpu", action="store_true")
    options = parser.parse_args()
    device = "cuda" if options.gpu else "cpu"
    killed = [name.split("=") for name in options.names if "=" in name]
    for name, step in killed:  # before threads and devices are used, which do not survive a fork
        train_and_die(name, options.data, options.folder / name, int(step), device)
    if killed:
        return
    with init_distributed(device) as devices:
        for name in options.names:
            trainer = trained(name, options.data, options.folder / name, devices)
            print("captured" if getattr(trainer.compute, "graph", None) is not None else "not captured")


if __name__ == "__main__":
    main()
