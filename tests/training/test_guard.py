"""A broken recipe, augmentation, optimizer, running mean or loader cannot land: two miniatures must get as far as they did.

Bands are mean ± 4 standard deviations of six seeds, in `guard.json`. `python -m tests.training.guard` printed, and writes again,

    digits: top-1 0.9551 ± 0.0102, loss 0.3381 ± 0.0293 (6 seeds)
    pets: top-1 0.5878 ± 0.0181, loss 1.5474 ± 0.0537 (6 seeds)

Broken by hand, with seed 0, these were caught: ten times the rate and a tenth of it; a running mean that is never updated or that
lags; mixed images whose targets are not mixed; targets of the neighbour; every tenth target wrong; crops ten times too small;
training images upside down; bundled weights that are not loaded; a scope of the classifier alone. Training without warm-up,
clipping or weight decay, or at a rate that never falls, gets as far in so few steps and is not caught here; `test_golden_losses`
watches warm-up and weight decay.
"""

import json

import pytest

from tests.training.guard import FILE, SEEDS, TRAININGS, WIDTH, reach

BANDS = json.loads(FILE.read_text())


@pytest.mark.parametrize("name", TRAININGS)
def test_a_miniature_gets_as_far_as_it_did(name, tmp_path):
    assert BANDS[name]["seeds"] >= SEEDS - 1
    reached = reach(name, 0, tmp_path / "run")
    for what, value in reached._asdict().items():
        mean, deviation = BANDS[name][what]["mean"], BANDS[name][what]["deviation"]
        assert abs(value - mean) <= WIDTH * deviation, f"{name}: {what} {value:.4f}, expected {mean} ± {WIDTH:g} x {deviation}"


@pytest.mark.parametrize("name", TRAININGS)
def test_the_band_is_narrow_enough_to_tell(name):
    """Neither guessing nor half of what is learnt lies in it."""
    top1, classes = BANDS[name]["top1"], {"digits": 10, "pets": 12}[name]
    assert top1["mean"] - WIDTH * top1["deviation"] > (top1["mean"] + 1 / classes) / 2
