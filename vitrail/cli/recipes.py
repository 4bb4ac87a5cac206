"""vitrail recipes: list them, show one in full."""

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer
import yaml
from rich.text import Text
from typer.core import TyperGroup

from vitrail.cli.console import print_table
from vitrail.cli.options import JsonOption, RecipeArgument, SetOption
from vitrail.cli.train import open_recipe, parse_changes
from vitrail.errors import UserError

NEEDS = {
    "a teacher": "--teacher: a network of any supported format, or a label store made by vitrail annotate",
    "token labels": "--labels: a label store made by vitrail annotate --what tokens",
}


class ListByDefault(TyperGroup):
    """`vitrail recipes 'deit3*'` is short for `vitrail recipes list 'deit3*'`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = next((word for word in args if not word.startswith("-")), None)
        if first not in self.commands and "--help" not in args:
            args = ["list", *args]
        return super().parse_args(ctx, args)


recipes = typer.Typer(cls=ListByDefault, help="List the recipes ([bold]vitrail recipes 'deit3*'[/bold]), or show one in full.")


@recipes.command("list")
def list_all(
    pattern: Annotated[str, typer.Argument(help="A part of a name, or a shell pattern such as 'deit3*384'.")] = "*",
    as_json: JsonOption = False,
) -> None:
    """List the recipes with paper, table row and published result; `vitrail recipes show NAME` prints one in full.

    Example: [bold]vitrail recipes 'deit3*'[/bold]
    """
    from vitrail.recipes import list_recipes, lookup
    from vitrail.recipes.lookup import summaries

    names = list_recipes(pattern)
    if not names:
        raise UserError(f"No recipe matches {pattern!r}; `vitrail recipes` lists all.")
    if as_json:
        print(json.dumps({name: lookup(name).to_dict() for name in names}, indent=1))
        return
    rows: list[Sequence[str | Text]] = []
    previous, shown = None, {name: summaries()[name] for name in names}
    for name, recipe in shown.items():
        if previous not in (None, recipe.paper):
            rows.append([])
        if previous != recipe.paper:
            rows.append([Text(recipe.paper, "bold")])
        previous = recipe.paper
        result = ": ".join(part for part in (recipe.row.split(";")[0], recipe.expected) if part)
        origin = f"\n    from {recipe.pretrained_recipe}" if recipe.pretrained_recipe else ""
        needed = "".join(f"\n    with {what}" for what in needs(recipe.distillation != "none", recipe.token_labels))
        rows.append([f"  {name}{origin}{needed}", str(recipe.batch_size), recipe.length, result])
    columns = ("recipe", "batch size", "length", "published")
    print_table(columns, rows, left=("recipe", "length", "published"), no_wrap=columns[:3])
    if any(recipe.pretrained_recipe for recipe in shown.values()):
        print("\nA recipe with `from NAME` starts from weights given with --from: those of the recipe NAME, or others.")
    for what in dict.fromkeys(
        what for recipe in shown.values() for what in needs(recipe.distillation != "none", recipe.token_labels)
    ):
        print(f"\nA recipe with {what} needs {NEEDS[what]}.")


@recipes.command("show")
def show_one(name: RecipeArgument, changes: SetOption = None, as_json: JsonOption = False) -> None:
    """Print all values of a recipe, each of which --set can change.

    Example: [bold]vitrail recipes show deit_small --set optimizer.lr=3e-4[/bold]
    """
    from vitrail.recipes import lookup

    opened = open_recipe(name)
    recipe = (lookup(opened) if isinstance(opened, str) else opened).set(parse_changes(changes, None, None, None))
    tree = recipe.to_dict()
    if not as_json:
        tokens = recipe.token_labels
        for what in needs(recipe.distillation.kind != "none", tokens.weight > 0 or tokens.target != "labels"):
            print(f"# A recipe with {what} needs {NEEDS[what]}.")
    print(json.dumps(tree, indent=1) if as_json else yaml.safe_dump(json.loads(json.dumps(tree)), sort_keys=False), end="")


def needs(teacher: bool, token_labels: bool) -> list[str]:
    """What has to be given on the command line."""
    return [what for what, needed in zip(NEEDS, (teacher, token_labels), strict=True) if needed]
