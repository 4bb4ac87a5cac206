"""Regression test for recipe, augmentation, optimizer, EMA and loader: two short trainings must reach their expected results.

Bands are mean ± 4 standard deviations over six seeds, in `guard.json`, as measured by `python -m tests.training.guard`:

    digits: top-1 0.9523 ± 0.0087, loss 0.3405 ± 0.0305 (6 seeds)
    pets: top-1 0.7656 ± 0.0240, loss 0.9121 ± 0.0711 (6 seeds)

Deliberate bugs that these tests detect with seed 0: ten times the learning rate or a tenth of it; an EMA that is never updated or
lags; mixed images with unmixed targets; shifted targets; every tenth target wrong; crops ten times too small; training images
upside down; bundled weights that are not loaded; training of the classifier only. Not detected in such short trainings: no
warmup, clipping or weight decay, or a constant learning rate. `test_golden_losses` covers warmup and weight decay.
"""

import json

import pytest

from tests.training.guard import FILE, SEEDS, TRAININGS, WIDTH, train_once
from vitrail.runs import finish, prepare
from vitrail.runs.step_timing import Pace
from vitrail.tasks.classification import Classification

BANDS = json.loads(FILE.read_text())


@pytest.mark.parametrize("name", TRAININGS)
def test_a_short_training_reaches_its_expected_result(name, tmp_path, monkeypatch):
    # These do not affect the result and have tests of their own.
    monkeypatch.setattr(prepare, "measure_pace", lambda *_: Pace(0.01))
    monkeypatch.setattr(finish, "write_report", lambda folder: None)
    monkeypatch.setattr(Classification, "report", lambda *_: {})
    assert BANDS[name]["seeds"] >= SEEDS - 1
    result = train_once(name, 0, tmp_path / "run")
    for what, value in result._asdict().items():
        mean, deviation = BANDS[name][what]["mean"], BANDS[name][what]["deviation"]
        assert abs(value - mean) <= WIDTH * deviation, f"{name}: {what} {value:.4f}, expected {mean} ± {WIDTH:g} x {deviation}"


@pytest.mark.parametrize("name", TRAININGS)
def test_the_bands_are_narrow(name):
    """They exclude chance level and half of the improvement over it."""
    top1, classes = BANDS[name]["top1"], {"digits": 10, "pets": 12}[name]
    assert top1["mean"] - WIDTH * top1["deviation"] > (top1["mean"] + 1 / classes) / 2
