"""Will it fit, and how long: the prediction, and what it says when it does not."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import vitrail
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.source import Subset
from vitrail.errors import UserError
from vitrail.recipes import lookup
from vitrail.runs import memory
from vitrail.runs.memory import Plan, answering_bytes, check_room, enough_memory, kept_bytes, make_plan
from vitrail.runs.prepare import divide, forecast, unseen
from vitrail.runs.step_timing import Pace
from vitrail.teachers import open_teacher
from vitrail.training.distributed import Devices
from vitrail.training.scope import apply_scope
from vitrail.training.trainer import Options

CPU = torch.device("cpu")
RECIPE = lookup("laptop").set({"augmentation.image_size": 16, "batch_size": 8, "schedule.length": "10 steps"})


def little(**parts):
    return vitrail.create("deit_tiny_patch16", 3, 16, **{"patch_size": 4, "width": 32, "heads": 2, "depth": 4} | parts)


def test_memory_is_what_is_fixed_and_so_much_for_each_image():
    plan = Plan(fixed=2e9, each=1e9, free=10e9, largest=8)
    assert plan.memory(3) == 5e9
    plan.check(8)
    with pytest.raises(vitrail.UserError, match=r"9 images at a time need about 11.0 GB and 10.0 GB are free: at most 8 fit"):
        plan.check(9)
    with pytest.raises(vitrail.UserError, match=r"A single image needs about 3.0 GB and 10.0 GB are free"):
        dataclasses.replace(plan, largest=0).check(1)


def test_planning_leaves_the_model_as_it_was():
    model = vitrail.create("vitrail_mini", 3, 16, depth=1, width=32)  # with batch norms
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = make_plan(model, RECIPE, CPU, 8)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert plan.largest > 8
    assert plan.memory(1) < plan.free


def test_what_is_frozen_and_what_is_computed_again_takes_less():
    whole = make_plan(little(), RECIPE, CPU, 8)
    averaged = make_plan(little(), RECIPE.set({"ema.decay": 0.9}), CPU, 8)
    plain = make_plan(little(), RECIPE.set({"optimizer.kind": "sgd"}), CPU, 8)
    frozen = little()
    apply_scope(frozen, "head")
    assert make_plan(frozen, RECIPE, CPU, 8).fixed < plain.fixed < whole.fixed < averaged.fixed
    assert make_plan(little(), RECIPE, CPU, 8, shares=4).fixed == pytest.approx(whole.fixed / 4)
    deep = little(depth=12)
    deep.recompute = True
    assert kept_bytes(deep, memory.cost(deep.architecture)) < 0.5 * memory.cost(deep.architecture).activation_bytes


def test_a_teacher_that_is_asked_at_every_step_counts():
    """Its weights, and what it holds for an image where that is more than the student keeps."""
    large = open_teacher(little(width=256, depth=8, heads=4))
    alone, taught = make_plan(little(depth=1), RECIPE, CPU, 8), make_plan(little(depth=1), RECIPE, CPU, 8, teacher=large)
    weights = sum(4 * parameter.numel() for parameter in large.parameters())
    assert taught.fixed - alone.fixed == taught.teacher == weights
    assert alone.teacher == 0
    tokens = 17 * 4
    assert answering_bytes(large, RECIPE) == 2 * tokens * (1024 + 1024)  # into the activation of a feed-forward layer, and out
    assert taught.each == max(alone.each, answering_bytes(large, RECIPE))
    wide = open_teacher(little(width=512, depth=1, mlp_ratio=16.0))
    assert make_plan(little(depth=1), RECIPE, CPU, 8, teacher=wide).each == answering_bytes(wide, RECIPE) > alone.each
    assert not any(layer._forward_hooks for layer in wide.modules())


def test_what_cannot_fit_is_not_tried(monkeypatch):
    monkeypatch.setattr(memory, "taste", lambda *_: pytest.fail("computed something"))
    monkeypatch.setattr(memory, "free_memory", lambda: 1000)
    with pytest.raises(vitrail.UserError, match="A single image needs about"):
        make_plan(little(), RECIPE, CPU, 8)


def test_a_system_that_does_not_say_what_is_free(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: 0)
    assert make_plan(little(), RECIPE, CPU, 8).largest == 8


def test_an_allocator_that_gives_up_becomes_a_sentence():
    with pytest.raises(vitrail.UserError, match="take a smaller model"), enough_memory():
        torch.zeros(1 << 60)
    with pytest.raises(RuntimeError, match="something else"), enough_memory():
        raise RuntimeError("something else")


def test_the_batch_is_cut_as_memory_allows_or_as_one_says():
    plan = Plan(0.0, 1e9, 10e9, largest=6)
    one = Devices(CPU)
    assert divide(one, RECIPE, plan, None).micro_batches == 2
    assert divide(one, RECIPE, plan, 2).micro_batches == 4
    assert divide(one, RECIPE, plan, 3).micro_batches == 4
    assert divide(one, RECIPE, dataclasses.replace(plan, largest=100), 10**9).micro_batches == 1
    with pytest.raises(vitrail.UserError, match=r"8 images at a time need about 8.0 GB"):
        divide(one, RECIPE, plan, 8)
    with pytest.raises(vitrail.UserError, match="A single image"):
        divide(one, RECIPE, dataclasses.replace(plan, largest=0), None)


def test_the_forecast_in_words():
    source = Subset(open_splits("digits").train, np.arange(64))
    devices = dataclasses.replace(Devices(CPU), micro_batches=2)
    plan, plain = Plan(1e9, 1e9, 9e9, 6), Options()
    words = forecast(plan, Pace(8.0), RECIPE, devices, source, plain)
    assert words == "10 steps, about 0:01:20 at 1 images/s; 5.0 GB of 9.0 GB"
    assert "at 0.01 images/s; 5.0" in forecast(plan, Pace(800.0), RECIPE, devices, source, plain)
    assert "at 1,600 images/s before compiling; 5.0" in forecast(
        plan, Pace(0.005), RECIPE, devices, source, Options(compile=True)
    )
    tested = RECIPE.set({"validation.every": "4 steps"})  # after 4, 8 and 10
    assert "about 0:01:41 at 1 images/s, 21 % of it validation; " in forecast(
        plan, Pace(8.0, 7.0), tested, devices, source, plain
    )
    assert forecast(plan, Pace(8.0), RECIPE, devices, source, plain, 3).startswith(
        "10 steps for each of 3 seeds, about 0:04:00 at"
    )
    taught = forecast(Plan(1e9, 1e9, 9e9, 6, teacher=3e8), Pace(8.0, asking=3.2), RECIPE, devices, source, plain)
    assert taught == f"{words}; 40 % of a step and 300 MB are the teacher's"
    repeated = RECIPE.set({"schedule.length": "2 epochs", "data.round_to": 50})  # an epoch is cut to 50 images: 6 steps
    assert forecast(plan, Pace(8.0), repeated, devices, source, plain).startswith("12 steps")


@pytest.mark.parametrize(
    ("parts", "size", "lost"),
    [({}, 16, 0), ({}, (18, 16), 2), ({}, (16, 19), 3), ({"stem": "conv"}, 18, 0), ({"stem": "hmlp"}, 18, 2)],
)
def test_pixels_that_no_patch_covers(parts, size, lost):
    said = unseen(vitrail.create("deit_tiny_patch16", 3, size, patch_size=4, depth=1, **parts))
    assert said == [] if not lost else said[0].endswith(f"the last {lost} are not seen")


def test_a_disk_without_room_is_told_beforehand(tmp_path, monkeypatch):
    model, recipe = vitrail.create("vitrail_mini", 3, 16, depth=1, width=32), lookup("laptop")
    count = sum(parameter.numel() for parameter in model.parameters())
    need = 3 * 12 * count + 12 * count  # three states of weights and two moments, three artifacts
    free = {"bytes": need}
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda place: SimpleNamespace(free=free["bytes"]))
    check_room(tmp_path / "new" / "run", model, recipe, keep=2)
    free["bytes"] = need - 1
    with pytest.raises(UserError, match=r"needs about \d+ kB on the disk of .* and \d+ kB are free: make room there"):
        check_room(tmp_path / "new" / "run", model, recipe, keep=2)
