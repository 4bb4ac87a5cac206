"""A short segmentation: `python -m tests.tasks.segmentation_process DATA FOLDER [STEP]` runs it, and kills itself at a step."""

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
from vitrail.tasks.segmentation import Segmentation
from vitrail.training.checkpointing import load_checkpoint
from vitrail.training.distributed import init_distributed
from vitrail.training.throughput import Throughput
from vitrail.training.trainer import Options, Trainer

# A stem and a head with BatchNorm, in groups of which two processes have one each, and ignored pixels; no dropout, which is
# drawn for each micro-batch.
CHANGES = {
    "model": "vitrail_mini",
    "architecture.width": 16,
    "architecture.depth": 1,
    "architecture.patch_size": 4,
    "architecture.drop_path": 0.2,
    "augmentation.image_size": [16, 16],
    "batch_size": 8,
    "group_size": 4,
    "precision": "fp32",
    "task_options.channels": 8,
    "task_options.auxiliary": 4,
    "task_options.dropout": 0.0,
    "optimizer.eps": 1e-5,
    "schedule.length": "8 steps",
    "schedule.warmup": "2 steps",
    "validation.every": "4 steps",
}


class Killed(Segmentation):
    """Kills its process after the update of the step `at`."""

    at = -1

    def after_optimizer_step(self, position, skipped):
        super().after_optimizer_step(position, skipped)
        if position.step == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def trained(data, folder, devices, kill_at=-1, changes=None):
    """A trainer that has run to its end, from its checkpoint if there is one."""
    recipe, splits = lookup("segment").set(CHANGES | (changes or {})), open_splits(data)
    Killed.complete_data(recipe, splits)
    task = Killed(recipe, splits.train, devices.device)
    task.at = kill_at
    model = build_initial(recipe, task.class_names, None)
    task.attach(model)
    trainer = Trainer(recipe, model, task, splits.train, devices, Path(folder), Options(save_steps=3))
    loaders = [ImageLoader(part, devices.device, 0, masks=True) for part in (splits.train, splits.validation)]
    trainer.validation = loaders[1]
    load_checkpoint(trainer, print)
    trainer.run(loaders[0], Display(8, 1, 8, console=Console(quiet=True)), None, Throughput(model, devices.device, 1))
    return trainer


if __name__ == "__main__":
    with init_distributed("cpu") as _devices:
        trained(sys.argv[1], sys.argv[2], _devices, int(sys.argv[3]) if len(sys.argv) > 3 else -1)
