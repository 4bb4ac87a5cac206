"""Every recipe by name: the papers' pages, the house's, the nearest guess."""

import difflib
import fnmatch
from functools import cache
from types import ModuleType

from vitrail.errors import UserError
from vitrail.recipes import cait, defaults, deit, deit3, deit3_21k, grafit, lvvit, patchconvnet, resmlp, three_things, vit
from vitrail.recipes.schema import Recipe

PAGES: tuple[ModuleType, ...] = (defaults, vit, deit, cait, resmlp, patchconvnet, deit3, deit3_21k, three_things, lvvit, grafit)


@cache
def recipes() -> dict[str, Recipe]:
    return {name: recipe for page in PAGES for name, recipe in page.RECIPES.items()}


def list_recipes(pattern: str = "*") -> list[str]:
    """Names that match a shell pattern (or contain the text), in the order of the papers."""
    if not any(sign in pattern for sign in "*?["):
        pattern = f"*{pattern}*"
    return [name for name in recipes() if fnmatch.fnmatch(name, pattern.lower())]


def lookup(name: str) -> Recipe:
    """A recipe by its name."""
    found = recipes().get(name.lower())
    if found is None:
        near = difflib.get_close_matches(name.lower(), recipes(), n=4, cutoff=0.4)
        hint = f"; the nearest are {', '.join(near)}" if near else ""
        raise UserError(f"There is no recipe {name!r}{hint} (`vitrail recipes` lists all).")
    return Recipe.from_dict(found.to_dict())  # a copy: an architecture is a dictionary, which anybody may write into
