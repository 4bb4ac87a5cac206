"""The time estimate: which parts are counted, how, and that the timed steps are undone."""

import dataclasses

import numpy as np
import pytest
import torch

import vitrail
from tests.images import make_folder, make_masked_folder, write_invalid_image
from tests.trainers import make_trainer
from vitrail.data import image_cache
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.source import Splits, Subset
from vitrail.recipes import lookup
from vitrail.runs import step_timing
from vitrail.runs.step_timing import BUDGET, SampleLoader, measure_pace
from vitrail.tasks import classification, teacher_labels
from vitrail.tasks.classification import Classification
from vitrail.tasks.registry import find_task
from vitrail.teachers import open_teacher
from vitrail.training import trainer
from vitrail.training.distributed import Devices
from vitrail.training.ema import ModelEma
from vitrail.training.trainer import Trainer

CPU = torch.device("cpu")
RECIPE = lookup("laptop").set(
    {"augmentation.image_size": 8, "batch_size": 32, "group_size": 16, "precision": "fp32", "ema.decay": 0.9}
)


class Clock:
    """A time that passes only when something is done: so much for each call, and so much for each image of it."""

    def __init__(self, monkeypatch):
        self.monkeypatch, self.time, self.calls = monkeypatch, 0.0, {}
        monkeypatch.setattr(step_timing, "now", lambda device: self.time)

    def costs(self, owner, name, once=0.0, each=0.0, count=lambda *_: 0):
        original = getattr(owner, name)

        def slow(*args, **named):
            self.time += once + each * count(*args)
            self.calls[name] = self.calls.get(name, 0) + 1
            return original(*args, **named)

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


def paced(splits, recipe=RECIPE, micro_batches=2):
    devices = dataclasses.replace(Devices(CPU), micro_batches=micro_batches)
    return measure_pace(make_trainer(recipe, splits.train, devices=devices, model=little()), splits, 0)


def test_every_part_of_a_step_and_of_a_validation_is_counted(splits, clock):
    """Two micro-batches of 16 images; the validation has 100."""
    clock.costs(Classification, "prepare_batch", once=0.001, each=0.0001, count=lambda _, batch, *__: len(batch.index))
    clock.costs(Trainer, "forward_backward", once=0.002, each=0.0002, count=lambda _, images, __: len(images))
    for owner, name, seconds in (
        (trainer, "clip_gradients", 0.01),
        (torch.optim.AdamW, "step", 0.02),
        (ModelEma, "update", 0.03),
    ):
        clock.costs(owner, name, seconds)
    clock.costs(classification, "count_hits", each=0.0004, count=lambda model, loader, *_: loader.images)
    pace = paced(splits)
    assert pace.step == pytest.approx(2 * (0.003 + 16 * 0.0003) + 0.06)
    assert pace.validation == pytest.approx(100 * 0.0004)
    assert pace.teacher == 0
    assert min(clock.calls.values()) >= 2


@pytest.fixture
def slow_teacher(splits, clock, monkeypatch):
    """Time a training with a teacher whose forward pass takes `once`, and a millisecond per image."""
    teacher = open_teacher(little())
    teacher.class_names = list(splits.train.classes)
    monkeypatch.setattr(teacher_labels, "open_teacher", lambda path, device: teacher)
    recipe = RECIPE.set({"distillation.kind": "hard", "distillation.teacher": "somewhere"})

    def measure(once=0.0):
        clock.costs(type(teacher), "forward", once, 0.001, count=lambda _, images, *__: len(images))
        return paced(splits, recipe)

    return measure


def test_a_teacher_takes_its_part_of_a_step(slow_teacher):
    pace = slow_teacher()
    assert pace.step == pace.teacher == pytest.approx(0.032)


def test_a_teacher_takes_no_more_than_the_step(slow_teacher):
    """It is timed on a few images, so that its fixed time counts for each of them."""
    pace = slow_teacher(once=0.5)
    assert pace.step == pace.teacher == pytest.approx(2 * 0.5 + 0.032)


def test_long_steps_are_extrapolated_from_short_ones(splits, clock):
    """A long step is not measured: after the first few images the remaining budget decides."""
    longest = []
    clock.costs(Trainer, "forward_backward", 0.05, 0.5, lambda _, images, __: longest.append(len(images)) or len(images))
    pace = paced(splits, micro_batches=1)
    assert max(longest) == 8
    assert pace.step == pytest.approx(0.05 + 32 * 0.5)
    assert clock.time < 7 * BUDGET


def test_fixed_time_of_a_step_is_not_attributed_to_its_images(splits, clock):
    """As on a busy machine, where a step waits however few its images are."""
    clock.costs(Trainer, "forward_backward", 1.5, 0.01, lambda _, images, __: len(images))
    assert paced(splits, micro_batches=1).step == pytest.approx(1.5 + 32 * 0.01)


def test_steps_of_minutes_are_measured_with_a_few_images_only(splits, clock):
    longest = []
    clock.costs(Trainer, "forward_backward", 0.0, 5.0, lambda _, images, __: longest.append(len(images)) or len(images))
    assert paced(splits, micro_batches=1).step == pytest.approx(32 * 5.0)
    assert max(longest) == 2


def test_the_number_of_images_grows_within_the_budget(splits, clock):
    seen = []
    clock.costs(Trainer, "forward_backward", 0.02, 0.02, lambda _, images, __: seen.append(len(images)) or len(images))
    pace = paced(splits, micro_batches=1)
    assert max(seen) == 8
    assert pace.step == pytest.approx(0.02 + 32 * 0.02)


def test_timed_steps_are_undone(splits, tmp_path, monkeypatch):
    """Afterwards the trainer takes the same first step as one that was not timed."""
    monkeypatch.chdir(tmp_path)
    devices = dataclasses.replace(Devices(CPU), micro_batches=2)
    model, other = little(), little()
    other.load_state_dict(model.state_dict())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    timed, plain = (make_trainer(RECIPE, splits.train, devices=devices, model=each) for each in (model, other))
    pace = measure_pace(timed, splits, 0)
    assert pace.step > 0
    assert pace.validation > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, before[name]) for name, value in timed.ema.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (timed.step, timed.validation, timed.devices, len(timed.optimizer.state)) == (0, None, devices, 0)
    assert torch.equal(timed.window, plain.window)
    assert list(tmp_path.iterdir()) == []
    batch = SampleLoader(splits.train, devices, None).batch(16)
    for each in (timed, plain):
        each.train_step(lambda: batch)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    assert torch.equal(timed.window, plain.window)


def test_decoding_at_every_step_takes_time_too(splits, clock, monkeypatch):
    recipe = RECIPE.set({"ema.decay": 0})
    clock.costs(Trainer, "forward_backward", 0.01)
    kept = paced(splits, recipe=recipe)
    monkeypatch.setattr(step_timing, "plan_cache", lambda *_, **__: type("Plan", (), {"location": "files"}))
    monkeypatch.setattr(step_timing.ImageReader, "read_image", lambda *_: (np.zeros((8, 8, 3), np.uint8), None))
    times = iter(np.arange(4) * 1.6)  # a tenth of a second for each of sixteen images
    monkeypatch.setattr(step_timing.time, "perf_counter", lambda: next(times))
    found = paced(splits, recipe=recipe)
    assert found.step == pytest.approx(kept.step + 32 * 0.1)
    assert found.validation == pytest.approx(kept.validation + 100 * 0.1)


def test_masks_are_part_of_the_cache(tmp_path, monkeypatch):
    """Images that fit into memory, but not together with their masks, are decoded at every step."""
    source = open_splits(make_masked_folder(tmp_path, 12)).train
    monkeypatch.setattr(image_cache, "free_memory", lambda: 2 * 3.5 * len(source) * 24 * 20)
    samples = SampleLoader(source, Devices(CPU), None)
    assert samples.decoding_seconds(1, None, find_task("classification")) == 0
    assert samples.decoding_seconds(1, None, find_task("segmentation")) > 0


def test_unreadable_images_do_not_stop_it(tmp_path):
    root = make_folder(tmp_path / "colors")
    files = sorted(root.rglob("*.png"))
    source = open_splits(str(root)).train
    write_invalid_image(files[0])
    some = SampleLoader(source, Devices(CPU), None).batch(40)
    assert len(some.index) == len(some.labels) == 40
    assert (some.sizes > 0).all()
    for file in files[1:]:
        write_invalid_image(file)
    none = SampleLoader(source, Devices(CPU), None).batch(3)
    assert none.sizes.tolist() == [[8, 8]] * 3
