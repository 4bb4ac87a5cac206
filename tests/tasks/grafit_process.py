"""A short training with Grafit: `python -m tests.tasks.grafit_process FOLDER [STEP [DEVICE]]`, which kills itself in that step.

On a GPU it is compiled, in bfloat16 and captured, which the last line of the output confirms.
"""

import os
import signal
import sys
from pathlib import Path
from types import MappingProxyType

import numpy as np

from tests.training.processes import run
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.image_loader import ImageLoader
from vitrail.data.label_choice import choose_labels
from vitrail.data.source import Labels, Subset
from vitrail.recipes import lookup
from vitrail.runs.initial_model import build_initial
from vitrail.tasks.grafit import Grafit
from vitrail.training.checkpointing import load_checkpoint
from vitrail.training.distributed import init_distributed
from vitrail.training.trainer import Options, Trainer

# BatchNorm in the stem, the projector and the predictor, and drop-path. All four losses.
CHANGES = {
    "model": "vitrail_mini",
    "architecture.width": 16,
    "architecture.depth": 1,
    "architecture.drop_path": 0.2,
    "augmentation.image_size": [8, 8],
    "architecture.patch_size": 2,
    "batch_size": 16,
    "precision": "fp32",
    "task_options.knn_images": 64,
    "task_options.outputs": 8,
    "task_options.hidden": 16,
    "task_options.class_weight": 0.5,
    "task_options.triplet_weight": 0.5,
    "optimizer.eps": 1e-5,
    "schedule.length": "10 steps",
    "schedule.warmup": "2 steps",
    "validation.every": "5 steps",
}
IMAGES = 40  # every image is seen several times in ten steps


class Killed(Grafit):
    """Kills its process after the update of the step `at`."""

    at = -1

    def after_optimizer_step(self, position, skipped):
        super().after_optimizer_step(position, skipped)
        if position.step == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def open_digits():
    """Digits with two coarse classes, even and odd."""
    splits = open_splits("digits")
    for part in splits:
        part.extra = {"parity": Labels(part.label.values % 2, ["even", "odd"])}
    choose_labels(splits, "parity")
    return splits


def trained(folder, devices, kill_at=-1, changes=MappingProxyType({})):
    """A trainer that has run to its end, from its checkpoint if there is one."""
    gpu = devices.device.type == "cuda"
    recipe = lookup("grafit_small").set(CHANGES | dict(changes) | ({"precision": "bf16"} if gpu else {}))
    splits = open_digits()
    train = Subset(splits.train, np.arange(IMAGES))
    task = Killed(recipe, train, devices.device)
    task.at = kill_at
    model = build_initial(recipe, task.class_names, None)
    task.attach(model)
    trainer = Trainer(recipe, model, task, train, devices, Path(folder), Options(save_steps=4, compile=gpu))
    trainer.validation = ImageLoader(Subset(splits.validation, np.arange(16)), devices.device, 0)
    load_checkpoint(trainer, print)
    run(trainer)
    return trainer


if __name__ == "__main__":
    _folder, _step, _device = [*sys.argv[1:], *["-1", "cpu"][len(sys.argv) - 2 :]]
    with init_distributed(_device) as _devices:
        _trainer = trained(_folder, _devices, int(_step))
        print("captured" if getattr(_trainer.compute, "graph", None) is not None else "not captured")
