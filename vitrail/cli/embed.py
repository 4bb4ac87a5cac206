"""vitrail embed and suite, and functions that they share with the probes."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from vitrail.cli.console import print_json, print_message, print_problems, print_table
from vitrail.cli.options import (
    CacheOption,
    FeatureOptions,
    HardwareOptions,
    JsonOption,
    NormalizeOption,
    SplitOption,
    WeightsArgument,
    expand_options,
)
from vitrail.formatting import percent, pluralize

if TYPE_CHECKING:
    from vitrail.data.loader import Problem
    from vitrail.data.source import Source
    from vitrail.evaluation.features import Embedding, FeatureKind
    from vitrail.evaluation.model import Model
    from vitrail.evaluation.probes.suite import ProbeTask, TaskResult


@expand_options
def embed(
    weights: WeightsArgument,
    source: Annotated[
        list[str],
        typer.Argument(metavar="SOURCE", help="A data set as for `vitrail train`, or image files and folders."),
    ],
    out: Annotated[Path, typer.Option(help="features.parquet, or features.npy with features.json.")],
    split: SplitOption = None,
    *,
    features: FeatureOptions,
    normalize: NormalizeOption = False,
    hardware: HardwareOptions,
) -> None:
    """Write one feature vector per image.

    Exit code 1: some images could not be read; 2: none could.

    Example: [bold]vitrail embed runs/photos-finetune photos/ --out features.parquet[/bold]
    """
    from vitrail.atomic_files import check_writable
    from vitrail.evaluation.embeddings import check_suffix, write_embedding
    from vitrail.evaluation.probes.protocol import open_embedding_source

    check_suffix(out)
    check_writable(out)
    images, problems = open_embedding_source(source, split)
    kind = features.kind(normalize=normalize)
    embedding = embed_images(weights, images, kind, hardware, features.cache, problems=problems)
    written = write_embedding(embedding, images, out, kind, str(weights))
    count, width = embedding.vectors.shape
    print(f"{pluralize(count, 'image')}, {width} features each -> {' and '.join(map(str, written))}")
    if problems or embedding.problems:
        sys.exit(1)


@expand_options
def suite(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A YAML or JSON file that lists the tasks.")],
    weights: Annotated[
        list[Path], typer.Argument(metavar="WEIGHTS", help="Checkpoints in any supported format, or run directories.")
    ],
    out: Annotated[Path | None, typer.Option(help="The folder for the results of each task; default: FILE.results.")] = None,
    *,
    hardware: HardwareOptions,
    cache: CacheOption = True,
    as_json: JsonOption = False,
) -> None:
    """Probe models on many data sets and print one table.

    Stored results are not computed again.

    Example: [bold]vitrail suite tasks.yaml deit3_small.safetensors runs/photos-finetune[/bold]
    """
    from vitrail.checkpoints.model_io import find_weights
    from vitrail.data.progress import progress
    from vitrail.evaluation.probes.suite import group_means, read_suite, run_suite

    tasks = read_suite(file)
    paths = [find_weights(path) for path in dict.fromkeys(weights)]
    folder = out or file.with_name(f"{file.stem}.results")
    device, batch_size, workers = hardware
    results = run_suite(
        tasks, paths, folder, lambda path: open_on(path, device), progress, batch_size, workers, print_message, cache
    )
    means = {str(path): group_means(tasks, results, str(path)) for path in paths}
    if as_json:
        print_json({"results": [result._asdict() for result in results], "means": means})
        return
    print_suite(tasks, results, means)


def print_suite(tasks: "Sequence[ProbeTask]", results: "Sequence[TaskResult]", means: dict[str, dict[str, float]]) -> None:
    by_task = {(result.task, result.weights): result for result in results}
    rows: list[list[str | Text]] = []
    for task in tasks:
        cells = [by_task[task.name, path] for path in means]
        scores = [percent(each.score, 2) + (f" ± {percent(each.sd, 2)}" if each.sd is not None else "") for each in cells]
        rows.append([task.name, task.probe, *scores])
    rows.append([])
    for name in next(iter(means.values())):
        rows.append([Text(name, "bold"), "", *(percent(each[name], 2) for each in means.values())])
    print_table(("task", "probe", *means), rows, left=("task", "probe"))


def open_on(weights: str | Path, device: str | None) -> "Model":
    """The model of these weights; on a CPU with as many threads as cores are idle."""
    from vitrail.devices import adapt_threads
    from vitrail.evaluation.model import device_of, open_model

    model = open_model(weights, device)
    for message in adapt_threads(device_of(model)):
        print_message(message)
    return model


def embed_images(
    weights: str | Path,
    images: "Source",
    kind: "FeatureKind",
    hardware: HardwareOptions,
    cache: bool,
    title: str = "embedding",
    problems: "Sequence[Problem]" = (),
) -> "Embedding":
    """The features of the images; unreadable ones, after other `problems`, are printed."""
    from vitrail.data.progress import progress
    from vitrail.evaluation.feature_cache import cached_embed
    from vitrail.evaluation.features import embed as compute_embedding

    model = open_on(weights, hardware.device)
    compute = cached_embed if cache else compute_embedding
    with progress(title, len(images)) as advance:
        embedding = compute(model, images, kind, hardware.batch_size, hardware.workers, advance)
    print_problems([*problems, *embedding.problems])
    return embedding
