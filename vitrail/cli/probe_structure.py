"""vitrail probe spectrum, random-labels, levels: how features are structured."""

from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from vitrail.cli.embed import (
    BareOption,
    BatchOption,
    DeviceOption,
    HalfOption,
    ImagesOption,
    JsonOption,
    LabelsOption,
    ManyArgument,
    MemoryOption,
    QueriesOption,
    SeedOption,
    SourceArgument,
    SplitOption,
    VectorOption,
    WeightsArgument,
    WorkersOption,
    complain,
    console,
    open_model,
    say,
    tell,
    watched,
)
from vitrail.errors import UserError
from vitrail.formatting import percent


def spectrum(
    weights: ManyArgument,
    source: SourceArgument,
    plot: Annotated[Path | None, typer.Option(help="Draw the curves of cumulative energy: energy.png, .svg or .pdf.")] = None,
    split: SplitOption = None,
    images: ImagesOption = None,
    vector: VectorOption = None,
    before_norm: BareOption = False,
    unit: Annotated[bool, typer.Option("--unit", help="Scale each vector to length one first.")] = False,
    bf16: HalfOption = False,
    seed: SeedOption = 0,
    device: DeviceOption = None,
    batch: BatchOption = 64,
    workers: WorkersOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say how many principal directions hold the energy of the features.

    Example: [bold]vitrail probe spectrum coarse.safetensors fine.safetensors cifar100/ --plot energy.svg[/bold]
    """
    from vitrail.evaluation.features import Readout
    from vitrail.evaluation.features import embed as run
    from vitrail.evaluation.probes.protocol import open_for_embedding, some
    from vitrail.evaluation.probes.spectrum import SHARES, check_figure, draw
    from vitrail.evaluation.probes.spectrum import spectrum as decompose

    if plot is not None:
        check_figure(plot)
    images_ = some(open_for_embedding([source], split)[0], images, seed)
    pooling = Readout(vector or "pooled", before_norm, unit, bf16)
    found = {}
    for path in weights:
        model = open_model(Path(path), device)
        with watched(f"embedding {Path(path).name}", len(images_)) as advance:
            embedding = run(model, images_, pooling, batch, workers, advance)
        complain(embedding.problems)
        found[path] = decompose(embedding.vectors)
    if plot is not None:
        draw(found, plot)
    if as_json:
        content = {
            name: {
                "images": each.images,
                "effective": each.effective,
                "components": {str(share): each.components(share) for share in SHARES},
                "eigenvalues": each.eigenvalues.tolist(),
                "energy": each.energy.tolist(),
            }
            for name, each in found.items()
        }
        tell(content)
        return
    table = Table("weights", box=None, header_style="bold", pad_edge=False)
    for name in ("images", "features", "effective", *(f"for {percent(share)}" for share in SHARES)):
        table.add_column(name, justify="right")
    for name, each in found.items():
        counts = (str(each.components(share)) for share in SHARES)
        table.add_row(Text(name), f"{each.images:,}", str(len(each.eigenvalues)), f"{each.effective:.1f}", *counts)
    console().print(table)


def random_labels(
    weights: WeightsArgument,
    source: SourceArgument,
    splits: Annotated[int, typer.Option(min=1, help="How many ways to cut the classes in halves.")] = 10,
    decay: Annotated[float, typer.Option(min=0, help="Weight decay of the linear classifier.")] = 1e-4,
    labels: LabelsOption = "label",
    split: SplitOption = None,
    images: ImagesOption = None,
    vector: VectorOption = None,
    before_norm: BareOption = False,
    bf16: HalfOption = False,
    seed: SeedOption = 0,
    device: DeviceOption = None,
    batch: BatchOption = 64,
    workers: WorkersOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cut every class into random halves and see how well a linear classifier learns them: 50% is nothing finer than the class.

    Example: [bold]vitrail probe random-labels coarse.safetensors cifar100/ --labels coarse_label[/bold]
    """
    from vitrail.evaluation.features import Readout
    from vitrail.evaluation.features import embed as run
    from vitrail.evaluation.probes.protocol import column, open_for_embedding, some, values_of
    from vitrail.evaluation.probes.separability import separability, summary

    images_ = some(open_for_embedding([source], split)[0], images, seed)
    column(images_, labels)
    model = open_model(weights, device)
    with watched("embedding", len(images_)) as advance:
        embedding = run(model, images_, Readout(vector or "pooled", before_norm, False, bf16), batch, workers, advance)
    complain(embedding.problems)
    embedding = embedding.pick(values_of(embedding, labels) >= 0)
    if not len(embedding.vectors):
        raise UserError(f"No image of {source} that can be read has a {labels}.")
    with watched("cutting classes", splits) as advance:
        found = separability(embedding.vectors, values_of(embedding, labels), splits, decay, advance)
    if as_json:
        tell(found._asdict())
        return
    table = Table("", box=None, header_style="bold", pad_edge=False)
    for name in ("top-1 on the images learned from", f"± over {splits} splits"):
        table.add_column(name, justify="right")
    for name, values in (("halves", found.plain), ("halves within the predicted class", found.conditioned)):
        mean, spread = summary(values)
        table.add_row(name, percent(mean, 2), percent(spread, 2) if splits > 1 else "")
    console().print(table)
    print(f"{found.images:,} images of {found.classes} classes, {2 * found.classes} halves.")


def levels(
    weights: Annotated[
        list[str],
        typer.Argument(metavar="[LEVEL=]WEIGHTS...", help="Models, with the labels they were trained with; then the source."),
    ],
    source: SourceArgument,
    scores: Annotated[list[str] | None, typer.Option("--score", help="knn, map or linear, again for more; knn and map.")] = None,
    protocol: Annotated[str, typer.Option(help="Of knn: dino, grafit or snca.")] = "grafit",
    memory: MemoryOption = None,
    queries: QueriesOption = None,
    images: ImagesOption = None,
    vector: VectorOption = None,
    before_norm: BareOption = False,
    bf16: HalfOption = False,
    seed: SeedOption = 0,
    device: DeviceOption = None,
    batch: BatchOption = 64,
    workers: WorkersOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure models at every level of a label hierarchy: a row per level, a column per model.

    Example: [bold]vitrail probe levels coarse_label=coarse.safetensors label=fine.safetensors pets/[/bold]
    """
    from vitrail.evaluation.features import Readout
    from vitrail.evaluation.probes.levels import NOTHING, Trained, level_of, levels_of, strays
    from vitrail.evaluation.probes.levels import measure as fill
    from vitrail.evaluation.probes.protocol import Settings, embed_sides, open_sides

    sides = open_sides(source, memory, queries, images, seed)
    known = levels_of(sides.memory)
    for coarse, fine in pairwise(known):
        if odd := strays(fine.labels, coarse.labels):
            say(f"{fine.name} is not a refinement of {coarse.name}: {len(odd)} of its classes lie in several, first {odd[0]}.")
    pooling = Readout(vector or "pooled", before_norm, False, bf16)
    trained = []
    names = [level.name for level in known] + [NOTHING]
    for text in weights:
        level, sign, path = text.partition("=")
        if not sign or (level not in names and Path(text).exists()):
            level, path = "", text
        if level and level not in names:
            raise UserError(f"{sides.memory.name} has no level {level!r}: choose from {', '.join(names)}.")
        model = open_model(Path(path), device)
        with watched(f"embedding {Path(path).name}", len(sides.memory) + len(sides.queries)) as advance:
            features = embed_sides(model, sides, pooling, batch, workers, advance)
        complain(features[0].problems + features[1].problems)
        trained.append(Trained(path, level or level_of(model, known) or "unknown", *features))
    wanted = scores or ["knn", "map"]
    with watched("measuring", len(trained) * len(known) * len(wanted)) as advance:
        grid = fill(sides, known, trained, wanted, Settings(protocol=protocol, seed=seed), advance)
    if as_json:
        tell(grid.to_dict())
        return
    for what in wanted:
        table = Table(f"{what}, tested at", box=None, header_style="bold", pad_edge=False)
        for name, level in zip(grid.models, grid.train, strict=True):
            table.add_column(Text(f"{level}\n{Path(name).name}"), justify="right", overflow="fold")
        for each, row in zip(known, grid.scores[what], strict=True):
            table.add_row(Text(f"{each.name} ({each.classes})"), *(percent(value, 2) for value in row))
        console().print(table)
        print(", ".join(f"{name} {percent(value, 2)}" for name, value in grid.parts(what).items()) + "\n")
