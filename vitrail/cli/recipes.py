"""vitrail recipes: list them, show one in full."""

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.text import Text
from typer.core import TyperGroup

from vitrail.cli.console import print_json, print_table
from vitrail.cli.options import JsonOption, RecipeArgument, SetOption
from vitrail.cli.train import parse_set
from vitrail.errors import UserError

NEEDS = {
    "a teacher": "--teacher: a network of any supported format, or a label store made by vitrail annotate",
    "token labels": "--labels: a label store made by vitrail annotate --outputs tokens",
}

# Listed without a pattern, besides the default recipes: one of each paper.
EXAMPLES = (
    "vit_base_patch16_1k",
    "deit_small",
    "cait_s24",
    "resmlp_s24",
    "patchconvnet_s60",
    "deit3_small",
    "three_base_18x2_ls",
    "lvvit_s",
    "grafit_r50",
    "grafit_small",
    "dino_small",
    "beit_small",
    "segment",
    "detect",
)


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
    pattern: Annotated[
        str | None, typer.Argument(metavar="PATTERN", help="A part of a name, or a shell pattern such as 'deit3*384'.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="List all recipes.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List recipes with paper, table row and published result: the default recipes and one of each paper, or all that match.

    Example: [bold]vitrail recipes 'deit3*'[/bold]

    `vitrail recipes show NAME` prints one in full. With --json and without a pattern all are printed.
    """
    from vitrail.recipes import list_recipes, lookup
    from vitrail.recipes.lookup import summaries

    names = list_recipes(pattern or "*")
    if not names:
        raise UserError(f"No recipe matches {pattern!r}; `vitrail recipes --all` lists all.")
    if as_json:
        print(json.dumps({name: lookup(name).to_dict() for name in names}, indent=1))
        return
    shortened = pattern is None and not everything
    if shortened:
        names = [name for name in names if summaries()[name].page == "defaults" or name in EXAMPLES]
        names.sort(key=lambda name: summaries()[name].paper != "vitrail")
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
    if shortened:
        print(
            f"\n{len(names)} of {len(summaries())} recipes: `vitrail recipes --all` lists all, `vitrail recipes 'deit3*'` those "
            "that match;\n`vitrail recipes show NAME` prints every value of one."
        )


@recipes.command("show")
def show_one(name: RecipeArgument, changes: SetOption = None, as_json: JsonOption = False) -> None:
    """Print all values of a recipe, each of which --set can change.

    Example: [bold]vitrail recipes show deit_small --set optimizer.lr=3e-4[/bold]
    """
    from vitrail.recipes import Recipe, lookup
    from vitrail.recipes.arguments import open_recipe

    opened = open_recipe(name)
    recipe = (opened if isinstance(opened, Recipe) else lookup(name)).set(parse_set(changes))
    if as_json:
        print_json(recipe.to_dict())
        return
    tokens = recipe.token_labels
    for what in needs(recipe.distillation.kind != "none", tokens.weight > 0 or tokens.target != "labels"):
        print(f"# A recipe with {what} needs {NEEDS[what]}.")
    print(recipe.to_yaml(), end="")


def needs(teacher: bool, token_labels: bool) -> list[str]:
    """What has to be given on the command line."""
    return [what for what, needed in zip(NEEDS, (teacher, token_labels), strict=True) if needed]
