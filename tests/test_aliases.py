"""Old names: every file of an earlier version is read under the current names, and the glossary lists all of them."""

import dataclasses
import pkgutil
import re
from pathlib import Path

import pytest

from vitrail import aliases
from vitrail.models.config import Architecture
from vitrail.models.registry import list_models
from vitrail.recipes import Recipe, list_recipes, lookup
from vitrail.recipes.ablations import PARTS

ROOT = Path(__file__).parents[1]
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
ROWS = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|$", GLOSSARY, re.MULTILINE)
TABLES = {name: table for name, table in vars(aliases).items() if re.fullmatch("[A-Z][A-Z_]+", name)}
del TABLES["UNITS"], TABLES["RECIPE_VALUES"]
FIELDS = {field.name for field in dataclasses.fields(Architecture)}
LEAVES = lookup("beit_small").leaves() | Recipe().leaves()
GROUPS = {key.partition(".")[0] for key in LEAVES}


def rows_of(heading):
    section = re.split(r"^## ", GLOSSARY, flags=re.MULTILINE)
    return re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|$", next(part for part in section if part.startswith(heading)), re.MULTILINE)


@pytest.mark.parametrize("name", TABLES)
def test_the_glossary_lists_every_alias(name):
    missing = [f"| `{old}` | `{new}` |" for old, new in TABLES[name].items() if (old, new) not in ROWS]
    assert not missing, "\n".join(["add to docs/glossary.md:", *missing])


def test_the_glossary_lists_every_value():
    for (key, old), new in aliases.RECIPE_VALUES.items():
        assert (f"{key}={old}", f"{key}={new}") in ROWS


def test_new_recipe_keys_exist():
    for old, new in (aliases.RECIPE | aliases.USUAL).items():
        group, _, field = new.partition(".")
        assert new in LEAVES or new in GROUPS or (group == "architecture" and field in FIELDS), (old, new)
    assert all(key in LEAVES for key, _ in aliases.RECIPE_VALUES)
    assert set(aliases.ARCHITECTURE.values()) <= FIELDS
    assert set(aliases.PARTS.values()) <= PARTS.keys()
    assert set(aliases.MODELS.values()) <= set(list_models())
    assert set(aliases.UNITS) <= set(aliases.USUAL)


def test_old_recipe_names_are_found():
    assert not set(aliases.RECIPE_NAMES) & set(list_recipes())
    for old, new in aliases.RECIPE_NAMES.items():
        assert lookup(old) == lookup(new)


def test_old_names_are_not_used_any_more():
    assert not (set(aliases.RECIPE) & (LEAVES.keys() | GROUPS))
    assert not (set(aliases.ARCHITECTURE) & FIELDS)
    assert not (set(aliases.MODELS) & set(list_models()))
    assert not (set(aliases.PARTS) & set(PARTS))


def to_old(tree):
    """A recipe as the first versions saved it."""
    keys = {new: old for old, new in aliases.RECIPE.items()}
    values = {(key, new): old for (key, old), new in aliases.RECIPE_VALUES.items()}
    fields = {new: old for old, new in aliases.ARCHITECTURE.items()}
    old = {}
    for group, value in tree.items():
        if group.startswith("task"):
            continue
        if group == "architecture":
            value = {fields.get(name, name): each for name, each in value.items()}
        elif isinstance(value, dict):
            paths = {leaf: keys.get(f"{group}.{leaf}", f"{group}.{leaf}").split(".", 1)[1] for leaf in value}
            value = {
                paths[leaf]: values.get((f"{group}.{leaf}", each), each) if isinstance(each, str) else each
                for leaf, each in value.items()
            }
        old[keys.get(group, group)] = value
    return old


@pytest.mark.parametrize("name", [name for name in list_recipes()[::7] if lookup(name).task == "classification"])
def test_old_recipes_are_read(name):
    recipe = lookup(name)
    old = to_old(recipe.to_dict())
    assert "optimiser" in old
    assert "rate" in old["optimiser"]
    assert Recipe.from_dict(old) == recipe
    upgraded = aliases.upgrade_recipe(old)
    assert aliases.upgrade_recipe(upgraded) == upgraded


def test_the_upgrades_are_idempotent():
    run = {
        "units": 2,
        "bad": [3],
        "recipe": to_old(Recipe(architecture={"layerscale_init": 0.1}).to_dict()),
        "architecture": dict.fromkeys(aliases.ARCHITECTURE, 1),
        "best": {"rate": 0.1, "pictures": 5, "top1": 0.5},
        "model": {"name": "house_tiny with depth=4"},
        "mistakes": [{"truth": 1, "guess": 2}],
    }
    manifest = dict.fromkeys(aliases.LABEL_STORE, 1) | {"covers": "centre", "shards": [{"pictures": 3}]}
    benchmark = {"cells": [dict.fromkeys(aliases.BENCHMARK, 1)], "ceiling": 3}
    for upgrade, content in (
        (aliases.upgrade_run, run),
        (aliases.upgrade_architecture, run["architecture"]),
        (aliases.upgrade_metrics, run["best"]),
        (aliases.upgrade_manifest, manifest),
        (aliases.upgrade_benchmark, benchmark),
    ):
        upgraded = upgrade(content)
        assert upgraded != content
        assert upgrade(upgraded) == upgraded
    assert aliases.upgrade_run(run)["model"]["name"] == "vitrail_tiny with depth=4"
    names = [*aliases.RECIPE, *aliases.USUAL, *LEAVES, "architecture.readout", "batch.size"]
    for upgrade_name, texts in (
        (aliases.upgrade_key, names),
        (aliases.upgrade_tensor, ["special", "positions.table", "readout.blocks.0/exp_avg", "head.bias"]),
        (aliases.upgrade_checkpoint_key, ["average:special", "optimiser:positions.table/exp_avg", "model:head.bias"]),
        (aliases.upgrade_name, [*aliases.MODELS, "house_tiny with depth=4", "deit_small_patch16"]),
    ):
        for text in texts:
            assert upgrade_name(upgrade_name(text)) == upgrade_name(text), text


def test_changes():
    changes = {"epochs": 20, "warmup_steps": "500", "lr": 1e-3, "objective.smoothing": 0.1, "schedule.length": "5 epochs"}
    assert aliases.upgrade_changes({"epochs": "3 epochs"}) == {"schedule.length": "3 epochs"}
    assert aliases.upgrade_changes(changes) == {
        "schedule.length": "5 epochs",
        "schedule.warmup": "500 steps",
        "optimizer.lr": 1e-3,
        "loss.label_smoothing": 0.1,
    }
    assert aliases.upgrade_key("optimizer.rate") == "optimizer.lr"  # an old key in a group under its new name
    assert Recipe.from_dict({"optimizer": {"rate": 0.1}}).optimizer.lr == 0.1


@pytest.mark.parametrize(("old", "new"), rows_of("Modules"))
def test_modules_of_the_glossary(old, new):
    path = ROOT / new.replace(".", "/")
    assert path.with_suffix(".py").exists() or (path / "__init__.py").exists(), f"{new} does not exist: update docs/glossary.md"


@pytest.mark.parametrize(("old", "new"), rows_of("Python"))
def test_python_names_of_the_glossary(old, new):
    pkgutil.resolve_name(new)
