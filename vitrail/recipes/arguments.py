"""The everyday arguments of a training, which `vitrail.train` and the command line share, as changes of a recipe."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from vitrail.aliases import upgrade_key
from vitrail.errors import UserError
from vitrail.recipes.duration import set_total_epochs
from vitrail.recipes.lookup import lookup
from vitrail.recipes.schema import Recipe, load_yaml

# The arguments of `vitrail.train` and, as `--batch-size`, the options of `vitrail train`, with the recipe keys that they set.
RECIPE_KEYS = {
    "from_": "init.weights",
    "epochs": "schedule.length",
    "scope": "init.scope",
    "seed": "seed",
    "teacher": "distillation.teacher",
    "labels": "token_labels.store",
    "label": "data.label",
    "map": "data.map",
    "tokenizer": "task_options.tokenizer",
    "lr": "optimizer.lr",
    "batch_size": "batch_size",
    "image_size": "augmentation.image_size",
    "weight_decay": "optimizer.weight_decay",
    "patience": "validation.patience",
}


def recipe_changes(recipe: str | Recipe | None, changes: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` by dotted key and, over them, the everyday arguments that are not None."""
    given = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in arguments.items()}
    new = {RECIPE_KEYS[name]: value for name, value in given.items() if value is not None and name != "epochs"}
    if given.get("epochs") is not None:
        new |= length_changes(recipe, given["epochs"], changes)
    return {key: value for key, value in changes.items() if upgrade_key(key) not in new} | new


def length_changes(recipe: str | Recipe | None, epochs: float, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes by which the recipe takes so many epochs, including its cooldown."""
    if not isinstance(epochs, int | float) or not 0 < epochs < math.inf:
        shown = f"{epochs:g}" if isinstance(epochs, int | float) else repr(epochs)
        raise UserError(f"epochs={shown} is not a valid length: give a positive number such as 30.")
    base = lookup(recipe) if isinstance(recipe, str) else recipe or Recipe()  # the default recipes have no cooldown either
    cooldown = {key: value for key, value in changes.items() if upgrade_key(key) == "schedule.cooldown"}
    return {**set_total_epochs(base.set(cooldown).schedule, epochs)}


def open_recipe(recipe: str | Recipe | None) -> str | Recipe | None:
    """The recipe in a file of an earlier run; names and recipes are returned unchanged."""
    if not isinstance(recipe, str) or not recipe.endswith((".yaml", ".yml", ".json")):
        return recipe
    path = Path(recipe).expanduser()
    if path.exists() and not path.is_file():
        raise UserError(f"The recipe {recipe} cannot be read: it is not a file.")
    try:
        tree = load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"The recipe {recipe} cannot be read: {error.strerror}.") from None
    except yaml.MarkedYAMLError as error:
        line = f" (line {error.problem_mark.line + 1})" if error.problem_mark else ""
        raise UserError(f"The recipe {recipe} is not YAML: {error.problem}{line}.") from None
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"The recipe {recipe} is not YAML: {' '.join(str(error).split())}.") from None
    return Recipe.from_dict(tree)
