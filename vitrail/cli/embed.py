"""vitrail embed, suite; and what they share with the probes."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitrail.formatting import percent

if TYPE_CHECKING:
    from vitrail.data.loader import Problem
    from vitrail.evaluation.probes.suite import Row, Task
    from vitrail.models.vision_transformer import VisionTransformer

WeightsArgument = Annotated[Path, typer.Argument(metavar="WEIGHTS", help="A checkpoint of any known kind, or a run's folder.")]
ManyArgument = Annotated[
    list[str],
    typer.Argument(metavar="WEIGHTS...", help="Checkpoints of any known kind or folders of runs; then the source."),
]
SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A folder of class folders, Parquet, tar, CIFAR or IDX files, a table, hf://owner/name, pets or digits.",
    ),
]
LabelsOption = Annotated[str, typer.Option(help="The column of labels: label, or a further one such as coarse_label.")]
MemoryOption = Annotated[str | None, typer.Option(help="The split that is remembered or learned from; train if not given.")]
QueriesOption = Annotated[
    str | None, typer.Option(help="The split that is asked about; test, else validation, else a tenth set aside.")
]
SplitOption = Annotated[str | None, typer.Option(help="train, validation or test; train if not given.")]
ImagesOption = Annotated[int | None, typer.Option(min=2, help="At most so many images of each split, drawn by the seed.")]
VectorOption = Annotated[
    str | None, typer.Option(help="pooled, class, mean, class_mean, distillation, penultimate or logits; as usual if not given.")
]
BareOption = Annotated[bool, typer.Option("--before-norm", help="Take vectors before the trunk's final norm.")]
HalfOption = Annotated[bool, typer.Option("--bf16", help="Compute the features in bfloat16.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Of everything that is drawn.")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; a GPU if there is one.")]
BatchOption = Annotated[int, typer.Option(min=1, help="Images computed at a time.")]
WorkersOption = Annotated[int | None, typer.Option(min=0, help="Processes that decode images; as useful if not given.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def embed(
    weights: WeightsArgument,
    source: Annotated[
        list[str],
        typer.Argument(metavar="SOURCE", help="A data set as for `vitrail train`, or image files and folders."),
    ],
    out: Annotated[Path, typer.Option(help="features.parquet, or features.npy with features.json beside it.")],
    split: SplitOption = None,
    vector: VectorOption = None,
    before_norm: BareOption = False,
    unit: Annotated[bool, typer.Option("--unit", help="Scale each vector to length one.")] = False,
    bf16: HalfOption = False,
    device: DeviceOption = None,
    batch: BatchOption = 64,
    workers: WorkersOption = None,
) -> None:
    """Write one feature vector per image. Exit code 1: some images could not be read; 2: none could.

    Example: [bold]vitrail embed runs/photos-laptop photos/ --out features.parquet[/bold]
    """
    from vitrail.atomic_files import check_writable
    from vitrail.data.inspection_report import counted
    from vitrail.evaluation.embeddings import check_ending, write_embedding
    from vitrail.evaluation.features import Readout
    from vitrail.evaluation.features import embed as run
    from vitrail.evaluation.probes.protocol import open_for_embedding

    check_ending(out)
    check_writable(out)
    images, problems = open_for_embedding(source, split)
    pooling = Readout(vector or "pooled", before_norm, unit, bf16)
    model = open_model(weights, device)
    with watched("embedding", len(images)) as advance:
        embedding = run(model, images, pooling, batch, workers, advance)
    complain(problems := problems + embedding.problems)
    written = write_embedding(embedding, images, out, pooling, str(weights))
    count, width = embedding.vectors.shape
    print(f"{counted(count, 'image')}, {width} features each -> {' and '.join(map(str, written))}")
    if problems:
        sys.exit(1)


def suite(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A YAML or JSON file that lists the tasks.")],
    weights: Annotated[list[Path], typer.Argument(metavar="WEIGHTS", help="Checkpoints of any known kind, or folders of runs.")],
    out: Annotated[
        Path | None, typer.Option(help="The folder that keeps every result as soon as it is there; FILE.results if not given.")
    ] = None,
    device: DeviceOption = None,
    batch: BatchOption = 64,
    workers: WorkersOption = None,
    as_json: JsonOption = False,
) -> None:
    """Probe models on many data sets and print one table. Results that are there already are not computed again.

    Example: [bold]vitrail suite tasks.yaml deit3_small.safetensors runs/photos-laptop[/bold]
    """
    from vitrail.evaluation.probes.suite import group_means, read_suite, run_suite

    tasks = read_suite(file)
    paths = [weights_file(path) for path in dict.fromkeys(weights)]
    folder = out or file.with_name(f"{file.stem}.results")
    rows = run_suite(tasks, paths, folder, lambda path: open_model(path, device), watched, batch, workers, say)
    means = {str(path): group_means(tasks, rows, str(path)) for path in paths}
    if as_json:
        tell({"results": [row._asdict() for row in rows], "means": means})
        return
    show_suite(tasks, rows, means)


def show_suite(tasks: "Sequence[Task]", rows: "Sequence[Row]", means: dict[str, dict[str, float]]) -> None:
    found = {(row.task, row.weights): row for row in rows}
    table = Table("task", "probe", box=None, header_style="bold", pad_edge=False)
    for path in means:
        table.add_column(Text(path), justify="right", overflow="fold")
    for task in tasks:
        cells = []
        for path in means:
            row = found[task.name, path]
            cells.append(percent(row.score, 2) + (f" ± {percent(row.spread, 2)}" if row.spread is not None else ""))
        table.add_row(Text(task.name), task.probe, *cells)
    table.add_row()
    for name in next(iter(means.values())):
        table.add_row(Text(name, "bold"), "", *(percent(each[name], 2) for each in means.values()))
    console().print(table)


@contextmanager
def watched(title: str, total: int) -> Iterator[Callable[[int], None]]:
    from vitrail.data.progress import progress

    with progress(title, total) as advance:
        yield advance


def weights_file(path: Path) -> Path:
    """A run's best weights; anything else as it is."""
    return path / "best.safetensors" if (path / "run.json").is_file() else path


def open_model(path: Path, device: str | None) -> "VisionTransformer":
    from vitrail.checkpoints import load
    from vitrail.training.distributed import choose_device

    return load(weights_file(path), device=choose_device(device))


def complain(problems: "Sequence[Problem]", named: int = 10) -> None:
    """Unreadable images, on standard error: some by name, the rest as a number."""
    for problem in problems[:named]:
        say("{}: {}".format(*problem))
    if len(problems) > named:
        say(f"… and {len(problems) - named:,} more images that could not be read.")


def say(sentence: str) -> None:
    print(sentence, file=sys.stderr)


def tell(content: Any) -> None:
    print(json.dumps(content, indent=1, ensure_ascii=False))


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120)
