"""The first losses of every recipe, in miniature, are those that were written down."""

import pytest

from tests.training.golden_losses import STEPS, first_losses, miniature, miniatures, read
from vitrail.recipes import list_recipes, lookup

GOLDEN = read()
NAMES, FOUND = miniatures()
SAME = 1e-5


@pytest.mark.parametrize("key", FOUND, ids=[f"{FOUND[key].name.rsplit(' ')[-1]}-{key}" for key in FOUND])
def test_first_losses(key):
    assert key in GOLDEN["losses"], "this recipe has changed: `python -m tests.training.golden_losses` writes its losses again"
    assert first_losses(FOUND[key]) == pytest.approx(GOLDEN["losses"][key], rel=SAME)


def test_every_recipe_has_its_losses():
    assert list(GOLDEN["recipes"]) == list_recipes()
    assert GOLDEN["recipes"] == NAMES
    assert set(GOLDEN["losses"]) == set(NAMES.values())
    assert all(len(losses) == STEPS for losses in GOLDEN["losses"].values())


# Each of these changes what a training does in its first twenty steps, and must not pass for the same.
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
def little():
    """One whose blocks count from the first step on, and its losses."""
    recipe = miniature(lookup("deit_small"))
    assert recipe.architecture["residual"] == "plain"
    return recipe, first_losses(recipe)


@pytest.mark.parametrize("leaf", CHANGES)
def test_a_changed_leaf_changes_them(leaf, little):
    recipe, losses = little
    assert recipe.leaves()[leaf] != CHANGES[leaf]
    assert first_losses(recipe.set({leaf: CHANGES[leaf]})) != pytest.approx(losses, rel=2 * SAME)


# The same for what a recipe learns from beside the labels.
GUIDES = {
    "deit_small_distilled": {"distillation.weight": 0.4, "distillation.kind": "soft", "distillation.label_smoothing": 0.1},
    "deit_small_soft": {"distillation.temperature": 2.0, "distillation.per_class": False},
    "lvvit_s_tokens": {"token_labels.weight": 0.5, "token_labels.target": "labels", "token_labels.mixtoken": 0.0},
    "lvvit_s_relabel": {"token_labels.target": "blend", "mixing.cutmix": 0.0},
}


@pytest.mark.parametrize(("name", "leaf"), [(name, leaf) for name, leaves in GUIDES.items() for leaf in leaves])
def test_a_changed_leaf_of_teaching_changes_them(name, leaf):
    recipe, value = miniature(lookup(name)), GUIDES[name][leaf]
    assert recipe.leaves()[leaf] != value
    assert first_losses(recipe.set({leaf: value})) != pytest.approx(GOLDEN["losses"][NAMES[name]], rel=2 * SAME)


def test_mixing_labels_is_putting_answers_back():
    """A sum over the same pairs of answer and label, in another order."""
    recipe = miniature(lookup("lvvit_s_tokens")).set({"token_labels.mixtoken_on": "labels"})
    assert first_losses(recipe) == pytest.approx(GOLDEN["losses"][NAMES["lvvit_s_tokens"]], rel=SAME)
