"""Every recipe: it builds, it survives JSON, its model exists, and its numbers are the published ones."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

import vitrail
from tests.recipes.published import Cell, read
from vitrail.errors import UserError
from vitrail.models.catalogue import list_models
from vitrail.models.catalogue import lookup as find_model
from vitrail.recipes import Recipe, list_recipes, lookup
from vitrail.recipes.catalogue import PAGES, recipes
from vitrail.recipes.recipe import parse_span

CELLS = read()
DOCS = Path(__file__).parents[2] / "docs" / "papers"
ABLATIONS = [(page.__name__.rpartition(".")[2], row) for page in PAGES for row in getattr(page, "ABLATIONS", {})]


@cache
def parts(name: str) -> vitrail.Architecture:
    recipe = lookup(name)
    found = find_model(recipe.model)[1].replace(**recipe.architecture)
    return found if recipe.augmentation.size == (0, 0) else found.replace(image_size=recipe.augmentation.size)


@cache
def build(architecture: vitrail.Architecture) -> None:
    vitrail.build(architecture, device="meta")


@pytest.mark.parametrize("name", list_recipes())
def test_a_recipe_is_whole(name):
    recipe = lookup(name)
    assert recipe.name == name
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert recipe.about.paper
    assert recipe.about.row
    parse_span(recipe.schedule.length)


@pytest.mark.parametrize("name", list_recipes())
def test_its_model_exists_and_takes_its_changes(name):
    recipe, found = lookup(name), parts(name)
    assert recipe.model in list_models()
    for field, value in recipe.architecture.items():
        assert getattr(found, field) == value
    build(found.replace(drop_path=0.0, image_size=224))  # recipes that share a network share this


@pytest.mark.parametrize("name", [name for name in list_recipes() if lookup(name).start.after])
def test_what_it_starts_from_is_a_recipe_of_the_same_network(name):
    recipe = lookup(name)
    before = parts(recipe.start.after)
    changed = set(before.differences(parts(name))) - {"image_size", "pre_logits"}
    assert not changed
    assert "_to_" in name


@pytest.mark.parametrize("name", sorted({cell.recipe for cell in CELLS}))
def test_published_numbers(name):
    recipe = lookup(name)
    leaves = recipe.leaves()
    for cell in CELLS:
        if cell.recipe == name:
            check(cell, recipe, leaves)


def check(cell: Cell, recipe: Recipe, leaves: dict) -> None:
    where = f"{cell.title}: {cell.recipe}, {cell.leaf}"
    match cell.leaf:
        case "rate":
            assert recipe.rate == pytest.approx(cell.value, rel=1e-9), where
        case "top1" if cell.value == "none":
            assert recipe.about.expects == "not published", where
        case "top1":
            assert re.match(r"[\d.]+(?= %)", recipe.about.expects)[0] == cell.value, where
        case "also":
            assert f" {cell.value} %" in recipe.about.expects, where
        case "about.tried":
            assert recipe.about.tried == (cell.value if isinstance(cell.value, tuple) else (cell.value,)), where
        case "hardware":
            assert cell.value in re.findall(r"\d+", recipe.about.hardware), where
        case leaf if leaf.startswith("part."):
            assert getattr(parts(cell.recipe), leaf.removeprefix("part.")) == cell.value, where
        case leaf:
            found = leaves[leaf]
            assert (tuple(found) if isinstance(cell.value, tuple) else found) == cell.value, where


def test_every_recipe_of_a_paper_is_published():
    """Nothing in the pages that the table of published numbers does not have."""
    house = {name for name in list_recipes() if lookup(name).about.paper == "house"}
    assert house == {"laptop", "small", "finetune"}
    assert {cell.recipe for cell in CELLS} == set(list_recipes()) - house


@pytest.mark.parametrize(("page", "row"), ABLATIONS)
def test_ablations_apply(page, row):
    table = next(module for module in PAGES if module.__name__.endswith(f".{page}")).ABLATIONS
    name, changes, *scores = table[row]
    changed = lookup(name).set(changes)
    found = {key: value for key, value in changed.leaves().items() if key in changes}
    assert found == changes
    build(find_model(changed.model)[1].replace(**changed.architecture))
    assert all(0 < score < 100 for score in scores)


# Table 3.8 of DeiT: what a row is called here, top-1 at 224 and at 384.
DEIT_ABLATIONS = """
none                      81.8 83.1
SGD                       74.5 77.3
fine-tuning with SGD      81.8 83.1
no RandAugment            79.6 80.4
AutoAugment               81.2 81.9
no mixup                  78.7 79.8
no CutMix                 80.0 80.6
no mixup, no CutMix       75.8 76.7
no erasing                4.3  0.1
no stochastic depth       3.4  0.1
no repeated augmentation  76.5 77.4
dropout                   81.3 83.1
EMA                       81.9 83.1
"""


def test_ablations_of_deit_are_those_of_its_table():
    table = next(page for page in PAGES if page.__name__.endswith(".deit")).ABLATIONS
    printed = {}
    for line in DEIT_ABLATIONS.strip().splitlines():
        row, first, second = line.rsplit(maxsplit=2)
        printed[row.strip()] = (float(first), float(second))
    assert {row: entry[2:] for row, entry in table.items()} == printed


def test_names_by_pattern():
    assert list_recipes("deit_base*")[0] == "deit_base"
    assert list_recipes("to_384") == [name for name in list_recipes() if "to_384" in name]
    assert set(list_recipes("house")) == set()
    assert list_recipes()[:3] == ["laptop", "small", "finetune"]


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(UserError) as caught:
        lookup("deit_bass")
    assert str(caught.value).startswith("There is no recipe 'deit_bass'; the nearest are deit_base, ")
    assert str(caught.value).endswith("(`vitrail recipes` lists all).")
    with pytest.raises(UserError, match=r"^There is no recipe 'ß' "):
        lookup("ß")


def test_a_recipe_from_the_catalogue_is_a_copy():
    lookup("deit_base").architecture["drop_path"] = 0.9
    assert lookup("deit_base").architecture == {"drop_path": 0.1}
    assert lookup("DeiT_Base") == recipes()["deit_base"]


PAGES_OF_DOCS = {"vit": "vit", "deit": "deit", "cait": "cait", "resmlp": "resmlp", "patchconvnet": "patchconvnet"}
PAGES_OF_DOCS |= {"deit3": "deit3", "deit3_21k": "deit3", "three_things": "three-things", "lvvit": "lv-vit", "grafit": "grafit"}


@pytest.mark.parametrize("page", PAGES_OF_DOCS)
def test_the_papers_pages_list_their_recipes(page):
    """Names in the first column of the table are patterns; each finds some recipe, and together they find all."""
    text = (DOCS / f"{PAGES_OF_DOCS[page]}.md").read_text().split("## Recipes\n")[1].split("\n## ")[0]
    patterns = [name for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)]
    found = [list_recipes(f"[{pattern[0]}]{pattern[1:]}") for pattern in patterns]
    assert all(found), [pattern for pattern, names in zip(patterns, found, strict=True) if not names]
    module = next(module for module in PAGES if module.__name__.endswith(f".{page}"))
    assert set(module.RECIPES) <= {name for names in found for name in names}


def test_size_of_the_pages():
    for module in PAGES:
        assert len(Path(module.__file__).read_text().splitlines()) <= 150, module.__name__
