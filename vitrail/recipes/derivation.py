"""How a page writes its recipes: one base, and what differs."""

import dataclasses
from typing import Any

from vitrail.recipes.schema import Recipe

# What the last part of a name stands for.
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


def change(base: Recipe, name: str, /, **changes: Any) -> Recipe:
    """A copy under another name; a group of settings takes a dictionary of those that differ.

    >>> change(DEIT, "deit_base_1000ep", schedule={"length": "1000 epochs"})
    """
    values: dict[str, Any] = {"name": name}
    for key, value in changes.items():
        old = getattr(base, key)
        if isinstance(old, dict):
            value = old | value
        elif isinstance(value, dict):
            value = dataclasses.replace(old, **value)
        values[key] = value
    return dataclasses.replace(base, **values)


def named(*recipes: Recipe) -> dict[str, Recipe]:
    return {recipe.name: recipe for recipe in recipes}


def top1(value: float | None, data: str = "imagenet") -> str:
    """The usual words of `about.expected`."""
    return "not published" if value is None else f"{value} % top-1 on {DATA[data]}"


def dropping(rate: float) -> dict[str, Any]:
    """Stochastic depth; from a fifth on the work of dropped images is left out, which is faster on a GPU."""
    return {"drop_path": rate, "drop_path_kind": "skip" if rate >= 0.2 else "each"}
