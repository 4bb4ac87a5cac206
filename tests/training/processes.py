"""Trainings by several processes on this machine, started as a person or torchrun would start them."""

import os
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from vitrail.data.datasets.lookup import open_splits
from vitrail.data.feed import Feed
from vitrail.data.source import Subset
from vitrail.recipes.schema import Recipe
from vitrail.runs.display import Display
from vitrail.runs.prepare import build
from vitrail.training.distributed import Devices
from vitrail.training.metrics import Metrics
from vitrail.training.throughput import Speed
from vitrail.training.trainer import Options, Trainer
from vitrail.training.training_state import load_state

ROOT = Path(__file__).parents[2]
TINY = Recipe(name="tiny", model="deit_tiny_patch16", batch_size=16, precision="fp32").set(
    {
        "architecture.width": 32,
        "architecture.depth": 2,
        "architecture.heads": 2,
        "architecture.patch_size": 4,
        "architecture.drop_path": 0.3,
        "augmentation.image_size": [8, 8],
        "augmentation.scale": [0.5, 1.0],
        "data.repeats": 2,
        "mixing.mixup": 0.8,
        "mixing.cutmix": 1.0,
        "loss.label_smoothing": 0.1,
        # Larger than the gradients that are nothing but rounding (those of key biases), which Adam would blow up to full steps.
        "optimizer.eps": 1e-5,
        "optimizer.lr": 3e-3,
        "optimizer.clip_grad_norm": 0.5,
        "ema.decay": 0.9,
        "ema.evaluate": True,
        "schedule.length": "20 steps",
        "schedule.warmup": "5 steps",
        "validation.every": "10 steps",
        "validation.crop_ratio": 1.0,
    }
)
# In the blocks, where they are computed twice with `recompute`, and in the stem.
BATCH_NORMS = {"model": "vitrail_mini", "architecture.width": 16, "architecture.norm": "batch"}
DENSE = {
    "model": "lvvit_t",
    "augmentation.image_size": [16, 16],
    "architecture.patch_size": 16,
}  # its dense head gets no gradient


class Recorded(Trainer):
    """Notes which images every unit has seen; `poison` is a step at which the last unit's images are no numbers."""

    poison = -1

    def prepare(self, batch, step, micro_batch):
        self.__dict__.setdefault("seen", {})[step, micro_batch] = (batch.index.tolist(), batch.repeat.tolist())
        images, targets = super().prepare(batch, step, micro_batch)
        bad = step == self.poison and micro_batch == self.devices.micro_batches - 1
        return (images * torch.nan if bad else images), targets


def prepared(folder, devices, changes=None, options=None, validation=None):
    """A training on the digits that is ready to run, tested on some of the validation images."""
    recipe = TINY.set(changes or {})
    splits = open_splits("digits")
    feeds = [Feed(part, devices.device, 0) for part in (splits.train, Subset(splits.validation, np.arange(142)[:validation]))]
    return Recorded(recipe, build(recipe, splits.train), devices, *feeds, Path(folder), options or Options())


def trained(folder, devices, changes=None, options=None, until=None, poison=-1, logged=False):
    """A training that has run to its end, or to a step; from its checkpoint if there is one. `logged`: with metrics.jsonl."""
    training = prepared(folder, devices, changes, options)
    load_state(training, print)
    training.poison = poison
    training.total = until or training.total
    with Metrics(training.folder, training.step) if logged else nullcontext() as metrics:
        run(training, metrics)
    return training


def run(training, metrics=None):
    display = Display(20, 1, 16, console=Console(quiet=True))
    training.run(display, metrics, Speed(training.model, training.devices.device, 1))


def alone(micro_batches):
    return Devices(torch.device("cpu"), micro_batches=micro_batches)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(rank=None, world=2, port=0, **more):
    plain = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    plain |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    if rank is not None:
        plain |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        plain |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return plain | more


def start(*words, **more):
    """Python with these arguments; its output is gathered."""
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=more or environment(),
    )


def side_by_side(*commands):
    """A command in each of several processes that know of each other; exit codes and what each has said."""
    port, world = free_port(), len(commands)
    processes = [start(*words, **environment(rank, world, port)) for rank, words in enumerate(commands)]
    said = [process.communicate(timeout=120) for process in processes]
    return [process.returncode for process in processes], said
