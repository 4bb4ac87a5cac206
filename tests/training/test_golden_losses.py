"""The first losses of a miniature of every recipe equal the recorded ones."""

import pytest

from tests.training.golden_losses import STEPS, first_losses, miniature, miniatures, read
from vitrail.recipes import list_recipes, lookup

GOLDEN = read()
NAMES, FOUND = miniatures()
TOLERANCE = 1e-5


@pytest.mark.parametrize("key", FOUND, ids=[f"{FOUND[key].name.rsplit(' ')[-1]}-{key}" for key in FOUND])
def test_first_losses(key):
    assert key in GOLDEN["losses"], "this recipe has changed: run `python -m tests.training.golden_losses` to record its losses"
    assert first_losses(FOUND[key]) == pytest.approx(GOLDEN["losses"][key], rel=TOLERANCE)


def test_every_recipe_has_golden_losses():
    assert list(GOLDEN["recipes"]) == list_recipes()
    assert GOLDEN["recipes"] == NAMES
    assert set(GOLDEN["losses"]) == set(NAMES.values())
    assert all(len(losses) == STEPS for losses in GOLDEN["losses"].values())


# Each of these changes must change the first twenty losses.
CHANGES = {
    "optimizer.kind": "lamb",
    "optimizer.lr": 0.00055,
    "optimizer.weight_decay": 0.5,
    "schedule.warmup": "4 epochs",
    "schedule.lag_epochs": 0,
    "loss.label_smoothing": 0.11,
    "mixing.switch_prob": 0.0,
    "data.repeats": 1,
    "augmentation.random_erasing": 0.5,
    "architecture.drop_path": 0.4,
}


@pytest.fixture(scope="module")
def small_recipe():
    """A miniature whose blocks affect the loss from the first step on, and its losses."""
    recipe = miniature(lookup("deit_small"))
    assert recipe.architecture["residual"] == "plain"
    return recipe, first_losses(recipe)


@pytest.mark.parametrize("key", CHANGES)
def test_a_changed_key_changes_the_losses(key, small_recipe):
    recipe, losses = small_recipe
    assert recipe.leaves()[key] != CHANGES[key]
    assert first_losses(recipe.set({key: CHANGES[key]})) != pytest.approx(losses, rel=2 * TOLERANCE)


# The same for distillation and token labels.
TEACHER_CHANGES = {
    "deit_small_distilled": {"distillation.weight": 0.4, "distillation.kind": "soft", "distillation.label_smoothing": 0.1},
    "deit_small_soft": {"distillation.temperature": 2.0, "distillation.per_class": False},
    "lvvit_s_tokens": {"token_labels.weight": 0.5, "token_labels.target": "labels", "token_labels.mixtoken": 0.0},
    "lvvit_s_relabel": {"token_labels.target": "blend", "mixing.cutmix": 0.0},
}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, leaves in TEACHER_CHANGES.items() for key in leaves])
def test_a_changed_teacher_key_changes_the_losses(name, key):
    recipe, value = miniature(lookup(name)), TEACHER_CHANGES[name][key]
    assert recipe.leaves()[key] != value
    assert first_losses(recipe.set({key: value})) != pytest.approx(GOLDEN["losses"][NAMES[name]], rel=2 * TOLERANCE)


def test_mixtoken_on_labels_equals_mixtoken_on_outputs():
    """The loss sums over the same pairs of output and label, in another order."""
    recipe = miniature(lookup("lvvit_s_tokens")).set({"token_labels.mixtoken_on": "labels"})
    assert first_losses(recipe) == pytest.approx(GOLDEN["losses"][NAMES["lvvit_s_tokens"]], rel=TOLERANCE)
