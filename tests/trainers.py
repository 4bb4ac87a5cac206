"""Trainers for tests, built as `vitrail.runs.prepare` builds them but without estimates."""

from pathlib import Path

import torch

from vitrail.runs.initial_model import build_initial, open_pretrained
from vitrail.tasks.registry import find_task
from vitrail.training.distributed import Devices
from vitrail.training.trainer import Options, Trainer

CPU = torch.device("cpu")


def initial_model(recipe, source):
    """The model at step 0 of a classification training."""
    pretrained = open_pretrained(recipe) if recipe.init.weights else None
    return build_initial(recipe, list(source.classes) if recipe.task == "classification" else None, pretrained)


def make_trainer(recipe, source, folder=Path(), devices=None, options=None, model=None, kind=Trainer):
    """A trainer on a training source; `validation` is set by tests that evaluate."""
    devices = devices or Devices(CPU)
    task = find_task(recipe.task)(recipe, source, devices.device)
    if model is None:
        model = build_initial(recipe, task.class_names, open_pretrained(recipe) if recipe.init.weights else None)
    task.attach(model)
    return kind(recipe, model, task, source, devices, Path(folder), options or Options())
