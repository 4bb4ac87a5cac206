"""Every recipe: it is valid, it can be saved as JSON, its model exists, and its numbers are the published ones."""

import importlib
import json
import re
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

import vitrail
from tests.recipes.published import Cell, read
from vitrail.cli.recipes import list_all, show_one
from vitrail.errors import UserError
from vitrail.models.registry import list_models
from vitrail.models.registry import lookup as find_model
from vitrail.recipes import Recipe, cait, list_recipes, lookup
from vitrail.recipes.lookup import INDEX, PAGES, make_index
from vitrail.recipes.schema import parse_duration
from vitrail.runs.initial_model import CLASS_QUERIES, RESTRUCTURED, adds_class_queries, can_restructure

CELLS: dict[str, list[Cell]] = {}
for _cell in read():
    CELLS.setdefault(_cell.recipe, []).append(_cell)
DOCS = Path(__file__).parents[2] / "docs" / "papers"
MODULES = {page: importlib.import_module(f"vitrail.recipes.{page}") for page in PAGES}
ABLATIONS = [(page, row) for page, module in MODULES.items() for row in getattr(module, "ABLATIONS", {})]


@cache
def parts(name: str) -> vitrail.Architecture:
    recipe = lookup(name)
    found = find_model(recipe.model)[1].replace(**recipe.architecture)
    return found if recipe.augmentation.image_size == (0, 0) else found.replace(image_size=recipe.augmentation.image_size)


@cache
def build(architecture: vitrail.Architecture) -> None:
    vitrail.build(architecture, device="meta")


@pytest.mark.parametrize("name", list_recipes())
def test_a_recipe_is_complete(name):
    recipe = lookup(name)
    assert recipe.name == name
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert recipe.about.paper
    assert recipe.about.row
    parse_duration(recipe.schedule.length)


@pytest.mark.parametrize("name", list_recipes())
def test_the_model_exists_and_accepts_the_changes(name):
    recipe, found = lookup(name), parts(name)
    assert recipe.model in list_models()
    for field, value in recipe.architecture.items():
        assert getattr(found, field) == value
    build(found.replace(drop_path=0.0, image_size=224))  # cached for recipes with the same network


@pytest.mark.parametrize("name", [name for name in list_recipes() if lookup(name).init.pretrained_recipe])
def test_the_pretrained_recipe_has_the_same_network(name):
    recipe = lookup(name)
    before = parts(recipe.init.pretrained_recipe)
    changed = set(before.differences(parts(name))) - {"image_size", "pre_logits"}
    if adds_class_queries(before, parts(name)):
        changed -= set(CLASS_QUERIES)
    assert not changed or (changed <= set(RESTRUCTURED) and can_restructure(before, parts(name)))
    assert "_to_" in name


@pytest.mark.parametrize("name", sorted(CELLS))
def test_published_numbers(name):
    recipe = lookup(name)
    leaves = recipe.leaves()
    for cell in CELLS[name]:
        check(cell, recipe, leaves)


def check(cell: Cell, recipe: Recipe, leaves: dict) -> None:
    where = f"{cell.title}: {cell.recipe}, {cell.leaf}"
    match cell.leaf:
        case "lr":
            assert recipe.lr == pytest.approx(cell.value, rel=1e-9), where
        case "top1" if cell.value == "none":
            assert recipe.about.expected == "not published", where
        case "top1":
            assert re.match(r"[\d.]+(?= %)", recipe.about.expected)[0] == cell.value, where
        case "also":
            assert f" {cell.value} %" in recipe.about.expected, where
        case "about.lr_grid":
            assert recipe.about.lr_grid == (cell.value if isinstance(cell.value, tuple) else (cell.value,)), where
        case "hardware":
            assert cell.value in re.findall(r"\d+", recipe.about.hardware), where
        case leaf if leaf.startswith("part."):
            assert getattr(parts(cell.recipe), leaf.removeprefix("part.")) == cell.value, where
        case leaf:
            found = leaves[leaf]
            assert (tuple(found) if isinstance(cell.value, tuple) else found) == cell.value, where


def test_every_recipe_of_a_paper_is_published():
    """The pages have no recipe that is not in published.txt."""
    own = {name for name in list_recipes() if lookup(name).about.paper == "vitrail"}
    assert own == {
        "laptop",
        "small",
        "finetune",
        "segment",
        "dino_small",
        "masked_small",
        "tokenizer",
        "tokenizer_small",
        "beit_small",
    }
    assert set(CELLS) == set(list_recipes()) - own


def test_papers_decode_jpegs_at_full_size():
    """The recipes of Vitrail decode large files at reduced size, which is faster."""
    for name in list_recipes():
        recipe = lookup(name)
        fast = recipe.about.paper == "vitrail" and recipe.task != "segmentation"  # masks have the full size
        assert recipe.data.decode_scale == (1.5 if fast else 0.0), name


def test_recipes_with_a_teacher():
    """The teacher is given by the user; the row names the one of the paper."""
    found = {name: lookup(name) for name in list_recipes() if lookup(name).distillation.kind != "none"}
    # CaiT's transfers start from distilled weights and are trained on labels alone.
    alone = {f"cait_{size}_distilled_to_{data}" for size in ("s36", "m36") for data in cait.TRANSFERS}
    distilled = {name for name in list_recipes() if re.search("_(distilled|soft|hard)(_|$)", name)}
    assert set(found) == distilled - alone
    for name, recipe in found.items():
        assert recipe.distillation.teacher == "", name
        assert "teacher RegNetY-16GF" in recipe.about.row or "teacher of that data" in recipe.about.row, name
        assert (recipe.distillation.kind == "soft") == ("_soft" in name), name
        assert parts(name).distillation == bool(re.search("^deit_.*_distilled|_token$", name)), name


def test_recipes_with_token_labels():
    found = {name: lookup(name) for name in list_recipes() if lookup(name).token_labels.target != "labels"}
    others = ("lvvit_t", "lvvit_s", "lvvit_m", "lvvit_l", "lvvit_deit_small")
    assert set(found) == {name for name in list_recipes("lvvit*") if name not in others}
    for name, recipe in found.items():
        assert recipe.token_labels.store == "", name
        assert "annotator NFNet-F6" in recipe.about.row, name
        assert recipe.token_labels.weight == 0 or parts(name).dense_head, name
        # A head that is not trained must not count in evaluation.
        assert (parts(name).dense_weight > 0) == (recipe.token_labels.weight > 0), name
        assert not (recipe.token_labels.mixtoken and recipe.mixing.cutmix), name


def test_the_list_shows_what_a_recipe_needs(capsys):
    list_all("deit_tiny*")
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    teachers = [line.split()[0] for line, after in pairwise(lines) if after.startswith("with a teacher")]
    assert teachers == ["deit_tiny_soft", "deit_tiny_hard", "deit_tiny_distilled", "deit_tiny_distilled_1000ep"]
    assert sum("needs --teacher" in line for line in lines) == 1
    assert not any("--labels" in line for line in lines)
    list_all("lvvit_s_relabel")
    output = capsys.readouterr().out
    assert "    with token labels" in output
    assert "needs --labels" in output
    list_all("cait_s36_distilled_to_c*")
    assert "with a teacher" not in capsys.readouterr().out
    show_one("lvvit_s_tokens")
    output = capsys.readouterr().out
    assert output.startswith("# A recipe with token labels needs --labels")
    assert Recipe.from_dict(yaml.safe_load(output)) == lookup("lvvit_s_tokens")
    show_one("deit_tiny")
    assert capsys.readouterr().out.startswith("name: deit_tiny")


@pytest.mark.parametrize(("page", "row"), ABLATIONS)
def test_ablations_apply(page, row):
    table = MODULES[page].ABLATIONS
    name, changes, *scores = table[row]
    changed = lookup(name).set(changes)
    found = {key: value for key, value in changed.leaves().items() if key in changes}
    assert found == changes
    build(find_model(changed.model)[1].replace(**changed.architecture))
    assert all(0 < score < 100 for score in scores)


# Table 3.8 of DeiT: name of the row here, top-1 at 224 and at 384.
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
    table = MODULES["deit"].ABLATIONS
    printed = {}
    for line in DEIT_ABLATIONS.strip().splitlines():
        row, first, second = line.rsplit(maxsplit=2)
        printed[row.strip()] = (float(first), float(second))
    assert {row: entry[2:] for row, entry in table.items()} == printed


# Table 7 of LV-ViT: MixToken, mixup, CutOut (erasing), RandAugment, top-1.
LVVIT_AUGMENTATIONS = """
yes no  yes yes 83.3
no  no  yes yes 81.3
yes yes yes yes 83.1
yes no  no  yes 83.0
yes no  yes no  82.8
"""


def test_ablations_of_lvvit_are_those_of_its_table():
    table = MODULES["lvvit"].ABLATIONS
    found = set()
    for row, (name, changes, score) in table.items():
        if row.startswith("tokens") and "token_labels.weight" not in changes:
            recipe = lookup(name).set(changes)
            used = (
                recipe.token_labels.mixtoken,
                recipe.mixing.mixup,
                recipe.augmentation.random_erasing,
                recipe.augmentation.policy == "rand",
            )
            found.add((*(("no", "yes")[bool(each)] for each in used), str(score)))
    assert found == {tuple(line.split()) for line in LVVIT_AUGMENTATIONS.strip().splitlines()}


def test_names_by_pattern():
    assert list_recipes("deit_base*")[0] == "deit_base"
    assert list_recipes("to_384") == [name for name in list_recipes() if "to_384" in name]
    assert set(list_recipes("house")) == set()
    assert list_recipes()[:3] == ["laptop", "small", "finetune"]


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(UserError) as caught:
        lookup("deit_bass")
    assert str(caught.value).startswith("There is no recipe 'deit_bass'; the nearest are deit_base, ")
    assert str(caught.value).endswith("(`vitrail recipes --all` lists all).")
    with pytest.raises(UserError, match=r"^There is no recipe 'ß' "):
        lookup("ß")


def test_every_lookup_builds_a_new_recipe():
    lookup("deit_base").architecture["drop_path"] = 0.9
    assert lookup("deit_base").architecture == {"drop_path": 0.1}
    assert lookup("DeiT_Base") == lookup("deit_base")


def test_the_index_is_current():
    assert make_index() == INDEX.read_text(), "run `python -m vitrail.recipes`"


LAZY = """
import sys
from vitrail.recipes import list_recipes, lookup
from vitrail.recipes.lookup import summaries
from vitrail.recipes.schema import Recipe

validated, validate = [], Recipe.__post_init__
Recipe.__post_init__ = lambda recipe: (validated.append(recipe.name), validate(recipe))
assert len(list_recipes()) == len(summaries()) > 400 and not validated
lookup("laptop")
pages = [name.rpartition(".")[2] for name in sys.modules if name.startswith("vitrail.recipes.")]
print(validated, "torch" in sys.modules, set(pages) & {"defaults", "deit", "vit", "cait"})
lookup("deit3_small")
print(validated)
"""


def test_recipes_are_built_when_looked_up():
    """Listing needs neither torch nor a validation; a lookup validates that recipe and its bases."""
    done = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["['laptop'] False {'defaults'}", "['laptop', 'deit_base', 'deit3_small']"]


PAGES_OF_DOCS = {"vit": "vit", "deit": "deit", "cait": "cait", "resmlp": "resmlp", "patchconvnet": "patchconvnet"}
PAGES_OF_DOCS |= {
    "dino": "resmlp",
    "masked_patches": "vit",
    "deit3": "deit3",
    "deit3_21k": "deit3",
    "three_things": "three-things",
    "beit": "three-things",
    "lvvit": "lv-vit",
    "grafit": "grafit",
    "fixres": "fixres",
}


@pytest.mark.parametrize("page", PAGES_OF_DOCS)
def test_the_pages_of_the_docs_list_their_recipes(page):
    """Names in the first column of the table are patterns; each matches some recipe, and together they match all."""
    text = (DOCS / f"{PAGES_OF_DOCS[page]}.md").read_text().split("## Recipes\n")[1].split("\n## ")[0]
    patterns = [name for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)]
    found = [list_recipes(f"[{pattern[0]}]{pattern[1:]}") for pattern in patterns]
    assert all(found), [pattern for pattern, names in zip(patterns, found, strict=True) if not names]
    assert set(MODULES[page].RECIPES) <= {name for names in found for name in names}


def test_size_of_the_pages():
    for module in MODULES.values():
        assert len(Path(module.__file__).read_text().splitlines()) <= 200, module.__name__
