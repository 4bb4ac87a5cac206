"""What is left of a recipe without one of its parts."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from vitrail.errors import UserError
from vitrail.models.registry import lookup as find_model
from vitrail.recipes import list_recipes, lookup
from vitrail.recipes.ablations import BY_LEAF, PARTS, part_named, without
from vitrail.recipes.schema import Recipe


@cache
def kinds():
    """A recipe for each set of parts, with its leaves to drop."""
    distinct = {}
    for name in list_recipes("*"):
        recipe = lookup(name)
        shape = (recipe.schedule.warmup, recipe.schedule.cooldown, recipe.schedule.kind, recipe.optimizer.clip_grad_norm > 0)
        image = replace(recipe.augmentation, image_size=(0, 0))
        parts = (recipe.data, recipe.mixing, recipe.loss, recipe.ema, image, *recipe.architecture, *shape)
        distinct.setdefault(parts, recipe)
    return [(recipe, {part: without(recipe, part) for part in PARTS}) for recipe in distinct.values()]


def test_every_recipe_without_each_part():
    """It is a recipe, and the part is really gone: there is nothing left to drop."""
    for recipe, leaves in kinds():
        for part in filter(leaves.get, PARTS):
            after = recipe.set(leaves[part])
            assert after != recipe, (recipe.name, part)
            assert without(after, part) == {}, (recipe.name, part)


def test_networks_without_their_parts_can_be_built():
    models = {(recipe.model, str(recipe.architecture)): recipe for recipe in map(lookup, list_recipes("*"))}
    for recipe in models.values():
        changes = without(recipe, "layer_scale") | without(recipe, "drop_path") | without(recipe, "dropout")
        parts = {leaf.removeprefix("architecture."): value for leaf, value in changes.items()}
        built = find_model(recipe.model)[1].replace(**recipe.architecture | parts)
        assert (built.drop_path, built.dropout, built.residual) == (0, 0, "plain"), recipe.name


def test_every_part_is_in_some_recipe():
    """But for those that no paper's recipe has; a recipe with them loses them."""
    absent = {part for part in PARTS if not any(leaves[part] for _, leaves in kinds())}
    rare = Recipe().set({"data.class_balanced": True, "optimizer.layer_decay": 0.7, "schedule.cooldown": "5 epochs"})
    rare = rare.set({"augmentation.color_jitter": [0.3, 0.3, 0.3, 0.0], "architecture.dropout": 0.1, "mixing.cutmix": 1.0})
    for part in absent:
        assert without(rare, part), part


def test_parts_that_hang_together():
    small = lookup("small")
    assert without(small, "mixing") == {"mixing.mixup": 0.0, "mixing.cutmix": 0.0}
    assert without(small, "average") == {"ema.decay": 0.0, "ema.evaluate": False}
    laptop = lookup("laptop")
    assert without(laptop, "mixing") == {}
    assert without(laptop, "crop") == {"augmentation.crop": "center", "augmentation.crop_ratio": 1.0}
    squash = laptop.set({"validation.resize": "square"})
    assert without(squash, "crop")["augmentation.crop"] == "squash"
    still = laptop.set(without(laptop, "crop"))
    assert without(still.set({"augmentation.hflip": 0.5}), "flip") == {}  # such a view is never turned round


def test_jitter_does_not_wake_up_when_the_policy_goes():
    """RandAugment takes the place of color jitter; without it there would be more of that, not less."""
    strengths = {"augmentation.color_jitter": [0.4, 0.4, 0.4, 0.0]}
    rand = Recipe().set({"augmentation.policy": "rand"} | strengths)
    assert without(rand, "jitter") == {}
    assert not any(rand.set(without(rand, "policy")).augmentation.color_jitter)
    three = Recipe().set({"augmentation.policy": "three"} | strengths)
    assert any(three.set(without(three, "policy")).augmentation.color_jitter)
    assert without(three, "jitter")


def test_parts_that_the_model_brings_along():
    recipe = Recipe().set({"model": "cait_s24"})
    assert without(recipe, "layer_scale") == {"architecture.residual": "plain"}
    assert without(Recipe(), "layer_scale") == {}
    assert without(Recipe(), "drop_path") == {}


def test_a_warm_up_of_nothing_is_none():
    assert without(Recipe().set({"schedule.warmup": "0 steps"}), "warmup") == {}
    assert without(Recipe().set({"schedule.warmup": "3%"}), "warmup") == {"schedule.warmup": "0 epochs"}


def test_names():
    assert part_named("augmentation.policy") == "policy"
    assert part_named("mixing.mixup") == "mixup"
    assert part_named("ema.decay") == "average"
    assert set(BY_LEAF.values()) <= PARTS.keys()
    leaves = Recipe().leaves()
    assert all(leaf in leaves or leaf.startswith("architecture.") for leaf in BY_LEAF)
    with pytest.raises(UserError, match=r"--drop smothing: .*did you mean smoothing.*choose from mixing, mixup"):
        part_named("smothing")


def test_the_table_of_the_docs():
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "compare.md").read_text()
    lines = [line for line in page.split("### What can be dropped")[1].splitlines() if line.startswith("| `")]
    assert [line.split("`")[1] for line in lines[1:]] == list(PARTS)
    for line, part in zip(lines[1:], PARTS.values(), strict=True):
        assert part.what in line
        assert all(f"`{leaf}" in line for leaf in part.without)
