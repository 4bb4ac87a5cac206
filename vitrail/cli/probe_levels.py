"""vitrail probe levels and scatter: models and features at the levels of a label hierarchy."""

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitrail.cli.console import print_json, print_message, print_table
from vitrail.cli.embed import embed_images, open_on
from vitrail.cli.options import JsonOption, LabelColumnOption, SourceArgument, WeightsArgument, expand_options
from vitrail.cli.probe import PairOptions, SplitOptions, embed_pair, probe
from vitrail.errors import UserError
from vitrail.formatting import percent

if TYPE_CHECKING:
    from vitrail.evaluation.probes.levels import Grid, Level

__all__ = ["probe"]  # with the commands of this file


@probe.command()
@expand_options
def levels(
    weights: Annotated[
        list[str],
        typer.Argument(
            metavar="[LEVEL=]WEIGHTS...",
            help="Models or folders of seeds, optionally with the level they were trained at; then SOURCE.",
        ),
    ],
    source: SourceArgument,
    scores: Annotated[
        list[str] | None, typer.Option("--score", help="knn, map or linear; repeatable; default: knn and map.")
    ] = None,
    protocol: Annotated[str, typer.Option(help="Protocol of knn: dino, grafit or snca.")] = "grafit",
    plot: Annotated[Path | None, typer.Option(help="Plot scores by training level: levels.png, .svg or .pdf.")] = None,
    *,
    options: PairOptions,
    as_json: JsonOption = False,
) -> None:
    """Evaluate models at every level of a label hierarchy: a row per level, a column per model.

    A folder with several seeds of a training (`vitrail train --seeds`) is one column: mean ± standard deviation.

    Example: [bold]vitrail probe levels coarse_label=coarse.safetensors label=fine.safetensors pets/[/bold]
    """
    from vitrail.data.progress import progress
    from vitrail.evaluation.probes.levels import (
        NO_LEVEL,
        EmbeddedModel,
        find_levels,
        inconsistent_classes,
        measure_grid,
        training_level,
    )
    from vitrail.evaluation.probes.protocol import Settings, default_vector
    from vitrail.evaluation.probes.spectrum import check_plot_path

    if plot is not None:
        check_plot_path(plot)
    scores = scores or ["knn", "map"]
    data = options.open(source)
    hierarchy = find_levels(data.memory)
    for coarse, fine in pairwise(hierarchy):
        if names := inconsistent_classes(fine.labels, coarse.labels):
            print_message(
                f"{fine.name} is not a refinement of {coarse.name}: {len(names)} of its classes have images in several of them, "
                f"first {names[0]}."
            )
    models = []
    known = [level.name for level in hierarchy] + [NO_LEVEL]
    for text in weights:
        level, sign, path = text.partition("=")
        if not sign or (level not in known and Path(text).exists()):
            level, path = "", text
        if level and level not in known:
            raise UserError(f"{data.memory.name} has no level {level!r}: choose from {', '.join(known)}.")
        for file in sorted(Path(path).glob("seed-*/best.safetensors")) or [Path(path)]:
            model = open_on(file, options.hardware.device)
            kind = options.features.kind(default_vector("knn", model))
            embeddings = embed_pair(model, data, kind, options, f"embedding {Path(path).name}")
            trunk = None
            if "linear" in scores and kind.vector == "projected":  # as it is fine-tuned: on the trunk
                trunk = embed_pair(model, data, kind._replace(vector="pooled"), options, f"embedding {Path(path).name}")
            trained = level or training_level(model, hierarchy, data.memory.label_name) or "unknown"
            models.append(EmbeddedModel(path, trained, *embeddings, trunk))
    with progress("probing", len(models) * len(hierarchy) * len(scores)) as advance:
        grid = measure_grid(data, hierarchy, models, scores, Settings(protocol=protocol, seed=options.seed), advance)
    grid = grid.average()
    if plot is not None:
        from vitrail.evaluation.embedding_figures import level_figure, save_figure

        save_figure(level_figure(grid), plot)
    if as_json:
        print_json(grid.to_dict())
        return
    for score in scores:
        print_grid(grid, hierarchy, score)


@probe.command()
@expand_options
def scatter(
    weights: WeightsArgument,
    source: SourceArgument,
    plot: Annotated[Path, typer.Option(help="The plot to write: family.png, .svg or .pdf.")],
    labels: LabelColumnOption = "label",
    within: Annotated[
        str | None, typer.Option(help="Only the images of a class of another column, such as family=Paridae.")
    ] = None,
    *,
    options: SplitOptions,
) -> None:
    """Plot the first two principal directions of the features, with a color for each class.

    Example: [bold]vitrail probe scatter runs/birds birds/ --labels species --within family=Paridae --plot paridae.png[/bold]
    """
    from vitrail.evaluation.embedding_figures import save_figure, scatter_figure
    from vitrail.evaluation.probes.protocol import default_vector, label_column, labels_of
    from vitrail.evaluation.probes.spectrum import check_plot_path

    check_plot_path(plot)
    data = options.open(source)
    column = label_column(data, labels)
    title = f"{Path(source).name or source}, by {labels}"
    if within is not None:
        level, _, name = within.partition("=")
        groups = label_column(data, level)
        if name not in groups.names:
            raise UserError(
                f"There is no class {name!r} in {level} of {source}: give --within COLUMN=CLASS, such as "
                f"{level}={groups.names[0]}."
            )
        title = f"{name}, by {labels}"
    vector = default_vector("knn", open_on(weights, options.hardware.device))
    embedding = embed_images(weights, data, options.features.kind(vector), options.hardware, options.features.cache)
    if within is not None:
        embedding = embedding.select(labels_of(embedding, level) == groups.names.index(name))
    save_figure(scatter_figure(embedding.vectors, labels_of(embedding, labels), column.names, title), plot)
    print(f"{len(embedding.vectors):,} images -> {plot}")


def print_grid(grid: "Grid", hierarchy: "list[Level]", score: str) -> None:
    models = [f"{level}\n{Path(name).name}" for name, level in zip(grid.models, grid.train, strict=True)]
    rows = [
        (
            f"{evaluated.name} ({evaluated.classes})",
            *(
                percent(value, 2) + (f" ± {percent(sd, 2)}" if sd is not None else "")
                for value, sd in zip(values, sds, strict=True)
            ),
        )
        for evaluated, values, sds in zip(hierarchy, grid.scores[score], grid.sds[score], strict=True)
    ]
    print_table((f"{score}, evaluated at", *models), rows)
    print(", ".join(f"{name} {percent(value, 2)}" for name, value in grid.means(score).items()) + "\n")
