"""Helpers to run trainings in several processes on this machine, started like torchrun does."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from tests.trainers import initial_model
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.image_loader import ImageLoader
from vitrail.data.source import Subset
from vitrail.recipes.schema import Recipe
from vitrail.runs.display import Display
from vitrail.runs.train import train
from vitrail.tasks.classification import Classification
from vitrail.tasks.registry import register_task
from vitrail.training.checkpointing import load_checkpoint
from vitrail.training.distributed import Devices
from vitrail.training.metrics import MetricsWriter
from vitrail.training.throughput import Throughput
from vitrail.training.trainer import Options, Trainer

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
        # Larger than gradients that are only rounding error (those of key biases), which Adam would scale up to full steps.
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
# In the stem and in the blocks, where `recompute` computes them twice.
BATCH_NORMS = {"model": "vitrail_mini", "architecture.width": 16, "architecture.norm": "batch"}
DENSE = {
    "model": "lvvit_t",
    "augmentation.image_size": [16, 16],
    "architecture.patch_size": 16,
}  # its dense head gets no gradient


class Recorded(Classification):
    """Records the images of every micro-batch in `seen`, by step and first position.

    Those of the micro-batch `poison` (step, first position) become NaN.
    """

    poison = (-1, 0)

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.seen = {}

    def prepare_batch(self, batch, position):
        key = (position.step, int(batch.position[0]))
        self.seen[key] = (batch.index.tolist(), batch.repeat.tolist())
        images, targets = super().prepare_batch(batch, position)
        return (images * torch.nan if key == self.poison else images), targets


class Fitted(Classification):
    """Fits a classifier that every process rounds differently, and records the classifier of the validations after that."""

    def initialize(self, model, loader, batch_size):
        torch.nn.init.zeros_(model.head.weight)
        messages = super().initialize(model, loader, batch_size)
        model.head.weight.data += int(os.environ.get("RANK", "0"))
        Fitted.heads = []
        return messages

    def evaluate(self, model, loader, batch_size, devices):
        Fitted.heads.append(model.head.weight.detach().clone())
        return super().evaluate(model, loader, batch_size, devices)


def finetuned(folder, **options):
    """The best validation and the classifiers of a short training that starts with a fitted classifier."""
    register_task("fitted", Fitted)
    Fitted.heads = []
    changes = {"task": "fitted", "init.probe_head": True, "validation.at_start": True, "schedule.length": "2 steps"}
    changes |= {"schedule.warmup": "1 steps", "ema.warmup": True}
    finished = train(recipe=TINY, changes=changes, out=folder, device="cpu", workers=0, options=Options(**options))
    return {"best": finished.best, "heads": Fitted.heads}


def prepared(folder, devices, changes=None, options=None, validation=None):
    """A trainer on the digits, with some of the validation images."""
    recipe = TINY.set(changes or {})
    splits = open_splits("digits")
    task = Recorded(recipe, splits.train, devices.device)
    model = initial_model(recipe, splits.train)
    task.attach(model)
    training = Trainer(recipe, model, task, splits.train, devices, Path(folder), options or Options())
    training.validation = ImageLoader(Subset(splits.validation, np.arange(142)[:validation]), devices.device, 0)
    return training


def trained(folder, devices, changes=None, options=None, until=None, poison=-1, logged=False):
    """A trainer that has run to its end or to step `until`, from its checkpoint if there is one; `logged`: with metrics.jsonl."""
    training = prepared(folder, devices, changes, options)
    load_checkpoint(training, print)
    poison_last(training, poison)
    training.total = until or training.total
    with MetricsWriter(training.folder, training.step) if logged else nullcontext() as metrics:
        run(training, metrics)
    return training


def poison_last(training, step):
    """At this step the images of the last micro-batch are NaN."""
    sampler, count = training.sampler, training.devices.micro_batches
    training.task.poison = (step, int(sampler.micro_batch(*divmod(step, sampler.steps), count - 1, count).position[0]))


def train_images(training):
    task = training.task
    return ImageLoader(training.source, training.devices.device, 0, masks=task.reads_masks, objects=task.reads_objects)


def run(training, metrics=None):
    display = Display(20, 1, 16, console=Console(quiet=True))
    throughput = Throughput(training.model, training.devices.device, 1)
    training.run(train_images(training), display, metrics, throughput)


def kill_before(step):
    """This process is killed before this step of its training."""
    train_step = Trainer.train_step

    def train_or_die(training, *arguments):
        if training.step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        train_step(training, *arguments)

    Trainer.train_step = train_or_die


def one_process(micro_batches):
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


def start(*arguments, **more):
    """Start Python with these arguments and capture its output."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=more or environment(),
    )


def side_by_side(*commands):
    """Run a command in each of several connected processes; returns exit codes and outputs."""
    port, world = free_port(), len(commands)
    processes = [start(*arguments, **environment(rank, world, port)) for rank, arguments in enumerate(commands)]
    outputs = [process.communicate(timeout=120) for process in processes]
    return [process.returncode for process in processes], outputs
