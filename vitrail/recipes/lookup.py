"""Recipes by name. `index.json` lists all of them, so a page is imported and a recipe built only when it is looked up."""

import difflib
import fnmatch
import importlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from vitrail.aliases import RECIPE_NAMES
from vitrail.errors import UserError
from vitrail.recipes.schema import Recipe

# In the order in which they are listed.
PAGES = (
    "defaults",
    "segmentation",
    "detection",
    "vit",
    "masked_patches",
    "deit",
    "cait",
    "resmlp",
    "dino",
    "patchconvnet",
    "deit3",
    "deit3_21k",
    "three_things",
    "beit",
    "lvvit",
    "grafit",
    "grafit_embeddings",
    "fixres",
)
INDEX = Path(__file__).with_name("index.json")


class Summary(NamedTuple):
    """What is known of a recipe without building it: its line in `vitrail recipes`."""

    page: str  # the module that defines it
    model: str
    batch_size: int
    length: str
    paper: str
    row: str
    expected: str
    pretrained_recipe: str
    distillation: str  # distillation.kind
    token_labels: bool  # needs a store of token labels


EMPTY = Summary("", "", 0, "", "", "", "", "", "", False)


@cache
def summaries() -> dict[str, Summary]:
    """A summary of every recipe by name, read from the index; needs no torch and builds no recipe."""
    return {name: Summary(*row) for name, row in json.loads(INDEX.read_text()).items()}


def list_recipes(pattern: str = "*") -> list[str]:
    """Names that match a shell pattern (or contain the text), in the order of the papers."""
    if not any(sign in pattern for sign in "*?["):
        pattern = f"*{pattern}*"
    return [name for name in summaries() if fnmatch.fnmatch(name, pattern.lower())]


def lookup(name: str) -> Recipe:
    """A recipe by its name; builds and validates this recipe and its bases."""
    current = RECIPE_NAMES.get(name.lower(), name.lower())
    summary = summaries().get(current)
    if summary is None:
        near = difflib.get_close_matches(name.lower(), summaries(), n=4, cutoff=0.4)
        hint = f"; the nearest are {', '.join(near)}" if near else ""
        raise UserError(f"There is no recipe {name!r}{hint} (`vitrail recipes --all` lists all).")
    return load_page(summary.page)[current]()


def load_page(page: str) -> dict[str, Callable[[], Recipe]]:
    return importlib.import_module(f"vitrail.recipes.{page}").RECIPES  # type: ignore[no-any-return]


def summarize(page: str, recipe: Recipe) -> Summary:
    about, tokens = recipe.about, recipe.token_labels
    return Summary(
        page,
        recipe.model,
        recipe.batch_size,
        recipe.schedule.length,
        about.paper,
        about.row,
        about.expected,
        recipe.init.pretrained_recipe,
        recipe.distillation.kind,
        tokens.weight > 0 or tokens.target != "labels",
    )


def make_index() -> str:
    """The content of index.json, from the pages: `python -m vitrail.recipes` writes it after a change of a page."""
    pages = {name: page for page in PAGES for name in load_page(page)}
    for name, page in pages.items():  # a new recipe can be the base of another one
        summaries()[name] = Summary(page, *summaries().get(name, EMPTY)[1:])
    rows = (f"  {json.dumps(name)}: {json.dumps(summarize(page, lookup(name)))}" for name, page in pages.items())
    return "{\n" + ",\n".join(rows) + "\n}\n"
