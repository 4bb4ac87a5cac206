"""vitrail compare, ablate."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitrail.cli.train import (
    EpochsOption,
    FromOption,
    MicroOption,
    ModelOption,
    SetOption,
    WorkersOption,
    choice,
    leaves_of,
    open_recipe,
)
from vitrail.errors import UserError

MetricOption = Annotated[str, typer.Option(help="top1, top5, loss (validation) or test (top-1 of the best weights).")]
AtOption = Annotated[str, typer.Option(help="best: the weights with the best validation top-1; last: those of the last step.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or folders that hold runs.")],
    metric: MetricOption = "top1",
    at: AtOption = "best",
    by: Annotated[
        str, typer.Option(help="recipe: runs that differ only by seed are a group; folder: each RUN given is.")
    ] = "recipe",
    images: Annotated[
        bool, typer.Option("--images", help="Also ask every model about every validation image, and compare these answers.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Where to draw seeds, means and intervals: a PNG file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare trainings: mean, spread and interval over seeds, differences to the first group and how sure they are.

    Example: [bold]vitrail compare runs/with-mixup runs/without --plot mixup.png[/bold]
    """
    from vitrail.atomic_files import check_writable
    from vitrail.runs import comparison
    from vitrail.runs.results import read_results

    choice("--at", at, ("best", "last"))
    choice("--by", by, ("recipe", "folder"))
    if plot is not None and plot.suffix.lower() != ".png":
        raise UserError(f"--plot {plot} is not a PNG file: give a name that ends in .png.")
    check_writable(plot)
    results, said = read_results(runs, metric, at)  # type: ignore[arg-type]
    groups, more = comparison.group_results(results, by == "folder")
    for sentence in (*said, *more):
        print(sentence, file=sys.stderr)
    rows = comparison.compare(groups)
    if len({result.data for group in groups for result in group.results}) > 1:
        print("These trainings did not have the same images: their numbers are not about the same thing.", file=sys.stderr)
    content = comparison.as_dict(rows, metric, at)
    if images:
        from vitrail.runs.predictions import compare_answers

        content["images"] = compare_answers(groups)
    if plot is not None:
        from vitrail.atomic_files import write_aside
        from vitrail.runs.seed_plot import draw_points

        drawn = draw_points(rows, metric, at)
        write_aside(plot, lambda side: side.write_bytes(drawn))
    if as_json:
        print(json.dumps(content, indent=1))
        return
    show(rows, metric, at)
    if images:
        show_images(content["images"], groups[0].name)


def ablate(
    recipe: Annotated[str, typer.Argument(help="A recipe's name, or a recipe.yaml of an earlier run.")],
    source: Annotated[str, typer.Argument(help="Images, as for `vitrail train`.")] = "digits",
    vary: Annotated[
        list[str] | None, typer.Option(metavar="KEY=A,B", help="Values of a leaf of the recipe to try; again for more leaves.")
    ] = None,
    drop: Annotated[
        list[str] | None, typer.Option(metavar="PART,PART", help="Parts to leave out: mixing, policy, average, clip, …")
    ] = None,
    grid: Annotated[bool, typer.Option("--grid/--one-at-a-time", help="Every combination, or one change at a time.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each cell.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="The first of the seeds.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="The folder of all the runs; runs/<data>-<recipe>-ablation if not given.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Trainings at a time; one, or one for each of --devices.")] = None,
    devices: Annotated[str | None, typer.Option(metavar="DEVICE,DEVICE", help="cuda:0,cuda:1: shared among trainings.")] = None,
    model: ModelOption = None,
    changes: SetOption = None,
    weights: FromOption = None,
    epochs: EpochsOption = None,
    micro_batch_size: MicroOption = None,
    workers: WorkersOption = None,
    pick: Annotated[
        bool, typer.Option("--pick", help="Say which cell is best on the validation images, and its command.")
    ] = False,
    metric: MetricOption = "top1",
    at: AtOption = "best",
    as_json: JsonOption = False,
) -> None:
    """Train a recipe without its parts, or with other values, several seeds each, and compare; the same command goes on.

    Example: [bold]vitrail ablate laptop photos/ --drop smoothing,clip --vary optimizer.lr=1e-3,4e-3 --seeds 3 --jobs 2[/bold]
    """
    from vitrail.runs import ablation
    from vitrail.runs.ablation_runs import run_ablation
    from vitrail.runs.comparison import MEASURES, as_dict
    from vitrail.runs.prepare import look_at, resolve
    from vitrail.training.distributed import choose_device

    choice("--at", at, ("best", "last"))
    choice("--metric", metric, tuple(MEASURES))
    if pick and metric == "test":
        raise UserError("--pick with --metric test would spoil the test images: choose by the validation images.")
    names = [name.strip() for name in (devices or "").split(",") if name.strip()]
    kinds = [choose_device(name).type for name in names]
    base_changes = leaves_of(changes, weights, epochs, None, recipe)
    if "seed" in base_changes:
        raise UserError("Every cell has the same seeds: give the first with --seed, and how many with --seeds.")
    base = resolve(open_recipe(recipe), model, base_changes | {"seed": seed}, kinds[0] if kinds else choose_device(None).type)
    drops = [part.strip() for text in drop or [] for part in text.split(",") if part.strip()]
    cells, said = ablation.make_cells(base, [ablation.parse_axis(text) for text in vary or []], drops, grid)
    look_at(source, base, model)  # complains here about what no cell could do
    folder = ablation.choose_place(out, source, base)
    for sentence in said:
        print(sentence, file=sys.stderr)
    opened = ablation.open_ablation(folder, source, cells, range(seed, seed + seeds))
    finished, failed = run_ablation(opened, names, jobs or max(len(names), 1), micro_batch_size, workers)
    if not finished:
        print("Stopped; the same command goes on.", file=sys.stderr)
        sys.exit(130)
    rows, said = ablation.tabulate(opened, metric, at)  # type: ignore[arg-type]
    for sentence in (*said, *failed):
        print(sentence, file=sys.stderr)
    content = as_dict(rows, metric, at)
    if pick:
        chosen = ablation.pick(rows, metric)
        extra = base_changes | ({"model": model} if model else {})
        command = ablation.command_for(opened, recipe, extra, chosen.group.name)
        content["pick"] = {"cell": chosen.group.name, "command": command}
    if as_json:
        print(json.dumps(content, indent=1))
    else:
        show(rows, metric, at)
        say(f"\n{folder}/table.md, table.json and table.png hold this table.")
        if pick:
            measure, spread = MEASURES[metric], chosen.spread
            sd = f" ± {measure.show(spread.sd)}" if spread.sd is not None else ""
            unsure = chosen.difference is not None and (chosen.difference.p is None or chosen.difference.p > 0.05)
            words = f"; that it differs from {rows[0].group.name} may be chance" if unsure else ""
            say(f"best: {chosen.group.name}, {measure.title} {measure.show(spread.mean)}{sd} (n = {spread.n}){words}\n{command}")
    if failed:
        raise UserError(f"{len(failed)} of the trainings failed, as said above: the same command tries them again.")


def show(rows: Any, metric: str, at: str) -> None:
    """The table, and what each group has changed."""
    from vitrail.runs import comparison

    say(f"{comparison.title(metric, at)}; sd over seeds")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for place, head in enumerate(comparison.columns(rows)):
        table.add_column(head, justify="right" if place else "left", no_wrap=bool(place), overflow="fold")
    for row in rows:
        table.add_row(*map(Text, comparison.cells(row, comparison.MEASURES[metric], len(rows))))
    screen().print(table)
    if note := comparison.footnote(rows):
        say(note)
    if len(rows) > 1:
        say("")
    for row in rows[1:]:
        say(f"{row.group.name}: {comparison.in_words(row)}")


def show_images(found: list[dict[str, Any]], first: str) -> None:
    say(f"\nThe same images, one by one: {first} and")
    for each in found:
        words = f"{each['name']}: {100 * each['mean']:+.2f} points, 95 % interval over {each['images']:,} images "
        words += f"{100 * each['low']:+.2f} to {100 * each['high']:+.2f}"
        say(words + (f", McNemar p {each['mcnemar']:.3f}" if each["mcnemar"] is not None else ""))


def screen() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120)


def say(text: str) -> None:
    """Print text as it stands: brackets in names are not markup."""
    screen().print(text, highlight=False, markup=False, soft_wrap=True)
