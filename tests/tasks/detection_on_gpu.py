"""A short detection on a GPU: `python -m tests.tasks.detection_on_gpu DATA FOLDER` with a CUDA graph and without; prints both."""

import sys
from pathlib import Path

import torch
from rich.console import Console

from tests.tasks.trainings import DETECTION
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.image_loader import ImageLoader
from vitrail.recipes import lookup
from vitrail.runs.display import Display
from vitrail.runs.initial_model import build_initial
from vitrail.tasks.detection import Detection
from vitrail.training.cuda_graphs import CapturedStep
from vitrail.training.distributed import Devices
from vitrail.training.throughput import Throughput
from vitrail.training.trainer import Options, Trainer


class Losses:
    """Collects the losses in place of a MetricsWriter."""

    def __init__(self):
        self.values = []

    def write(self, kind, step, epoch, values):
        self.values += [values["loss"]] if kind == "train" else []

    def sync(self):
        pass


def train(data, folder, compile):
    """The losses of each step, and whether the steps were a CUDA graph."""
    device = torch.device("cuda", 0)
    recipe, splits = lookup("detect").set(DETECTION | {"group_size": 0, "precision": "bf16"}), open_splits(data)
    task = Detection(recipe, splits.train, device)
    model = build_initial(recipe, None, None)
    task.attach(model)
    trainer = Trainer(recipe, model, task, splits.train, Devices(device), Path(folder), Options(compile=compile, log_steps=1))
    loaders = [ImageLoader(part, device, 0, objects=True) for part in (splits.train, splits.validation)]
    trainer.validation, losses = loaders[1], Losses()
    trainer.run(loaders[0], Display(5, 1, 4, console=Console(quiet=True)), losses, Throughput(model, device, 1))
    return losses.values, isinstance(trainer.compute, CapturedStep) and trainer.compute.graph is not None


if __name__ == "__main__":
    _captured, _graph = train(sys.argv[1], f"{sys.argv[2]}/graph", True)
    _plain, _ = train(sys.argv[1], f"{sys.argv[2]}/plain", False)
    print("losses with a graph", _captured, "without", _plain)
    assert _graph, "the step was not captured"
    assert all(abs(one - other) < 0.05 * other for one, other in zip(_captured, _plain, strict=True))
    print("equal")
