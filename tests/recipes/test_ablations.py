"""Recipes with one of their parts turned off."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from vitrail.aliases import PARTS as OLD_PARTS
from vitrail.errors import UserError
from vitrail.models.registry import lookup as find_model
from vitrail.recipes import list_recipes, lookup
from vitrail.recipes.ablations import BY_KEY, PARTS, find_part, without
from vitrail.recipes.schema import Recipe


@cache
def distinct_recipes():
    """One recipe for each combination of parts, with the changes that turn off each part."""
    distinct = {}
    for name in list_recipes("*"):
        recipe = lookup(name)
        shape = (recipe.schedule.warmup, recipe.schedule.cooldown, recipe.schedule.kind, recipe.optimizer.clip_grad_norm > 0)
        image = replace(recipe.augmentation, image_size=(0, 0))
        parts = (recipe.data, recipe.mixing, recipe.loss, recipe.ema, image, *recipe.architecture, *shape)
        distinct.setdefault(parts, recipe)
    return [(recipe, {part: without(recipe, part) for part in PARTS}) for recipe in distinct.values()]


def test_every_recipe_without_each_part():
    """The changes make a valid recipe in which the part is off."""
    for recipe, leaves in distinct_recipes():
        for part in filter(leaves.get, PARTS):
            after = recipe.set(leaves[part])
            assert after != recipe, (recipe.name, part)
            assert without(after, part) == {}, (recipe.name, part)


def test_networks_without_their_parts_can_be_built():
    models = {(recipe.model, str(recipe.architecture)): recipe for recipe in map(lookup, list_recipes("*"))}
    for recipe in models.values():
        changes = without(recipe, "layerscale") | without(recipe, "drop_path") | without(recipe, "dropout")
        parts = {leaf.removeprefix("architecture."): value for leaf, value in changes.items()}
        built = find_model(recipe.model)[1].replace(**recipe.architecture | parts)
        assert (built.drop_path, built.dropout, built.residual) == (0, 0, "plain"), recipe.name


def test_every_part_is_in_some_recipe():
    """Parts that no paper's recipe has are tested with a recipe that has them."""
    absent = {part for part in PARTS if not any(leaves[part] for _, leaves in distinct_recipes())}
    rare = Recipe().set({"data.class_balanced": True, "optimizer.layer_decay": 0.7, "schedule.cooldown": "5 epochs"})
    rare = rare.set({"augmentation.color_jitter": [0.3, 0.3, 0.3, 0.0], "architecture.dropout": 0.1, "mixing.cutmix": 1.0})
    for part in absent:
        assert without(rare, part), part


def test_parts_with_several_keys():
    small = lookup("small")
    assert without(small, "mixing") == {"mixing.mixup": 0.0, "mixing.cutmix": 0.0}
    assert without(small, "ema") == {"ema.decay": 0.0, "ema.evaluate": False}
    laptop = lookup("laptop")
    assert without(laptop, "mixing") == {}
    assert without(laptop, "crop") == {"augmentation.crop": "center", "augmentation.crop_ratio": 1.0}
    squash = laptop.set({"validation.resize": "square"})
    assert without(squash, "crop")["augmentation.crop"] == "squash"
    still = laptop.set(without(laptop, "crop"))
    assert without(still.set({"augmentation.hflip": 0.5}), "hflip") == {}  # a fixed crop is never flipped


def test_dropping_the_policy_does_not_enable_color_jitter():
    """RandAugment replaces color jitter, so jitter would come into effect without it."""
    strengths = {"augmentation.color_jitter": [0.4, 0.4, 0.4, 0.0]}
    rand = Recipe().set({"augmentation.policy": "rand"} | strengths)
    assert without(rand, "color_jitter") == {}
    assert not any(rand.set(without(rand, "policy")).augmentation.color_jitter)
    three = Recipe().set({"augmentation.policy": "three"} | strengths)
    assert any(three.set(without(three, "policy")).augmentation.color_jitter)
    assert without(three, "color_jitter")


def test_parts_of_the_model():
    recipe = Recipe().set({"model": "cait_s24"})
    assert without(recipe, "layerscale") == {"architecture.residual": "plain"}
    assert without(Recipe(), "layerscale") == {}
    assert without(Recipe(), "drop_path") == {}


def test_a_warmup_of_zero_is_off():
    assert without(Recipe().set({"schedule.warmup": "0 steps"}), "warmup") == {}
    assert without(Recipe().set({"schedule.warmup": "3%"}), "warmup") == {"schedule.warmup": "0 epochs"}


def test_names():
    assert find_part("augmentation.policy") == "policy"
    assert find_part("mixing.mixup") == "mixup"
    assert find_part("ema.decay") == "ema"
    assert set(BY_KEY.values()) <= PARTS.keys()
    leaves = Recipe().leaves()
    assert all(key in leaves or key.startswith("architecture.") for key in BY_KEY)
    assert [find_part(name) for name in PARTS] == list(PARTS)
    assert all(find_part(old) == new for old, new in OLD_PARTS.items())
    assert find_part("objective.smoothing") == "label_smoothing"
    with pytest.raises(UserError, match=r"--drop label_smothing: .*did you mean label_smoothing.*choose from mixing, mixup"):
        find_part("label_smothing")


def test_the_table_in_the_docs():
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "compare.md").read_text()
    lines = [line for line in page.split("### What can be dropped")[1].splitlines() if line.startswith("| `")]
    assert [line.split("`")[1] for line in lines[1:]] == list(PARTS)
    for line, part in zip(lines[1:], PARTS.values(), strict=True):
        assert part.description in line
        assert all(f"`{key}" in line for key in part.off)
