"""vitrail probe: evaluate the frozen features of a model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from vitrail.cli.console import print_json, print_message, print_problems, print_table
from vitrail.cli.embed import embed_images, open_on
from vitrail.cli.options import (
    FeatureOptions,
    HardwareOptions,
    ImagesOption,
    JsonOption,
    LabelColumnOption,
    NormalizeOption,
    SeedOption,
    SourceArgument,
    SplitOption,
    WeightsArgument,
    check_choice,
    expand_options,
    feature_option,
)
from vitrail.errors import UserError
from vitrail.formatting import percent

if TYPE_CHECKING:
    from vitrail.data.source import Source
    from vitrail.evaluation.features import Embedding, FeatureKind
    from vitrail.evaluation.model import Model
    from vitrail.evaluation.probes.protocol import LabeledFeatures, ProbeData, Settings

probe = typer.Typer(
    no_args_is_help=True, help="Evaluate the frozen features of a model: k-NN, linear, few-shot, retrieval and others."
)


class PairOptions(NamedTuple):
    """Options of the probes with memory and queries."""

    memory: Annotated[str | None, feature_option(help="Split to fit or search in; default: train.")] = None
    queries: Annotated[
        str | None,
        feature_option(help="Split to evaluate; default: test, else validation, else 10 % of the memory."),
    ] = None
    images: ImagesOption = None
    map: Annotated[
        str | None, feature_option(help="CSV or JSON file with a coarser class for every class: further label columns.")
    ] = None
    features: FeatureOptions = FeatureOptions()
    seed: SeedOption = 0
    hardware: HardwareOptions = HardwareOptions()

    def open(self, source: str) -> "ProbeData":
        from vitrail.evaluation.probes.protocol import open_probe_data

        return open_probe_data(source, self.memory, self.queries, self.images, self.seed, self.map)


class SplitOptions(NamedTuple):
    """Options of the probes of one split."""

    split: SplitOption = None
    images: ImagesOption = None
    features: FeatureOptions = FeatureOptions()
    seed: SeedOption = 0
    hardware: HardwareOptions = HardwareOptions()

    def open(self, source: str) -> "Source":
        from vitrail.data.source import subsample
        from vitrail.evaluation.probes.protocol import open_embedding_source

        return subsample(open_embedding_source([source], self.split)[0], self.images, self.seed)


@probe.command()
@expand_options
def knn(
    weights: WeightsArgument,
    source: SourceArgument,
    protocol: Annotated[str, typer.Option(help="dino (k 20), grafit (k chosen on the memory) or snca (k 30).")] = "dino",
    k: Annotated[int | None, typer.Option("-k", "--k", min=1, help="Number of neighbors; default: the protocol's.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Votes are exp(cosine / temperature); default: the protocol's.")
    ] = None,
    labels: LabelColumnOption = "label",
    *,
    options: PairOptions,
    as_json: JsonOption = False,
) -> None:
    """Classify by the weighted votes of the nearest neighbors in the memory.

    Example: [bold]vitrail probe knn runs/photos-finetune photos/ --protocol grafit[/bold]
    """
    from vitrail.evaluation.probes.protocol import Settings

    settings = Settings(protocol=protocol, k=k, temperature=temperature, seed=options.seed)
    run_probe("knn", compute_inputs("knn", weights, source, labels, options), settings, as_json)


@probe.command()
@expand_options
def linear(
    weights: WeightsArgument,
    source: SourceArgument,
    weight_decay: Annotated[
        list[float] | None,
        typer.Option("--weight-decay", "--decay", help="A weight decay to try; repeatable; default: 1 to 1e-5."),
    ] = None,
    held_out: Annotated[
        float, typer.Option("--held-out", "--share", help="Fraction of every class to choose the weight decay on.")
    ] = 0.1,
    labels: LabelColumnOption = "label",
    *,
    options: PairOptions,
    as_json: JsonOption = False,
) -> None:
    """Fit a linear classifier on the memory (logistic regression by L-BFGS) and evaluate it on the queries.

    Example: [bold]vitrail probe linear deit3_small.safetensors flowers/[/bold]
    """
    from vitrail.evaluation.probes.linear import WEIGHT_DECAYS
    from vitrail.evaluation.probes.protocol import Settings

    settings = Settings(
        held_out=held_out, seed=options.seed, weight_decays=tuple(weight_decay) if weight_decay else WEIGHT_DECAYS
    )
    run_probe("linear", compute_inputs("linear", weights, source, labels, options), settings, as_json)


@probe.command()
@expand_options
def fewshot(
    weights: WeightsArgument,
    source: SourceArgument,
    shots: Annotated[int, typer.Option(min=1, help="Labeled images per class.")] = 5,
    penalty: Annotated[float, typer.Option(help="Penalty on the squared weights.")] = 1024.0,
    seeds: Annotated[int, typer.Option(min=1, help="Number of draws of the labeled images.")] = 3,
    labels: LabelColumnOption = "label",
    *,
    options: PairOptions,
    as_json: JsonOption = False,
) -> None:
    """Fit a linear map on a few labeled images of each class (ViT's few-shot metric) and evaluate it on the queries.

    Example: [bold]vitrail probe fewshot deit3_small.safetensors flowers/ --shots 5[/bold]
    """
    from vitrail.evaluation.probes.protocol import Settings

    settings = Settings(shots=shots, penalty=penalty, seeds=seeds, seed=options.seed)
    run_probe("fewshot", compute_inputs("fewshot", weights, source, labels, options), settings, as_json)


@probe.command()
@expand_options
def retrieval(
    weights: WeightsArgument,
    source: SourceArgument,
    coarse: Annotated[
        str | None, typer.Option(help="A column of coarse labels: adds the conditional and the oracle ranking.")
    ] = None,
    coarse_by: Annotated[
        str,
        typer.Option(help="Predict the coarse label of a query by memory, neighbors (k 30) or softmax, the model's classifier."),
    ] = "memory",
    labels: LabelColumnOption = "label",
    *,
    options: PairOptions,
    as_json: JsonOption = False,
) -> None:
    """Rank the memory for every query: mean average precision, with images of the same label as relevant.

    Example: [bold]vitrail probe retrieval coarse.safetensors pets/ --coarse coarse_label[/bold]
    """
    from vitrail.evaluation.probes.protocol import measure_retrieval

    check_choice("--coarse-by", coarse_by, ("memory", "neighbors", "softmax"))
    inputs = compute_inputs("retrieval", weights, source, labels, options, coarse)
    by = inputs.model if coarse_by == "softmax" else coarse_by
    _, batch_size, workers = options.hardware
    scores = measure_retrieval(inputs.data, inputs.memory, inputs.queries, labels, coarse, by, batch_size, workers)
    if as_json:
        print_json({name: precision._asdict() for name, precision in scores.items()} | describe_inputs(inputs))
        return
    rows = [
        (name, percent(precision.mean, 2), f"{precision.queries:,}", f"{precision.without_match:,}")
        for name, precision in scores.items()
    ]
    print_table(("score", "mAP", "queries", "without match"), rows)
    print(summary_line(inputs))


@probe.command()
@expand_options
def spectrum(
    weights: Annotated[list[str], typer.Argument(metavar="WEIGHTS...", help="Checkpoints or run directories, then SOURCE.")],
    source: SourceArgument,
    plot: Annotated[Path | None, typer.Option(help="Plot the cumulative variance: energy.png, .svg or .pdf.")] = None,
    *,
    options: SplitOptions,
    normalize: NormalizeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Print the number of principal directions that contain most of the variance of the features.

    Example: [bold]vitrail probe spectrum coarse.safetensors fine.safetensors cifar100/ --plot energy.svg[/bold]
    """
    from vitrail.evaluation.probes.spectrum import SHARES, check_plot_path, compute_spectrum, plot_spectra

    if plot is not None:
        check_plot_path(plot)
    data, kind = options.open(source), options.features.kind(normalize=normalize)
    spectra = {}
    for path in weights:
        embedding = embed_images(path, data, kind, options.hardware, options.features.cache, f"embedding {Path(path).name}")
        spectra[path] = compute_spectrum(embedding.vectors)
    if plot is not None:
        plot_spectra(spectra, plot)
    if as_json:
        content = {
            name: {
                "images": each.images,
                "effective": each.effective,
                "components": {str(share): each.components(share) for share in SHARES},
                "eigenvalues": each.eigenvalues.tolist(),
                "energy": each.energy.tolist(),
            }
            for name, each in spectra.items()
        }
        print_json(content)
        return
    shares = [f"for {percent(share)}" for share in SHARES]
    rows = [
        (name, f"{each.images:,}", str(len(each.eigenvalues)), f"{each.effective:.1f}", *map(str, map(each.components, SHARES)))
        for name, each in spectra.items()
    ]
    print_table(("weights", "images", "features", "effective", *shares), rows)


@probe.command()
@expand_options
def random_labels(
    weights: WeightsArgument,
    source: SourceArgument,
    splits: Annotated[int, typer.Option(min=1, help="Number of random splits of the classes.")] = 10,
    weight_decay: Annotated[
        float, typer.Option("--weight-decay", "--decay", min=0, help="Weight decay of the linear classifier.")
    ] = 1e-4,
    labels: LabelColumnOption = "label",
    *,
    options: SplitOptions,
    as_json: JsonOption = False,
) -> None:
    """Split every class into random halves and fit a linear classifier: 50 % means that features contain only the class.

    Example: [bold]vitrail probe random-labels coarse.safetensors cifar100/ --labels coarse_label[/bold]
    """
    from vitrail.data.progress import progress
    from vitrail.evaluation.probes.protocol import label_column, labels_of
    from vitrail.evaluation.probes.separability import mean_and_sd, measure_separability

    data = options.open(source)
    label_column(data, labels)
    embedding = embed_images(weights, data, options.features.kind(), options.hardware, options.features.cache)
    embedding = embedding.select(labels_of(embedding, labels) >= 0)
    if not len(embedding.vectors):
        raise UserError(f"No readable image of {source} has a {labels}.")
    with progress("random splits", splits) as advance:
        result = measure_separability(embedding.vectors, labels_of(embedding, labels), splits, weight_decay, advance)
    if as_json:
        print_json(result._asdict())
        return
    rows = []
    for name, values in (("halves", result.plain), ("halves given the predicted class", result.conditioned)):
        mean, sd = mean_and_sd(values)
        rows.append((name, percent(mean, 2), percent(sd, 2) if splits > 1 else ""))
    print_table(("", "top-1 on the training images", f"± over {splits} splits"), rows)
    print(f"{result.images:,} images of {result.classes} classes, {2 * result.classes} halves.")


class ProbeInputs(NamedTuple):
    model: "Model"
    data: "ProbeData"
    memory: "Embedding"
    queries: "Embedding"
    features: "LabeledFeatures"
    kind: "FeatureKind"


def compute_inputs(
    name: str, weights: Path, source: str, labels: str, options: PairOptions, coarse: str | None = None
) -> ProbeInputs:
    """The features and labels of memory and queries; missing label columns are reported before any computation."""
    from vitrail.evaluation.probes.protocol import default_vector, label_column, select_labeled

    data = options.open(source)
    for part in (data.memory, data.queries):
        for column in (labels, coarse or labels):
            label_column(part, column)
    model = open_on(weights, options.hardware.device)
    kind = options.features.kind(default_vector(name, model))
    memory, queries = embed_pair(model, data, kind, options)
    return ProbeInputs(model, data, memory, queries, select_labeled(data, memory, queries, labels), kind)


def embed_pair(
    model: "Model", data: "ProbeData", kind: "FeatureKind", options: PairOptions, title: str = "embedding"
) -> "tuple[Embedding, Embedding]":
    """The features of memory and queries; unreadable images are printed."""
    from vitrail.data.progress import progress
    from vitrail.evaluation.probes.protocol import embed_probe_data

    _, batch_size, workers = options.hardware
    with progress(title, len(data.memory) + len(data.queries)) as advance:
        memory, queries = embed_probe_data(model, data, kind, batch_size, workers, advance, options.features.cache)
    print_problems(memory.problems + queries.problems)
    return memory, queries


def run_probe(name: str, inputs: ProbeInputs, settings: "Settings", as_json: bool) -> None:
    """Run one of the probes with a single score and print it."""
    from vitrail.evaluation.accuracy import TOP5_CLASSES
    from vitrail.evaluation.probes.protocol import PROBES
    from vitrail.evaluation.verdict import make_verdict

    result = PROBES[name](inputs.features, settings)
    if as_json:
        print_json(result.details | describe_inputs(inputs))
        return
    hidden = ("top5",) if len(inputs.features.names) < TOP5_CLASSES else ()
    titles = {"top1": "top-1", "top5": "top-5", "sd": f"± over {settings.seeds} draws", "weight_decay": "weight decay"}
    cells = {
        titles.get(key, key): format_cell(key, value)
        for key, value in result.details.items()
        if key not in hidden and not isinstance(value, dict | list | bool)
    }
    print_table(list(cells), [list(cells.values())], left=())
    print(summary_line(inputs))
    if result.sd is None:
        for sentence in make_verdict(result.score, len(inputs.features.queries), len(inputs.features.names)).describe():
            print(sentence)
    if result.details.get("weight_decay_at_edge"):
        print_message(
            "The best weight decay is the smallest or largest tried: try a wider range with --weight-decay (repeatable)."
        )


def format_cell(key: str, value: Any) -> str:
    if key in ("top1", "top5", "sd", "map"):
        return percent(value, 2)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def summary_line(inputs: ProbeInputs) -> str:
    data, features = inputs.data, inputs.features
    return (
        f"memory: {len(features.memory):,} images ({data.memory_name}), queries: {len(features.queries):,} images "
        f"({data.queries_name}), {len(features.names)} classes, {features.memory.shape[1]} features ({inputs.kind.vector})."
    )


def describe_inputs(inputs: ProbeInputs) -> dict[str, Any]:
    data, features = inputs.data, inputs.features
    return {
        "memory": {"split": data.memory_name, "images": len(features.memory)},
        "queries": {"split": data.queries_name, "images": len(features.queries)},
        "classes": len(features.names),
        "features": features.memory.shape[1],
        "feature_kind": inputs.kind._asdict(),
    }
