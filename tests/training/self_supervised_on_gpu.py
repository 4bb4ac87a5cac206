"""A few steps of a self-supervised training, compiled and captured as a CUDA graph, against the same steps without both.

    python -m tests.training.self_supervised_on_gpu dino

Prints "equal". Without a GPU both are the same eager steps.
"""

import dataclasses
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import vitrail
from tests.trainers import make_trainer
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.loader import DecodedBatch, ImageReader, make_batch
from vitrail.data.sampler import Samples
from vitrail.devices import choose_device
from vitrail.models.registry import create
from vitrail.recipes import lookup
from vitrail.training.distributed import Devices
from vitrail.training.trainer import Options

STEPS, IMAGES = 6, 16
SMALL = {"batch_size": IMAGES, "augmentation.image_size": 32, "schedule.length": "20 steps", "precision": "bf16"}
NARROW = {"architecture.depth": 2, "architecture.width": 64, "architecture.heads": 2, "architecture.patch_size": 4}
CHANGES = {
    "dino": NARROW
    | {"task_options.outputs": 128, "task_options.hidden": 64, "task_options.local_crops": 3, "task_options.patch_weight": 0.5},
    "grafit": NARROW | {"task_options.outputs": 16, "task_options.hidden": 64, "data.label": ""},
    "masked": NARROW,
    "beit": NARROW,
    "tokenizer": {"task_options.codes": 32, "task_options.width": 32},
}


def make_recipe(name, folder):
    recipe = lookup(f"{name}_small").set(SMALL | CHANGES[name])
    if name == "beit":
        tokenizer = create("vitrail_mini", 16, 32, width=32, depth=1, patch_size=4)
        tokenizer.notes["recipe"] = '{"task": "tokenizer"}'
        path = vitrail.save(tokenizer, Path(folder, "tokenizer.safetensors"))
        recipe = recipe.set({"task_options.tokenizer": str(path)})
    return recipe


def run_steps(recipe, options, device):
    """Losses [STEPS] and final weights of a training on the first images of the built-in photographs."""
    source = open_splits("pets").train
    index = np.arange(IMAGES)
    decoded = ImageReader(source, None, False).read_images(index)
    samples = Samples(index, np.zeros_like(index), index)
    batch = make_batch(source, DecodedBatch(decoded.pixels, decoded.sizes, None, samples, []))
    torch.manual_seed(0)
    trainer = make_trainer(recipe, source, devices=Devices(device), options=options)
    losses = []
    for _ in range(STEPS):
        before = trainer.window[0].clone()
        trainer.train_step(lambda: batch)
        losses.append(float(trainer.window[0] - before))
    if options.compile:
        assert trainer.compute.graph is not None, f"the step was not captured: {trainer.compute.failure}"
        views = trainer.task._captured_views
        assert views.graphs, f"the views were not captured: {views.failure}"
    return np.array(losses), torch.cat([parameter.detach().float().flatten() for parameter in trainer.task.module.parameters()])


if __name__ == "__main__":
    device = choose_device(None)
    with tempfile.TemporaryDirectory() as folder:
        recipe = make_recipe(sys.argv[1], folder)
        plain = run_steps(recipe, Options(), device)
        fast = run_steps(recipe, dataclasses.replace(Options(), compile=device.type == "cuda"), device)
    assert plain[0][-1] != plain[0][0], "the steps change nothing"
    np.testing.assert_allclose(fast[0], plain[0], rtol=2e-2)
    assert (fast[1] - plain[1]).norm() <= 0.02 * plain[1].norm()
    print("equal")
