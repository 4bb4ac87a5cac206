"""vitrail probe: what a model's features are worth, without training it further."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.table import Table

from vitrail.cli.embed import (
    BareOption,
    BatchOption,
    DeviceOption,
    HalfOption,
    ImagesOption,
    JsonOption,
    LabelsOption,
    MemoryOption,
    QueriesOption,
    SeedOption,
    SourceArgument,
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
from vitrail.cli.probe_structure import levels, random_labels, spectrum
from vitrail.cli.train import choice
from vitrail.formatting import percent

if TYPE_CHECKING:
    from vitrail.evaluation.features import Embedding, Readout
    from vitrail.evaluation.probes.protocol import Known, Settings, Sides
    from vitrail.models.vision_transformer import VisionTransformer

probe = typer.Typer(
    no_args_is_help=True, help="Measure what a model's features are worth, without training it: neighbours, linear, few shots…"
)
for command in (spectrum, random_labels, levels):
    probe.command()(command)


class Options(NamedTuple):
    """What the probes with two sides have in common."""

    labels: str
    memory: str | None
    queries: str | None
    images: int | None
    seed: int
    vector: str | None
    before_norm: bool
    bf16: bool
    device: str | None
    batch: int
    workers: int | None


@probe.command()
def knn(
    weights: WeightsArgument,
    source: SourceArgument,
    protocol: Annotated[str, typer.Option(help="dino (k 20), grafit (k chosen on the memory) or snca (k 30).")] = "dino",
    k: Annotated[int | None, typer.Option("-k", "--k", min=1, help="Neighbours that vote, if other than the protocol's.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Votes are exp(cosine / temperature); the protocol's.")] = None,
    labels: LabelsOption = "label",
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
    """Classify by the weighted votes of the nearest neighbours among remembered images.

    Example: [bold]vitrail probe knn runs/photos-laptop photos/ --protocol grafit[/bold]
    """
    from vitrail.evaluation.probes.protocol import Settings

    settings = Settings(protocol=protocol, k=k, temperature=temperature, seed=seed)
    options = Options(labels, memory, queries, images, seed, vector, before_norm, bf16, device, batch, workers)
    measure("knn", weights, source, settings, options, as_json)


@probe.command()
def linear(
    weights: WeightsArgument,
    source: SourceArgument,
    decay: Annotated[list[float] | None, typer.Option(help="A weight decay to try, again for more; else 1 to 1e-5.")] = None,
    share: Annotated[float, typer.Option(help="The part of every class held out to choose the decay on.")] = 0.1,
    labels: LabelsOption = "label",
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
    """Fit a linear classifier to the frozen features (logistic regression by L-BFGS) and test it.

    Example: [bold]vitrail probe linear deit3_small.safetensors flowers/[/bold]
    """
    from vitrail.evaluation.probes.linear import DECAYS
    from vitrail.evaluation.probes.protocol import Settings

    settings = Settings(share=share, seed=seed, decays=tuple(decay) if decay else DECAYS)
    options = Options(labels, memory, queries, images, seed, vector, before_norm, bf16, device, batch, workers)
    measure("linear", weights, source, settings, options, as_json)


@probe.command()
def fewshot(
    weights: WeightsArgument,
    source: SourceArgument,
    shots: Annotated[int, typer.Option(min=1, help="Labelled images of each class.")] = 5,
    penalty: Annotated[float, typer.Option(help="On the squared weights of the fit.")] = 1024.0,
    seeds: Annotated[int, typer.Option(min=1, help="How many choices of the few images to average over.")] = 3,
    labels: LabelsOption = "label",
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
    """Fit least squares to a few labelled images of each class and test it (ViT's 5-shot measure).

    Example: [bold]vitrail probe fewshot deit3_small.safetensors flowers/ --shots 5[/bold]
    """
    from vitrail.evaluation.probes.protocol import Settings

    settings = Settings(shots=shots, penalty=penalty, seeds=seeds, seed=seed)
    options = Options(labels, memory, queries, images, seed, vector, before_norm, bf16, device, batch, workers)
    measure("fewshot", weights, source, settings, options, as_json)


@probe.command()
def retrieval(
    weights: WeightsArgument,
    source: SourceArgument,
    coarse: Annotated[
        str | None, typer.Option(help="A column of coarse labels: adds the conditional and the oracle ranking.")
    ] = None,
    coarse_by: Annotated[
        str, typer.Option(help="Who says a query's coarse label: memory, neighbours (k 30), or softmax, the model's classifier.")
    ] = "memory",
    labels: LabelsOption = "label",
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
    """Rank the remembered images for every query: mean average precision, those of its label being right.

    Example: [bold]vitrail probe retrieval coarse.safetensors pets/ --coarse coarse_label[/bold]
    """
    from vitrail.evaluation.probes.protocol import rank

    choice("--coarse-by", coarse_by, ("memory", "neighbours", "softmax"))
    options = Options(labels, memory, queries, images, seed, vector, before_norm, bf16, device, batch, workers)
    looked = look("retrieval", weights, source, options, coarse)
    by = looked.model if coarse_by == "softmax" else coarse_by
    found = rank(looked.sides, looked.memory, looked.queries, labels, coarse, by, batch, workers)
    if as_json:
        tell({name: each._asdict() for name, each in found.items()} | about(looked))
        return
    table = Table("score", box=None, header_style="bold", pad_edge=False)
    for name in ("mAP", "queries", "without answer"):
        table.add_column(name, justify="right")
    for name, each in found.items():
        table.add_row(name, percent(each.mean, 2), f"{each.queries:,}", f"{each.without:,}")
    console().print(table)
    print(sentence(looked))


class Looked(NamedTuple):
    model: "VisionTransformer"
    sides: "Sides"
    memory: "Embedding"
    queries: "Embedding"
    known: "Known"
    pooling: "Readout"


def look(name: str, weights: Path, source: str, options: Options, further: str | None = None) -> Looked:
    """Both sides' features and labels; a `further` column of labels is missed before anything is computed."""
    from vitrail.evaluation.features import Readout
    from vitrail.evaluation.probes.protocol import column, embed_sides, known, open_sides, usual_vector

    sides = open_sides(source, options.memory, options.queries, options.images, options.seed)
    for side in (sides.memory, sides.queries):
        for name_ in (options.labels, further or options.labels):
            column(side, name_)
    model = open_model(weights, options.device)
    pooling = Readout(options.vector or usual_vector(name, model), options.before_norm, False, options.bf16)
    with watched("embedding", len(sides.memory) + len(sides.queries)) as advance:
        memory, queries = embed_sides(model, sides, pooling, options.batch, options.workers, advance)
    complain(memory.problems + queries.problems)
    return Looked(model, sides, memory, queries, known(sides, memory, queries, options.labels), pooling)


def measure(name: str, weights: Path, source: str, settings: "Settings", options: Options, as_json: bool) -> None:
    """One of the probes that give one number."""
    from vitrail.evaluation.probes.protocol import PROBES

    looked = look(name, weights, source, options)
    result = PROBES[name](looked.known, settings)
    if as_json:
        tell(result.details | about(looked))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    cells = {key: cell(key, value) for key, value in result.details.items() if not isinstance(value, dict | list | bool)}
    for key in cells:
        table.add_column(
            {"top1": "top-1", "top5": "top-5", "spread": f"± of {settings.seeds} choices"}.get(key, key), justify="right"
        )
    table.add_row(*cells.values())
    console().print(table)
    print(sentence(looked))
    if result.details.get("decay_at_edge"):
        say("The best decay is the first or last of those tried: a wider range (--decay, again for more) may give more.")


def cell(key: str, value: Any) -> str:
    if key in ("top1", "top5", "spread"):
        return percent(value, 2)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def sentence(looked: Looked) -> str:
    sides, known = looked.sides, looked.known
    return (
        f"{len(known.memory):,} images of {sides.memory_name} remembered, {len(known.queries):,} of {sides.queries_name} "
        f"asked, {len(known.names)} classes, {known.memory.shape[1]} features ({looked.pooling.vector})."
    )


def about(looked: Looked) -> dict[str, Any]:
    sides, known = looked.sides, looked.known
    return {
        "memory": {"split": sides.memory_name, "images": len(known.memory)},
        "asked": {"split": sides.queries_name, "images": len(known.queries)},
        "classes": len(known.names),
        "features": known.memory.shape[1],
        "pooling": looked.pooling._asdict(),
    }
