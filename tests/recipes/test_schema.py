"""The tree of a recipe: changing leaves, reading it back, and the sentences for what is wrong."""

import json

import pytest

from vitrail.errors import UserError
from vitrail.recipes.derivation import change
from vitrail.recipes.schema import About, Recipe, parse_span, parse_value


def test_leaves_are_set_by_their_dotted_names():
    recipe = Recipe().set({"optimizer.lr": "1e-3", "schedule.length": "20000 steps", "model": "cait_s24", "batch_size": "64"})
    assert (recipe.optimizer.lr, recipe.schedule.length, recipe.model, recipe.batch_size) == (1e-3, "20000 steps", "cait_s24", 64)
    assert Recipe().set({}) == Recipe()


def test_a_set_copy_leaves_the_original_alone():
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
def test_text_becomes_plain_values(text, value):
    assert parse_value(text) == value


def test_sizes_and_pairs():
    assert Recipe().set({"augmentation.image_size": "192x256"}).augmentation.image_size == (192, 256)
    assert Recipe().set({"augmentation.image_size": 96}).augmentation.image_size == (96, 96)
    assert Recipe().set({"optimizer.betas": "[0.9, 0.95]"}).optimizer.betas == (0.9, 0.95)
    with pytest.raises(UserError, match=r"optimizer.betas=\[0.9\] should be 2 numbers"):
        Recipe().set({"optimizer.betas": "[0.9]"})


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("optimizer.rat", r"A recipe has no 'optimizer.rat'; the nearest are .*optimizer.lr"),
        ("rate", r"A recipe has no 'rate'; the nearest are .*optimizer.lr"),
        ("schedule", r"schedule is a group of settings: set one of them, such as schedule.length"),
        ("nothing.at.all", r"A recipe has no 'nothing.at.all'"),
        ("batch.size", r"A recipe has no 'batch.size'"),
        ("architecture.depht", r"'depht' is not a part of an architecture; did you mean depth"),
    ],
)
def test_unknown_keys_suggest_the_nearest(key, sentence):
    with pytest.raises(UserError, match=sentence):
        Recipe().set({key: 1})


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("batch_size", "many", "batch_size='many' should be of the kind int"),
        ("batch_size", "2.5", r"batch_size=2.5 should be of the kind int"),
        ("batch_size", "true", r"batch_size=True should be of the kind int"),
        ("optimizer.lr", "fast", "optimizer.lr='fast' should be of the kind float"),
        ("optimizer.nesterov", "1", "optimizer.nesterov=1 should be of the kind bool"),
        ("optimizer.kind", "adm", "optimizer.kind='adm' is not known; choose from adamw, adam, sgd, lamb, adagrad"),
        ("model", 7, "model=7 should be text"),
        ("init.scope", "last:", "init.scope='last:' is not known"),
        ("init.scope", "heads", "init.scope='heads' is not known"),
        ("augmentation.policy", "random", "policy='random' is not known"),
    ],
)
def test_bad_kinds(key, value, sentence):
    with pytest.raises(UserError, match=sentence):
        Recipe().set({key: value})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"optimizer.lr": -1.0}, "optimizer.lr must not be negative"),
        ({"ema.decay": 1.0}, "ema.decay must lie in"),
        ({"loss.label_smoothing": 1.0}, "loss.label_smoothing must lie in"),
        ({"loss.kind": "binary", "loss.label_smoothing": 0.1}, "they cannot be smoothed"),
        ({"mixing.mixup": -0.1}, "must not be negative"),
        ({"schedule.length": "50%"}, "schedule.length is a share of itself"),
        ({"schedule.warmup": "soon"}, "'soon' is not a span of time"),
        ({"validation.every": "3 days"}, "'3 days' is not a span of time"),
    ],
)
def test_values_that_make_no_sense(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        Recipe().set(changes)


@pytest.mark.parametrize(
    ("text", "span"),
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
def test_spans(text, span):
    assert parse_span(text) == span


@pytest.mark.parametrize("text", ["", "300", "epochs", "-5 epochs", "5 hours", "five epochs", "5 epochs and a bit"])
def test_bad_spans(text):
    with pytest.raises(UserError, match="is not a span of time: write '300 epochs', '20000 steps' or '5%'"):
        parse_span(text)


def test_a_tree_is_read_back_after_json():
    recipe = Recipe(architecture={"depth": 6, "stem_kernels": [7, 3]}).set({"augmentation.image_size": [64, 96]})
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert Recipe.from_dict({}) == Recipe()


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ({"optimizer": {}}, "A recipe has no 'optimizer'; the nearest are optimizer"),
        ({"optimizer": {"lr": 1}}, "A recipe has no 'optimizer.lr'"),
        ({"optimizer": 3}, "optimizer is a group of settings, not 3"),
        ([], r"The recipe is a group of settings, not \[\]"),
        ({"mixing": {"mixup": "much"}}, "mixing.mixup='much' should be of the kind float"),
        ({"architecture": {"width": 1, "heigth": 2}}, "'heigth' is not a part of an architecture"),
    ],
)
def test_bad_trees(tree, sentence):
    with pytest.raises(UserError, match=sentence):
        Recipe.from_dict(tree)


def test_the_rate_follows_the_batch():
    recipe = Recipe(batch_size=2048).set({"optimizer.lr": 5e-4, "optimizer.lr_batch_size": 512})
    assert recipe.lr == pytest.approx(2e-3)
    assert recipe.set({"optimizer.lr_batch_size": 0}).lr == 5e-4


def test_pages_change_groups_and_merge_architectures():
    base = Recipe(architecture={"depth": 6}, about=About("somebody"))
    found = change(base, "other", architecture={"drop_path": 0.1}, optimizer={"lr": 1.0}, batch_size=8, about={"row": "1"})
    assert found.name == "other"
    assert found.architecture == {"depth": 6, "drop_path": 0.1}
    assert (found.optimizer.lr, found.optimizer.weight_decay, found.batch_size) == (1.0, base.optimizer.weight_decay, 8)
    assert found.about == About("somebody", "1")
    with pytest.raises(TypeError):
        change(base, "other", optimizer={"rate": 1.0})
