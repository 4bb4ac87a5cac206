"""Helpers for the papers' files: a table of recipe names, each with the function that builds the recipe from a base."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from vitrail.recipes.lookup import lookup
from vitrail.recipes.schema import Recipe

# Data sets by the last part of a recipe's name.
DATA = {
    "imagenet": "ImageNet",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "pets": "Oxford-IIIT Pets",
    "flowers": "Flowers-102",
    "cars": "Stanford Cars",
    "food101": "Food-101",
    "inat18": "iNaturalist 2018",
    "inat19": "iNaturalist 2019",
    "vtab": "the 19 tasks of VTAB",
}


class Page(dict[str, Callable[[], Recipe]]):
    """The recipes of one paper by name; calling a value builds and validates that recipe."""

    def add(self, name: str, build: Callable[..., Recipe], *args: Any, **kwargs: Any) -> None:
        """`build(name, *args, **kwargs)` returns the recipe `name`."""
        self[name] = partial(build, name, *args, **kwargs)

    def derive(self, name: str, base: str, **changes: Any) -> None:
        """`change(base, name, **changes)` returns the recipe `name`."""
        self[name] = partial(change, base, name, **changes)


def change(base: Recipe | str, name: str, /, **changes: Any) -> Recipe:
    """A copy of a recipe, given itself or by name, under another name; a group of settings takes a dictionary of changes.

    >>> change("deit_base", "deit_base_1000ep", schedule={"length": "1000 epochs"})
    """
    base = lookup(base) if isinstance(base, str) else base
    values: dict[str, Any] = {"name": name}
    for key, value in changes.items():
        old = getattr(base, key)
        if isinstance(old, dict):
            value = old | value
        elif isinstance(value, dict):
            value = dataclasses.replace(old, **value)
        values[key] = value
    return dataclasses.replace(base, **values)


def top1(value: float | None, data: str = "imagenet") -> str:
    """The text of `about.expected` for a top-1 accuracy."""
    return "not published" if value is None else f"{value} % top-1 on {DATA[data]}"


def drop_path_fields(rate: float) -> dict[str, Any]:
    """Stochastic depth; from 0.2 on dropped images are not computed, which is faster on a GPU."""
    return {"drop_path": rate, "drop_path_kind": "skip" if rate >= 0.2 else "each"}
