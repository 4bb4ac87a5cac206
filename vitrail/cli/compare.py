"""vitrail compare, ablate."""

import contextlib
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from vitrail.cli.console import print_message, print_table, print_text
from vitrail.cli.options import (
    AtOption,
    DeviceOption,
    EpochsOption,
    FromOption,
    JsonOption,
    MetricOption,
    MicroBatchSizeOption,
    ModelOption,
    PlotOption,
    RecipeArgument,
    SetOption,
    SourceArgument,
    WorkersOption,
    check_choice,
    expand_options,
)
from vitrail.cli.train import parse_set
from vitrail.errors import UserError

if TYPE_CHECKING:
    from vitrail.runs.comparison import Group
    from vitrail.training.metrics import Metric


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories, or folders that contain runs.")],
    metric: MetricOption = "primary",
    at: AtOption = "best",
    by: Annotated[
        str, typer.Option(help="recipe: runs that differ only by seed are a group; folder: each RUN given is a group.")
    ] = "recipe",
    images: Annotated[
        bool, typer.Option("--images", help="Also compare the predictions of all models for every validation image.")
    ] = False,
    plot: PlotOption = None,
    figures: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Draw the noise of seeds, crop boxes, mixed patches and norms of branches of these runs to PNG files in FOLDER.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare trainings: mean, spread and interval over seeds, and differences to the first group with their p-values.

    Example: [bold]vitrail compare runs/with-mixup runs/without --plot mixup.png[/bold]
    """
    from vitrail.atomic_files import check_writable, check_writable_folder
    from vitrail.runs import comparison
    from vitrail.runs.results import choose_metric, read_results

    check_choice("--at", at, ("best", "last"))
    check_choice("--by", by, ("recipe", "folder"))
    if plot is not None and plot.suffix.lower() != ".png":
        raise UserError(f"--plot {plot} is not a PNG file: give a name that ends in .png.")
    check_writable(plot)
    check_writable_folder(figures)
    chosen = choose_metric(runs, metric)
    results, messages = read_results(runs, chosen, at)  # type: ignore[arg-type]
    groups, more = comparison.group_results(results, by == "folder")
    for message in (*messages, *more):
        print(message, file=sys.stderr)
    rows = comparison.compare(groups)
    if len({result.data for group in groups for result in group.results}) > 1:
        print("These trainings used different images: their metrics are not comparable.", file=sys.stderr)
    content = comparison.comparison_to_dict(rows, chosen, at)
    if images:
        from vitrail.runs.predictions import compare_predictions

        content["images"] = compare_predictions(groups)
    if plot is not None:
        from vitrail.atomic_files import atomic_write
        from vitrail.runs.seed_plot import draw_seed_plot

        drawn = draw_seed_plot(rows, chosen, at)
        atomic_write(plot, lambda side: side.write_bytes(drawn))
    if figures is not None:
        draw_figures(figures, groups, chosen)
    if as_json:
        print(json.dumps(content, indent=1))
        return
    show(rows, chosen, at)
    if images:
        show_images(content["images"], groups[0].name)


def draw_figures(folder: Path, groups: "Sequence[Group]", metric: "Metric") -> None:
    """Write the figures that these runs allow, and one sentence for each of the others."""
    from vitrail.atomic_files import atomic_write
    from vitrail.runs import augmentation_figures, model_figures, seed_figures

    folder.mkdir(parents=True, exist_ok=True)
    drawings = {name: partial(draw, groups, metric) for name, draw in seed_figures.FIGURES.items()}
    others = augmentation_figures.FIGURES | model_figures.FIGURES
    drawings |= {name: partial(draw, groups) for name, draw in others.items()}
    for name, draw in drawings.items():
        try:
            png = draw()
        except UserError as error:
            print_message(f"{name}.png is not drawn: {error}")
            continue
        path = folder / f"{name}.png"
        atomic_write(path, lambda file, png=png: file.write_bytes(png))  # type: ignore[misc]
        print_message(f"wrote {path}")


class VariantOptions(NamedTuple):
    """The trainings to compare, and the folder of their runs."""

    vary: Annotated[
        list[str] | None, typer.Option(metavar="KEY=A,B", help="Values of a recipe key to try; repeatable for more keys.")
    ] = None
    drop: Annotated[
        list[str] | None, typer.Option(metavar="PART,PART", help="Parts to remove: mixing, policy, ema, clip_grad_norm, …")
    ] = None
    grid: Annotated[bool, typer.Option("--grid/--one-at-a-time", help="Every combination, or one change at a time.")] = False
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each variant.")] = 3
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0
    out: Annotated[Path | None, typer.Option(help="Folder of all runs; default: runs/<data>-<recipe>-ablation.")] = None


class TrainingOptions(NamedTuple):
    """The options of all these trainings."""

    model: ModelOption = None
    changes: SetOption = None
    from_: FromOption = None
    epochs: EpochsOption = None
    device: DeviceOption = None
    micro_batch_size: MicroBatchSizeOption = None
    workers: WorkersOption = None


@expand_options
def ablate(
    recipe: RecipeArgument,
    source: SourceArgument = "digits",
    *,
    variants: VariantOptions,
    training: TrainingOptions,
    pick: Annotated[
        bool, typer.Option("--pick", help="Print the variant with the best validation metric, and its command.")
    ] = False,
    metric: MetricOption = "primary",
    at: AtOption = "best",
    as_json: JsonOption = False,
) -> None:
    """Train a recipe without its parts, or with other values, with several seeds each, and compare. Run again, it continues.

    Example: [bold]vitrail ablate laptop photos/ --drop label_smoothing,clip_grad_norm --vary optimizer.lr=1e-3,4e-3[/bold]

    Several GPUs: start the same command once per GPU, with --device cuda:0, --device cuda:1, ….
    """
    from vitrail.devices import choose_device
    from vitrail.recipes.arguments import open_recipe, recipe_changes
    from vitrail.runs import ablation
    from vitrail.runs.comparison import comparison_to_dict, find_metric
    from vitrail.runs.request import TrainRequest, open_data, resolve_recipe
    from vitrail.runs.results import choose_metric
    from vitrail.runs.train import to_stderr
    from vitrail.tasks.registry import find_task

    check_choice("--at", at, ("best", "last"))
    if pick and metric == "test":
        raise UserError("--pick must not choose by the test images: use a validation metric.")
    seed, seeds, model = variants.seed, variants.seeds, training.model
    opened_recipe = open_recipe(recipe)
    everyday = {"from_": training.from_, "epochs": training.epochs}
    base_changes = recipe_changes(opened_recipe, parse_set(training.changes), everyday)
    if "seed" in base_changes:
        raise UserError("All variants have the same seeds: give the first with --seed, and their number with --seeds.")
    request = TrainRequest(
        source,
        opened_recipe,
        model,
        base_changes | {"seed": seed},
        device=training.device,
        micro_batch_size=training.micro_batch_size,
        workers=training.workers,
    )
    base = resolve_recipe(request, choose_device(training.device).type)
    find_metric(metric, find_task(base.task).metric)  # raises here if it is not known
    drops = [part.strip() for text in variants.drop or [] for part in text.split(",") if part.strip()]
    axes = [ablation.parse_axis(text) for text in variants.vary or []]
    cells, messages = ablation.make_cells(base, axes, drops, variants.grid)
    open_data(request, base)  # raises here for what no variant could do
    folder = ablation.choose_folder(variants.out, source, base)
    for message in messages:
        print(message, file=sys.stderr)
    opened = ablation.open_ablation(folder, source, cells, range(seed, seed + seeds))
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():  # standard output is JSON only
        finished, failed = ablation.run_ablation(opened, request, to_stderr)
    if not finished:
        print("Stopped; run the same command again to continue.", file=sys.stderr)
        sys.exit(130)
    measure = choose_metric([folder], metric)  # the task's may depend on the data
    rows, messages = ablation.tabulate(opened, measure, at)  # type: ignore[arg-type]
    for message in (*messages, *failed):
        print(message, file=sys.stderr)
    content = comparison_to_dict(rows, measure, at)
    chosen = None
    if ablation.is_at_chance(rows, measure):
        print(
            "No variant is clearly better than guessing, so there is no winner: train for longer, or start from weights with "
            "--from.",
            file=sys.stderr,
        )
    elif pick:
        chosen = ablation.pick(rows, measure)
        extra = base_changes | ({"model": model} if model else {})
        command = ablation.command_for(opened, recipe, extra, chosen.group.name)
        content["pick"] = {"cell": chosen.group.name, "command": command}
    if as_json:
        print(json.dumps(content, indent=1))
    else:
        show(rows, measure, at)
        print_text(f"\n{folder}/table.md, table.json and table.png contain this table.")
        if chosen is not None:
            spread = chosen.spread
            sd = f" ± {measure.show(spread.sd)}" if spread.sd is not None else ""
            unsure = chosen.difference is not None and (chosen.difference.p is None or chosen.difference.p > 0.05)
            note = f"; its difference to {rows[0].group.name} may be chance" if unsure else ""
            value = f"{measure.title} {measure.show(spread.mean)}{sd} (n = {spread.n})"
            print_text(f"best: {chosen.group.name}, {value}{note}\n{command}")
    if failed:
        raise UserError(f"{len(failed)} of the trainings failed, see above: the same command tries them again.")


def show(rows: Any, metric: "Metric", at: str) -> None:
    """Print the table and what each group changes."""
    from vitrail.runs import comparison

    print_text(f"{comparison.title(metric, at)}; sd over seeds")
    cells = [comparison.cells(row, metric, len(rows)) for row in rows]
    columns = comparison.columns(rows)
    print_table(columns, cells, no_wrap=columns[1:])
    if note := comparison.footnote(rows):
        print_text(note)
    if len(rows) > 1:
        print_text("")
    for row in rows[1:]:
        print_text(f"{row.group.name}: {comparison.describe_changes(row)}")


def show_images(differences: list[dict[str, Any]], first: str) -> None:
    print_text(f"\nImage by image, compared with {first}:")
    for each in differences:
        text = f"{each['name']}: {100 * each['mean']:+.2f} points, 95 % interval over {each['images']:,} images "
        text += f"{100 * each['low']:+.2f} to {100 * each['high']:+.2f}"
        print_text(text + (f", McNemar p {each['mcnemar']:.3f}" if each["mcnemar"] is not None else ""))
