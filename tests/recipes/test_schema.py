"""The recipe: changing values, reading it back, and the messages for wrong keys and values."""

import json

import pytest

from vitrail.data.transforms.config import INTERPOLATIONS, NO_ANTIALIAS
from vitrail.data.transforms.resize import FILTERS
from vitrail.errors import UserError
from vitrail.recipes.derivation import change
from vitrail.recipes.schema import About, Recipe, parse_duration, parse_value


def test_values_are_set_by_dotted_key():
    recipe = Recipe().set({"optimizer.lr": "1e-3", "schedule.length": "20000 steps", "model": "cait_s24", "batch_size": "64"})
    assert (recipe.optimizer.lr, recipe.schedule.length, recipe.model, recipe.batch_size) == (1e-3, "20000 steps", "cait_s24", 64)
    assert Recipe().set({}) == Recipe()


def test_set_does_not_change_the_original():
    first = Recipe(architecture={"depth": 6})
    second = first.set({"architecture.depth": 8, "architecture.drop_path": 0.1})
    assert first.architecture == {"depth": 6}
    assert second.architecture == {"depth": 8, "drop_path": 0.1}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("5E", "5E"),
        ("192x256", [192, 256]),
        ("true", True),
        ("[0.9, 0.95]", [0.9, 0.95]),
        ("5%", "5%"),
        ("300 epochs", "300 epochs"),
        ("", ""),
        ("[1,", "[1,"),
        (3, 3),
    ],
)
def test_parse_value(text, value):
    assert parse_value(text) == value


def test_sizes_and_pairs():
    assert Recipe().set({"augmentation.image_size": "192x256"}).augmentation.image_size == (192, 256)
    assert Recipe().set({"augmentation.image_size": 96}).augmentation.image_size == (96, 96)
    assert Recipe().set({"optimizer.betas": "[0.9, 0.95]"}).optimizer.betas == (0.9, 0.95)
    with pytest.raises(UserError, match=r"optimizer.betas=\[0.9\] should be 2 numbers"):
        Recipe().set({"optimizer.betas": "[0.9]"})


@pytest.mark.parametrize(
    ("key", "value", "current", "expected"),
    [
        ("lr", "3e-4", "optimizer.lr", 3e-4),
        ("rate", "3e-4", "optimizer.lr", 3e-4),
        ("weight_decay", 0.1, "optimizer.weight_decay", 0.1),
        ("epochs", 20, "schedule.length", "20 epochs"),
        ("epochs", "2.5", "schedule.length", "2.5 epochs"),
        ("warmup_epochs", "3", "schedule.warmup", "3 epochs"),
        ("image_size", "192x256", "augmentation.image_size", (192, 256)),
        ("drop_path", 0.2, "architecture.drop_path", 0.2),
        ("batch", 64, "batch_size", 64),
        ("optimiser.rate", 0.1, "optimizer.lr", 0.1),
        ("objective.smoothing", 0.2, "loss.label_smoothing", 0.2),
        ("architecture.residual_start", 1e-5, "architecture.layerscale_init", 1e-5),
        ("schedule.shape", "stairs", "schedule.kind", "step"),
        ("task_options.mask_ratio", "0.4", "task_options.mask_ratio", 0.4),
    ],
)
def test_usual_and_old_names(key, value, current, expected):
    assert Recipe().set({key: value}).leaves()[current] == expected


def test_the_task():
    assert (Recipe().task, Recipe().task_options) == ("classification", {})
    recipe = Recipe().set({"task": "masked_patches", "task_options.mask_ratio": 0.4})
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    old = {key: value for key, value in Recipe().to_dict().items() if not key.startswith("task")}
    assert Recipe.from_dict(old) == Recipe()


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("optimizer.rat", r"A recipe has no 'optimizer.rat'; the nearest are .*optimizer.lr"),
        ("learnin_rate", r"A recipe has no 'learnin_rate'; the nearest are optimizer.lr"),
        ("optimizer.weight_decey", r"the nearest are optimizer.weight_decay"),
        ("schedule", r"schedule is a group of settings: set one of them, such as schedule.length"),
        ("nothing.at.all", r"A recipe has no 'nothing.at.all'"),
        ("batch.size", r"A recipe has no 'batch.size'"),
        ("architecture.depht", r"'depht' is not a field of Architecture; did you mean depth"),
    ],
)
def test_unknown_keys_suggest_the_nearest(key, message):
    with pytest.raises(UserError, match=message):
        Recipe().set({key: 1})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("batch_size", "many", "batch_size='many' should be an integer"),
        ("batch_size", "2.5", r"batch_size=2.5 should be an integer"),
        ("batch_size", "true", r"batch_size=True should be an integer"),
        ("optimizer.lr", "fast", "optimizer.lr='fast' should be a number"),
        ("optimizer.nesterov", "1", "optimizer.nesterov=1 should be true or false"),
        ("optimizer.kind", "adm", "optimizer.kind='adm' is not known; choose from adamw, adam, sgd, lamb, adagrad"),
        ("model", 7, "model=7 should be text"),
        ("init.scope", "last:", "init.scope='last:' is not known"),
        ("init.scope", "heads", "init.scope='heads' is not known"),
        ("augmentation.policy", "random", "policy='random' is not known"),
    ],
)
def test_wrong_types(key, value, message):
    with pytest.raises(UserError, match=message):
        Recipe().set({key: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"optimizer.lr": -1.0}, "optimizer.lr must not be negative"),
        ({"ema.decay": 1.0}, "ema.decay must lie in"),
        ({"loss.label_smoothing": 1.0}, "loss.label_smoothing must lie in"),
        ({"loss.kind": "binary", "loss.label_smoothing": 0.1}, "label smoothing has no meaning"),
        ({"mixing.mixup": -0.1}, "must not be negative"),
        ({"schedule.length": "50%"}, "schedule.length cannot be a percentage"),
        ({"schedule.warmup": "soon"}, "'soon' is not a duration"),
        ({"validation.every": "3 days"}, "'3 days' is not a duration"),
    ],
)
def test_invalid_values(changes, message):
    with pytest.raises(UserError, match=message):
        Recipe().set(changes)


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("300 epochs", (300.0, "epoch")),
        ("1 epoch", (1.0, "epoch")),
        ("2.5 epochs", (2.5, "epoch")),
        ("20000 steps", (20000.0, "step")),
        ("2e4 steps", (20000.0, "step")),
        ("5%", (5.0, "%")),
        (" 5 % ", (5.0, "%")),
    ],
)
def test_durations(text, duration):
    assert parse_duration(text) == duration


@pytest.mark.parametrize("text", ["", "300", "epochs", "-5 epochs", "5 hours", "five epochs", "5 epochs and a bit"])
def test_invalid_durations(text):
    with pytest.raises(UserError, match="is not a duration: write '300 epochs', '20000 steps' or '5%'"):
        parse_duration(text)


def test_a_tree_is_read_back_after_json():
    recipe = Recipe(architecture={"depth": 6, "stem_kernels": [7, 3]}).set({"augmentation.image_size": [64, 96]})
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert Recipe.from_dict({}) == Recipe()


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"optimizr": {}}, "A recipe has no 'optimizr'; the nearest are optimizer"),
        ({"optimizer": {"lrr": 1}}, "A recipe has no 'optimizer.lrr'; the nearest are lr"),
        ({"architecture": 3}, "architecture is a group of settings, not 3"),
        ({"optimizer": 3}, "optimizer is a group of settings, not 3"),
        ([], r"The recipe is a group of settings, not \[\]"),
        ({"mixing": {"mixup": "much"}}, "mixing.mixup='much' should be a number"),
        ({"architecture": {"width": 1, "heigth": 2}}, "'heigth' is not a field of Architecture"),
    ],
)
def test_bad_trees(tree, message):
    with pytest.raises(UserError, match=message):
        Recipe.from_dict(tree)


def test_the_learning_rate_scales_with_the_batch_size():
    recipe = Recipe(batch_size=2048).set({"optimizer.lr": 5e-4, "optimizer.lr_batch_size": 512})
    assert recipe.lr == pytest.approx(2e-3)
    assert recipe.set({"optimizer.lr_batch_size": 0}).lr == 5e-4


def test_change_merges_groups_and_architectures():
    base = Recipe(architecture={"depth": 6}, about=About("paper"))
    other = change(base, "other", architecture={"drop_path": 0.1}, optimizer={"lr": 1.0}, batch_size=8, about={"row": "1"})
    assert other.name == "other"
    assert other.architecture == {"depth": 6, "drop_path": 0.1}
    assert (other.optimizer.lr, other.optimizer.weight_decay, other.batch_size) == (1.0, base.optimizer.weight_decay, 8)
    assert other.about == About("paper", "1")
    with pytest.raises(TypeError):
        change(base, "other", optimizer={"rate": 1.0})


def test_the_interpolations_are_those_of_the_resize_filters():
    assert (*FILTERS, NO_ANTIALIAS) == INTERPOLATIONS
