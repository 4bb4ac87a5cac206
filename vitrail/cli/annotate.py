"""vitrail annotate, store info."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.table import Table
from rich.text import Text

from vitrail.cli.console import make_console, print_json, print_message, print_skipped
from vitrail.cli.options import DeviceOption, JsonOption, WorkersOption, expand_options, hardware_option, parse_size
from vitrail.errors import UserError
from vitrail.formatting import format_bytes, pluralize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vitrail.data.source import Source
    from vitrail.teachers import Teacher
    from vitrail.teachers.annotation import AnnotationRequest
    from vitrail.teachers.class_index import ClassSubset
    from vitrail.teachers.label_store_writer import AnnotationResult

store = typer.Typer(no_args_is_help=True, help="Inspect a label store.")
ADVICE = "give the teacher's class names with --classes, or put WordNet ids of the data's classes into its wordnet_ids.json"
NOTHING_STORED = "Stopped before the first shard was written: nothing is stored."


class OutputOptions(NamedTuple):
    """The predictions to store."""

    outputs: Annotated[
        str, typer.Option("--outputs", "--what", help="logits, tokens (logits at every position), features; comma-separated.")
    ] = "logits"
    top_k: Annotated[int, typer.Option(min=0, help="Number of classes to store per prediction; 0: all.")] = 0
    views: Annotated[int, typer.Option(min=1, max=2, help="2: also annotate the horizontal flip of each image.")] = 1
    all_classes: Annotated[
        bool, typer.Option("--all-classes", help="Store all classes of the teacher, not only those of the data.")
    ] = False
    batch_size: Annotated[
        int | None,
        hardware_option(min=1, help="Images per forward pass; default: 256 on a GPU, else 64."),
    ] = None

    def request(self, device: str | None) -> "AnnotationRequest":
        from vitrail.devices import choose_device
        from vitrail.teachers.annotation import AnnotationRequest, default_batch_size

        names = tuple(name.strip() for name in self.outputs.split(",") if name.strip())
        return AnnotationRequest(names, self.top_k, self.views, self.batch_size or default_batch_size(choose_device(device)))


class TeacherOptions(NamedTuple):
    """How to open the teacher, for what its file does not contain."""

    size: Annotated[str | None, typer.Option(help="Input size of the teacher: 384, or 192x256; default: its own.")] = None
    classes: Annotated[
        str | None,
        typer.Option(help="Classes of a teacher without class names: a file with one name per line, or their number."),
    ] = None
    preprocessing: Annotated[
        Path | None,
        typer.Option(help='JSON file, for a teacher without preprocessing: {"image_size": 224, "mean": …, "std": …}.'),
    ] = None
    kind: Annotated[
        str | None,
        typer.Option(help="Kind of a file that cannot be recognized: resnet_keras, exported, onnx."),
    ] = None
    device: DeviceOption = None

    def class_names(self) -> list[str] | int | None:
        from vitrail.teachers.sidecar import read_classes

        return read_classes(self.classes) if self.classes is not None else None

    def open(self, path: str) -> "Teacher":
        from vitrail.checkpoints.readers import read_json_object
        from vitrail.devices import adapt_threads, choose_device
        from vitrail.teachers import open_teacher

        settings = read_json_object(self.preprocessing) if self.preprocessing is not None else None
        if self.preprocessing is not None and settings is None:
            raise UserError(f"There is no file {self.preprocessing}.")
        size, device = parse_size(self.size), choose_device(self.device)
        for message in adapt_threads(device):
            print_message(message)
        return open_teacher(path, device, self.class_names(), settings, self.kind, size)


@expand_options
def annotate(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="TEACHER SOURCE",
            help="A checkpoint, a run directory, timm:NAME, a .pt2 or .onnx file; then the data as for `vitrail train`.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="STORE", help="The folder to write.")],
    *,
    output: OutputOptions,
    teacher_options: TeacherOptions,
    split: Annotated[str | None, typer.Option(help="train, validation, test or all; default: train.")] = None,
    from_published: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Import label maps of TokenLabeling instead of using a teacher."),
    ] = None,
    workers: WorkersOption = None,
) -> None:
    """Store a teacher's predictions for every image.

    An interrupted run continues when the command is repeated.

    Example: [bold]vitrail annotate regnety_160.pth photos/ --out labels --outputs logits,tokens --top-k 5[/bold]
    """
    from vitrail.atomic_files import check_writable
    from vitrail.data.progress import progress
    from vitrail.teachers.label_store_writer import check_output_folder

    if from_published is not None and len(paths) != 1:
        raise UserError("With --from-published give only the data: vitrail annotate SOURCE --from-published FOLDER --out STORE.")
    if from_published is None and len(paths) != 2:
        raise UserError(
            f"Expected a teacher and the data, not {len(paths)} arguments: vitrail annotate TEACHER SOURCE --out STORE."
        )
    data = paths[-1]
    source = open_data(data, split)
    check_output_folder(out, data)
    check_writable(out)
    class_names = teacher_options.class_names()
    try:
        if from_published is not None:
            from vitrail.teachers.tokenlabeling import import_token_labels

            result = import_token_labels(from_published, source, out, class_names, workers, progress, print_message)
        else:
            from vitrail.teachers.annotation import annotate as run

            request, teacher = output.request(teacher_options.device), teacher_options.open(paths[0])
            subset = choose_classes(teacher, source, data, request.outputs, output.all_classes)
            result = run(teacher, source, out, request, workers, progress, print_message, Path(paths[0]), class_subset=subset)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(describe_interruption(out)) from None
    print_result(data, result)


@store.command()
def info(
    path: Annotated[Path, typer.Argument(metavar="STORE", help="A folder written by `vitrail annotate`.")],
    check: Annotated[bool, typer.Option("--check", help="Compare every shard with its digest.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the teacher, the outputs and the size of a label store.

    Example: [bold]vitrail store info labels --check[/bold]
    """
    from vitrail.teachers.label_store import check_shards, read_manifest

    manifest = read_manifest(path)
    check_shards(path, manifest, check)
    summary = summarize(manifest)
    if as_json:
        print_json(summary | {"checked": check})
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in summary.items():
        if value is not None:
            table.add_row(Text(name.replace("_", " "), "bold"), Text(format_entry(name, value)))
    make_console().print(table)
    if check:
        print("All shards match their digests.")


def summarize(manifest: dict[str, Any]) -> dict[str, Any]:
    teacher, shards = manifest["teacher"], manifest["shards"]
    done, size = (sum(shard[name] for shard in shards) for name in ("images", "bytes"))
    return {
        "teacher": teacher["name"],
        "weights": teacher["weights"],
        "classes": teacher["classes"],
        "teacher_classes": (manifest.get("class_subset") or {}).get("of"),
        "class_names": teacher["class_names"],
        "outputs": manifest["outputs"],
        "values": manifest["values"],
        "top_k": manifest["top_k"],
        "views": manifest["views"],
        "size": manifest["size"],
        "covers": manifest["covers"],
        "arrays": {name: [array["dtype"], *array["shape"]] for name, array in manifest["arrays"].items()},
        "images": manifest["images"],
        "annotated": done,
        "unreadable": sum(len(shard["skipped"]) for shard in shards),
        "shards": len(shards),
        "bytes": size,
        "bytes_per_image": round(size / done, 1) if done else None,
        "complete": manifest["complete"],
        "vitrail": manifest["vitrail"],
    }


def format_entry(name: str, value: Any) -> str:
    if name == "class_names":
        return ", ".join(value[:5]) + (", …" if len(value) > 5 else "")
    if name == "arrays":
        return "\n".join(f"{array} {dtype} [{', '.join(map(str, shape))}]" for array, (dtype, *shape) in value.items())
    if name == "size":
        return " x ".join(map(str, value))
    if name == "top_k":
        return f"{value} classes" if value else "all classes"
    if name == "covers":
        return {"whole": "maps cover the full image", "center": "maps cover the center square"}.get(value, str(value))
    if isinstance(value, bool):
        return "yes" if value else "no: run the same vitrail annotate command again"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def open_data(path: str, split: str | None) -> "Source":
    from vitrail.data.datasets.concat import join
    from vitrail.data.datasets.lookup import open_source, open_sources

    if split == "all":
        return join(list(open_sources(path).values()))
    return open_source(path, split)


def choose_classes(
    teacher: "Teacher", source: "Source", data: str, outputs: "Sequence[str]", all_classes: bool
) -> "ClassSubset | None":
    """The classes to store, None for all; prints how they were matched before the long computation."""
    from vitrail.teachers.class_index import match_source

    count = f"{teacher.classes:,}"
    if tuple(outputs) == ("features",):
        return None
    if not source.classes:
        print(f"{data} has no classes: all {count} classes of the teacher are stored.")
        return None
    try:
        subset = match_source(teacher, source, ADVICE, data)
    except UserError as error:
        print_message(
            f"Warning: all {count} classes of the teacher are stored, and a training on this data will reject the store. {error}"
        )
        return None
    if subset.indices.tolist() == list(range(teacher.classes)):
        print(f"The {count} classes of the teacher are those of the data ({subset.method}).")
        return None
    stored = "all are stored" if all_classes else "only these are stored; --all-classes stores all"
    print(f"{len(subset.names):,} of the teacher's {count} classes are those of the data ({subset.method}): {stored}.")
    return None if all_classes else subset


def print_result(data: str, result: "AnnotationResult") -> None:
    reused = f" ({result.reused_shards:,} from an earlier run)" if result.reused_shards else ""
    duplicates = result.source_images - result.images - result.unreadable_files
    skipped = f" ({pluralize(duplicates, 'duplicate')} skipped)" if duplicates else ""
    print(
        f"{data} -> {result.path}: {pluralize(result.images, 'image')}{skipped} in {pluralize(result.shards, 'shard')}{reused}, "
        f"{format_bytes(result.bytes)}, {result.bytes / result.images:,.0f} bytes per image"
    )
    print_skipped(result.skipped)


def describe_interruption(out: Path) -> str:
    from vitrail.teachers.label_store import read_manifest

    try:
        manifest = read_manifest(out)
    except UserError:
        return NOTHING_STORED
    done = sum(shard["images"] for shard in manifest["shards"])
    return f"Stopped; {done:,} of {manifest['images']:,} images are stored in {out}: run the same command again to continue."
