"""The collapse alarm of DINO: it names what is wrong in collapsing trainings and is silent in others."""

from pathlib import Path

import numpy as np
import pytest

from tests.trainers import CPU, make_trainer
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.image_loader import ImageLoader
from vitrail.data.source import Subset
from vitrail.recipes import lookup
from vitrail.recipes.task_options import DinoOptions
from vitrail.tasks.dino_collapse import CollapseAlarm

HEALTHY = {"information": 0.3, "common_output": 0.1, "output_entropy": 6.5, "mean_output_entropy": 6.8}
UNIFORM = {"information": 0.001, "common_output": 0.5, "output_entropy": 6.93, "mean_output_entropy": 6.931}
COMMON = {"information": 0.03, "common_output": 0.98, "output_entropy": 3.2, "mean_output_entropy": 3.24}


def check(validations, temperature=0.04, steps_per_epoch=30, warmup=1, **options):
    """The messages of the alarm after epoch 1, 2, …"""
    alarm = CollapseAlarm(DinoOptions(outputs=1024, **options), lr=1e-3)
    steps = [steps_per_epoch * epoch for epoch in range(1, len(validations) + 1)]
    return [
        alarm.check(values, temperature, step, step > warmup * steps_per_epoch)
        for step, values in zip(steps, validations, strict=True)
    ]


def test_it_is_silent_for_healthy_outputs():
    assert not any(check([HEALTHY] * 5))
    assert not any(check([HEALTHY] * 5, temperature=0.2))  # not uniform, whatever the temperature
    assert not any(check([UNIFORM, HEALTHY, UNIFORM, HEALTHY]))


def test_a_high_temperature_is_named():
    first, second = check([UNIFORM] * 2, temperature=0.2)
    assert not first
    assert "nearly uniform" in second
    assert "task_options.teacher_temperature=0.2 is too high for student_temperature=0.1; set it to 0.04 to 0.07." in second


def test_missing_centering_is_named():
    assert "task_options.center_momentum=1 turns centering off; set it to 0.9." in check([COMMON] * 2, center_momentum=1.0)[1]
    slow = check([COMMON] * 40, center_momentum=0.99)
    # Its EMA needs a hundred steps, and has five times as many.
    assert [bool(message) for message in slow].index(True) * 30 > 500
    assert "task_options.center_momentum=0.99 makes the center too slow; lower it." in slow[-1]
    assert not any(check([COMMON], center_momentum=1.0))


def test_other_reasons():
    falling = [UNIFORM | {"information": 0.004 / epoch} for epoch in range(1, 6)]
    found = [bool(message) for message in check(falling, warmup=2)]
    assert found == [False, False, False, True, True]  # not in the warmup of the learning rate, and the second time
    assert "the network has collapsed; lower optimizer.lr=0.001 or task_options.teacher_temperature=0.04" in check(falling)[-1]
    assert not any(check(falling[::-1], warmup=0))  # it recovers


def test_the_report_repeats_what_was_printed():
    """It checks all validations once more, after the last one."""
    for steps in ((30,), (30, 60, 90)):
        alarm = CollapseAlarm(DinoOptions(outputs=1024), lr=1e-3)
        printed, reported = ([bool(alarm.check(UNIFORM, 0.2, step, True)) for step in steps] for _ in range(2))
        assert printed == reported == [step > 30 for step in steps]


# Trainings of seconds. In all of them the outputs of the untrained networks still say something about the image.
CHANGES = {
    "model": "vitrail_mini",
    "architecture.width": 32,
    "architecture.depth": 2,
    "precision": "fp32",
    "batch_size": 16,
    "task_options.local_crops": 1,
    "task_options.hidden": 128,
    "task_options.outputs": 512,
    "task_options.knn_images": 32,
    "schedule.length": "2 epochs",
}
DATA = {
    "pets": {"augmentation.image_size": [32, 32], "architecture.patch_size": 8},
    "digits": {"augmentation.image_size": [8, 8], "architecture.patch_size": 2, "augmentation.scale": [0.7, 1.0]},
}
CASES = {
    "healthy": ({}, ""),
    "hot": ({"task_options.teacher_temperature": 0.3}, "task_options.teacher_temperature=0.3 is too high"),
    "not centered": ({"task_options.center_momentum": 1.0}, "center_momentum=1 turns centering off"),
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("data", DATA)
def test_collapses_are_found_within_three_epochs(data, case, seed):
    changes, expected = CASES[case]
    recipe = lookup("dino_small").set(CHANGES | DATA[data] | changes | {"seed": seed})
    splits = open_splits(data)
    source = Subset(splits.train, np.linspace(0, len(splits.train) - 1, 96).astype(np.int64))
    trainer = make_trainer(recipe, source, Path("nowhere"))
    trainer.validation = ImageLoader(Subset(splits.validation, np.arange(32)), CPU, 0)
    stream = ImageLoader(source, CPU, 0).train_loader(trainer.sampler, (0,), 1)
    found = []
    for number, batch in enumerate(stream.iterate_steps(0, trainer.total), 1):
        trainer.train_step(lambda batch=batch: batch)
        if number % trainer.sampler.steps == 0:
            epoch = number / trainer.sampler.steps
            found.append(trainer.task.diagnose(trainer.evaluate(), epoch))
    assert found[0] == ""
    assert expected in found[1]
    assert bool(found[1]) == bool(expected)
