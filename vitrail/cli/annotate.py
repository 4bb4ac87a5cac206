"""vitrail annotate, store info."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitrail.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vitrail.data.source import Source
    from vitrail.teachers import Teacher
    from vitrail.teachers.class_index import Chosen
    from vitrail.teachers.label_store_writer import Written

store = typer.Typer(no_args_is_help=True, help="Look into a store of a teacher's answers.")
ADVICE = "name the teacher's with --classes, or put the WordNet ids of the data's into wordnet_ids.json beside it"
NAMED = 10  # of the images that could not be read; the manifest has all


def annotate(
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="TEACHER SOURCE",
            help="A checkpoint, a run's folder, timm:NAME, a .pt2 or .onnx file; then the data as for `vitrail train`.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="STORE", help="The folder to write.")],
    what: Annotated[str, typer.Option(help="logits, tokens (a map of labels), features; several with commas.")] = "logits",
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="How many classes are kept of each answer; 0: all.")] = 0,
    views: Annotated[int, typer.Option(min=1, max=2, help="2: of each image's mirror image, too.")] = 1,
    size: Annotated[str | None, typer.Option(help="The size the teacher sees: 384, or 192x256; its own if not given.")] = None,
    all_classes: Annotated[
        bool, typer.Option("--all-classes", help="Keep answers about all of the teacher's classes, not the data's alone.")
    ] = False,
    split: Annotated[str | None, typer.Option(help="train, validation, test or all; train if not given.")] = None,
    classes: Annotated[
        str | None, typer.Option(help="The teacher's classes where it does not name them: a file with one a line, or how many.")
    ] = None,
    preprocessing: Annotated[
        Path | None,
        typer.Option(help='JSON, for a teacher that does not say it: {"image_size": 224, "mean": …, "std": …}.'),
    ] = None,
    kind: Annotated[str | None, typer.Option(help="What the file does not tell: resnet_keras, exported, onnx.")] = None,
    from_published: Annotated[
        Path | None, typer.Option("--from-published", metavar="FOLDER", help="Label maps of TokenLabeling instead of a teacher.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Images computed at a time; 256 on a GPU and 64 elsewhere if not given.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; a GPU if there is one.")] = None,
    workers: Annotated[int | None, typer.Option(min=0, help="Processes that decode images; as useful if not given.")] = None,
) -> None:
    """Ask a teacher about every image once and keep what it says. Stopped and run again, it goes on where it was.

    Example: [bold]vitrail annotate regnety_160.pth photos/ --out answers --what logits,tokens --top-k 5[/bold]
    """
    from vitrail.atomic_files import check_writable
    from vitrail.data.progress import progress
    from vitrail.teachers.label_store_writer import check_place
    from vitrail.teachers.sidecar import read_classes

    needed = 1 if from_published is not None else 2
    if len(places) != needed:
        raise UserError(
            "With --from-published give the data alone: vitrail annotate SOURCE --from-published FOLDER --out STORE."
            if from_published is not None
            else f"Give a teacher and the data, not {len(places)} things: vitrail annotate TEACHER SOURCE --out STORE."
        )
    source = open_data(places[-1], split)
    check_place(out, places[-1])
    check_writable(out)
    named = read_classes(classes) if classes is not None else None
    try:
        if from_published is not None:
            from vitrail.teachers.tokenlabeling import import_published

            result = import_published(from_published, source, out, named, workers, progress, complain)
        else:
            from vitrail.teachers.annotation import Wanted, usual_batch
            from vitrail.teachers.annotation import annotate as run
            from vitrail.training.distributed import choose_device

            batch = batch or usual_batch(choose_device(device))
            wanted = Wanted(tuple(part.strip() for part in what.split(",") if part.strip()), top_k, views, batch)
            teacher = open_one(places[0], device, named, preprocessing, kind, size)
            chosen = choose(teacher, source, places[-1], wanted.what, all_classes)
            result = run(teacher, source, out, wanted, workers, progress, complain, Path(places[0]), chosen=chosen)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(what_is_kept(out)) from None
    tell(places[-1], result)


@store.command()
def info(
    path: Annotated[Path, typer.Argument(metavar="STORE", help="A folder that `vitrail annotate` has written.")],
    check: Annotated[bool, typer.Option("--check", help="Read every shard and compare it with its digest.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say whose answers a store holds, about how many images, and how much room they take.

    Example: [bold]vitrail store info answers --check[/bold]
    """
    from vitrail.teachers.label_store import check_shards, read_manifest

    manifest = read_manifest(path)
    check_shards(path, manifest, check)
    facts = summary(manifest)
    if as_json:
        print(json.dumps(facts | {"checked": check}, indent=1, ensure_ascii=False))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in facts.items():
        if value is not None:
            table.add_row(Text(name.replace("_", " "), "bold"), Text(shown(name, value)))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if check:
        print("Every shard is what its digest says.")


def summary(manifest: dict[str, Any]) -> dict[str, Any]:
    teacher, shards = manifest["teacher"], manifest["shards"]
    done, size = (sum(shard[name] for shard in shards) for name in ("images", "bytes"))
    return {
        "teacher": teacher["name"],
        "weights": teacher["weights"],
        "classes": teacher["classes"],
        "teacher_classes": (manifest.get("chosen") or {}).get("of"),
        "class_names": teacher["class_names"],
        "keeps": manifest["what"],
        "values": manifest["values"],
        "top_k": manifest["top_k"],
        "views": manifest["views"],
        "size": manifest["size"],
        "covers": manifest["covers"],
        "arrays": {name: [each["dtype"], *each["shape"]] for name, each in manifest["arrays"].items()},
        "images": manifest["images"],
        "annotated": done,
        "unreadable": sum(len(shard["skipped"]) for shard in shards),
        "shards": len(shards),
        "bytes": size,
        "bytes_per_image": round(size / done, 1) if done else None,
        "complete": manifest["complete"],
        "vitrail": manifest["vitrail"],
    }


def shown(name: str, value: Any) -> str:
    if name == "class_names":
        return ", ".join(value[:5]) + (", …" if len(value) > 5 else "")
    if name == "arrays":
        return "\n".join(f"{each} {kind} [{', '.join(map(str, shape))}]" for each, (kind, *shape) in value.items())
    if name == "size":
        return " x ".join(map(str, value))
    if name == "top_k":
        return f"{value} classes" if value else "all classes"
    if name == "covers":
        return {"whole": "maps lie over the whole image", "centre": "maps lie over the centre square"}.get(value, value)
    if isinstance(value, bool):
        return "yes" if value else "no: run the same vitrail annotate again"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def open_data(path: str, split: str | None) -> "Source":
    from vitrail.data.datasets.concat import join
    from vitrail.data.datasets.lookup import open_parts, open_source

    if split == "all":
        return join(list(open_parts(path).values()))
    return open_source(path, split)


def open_one(
    path: str, device: str | None, classes: list[str] | int | None, preprocessing: Path | None, kind: str | None, size: str | None
) -> "Teacher":
    from vitrail.checkpoints.readers import read_json
    from vitrail.cli.main import parse_size
    from vitrail.teachers import open_teacher
    from vitrail.training.distributed import choose_device

    prepared = read_json(preprocessing) if preprocessing is not None else None
    if preprocessing is not None and prepared is None:
        raise UserError(f"There is no file {preprocessing}.")
    return open_teacher(path, choose_device(device), classes, prepared, kind, parse_size(size))


def choose(teacher: "Teacher", source: "Source", data: str, what: "Sequence[str]", all_classes: bool) -> "Chosen | None":
    """Those of the teacher's classes that are kept, None for all; says how they were found before hours are spent on them."""
    from vitrail.teachers.class_index import match_data

    count = f"{teacher.classes:,}"
    if tuple(what) == ("features",):
        return None
    if not source.classes:
        print(f"{data} has no classes: answers are kept about all {count} of the teacher's.")
        return None
    try:
        found = match_data(teacher, source, ADVICE, data)
    except UserError as error:
        complain(
            f"Warning: answers are kept about all {count} of the teacher's classes, and a training on this data would refuse "
            f"them. {error}"
        )
        return None
    if found.numbers.tolist() == list(range(teacher.classes)):
        print(f"The teacher's {count} classes are the data's ({found.how}).")
        return None
    kept = "about all" if all_classes else "about these alone; --all-classes keeps all"
    print(f"{len(found.names):,} of the teacher's {count} classes are the data's ({found.how}): answers are kept {kept}.")
    return None if all_classes else found


def tell(name: str, result: "Written") -> None:
    from vitrail.data.inspection_report import bytes_text, counted

    kept = f" ({result.kept:,} of them from an earlier run)" if result.kept else ""
    twice = result.given - result.images - result.lost
    again = f" ({counted(twice, 'further one')} equal to these)" if twice else ""
    print(
        f"{name} -> {result.path}: {counted(result.images, 'image')}{again} in {counted(result.shards, 'shard')}{kept}, "
        f"{bytes_text(result.bytes)}, {result.bytes / result.images:,.0f} bytes each"
    )
    if result.skipped:
        complain(f"Left out, because unreadable: {counted(len(result.skipped), 'image')}.")
        for problem in result.skipped[:NAMED]:
            complain(f"  {problem.where}: {problem.reason}")
        if len(result.skipped) > NAMED:
            complain(f"  and {len(result.skipped) - NAMED:,} more")


def what_is_kept(out: Path) -> str:
    from vitrail.teachers.label_store import read_manifest

    try:
        manifest = read_manifest(out)
    except UserError:
        return "Stopped before the first shard was written: nothing was kept."
    done = sum(shard["images"] for shard in manifest["shards"])
    return f"Stopped; {done:,} of {manifest['images']:,} images are kept in {out}, and the same command goes on from there."


def complain(sentence: str) -> None:
    print(sentence.encode("utf-8", "replace").decode(), file=sys.stderr)  # file names that are no text could not be printed
