"""DINO: parity with the released code, an independent reference, schedules, the model families and bad inputs."""

import copy
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.trainers import CPU
from vitrail.checkpoints.formats import deit
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.source import Subset
from vitrail.models.registry import build, lookup
from vitrail.recipes.schema import OptimizerConfig, Recipe, ScheduleConfig
from vitrail.recipes.task_options import DinoOptions
from vitrail.tasks.dino import Dino, DinoTargets
from vitrail.training.distributed import Devices
from vitrail.training.trainer import Options, Trainer

GOLDEN = Path(__file__).parents[1] / "golden" / "dino.npz"
TINY = DinoOptions(outputs=24, hidden=8, bottleneck=6, local_crops=2, local_size=4)
MODEL = lookup("deit_tiny_patch16")[1].replace(
    width=8, depth=1, heads=2, mlp_ratio=1.0, patch_size=2, image_size=(4, 4), classes=0, drop_path=0.0
)
# The names of the released head, and ours.
HEAD = {f"mlp.{2 * index}": f"layers.{index}" for index in range(3)} | {
    "last_layer.weight_v": "direction",
    "last_layer.weight_g": "gain",
}


def make_task(options=TINY, architecture=MODEL, images=8, **changes):
    source = Subset(open_splits("digits").train, np.arange(images))
    recipe = Recipe(task="dino", task_options=dataclasses.asdict(options), precision="fp32", batch_size=4)
    augmentation = dataclasses.replace(recipe.augmentation, image_size=architecture.image_size)
    recipe = dataclasses.replace(recipe, **{"augmentation": augmentation} | changes)
    task = Dino(recipe, source, CPU)
    torch.manual_seed(0)
    task.attach(build(architecture, "tiny"))
    return task


def make_trainer(task, micro_batches=1):
    devices = Devices(CPU, micro_batches=micro_batches)
    return Trainer(task.recipe, task.module.model, task, task.source, devices, Path(), Options())


def blank_batch(images):
    index = torch.arange(images)
    batch = SimpleNamespace(index=index, position=index, repeat=torch.zeros_like(index))
    batch.to = lambda device: batch
    return batch


def initial_values(names_and_shapes):
    """The weights with which the golden numbers start: as many random numbers as needed, by name."""
    rng = np.random.default_rng(0)
    values = {}
    for name, shape in sorted(names_and_shapes.items()):
        value = rng.standard_normal(shape) * 0.2
        if "weight_g" in name:
            value = np.ones(shape)
        elif "norm" in name and name.endswith("weight"):
            value = 1 + value
        values[name] = torch.from_numpy(value)
    return values


def with_our_names(values, architecture):
    """Weights of the released code under the names of `DinoModule.student`."""
    backbone = {name.removeprefix("backbone."): value for name, value in values.items() if name.startswith("backbone.")}
    own = {}
    for key in build(architecture, "tiny").state_dict():
        pair = deit.to_pair(key, architecture)
        own[f"model.{key}"] = pair.codec.read([backbone[name] for name in pair.theirs])
    for name, value in values.items():
        for theirs, ours in HEAD.items():
            if name.startswith(f"head.{theirs}"):
                own[name.replace(theirs, ours)] = value
    return own


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("fixed", {"clip_grad": 0.3}),
        ("trained", {"norm_last_layer": False, "freeze_last_layer": 0.0, "clip_grad": 3.0, "local_crops": 0}),
    ],
)
def test_four_steps_of_the_released_code(case, changes):
    """`tests/golden/dino.npz` has what main_dino.train_one_epoch left after two epochs of two steps, in float64."""
    golden = {name.removeprefix(f"{case}/"): value for name, value in np.load(GOLDEN).items() if name.startswith(case)}
    schedule = {"teacher_temperature": 0.0625, "teacher_temperature_start": 0.03125, "teacher_temperature_warmup": 2.0}
    options = dataclasses.replace(TINY, momentum=0.9, **schedule, **changes)
    task = make_task(
        options,
        optimizer=OptimizerConfig(lr=0.01, weight_decay=0.04, weight_decay_on="tensors"),
        schedule=ScheduleConfig(length="2 epochs", warmup="0 epochs", min_lr=1e-3),
    )
    shapes = {name.removeprefix("student/"): value.shape for name, value in golden.items() if name.startswith("student/")}
    start = with_our_names(initial_values(shapes), task.module.model.architecture)
    task.module.double()
    task.module.student.load_state_dict(start)
    task.module.teacher.load_state_dict(start)
    trainer = make_trainer(task)
    rng = np.random.default_rng(1)
    views = 2 + options.local_crops
    steps = [[torch.from_numpy(rng.standard_normal((4, 3, 4, 4))) for _ in range(views)] for _ in range(4)]
    losses = []

    def prepare(batch, position):
        crops = steps[position.step]
        temperature = torch.tensor(task.temperature_at(position.epoch), dtype=torch.float64)
        targets = DinoTargets(torch.cat(crops[2:]) if views > 2 else None, temperature)
        losses.append(float(copy.deepcopy(task.module)(torch.cat(crops[:2]), targets)[0].detach()))
        return torch.cat(crops[:2]), targets

    task.prepare_batch = prepare
    for _ in range(4):
        trainer.train_step(lambda: blank_batch(4))
    np.testing.assert_allclose(losses, golden["losses"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(task.module.center, golden["center"], rtol=0, atol=1e-12)
    for part, module in (("student", task.module.student), ("teacher", task.module.teacher)):
        theirs = {name.removeprefix(f"{part}/"): torch.from_numpy(v) for name, v in golden.items() if name.startswith(part)}
        expected = with_our_names(theirs, task.module.model.architecture)
        assert expected.keys() == module.state_dict().keys()
        for name, value in module.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-9, msg=f"{part} {name} differs")


def reference_loss(student, teacher, center, temperature, student_temperature, images):
    """The loss of the paper, pair by pair, from outputs [views * images, K]."""
    teacher_views = F.softmax((teacher - center) / temperature, -1).split(images)
    student_views = F.log_softmax(student / student_temperature, -1).split(images)
    pairs = [(t, s) for t in range(len(teacher_views)) for s in range(len(student_views)) if t != s]
    return sum(-(teacher_views[t] * student_views[s]).sum(-1).mean() for t, s in pairs) / len(pairs)


@pytest.mark.parametrize("local", [0, 3])
def test_loss_and_gradients_are_those_of_the_formula(local):
    task = make_task(dataclasses.replace(TINY, local_crops=local, local_size=2))
    module = task.module.double()
    torch.nn.init.normal_(module.center)
    torch.nn.init.normal_(module.teacher.head.direction)
    images, small = torch.randn(6, 3, 4, 4, dtype=torch.float64), torch.randn(3 * local, 3, 2, 2, dtype=torch.float64)
    values = module(images, DinoTargets(small if local else None, torch.tensor(0.05, dtype=torch.float64)))
    values[0].backward()
    found = {
        name: parameter.grad.clone()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and "gain" not in name
    }
    module.zero_grad()
    features = [module.model.features(part).pooled for part in (images, small) if len(part)]
    head, outputs = module.teacher.head, module.teacher.head(module.teacher.model(images))
    weight = head.direction / head.direction.norm(dim=1, keepdim=True)
    torch.testing.assert_close(outputs, head.project(module.teacher.model(images)) @ weight.T)
    loss = reference_loss(module.head(torch.cat(features)), outputs, module.center, 0.05, 0.1, 3)
    loss.backward()
    torch.testing.assert_close(values[0], loss, rtol=1e-10, atol=0)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, dict(module.named_parameters())[name].grad, rtol=1e-9, atol=1e-14)
    probabilities = F.softmax((outputs - module.center) / 0.05, -1)
    entropy = -(probabilities * probabilities.log()).sum(1).mean()
    torch.testing.assert_close(values[1:3], torch.stack([entropy, loss.detach() - entropy]))
    assert len(values) == 1 + len(task.logs) == (5 if local else 4)
