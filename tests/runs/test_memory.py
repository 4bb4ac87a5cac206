"""Estimates of memory, disk space and time, and the errors where something does not fit."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import vitrail
from tests.images import make_masked_folder
from tests.shapes import make_coco
from tests.tasks.trainings import make
from tests.trainers import make_trainer
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.source import Splits, Subset
from vitrail.errors import UserError
from vitrail.recipes import lookup
from vitrail.runs import memory, step_timing
from vitrail.runs.memory import (
    MemoryPlan,
    activation_bytes,
    cached_bytes,
    check_disk_space,
    explain_out_of_memory,
    plan_memory,
    teacher_activation_bytes,
)
from vitrail.runs.prepare import describe_grid, divide_batch
from vitrail.runs.step_timing import Pace, forecast
from vitrail.tasks.classification import Classification
from vitrail.tasks.teacher_labels import OnlineTeacher
from vitrail.teachers import open_teacher
from vitrail.training.distributed import Devices
from vitrail.training.scope import apply_scope
from vitrail.training.trainer import Options

CPU = torch.device("cpu")
RECIPE = lookup("laptop").set({"augmentation.image_size": 16, "batch_size": 8, "schedule.length": "10 steps"})


def little(**parts):
    return vitrail.create("deit_tiny_patch16", 3, 16, **{"patch_size": 4, "width": 32, "heads": 2, "depth": 4} | parts)


@pytest.fixture(scope="module")
def source():
    return Subset(open_splits("digits").train, np.arange(64))


def planned(model, recipe=RECIPE, teacher=None, sharded_over=1):
    """The memory plan of a classification with up to 8 images at a time."""
    return plan_memory(model, attached(model, recipe, teacher), CPU, 8, sharded_over)


def attached(model, recipe=RECIPE, teacher=None):
    """A classification task; its teacher, if any, is this network."""
    task = Classification(recipe, open_splits("digits").train, CPU)
    if teacher is not None:
        augmentation = recipe.augmentation
        task.online = OnlineTeacher(teacher, torch.arange(3), augmentation.mean, augmentation.std, [])
        task.teacher = teacher
    task.attach(model)
    return task


def test_memory_is_fixed_plus_per_image():
    plan = MemoryPlan(fixed=2e9, per_image=1e9, free=10e9, max_images=8)
    assert plan.memory(3) == 5e9
    plan.check(8)
    with pytest.raises(vitrail.UserError, match=r"9 images needs about 11.0 GB and 10.0 GB are free: at most 8 images fit"):
        plan.check(9)
    with pytest.raises(vitrail.UserError, match=r"A single image needs about 3.0 GB and 10.0 GB are free"):
        dataclasses.replace(plan, max_images=0).check(1)


def test_planning_does_not_change_the_model():
    model = vitrail.create("vitrail_mini", 3, 16, depth=1, width=32)  # with batch norms
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = planned(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert plan.max_images > 8
    assert plan.memory(1) < plan.free


def test_frozen_parameters_and_recomputation_need_less():
    whole = planned(little())
    averaged = planned(little(), RECIPE.set({"ema.decay": 0.9}))
    plain = planned(little(), RECIPE.set({"optimizer.kind": "sgd"}))
    frozen = little()
    apply_scope(frozen, "head")
    assert planned(frozen).fixed < plain.fixed < whole.fixed < averaged.fixed
    assert planned(little(), sharded_over=4).fixed == pytest.approx(whole.fixed / 4)
    deep = little(depth=12)
    deep.recompute = True
    assert activation_bytes(deep, memory.cost(deep.architecture)) < 0.5 * memory.cost(deep.architecture).activation_bytes


def test_a_teacher_counts():
    """Its weights, and its activations for an image where they are larger than the student's."""
    large = open_teacher(little(width=256, depth=8, heads=4))
    alone, taught = planned(little(depth=1)), planned(little(depth=1), teacher=large)
    weights = sum(4 * parameter.numel() for parameter in large.parameters())
    assert taught.fixed - alone.fixed == taught.teacher == weights
    assert alone.teacher == 0
    tokens = 17 * 4
    activations = teacher_activation_bytes(attached(little(depth=1), teacher=large))
    assert activations == 2 * tokens * (1024 + 1024)  # input and output of the activation function of a feed-forward layer
    assert taught.per_image == max(alone.per_image, activations)
    wide = open_teacher(little(width=512, depth=1, mlp_ratio=16.0))
    activations = teacher_activation_bytes(attached(little(depth=1), teacher=wide))
    assert planned(little(depth=1), teacher=wide).per_image == activations > alone.per_image
    assert not any(layer._forward_hooks for layer in wide.modules())


def test_what_cannot_fit_is_not_computed(monkeypatch):
    monkeypatch.setattr(memory, "measure_memory", lambda *_: pytest.fail("computed something"))
    monkeypatch.setattr(memory, "free_memory", lambda: 1000)
    with pytest.raises(vitrail.UserError, match="A single image needs about"):
        planned(little())


def test_a_system_that_does_not_report_free_memory(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: 0)
    assert planned(little()).max_images == 8


def test_out_of_memory_errors_are_explained():
    with pytest.raises(vitrail.UserError, match="use a smaller model"), explain_out_of_memory():
        torch.zeros(1 << 60)
    with pytest.raises(RuntimeError, match="something else"), explain_out_of_memory():
        raise RuntimeError("something else")


def divided(max_images, wanted=None, module=None, world_size=1, **changes):
    """(micro-batches, group size, messages) for a batch of 8 images of 1 GB each."""
    plan, messages = MemoryPlan(0.0, 1e9, 10e9, max_images), []
    task = SimpleNamespace(recipe=RECIPE.set(changes), module=module or nn.Linear(1, 1))
    devices, recipe = divide_batch(Devices(CPU, world_size=world_size), task, plan, wanted, messages.append)
    return devices.micro_batches, recipe.group_size, messages


def test_the_batch_is_divided_by_memory_or_as_requested():
    assert [divided(6)[0], divided(6, 2)[0], divided(6, 3)[0], divided(100, 10**9)[0]] == [2, 4, 4, 1]
    with pytest.raises(vitrail.UserError, match=r"A micro-batch of 8 images needs about 8.0 GB"):
        divided(6, 8)
    with pytest.raises(vitrail.UserError, match="A single image"):
        divided(0)


def test_micro_batches_keep_mixed_pairs_and_normalized_groups_together():
    """Groups of a recipe are part of the result: a micro-batch has whole groups, or pairs of images of one group."""
    assert divided(1)[0] == 8
    with pytest.raises(vitrail.UserError, match="with pairs of groups of 4 images: set group_size to at most 1"):
        divided(1, **{"mixing.mixup": 0.8, "group_size": 4})
    assert divided(3, **{"mixing.mixup": 0.8, "group_size": 4})[0] == 4
    norm = nn.BatchNorm2d(3)
    assert divided(8, module=norm, group_size=4) == (1, 4, [])
    assert divided(5, module=norm, group_size=4) == (2, 4, [])
    with pytest.raises(vitrail.UserError, match="with whole groups of 4 images: set group_size to at most 3"):
        divided(3, module=norm, group_size=4)
    count, size, (message,) = divided(3, module=norm)
    assert (count, size) == (4, 2)
    assert "group_size set to 2" in message


def test_groups_fit_any_batch_size():
    sizes = {8: [8, 4, 8, 2], 7: [7, 7, 7, 7], 12: [12, 4, 6, 2]}
    for batch_size, expected in sizes.items():
        found = [RECIPE.set({"batch_size": batch_size, "group_size": group}).images_per_group for group in (0, 5, 8, 2)]
        assert found == expected


PLAN = MemoryPlan(1e9, 1e9, 9e9, 6)


@pytest.fixture
def foretell(source):
    devices, model = dataclasses.replace(Devices(CPU), micro_batches=2), little(depth=1)

    def foretell(pace, recipe=RECIPE, plan=PLAN, options=None, others=()):
        trainer = make_trainer(recipe, source, devices=devices, model=model)
        trainer.options = options or trainer.options  # set here, so that nothing is compiled
        return forecast(trainer, plan, pace, "my photos", others)

    return foretell


def test_the_forecast(foretell):
    (plain,) = foretell(Pace(8.0))
    assert plain == "10 steps, about 80 s at 1 images/s; 5.0 GB of 9.0 GB memory"
    assert "at 0.01 images/s; 5.0" in foretell(Pace(800.0))[0]
    assert "at 1,600 images/s before compiling; 5.0" in foretell(Pace(0.005), options=Options(compile=True))[0]
    validated = RECIPE.set({"validation.every": "4 steps"})  # after 4, 8 and 10
    assert "about 2 min at 1 images/s, 21 % of it validation; " in foretell(Pace(8.0, 7.0), validated)[0]
    several = foretell(Pace(8.0), others=[1.0, 2.5])[0]
    assert several.startswith("10 steps, about 80 s at 1 images/s; all 3 trainings about 6 min; 5.0 GB")
    taught = foretell(Pace(8.0, teacher=3.2), plan=dataclasses.replace(PLAN, teacher=3e8))
    assert taught == [f"{plain}; the teacher takes 40 % of a step and 300 MB"]
    assert foretell(Pace(8.0), plan=dataclasses.replace(PLAN, cached=5e8)) == [f"{plain}, 500 MB of it decoded images"]
    rounded = RECIPE.set({"schedule.length": "2 epochs", "data.round_to": 50})  # an epoch has 50 images: 6 steps
    assert foretell(Pace(8.0), rounded)[0].startswith("2 epochs of 6 steps, about")


def test_the_forecast_names_busy_cores(foretell, monkeypatch):
    monkeypatch.setattr(step_timing, "count_cores", lambda: 2)
    monkeypatch.setattr(vitrail.devices, "count_cores", lambda: 2)
    assert len(foretell(Pace(8.0, busy_cores=0.2))) == 1
    _, busy = foretell(Pace(8.0, busy_cores=1.6))
    assert busy == "other programs use 1.6 of 2 cores: it may take up to 1.8 times longer or shorter"


def test_the_forecast_suggests_to_annotate(foretell):
    """With a teacher of more than half of a step: 64 images of 5 / 8 s each."""
    recipe = RECIPE.set({"distillation.teacher": "runs/teacher"})
    assert len(foretell(Pace(8.0, teacher=3.9), recipe)) == 1
    _, advice = foretell(Pace(8.0, teacher=5.0), recipe)
    assert "`vitrail annotate runs/teacher 'my photos' --out labels` stores its predictions in about 40 s; then" in advice
    assert advice.endswith("give --teacher labels")


def test_the_forecast_of_many_hours_names_alternatives(foretell):
    recipe = RECIPE.set({"schedule.length": "100 epochs", "augmentation.image_size": 224})
    assert len(foretell(Pace(17.0), recipe)) == 1
    _, advice = foretell(Pace(180.0), recipe)  # 800 steps: 40 hours
    assert advice.startswith("this is more than 4 h: give --minutes 60 for a training that ends after an hour, or --epochs 10 ")
    assert "--epochs 10 (about 4 h), or --image-size 112 (about 10 h), or `vitrail train 'my photos' --from" in advice


def test_decoded_images_are_counted(source):
    model = little()
    plain, cached = (plan_memory(model, attached(model), CPU, 8, cached=cached) for cached in (0, 5e8))
    assert cached.fixed == plain.fixed + 5e8
    splits = Splits(source, Subset(source, np.arange(16)), None)
    assert cached_bytes(splits, RECIPE, CPU) == (64 + 16) * 3 * 8 * 8


def test_decoded_masks_are_counted(tmp_path):
    boxes, shapes = open_splits(make_masked_folder(tmp_path / "boxes", 12)), open_splits(make_coco(tmp_path / "shapes", 12))
    assert cached_bytes(boxes, lookup("segment"), CPU) == 12 * 4 * 24 * 20
    assert cached_bytes(shapes, lookup("detect"), CPU) == 12 * 4 * 64 * 56


@pytest.mark.parametrize(
    ("parts", "size", "lost"),
    [({}, 16, 0), ({}, (18, 16), 2), ({}, (16, 19), 3), ({"stem": "conv"}, 18, 0), ({"stem": "hmlp"}, 18, 2)],
)
def test_pixels_that_no_patch_covers(parts, size, lost):
    messages = describe_grid(vitrail.create("deit_tiny_patch16", 3, size, patch_size=4, depth=1, **parts))
    assert messages == [] if not lost else messages[0].endswith(f"the last {lost} are ignored")


def test_disk_space_is_checked_first(tmp_path, monkeypatch):
    model = little(depth=1)
    task = attached(model)
    count = sum(parameter.numel() for parameter in model.parameters())
    need = 3 * 12 * count + 12 * count  # three states of weights and two moments, three artifacts
    free = {"bytes": need}
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda place: SimpleNamespace(free=free["bytes"]))
    check_disk_space(tmp_path / "new" / "run", model, task, keep=2)
    free["bytes"] = need - 1
    with pytest.raises(UserError, match=r"needs about \d+ kB on the disk of .* and \d+ kB are free: free some space, or give"):
        check_disk_space(tmp_path / "new" / "run", model, task, keep=2)


def test_heads_and_teacher_of_a_task_need_disk_space(tmp_path, monkeypatch):
    task = make("dino", tmp_path, tmp_path / "run").task
    module, count = task.module, lambda part: sum(tensor.numel() for tensor in part.state_dict().values())
    moments = 2 * sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    bytes_of_state = 4 * (count(module.model) + count(module.head) + count(module.teacher) + moments)
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda place: SimpleNamespace(free=3 * bytes_of_state))
    with pytest.raises(UserError, match="free some space"):
        check_disk_space(tmp_path, module.model, task, keep=2)
    check_disk_space(tmp_path, module.model, task, keep=1)
