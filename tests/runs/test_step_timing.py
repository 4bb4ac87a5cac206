"""How long it will take: which parts are counted, how, and that nothing is left of the rehearsal."""

import dataclasses

import numpy as np
import pytest
import torch

import vitrail
from tests.images import make_folder, spoil
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.source import Splits, Subset
from vitrail.recipes import lookup
from vitrail.runs import step_timing
from vitrail.runs.step_timing import BUDGET, Sample, rehearse
from vitrail.tasks.supervision import Asked, Guide
from vitrail.teachers import open_teacher
from vitrail.training import trainer
from vitrail.training.distributed import Devices
from vitrail.training.ema import ModelEma
from vitrail.training.trainer import Options, Trainer

CPU = torch.device("cpu")
RECIPE = lookup("laptop").set({"augmentation.image_size": 8, "batch_size": 32, "precision": "fp32", "ema.decay": 0.9})


class Clock:
    """A time that passes only when something is done: so much for each call, and so much for each image of it."""

    def __init__(self, monkeypatch):
        self.monkeypatch, self.time, self.calls = monkeypatch, 0.0, {}
        monkeypatch.setattr(step_timing, "now", lambda device: self.time)

    def costs(self, owner, name, once=0.0, each=0.0, count=lambda *_: 0):
        original = getattr(owner, name)

        def slow(*words, **named):
            self.time += once + each * count(*words)
            self.calls[name] = self.calls.get(name, 0) + 1
            return original(*words, **named)

        self.monkeypatch.setattr(owner, name, slow)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture(scope="module")
def splits():
    found = open_splits("digits")
    return Splits(Subset(found.train, np.arange(640)), Subset(found.validation, np.arange(100)), None)


def little(**parts):
    return vitrail.create("vitrail_mini", 10, 8, **{"patch_size": 4, "width": 16, "depth": 1} | parts)


def paced(splits, model=None, recipe=RECIPE, micro_batches=2, asked=None):
    model = model or little()
    guide = Guide(recipe, model, splits.train, CPU, asked)
    return rehearse(model, recipe, dataclasses.replace(Devices(CPU), micro_batches=micro_batches), splits, Options(), guide, 0)


def test_every_part_of_a_step_and_of_a_validation_is_counted(splits, clock):
    """Two units of 16 images; the validation has 100."""
    clock.costs(Trainer, "prepare", once=0.001, each=0.0001, count=lambda _, batch, *__: len(batch.index))
    clock.costs(Trainer, "learn", once=0.002, each=0.0002, count=lambda _, images, __: len(images))
    for owner, name, seconds in (
        (trainer, "clip_gradients", 0.01),
        (torch.optim.AdamW, "step", 0.02),
        (ModelEma, "update", 0.03),
    ):
        clock.costs(owner, name, seconds)
    clock.costs(trainer, "count_hits", each=0.0004, count=lambda model, feed, *_: feed.few)
    pace = paced(splits)
    assert pace.step == pytest.approx(2 * (0.003 + 16 * 0.0003) + 0.06)
    assert pace.looking == pytest.approx(100 * 0.0004)
    assert pace.asking == 0
    assert min(clock.calls.values()) >= 2


def test_a_teacher_takes_its_part_of_a_step(splits, clock):
    teacher = open_teacher(little())
    clock.costs(type(teacher), "forward", each=0.001, count=lambda _, images, *__: len(images))
    recipe = RECIPE.set({"distillation.kind": "hard", "distillation.teacher": "somewhere"})
    pace = paced(splits, recipe=recipe, asked=Asked(teacher, torch.arange(10), []))
    assert pace.step == pace.asking == pytest.approx(0.032)


def test_a_teacher_takes_no_more_than_the_step(splits, clock):
    """Asked about a few images, what it takes once counts for each of them."""
    teacher = open_teacher(little())
    clock.costs(type(teacher), "forward", once=0.5, each=0.001, count=lambda _, images, *__: len(images))
    recipe = RECIPE.set({"distillation.kind": "hard", "distillation.teacher": "somewhere"})
    pace = paced(splits, recipe=recipe, asked=Asked(teacher, torch.arange(10), []))
    assert pace.step == pace.asking == pytest.approx(2 * 0.5 + 0.032)


def test_long_steps_are_reckoned_from_short_ones(splits, clock):
    """A step of a minute is not tried: after the first few images the time that is left decides."""
    longest = []
    clock.costs(Trainer, "learn", 0.05, 0.5, lambda _, images, __: longest.append(len(images)) or len(images))
    pace = paced(splits, micro_batches=1)
    assert max(longest) == 8
    assert pace.step == pytest.approx(0.05 + 32 * 0.5)
    assert clock.time < 7 * BUDGET


def test_what_every_step_takes_is_not_taken_for_the_images(splits, clock):
    """As on a machine that others keep busy, where a step waits however few its images are."""
    clock.costs(Trainer, "learn", 1.5, 0.01, lambda _, images, __: len(images))
    assert paced(splits, micro_batches=1).step == pytest.approx(1.5 + 32 * 0.01)


def test_steps_of_minutes_are_tried_with_a_few_images_alone(splits, clock):
    longest = []
    clock.costs(Trainer, "learn", 0.0, 5.0, lambda _, images, __: longest.append(len(images)) or len(images))
    assert paced(splits, micro_batches=1).step == pytest.approx(32 * 5.0)
    assert max(longest) == 2


def test_what_lies_between_is_measured_as_far_as_time_allows(splits, clock):
    seen = []
    clock.costs(Trainer, "learn", 0.02, 0.02, lambda _, images, __: seen.append(len(images)) or len(images))
    pace = paced(splits, micro_batches=1)
    assert max(seen) == 8
    assert pace.step == pytest.approx(0.02 + 32 * 0.02)


def test_nothing_is_left_of_it(splits, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = little()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pace = paced(splits, model)
    assert pace.step > 0
    assert pace.looking > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert list(tmp_path.iterdir()) == []


def test_decoding_at_every_step_takes_time_too(splits, clock, monkeypatch):
    recipe = RECIPE.set({"ema.decay": 0})
    clock.costs(Trainer, "learn", 0.01)
    kept = paced(splits, recipe=recipe)
    monkeypatch.setattr(step_timing, "choose_store", lambda *_, **__: type("Plan", (), {"place": "files"}))
    monkeypatch.setattr(step_timing.Reader, "image", lambda *_: (np.zeros((8, 8, 3), np.uint8), None))
    times = iter(np.arange(4) * 1.6)  # a tenth of a second for each of sixteen images
    monkeypatch.setattr(step_timing.time, "perf_counter", lambda: next(times))
    found = paced(splits, recipe=recipe)
    assert found.step == pytest.approx(kept.step + 32 * 0.1)
    assert found.looking == pytest.approx(kept.looking + 100 * 0.1)


def test_images_that_cannot_be_read_do_not_stop_it(tmp_path):
    root = make_folder(tmp_path / "colors")
    files = sorted(root.rglob("*.png"))
    source = open_splits(str(root)).train
    spoil(files[0])
    some = Sample(source, Devices(CPU), None).batch(40)
    assert len(some.index) == len(some.labels) == 40
    assert (some.sizes > 0).all()
    for file in files[1:]:
        spoil(file)
    none = Sample(source, Devices(CPU), None).batch(3)
    assert none.sizes.tolist() == [[8, 8]] * 3
