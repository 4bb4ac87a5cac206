"""A short detection: `python -m tests.tasks.detection_process DATA FOLDER [STEP]` runs it, and kills itself at a step."""

import os
import signal
import sys
from pathlib import Path

from rich.console import Console

from vitrail.data.datasets.lookup import open_splits
from vitrail.data.image_loader import ImageLoader
from vitrail.recipes import lookup
from vitrail.runs.display import Display
from vitrail.runs.initial_model import build_initial
from vitrail.tasks.detection import Detection
from vitrail.training.checkpointing import load_checkpoint
from vitrail.training.distributed import init_distributed
from vitrail.training.throughput import Throughput
from vitrail.training.trainer import Options, Trainer

# A stem and a neck with BatchNorm, in groups of which two processes have one each; stochastic depth.
CHANGES = {
    "model": "vitrail_mini",
    "architecture.width": 32,
    "architecture.depth": 1,
    "architecture.patch_size": 8,
    "architecture.drop_path": 0.2,
    "augmentation.image_size": [64, 64],
    "batch_size": 4,
    "group_size": 2,
    "precision": "fp32",
    "task_options.channels": 16,
    "task_options.hidden": 32,
    "task_options.candidates": 60,
    "task_options.proposals": 30,
    "task_options.anchors_sampled": 32,
    "task_options.boxes_sampled": 16,
    "task_options.max_objects": 9,
    "optimizer.eps": 1e-5,
    "optimizer.layer_decay": 1.0,
    "schedule.length": "5 steps",
    "schedule.warmup": "2 steps",
    "validation.every": "5 steps",
}


class Killed(Detection):
    """Kills its process after the update of the step `at`."""

    at = -1

    def after_optimizer_step(self, position, skipped):
        super().after_optimizer_step(position, skipped)
        if position.step == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def trained(data, folder, devices, kill_at=-1, changes=None):
    """A trainer that has run to its end, from its checkpoint if there is one."""
    recipe, splits = lookup("detect").set(CHANGES | (changes or {})), open_splits(data)
    task = Killed(recipe, splits.train, devices.device)
    task.at = kill_at
    model = build_initial(recipe, task.class_names, None)
    task.attach(model)
    trainer = Trainer(recipe, model, task, splits.train, devices, Path(folder), Options(save_steps=3))
    loaders = [ImageLoader(part, devices.device, 0, objects=True) for part in (splits.train, splits.validation)]
    trainer.validation = loaders[1]
    load_checkpoint(trainer, print)
    trainer.run(loaders[0], Display(5, 1, 4, console=Console(quiet=True)), None, Throughput(model, devices.device, 1))
    return trainer


if __name__ == "__main__":
    with init_distributed("cpu") as _devices:
        trained(sys.argv[1], sys.argv[2], _devices, int(sys.argv[3]) if len(sys.argv) > 3 else -1)
