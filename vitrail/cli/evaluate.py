"""vitrail evaluate, disagree."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from vitrail.cli.evaluation_tables import say, show, show_disagreement
from vitrail.cli.predict import weights_file
from vitrail.errors import UserError

if TYPE_CHECKING:
    from vitrail.data.source import Source
    from vitrail.evaluation.class_matching import Among, Matching
    from vitrail.evaluation.evaluate import Evaluation, Head, Part
    from vitrail.models.vision_transformer import VisionTransformer

SOURCE = "A folder of class folders, Parquet, tar, CIFAR or IDX files, a table, hf://owner/name, pets or digits"
SplitOption = Annotated[
    str | None, typer.Option(help="train, validation or test; test if there is one, else validation, else everything.")
]
AmongOption = Annotated[str, typer.Option(help="What the model may answer: the data's classes (subset) or all of its own (all).")]
MapOption = Annotated[
    Path | None, typer.Option("--map", help="JSON: which class of the data is which class or classes of the model.")
]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; a GPU if there is one.")]
BatchOption = Annotated[int, typer.Option(min=1, help="Images computed at a time.")]
WorkersOption = Annotated[int | None, typer.Option(min=0, help="Processes that decode images; one per core if not given.")]


def evaluate(
    weights: Annotated[Path, typer.Argument(metavar="WEIGHTS", help="A checkpoint of any known kind, or the folder of a run.")],
    sources: Annotated[
        list[str], typer.Argument(metavar="SOURCE...", help=f"{SOURCE}; further ones are compared with the first.")
    ],
    split: SplitOption = None,
    head: Annotated[str, typer.Option(help="Of a distilled model: both, class or distillation.")] = "both",
    among: AmongOption = "subset",
    chosen: MapOption = None,
    labels: Annotated[
        Path | None, typer.Option(help="JSON with all the right classes of each image of the first SOURCE, as ReaL has.")
    ] = None,
    sizes: Annotated[str | None, typer.Option(help="Sizes to try: 160,192,224 or 192x256 (height x width).")] = None,
    crop_ratios: Annotated[str | None, typer.Option(help="Shares of the resized image to try: 0.8,0.9,1.0.")] = None,
    out: Annotated[Path | None, typer.Option(help="A folder for report.html, its images and evaluation.json.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    device: DeviceOption = None,
    batch: BatchOption = 64,
    workers: WorkersOption = None,
) -> None:
    """Measure a model: accuracy, classes, confusions, calibration; on other data, at other sizes, with other crops.

    Example: [bold]vitrail evaluate runs/photos-laptop photos/ --out report[/bold]
    """
    from vitrail.atomic_files import check_folder
    from vitrail.checkpoints import load
    from vitrail.evaluation.evaluate import check_head, sweep
    from vitrail.training.distributed import choose_device

    tried, ratios = parse_sizes(sizes), parse_ratios(crop_ratios)
    which, answers = one_of("--head", head, ("both", "class", "distillation")), check_among(among)
    check_folder(out)
    model = load(weights_file(weights), device=choose_device(device))
    check_head(model, cast("Head", which))
    parts = [open_one(path, split, weights) for path in sources]
    matchings = match_all(model, parts, sources, chosen)
    measured = [
        measure(model, part, path, matching, answers, cast("Head", which), batch, workers, labels if number == 0 else None)
        for number, (part, path, matching) in enumerate(zip(parts, sources, matchings, strict=True))
    ]
    found: list[dict[str, Any]] = []
    if tried or ratios:
        from vitrail.data.progress import progress

        with progress("sweeping", len(parts[0].source) * max(len(tried), 1) * max(len(ratios), 1)) as advance:
            arguments = (tried, ratios, answers, cast("Head", which), batch, workers, advance)
            found = list(sweep(model, parts[0].source, matchings[0], *arguments))
    title = f"{model.name or Path(weights).name} on {Path(sources[0]).name or sources[0]}"
    content = {
        "weights": str(weights),
        "model": model.name,
        "head": which,
        "preprocessing": model.preprocessing.to_dict(),
        "evaluations": [each.to_dict() for each in measured],
        "sweep": found,
    }
    written = write_folder(out, title, measured, found, content) if out is not None else []
    if as_json:
        print(json.dumps(jsonable(content), indent=1))
        return
    show(measured, found)
    for path in written:
        say(f"wrote {path}")


def disagree(
    words: Annotated[
        list[str], typer.Argument(metavar="WEIGHTS... SOURCE", help=f"Checkpoints or folders of runs, then the data. {SOURCE}.")
    ],
    split: SplitOption = None,
    heads: Annotated[bool, typer.Option("--heads", help="Each head of a distilled model stands for itself.")] = False,
    among: AmongOption = "subset",
    chosen: MapOption = None,
    out: Annotated[Path | None, typer.Option(help="A PNG image of some of the images on which models differ.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Which images it shows.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    device: DeviceOption = None,
    batch: BatchOption = 64,
    workers: WorkersOption = None,
) -> None:
    """Compare models image by image: how often they differ, who errs where, whether they err on the same images.

    Example: [bold]vitrail disagree runs/teacher runs/student photos/ --out differ.png[/bold]
    """
    import numpy as np

    from vitrail.atomic_files import check_writable, write_aside
    from vitrail.evaluation.disagreement import compare, draw_sheet
    from vitrail.training.distributed import choose_device

    if out is not None and out.suffix != ".png":
        raise UserError(f"The sheet is a PNG image: call it differ.png, not {out.name!r}.")
    check_writable(out)
    *files, path = words
    if not files:
        raise UserError("Give the weights of at least two models, then the data.")
    answers = check_among(among)
    part = open_one(path, split, Path(files[0]))
    names, guesses, truth, image, classes = ask_all(
        files, path, part, answers, chosen, heads, choose_device(device), batch, workers
    )
    shared = np.flatnonzero(truth >= 0)
    truth, image, guesses = truth[shared], image[shared], guesses[:, shared]
    found = compare(names, guesses, truth, classes)
    if out is not None:
        title = f"Where models differ on {Path(path).name or path}"
        sheet = draw_sheet(part.source, image, guesses, truth, names, classes, title, seed)
        if sheet is not None:
            write_aside(out, lambda side: sheet.save(side, "PNG"))
    if as_json:
        print(json.dumps({"source": path, "split": part.split} | jsonable(found.to_dict()), indent=1))
        return
    show_disagreement(found)
    if out is not None:
        say(f"wrote {out}" if (guesses != guesses[0]).any() else "The models never differ: there is nothing to draw.")


def ask_all(
    files: Sequence[str],
    path: str,
    part: "Part",
    among: "Among",
    chosen: Path | None,
    heads: bool,
    device: Any,
    batch: int,
    workers: int | None,
) -> tuple[list[str], Any, Any, Any, list[str]]:
    """Names [M], guesses [M, N], truth [N], image numbers [N] and the names of the answers, one model in memory at a time."""
    import numpy as np

    from vitrail.checkpoints import load
    from vitrail.data.progress import progress
    from vitrail.evaluation.evaluate import HEADS, collect_scores, feed_of

    names, guesses, first = titles(files), [], None
    called: list[str] = []
    for name, file in zip(names, files, strict=True):
        model = load(weights_file(Path(file)), device=device)
        (matching,) = match_all(model, [part], [path], chosen)
        wanted: tuple[Head, ...] = HEADS if heads and model.head_distillation is not None else ("both",)
        for head in wanted:
            with feed_of(model, part.source, workers) as feed, progress(name, len(part.source)) as advance:
                scores = collect_scores(model, feed, matching, among, head, batch, advance)
            if first is None:
                first = (matching, scores)
            if matching.names != first[0].names or not np.array_equal(scores.image, first[1].image):
                raise UserError(f"{file} does not tell apart the same classes as {files[0]}: a map must group both alike.")
            guesses.append(np.minimum(scores.guess, len(matching.names)))
            called.append(f"{name}, {head}" if len(wanted) > 1 else name)
    if len(guesses) < 2:
        raise UserError("One model cannot differ: give the weights of another, or --heads for a distilled one.")
    assert first is not None
    return called, np.stack(guesses), first[1].truth, first[1].image, first[0].names


def titles(files: Sequence[str]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    parts = [Path(file).parts for file in files]
    for depth in range(1, max(map(len, parts), default=1) + 1):
        short = ["/".join(each[-depth:]) for each in parts]
        if len(set(short)) == len(short):
            return short
    return [f"{file} ({number})" for number, file in enumerate(files, 1)]


def open_one(path: str, split: str | None, weights: Path) -> "Part":
    from vitrail.evaluation.evaluate import open_part

    part = open_part(path, split, trained_on(weights, path))
    if part.source.label is None:
        raise UserError(f"{path} has no labels: put the images into one folder per class, or give a table with a label.")
    return part


def trained_on(weights: Path, path: str) -> bool:
    """Whether the weights are those of a run on this data."""
    for folder in (weights, weights.parent):
        try:
            source = json.loads((folder / "run.json").read_text(encoding="utf-8"))["source"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        return source == path or os.path.realpath(str(source)) == os.path.realpath(path)
    return False


def match_all(model: "VisionTransformer", parts: "Sequence[Part]", paths: Sequence[str], chosen: Path | None) -> "list[Matching]":
    from vitrail.evaluation.class_matching import match, read_ids, read_map

    rules = read_map(chosen) if chosen is not None else None
    found = []
    known = {name for part in parts for name in part.source.classes}
    for path, part in zip(paths, parts, strict=True):
        own = rules
        if rules is not None and all(name in known for name in rules):
            own = {name: value for name, value in rules.items() if name in part.source.classes} or None
        classes = part.source.classes
        found.append(match(model.class_names, model.architecture.classes, classes, path, own, read_ids(part.source.name)))
    return found


def measure(
    model: "VisionTransformer",
    part: "Part",
    path: str,
    matching: "Matching",
    among: "Among",
    head: "Head",
    batch: int,
    workers: int | None,
    labels: Path | None,
) -> "Evaluation":
    from vitrail.data.progress import progress
    from vitrail.evaluation.evaluate import collect_scores, feed_of, judge
    from vitrail.evaluation.multilabel import read_labels

    valid = read_labels(labels, part.source) if labels is not None else None

    def scores_of(source: "Source", text: str) -> Any:
        with feed_of(model, source, workers) as feed, progress(text, len(source)) as advance:
            return collect_scores(model, feed, matching, among, head, batch, advance)

    scores = scores_of(part.source, "evaluating")
    fitting = scores_of(part.fitting, "fitting the temperature") if part.fitting is not None else None
    return judge(scores, matching, path, part.split, among, fitting, valid)


def write_folder(
    out: Path, title: str, measured: "Sequence[Evaluation]", found: Sequence[dict[str, Any]], content: dict[str, Any]
) -> list[Path]:
    from vitrail.atomic_files import write_aside
    from vitrail.cli.evaluation_page import write_pages

    text = json.dumps(jsonable(content), indent=1) + "\n"
    write_aside(out / "evaluation.json", lambda side: side.write_text(text, encoding="utf-8"))
    return [*write_pages(out, title, measured, found), out / "evaluation.json"]


def jsonable(value: Any) -> Any:
    """JSON has no NaN: null."""
    if isinstance(value, dict):
        return {name: jsonable(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def one_of(option: str, value: str, choices: Sequence[str]) -> str:
    if value not in choices:
        raise UserError(f"{option} {value} is not known: choose {', '.join(choices[:-1])} or {choices[-1]}.")
    return value


def check_among(value: str) -> Literal["subset", "all"]:
    return cast("Among", one_of("--among", value, ("subset", "all")))


def parse_sizes(text: str | None) -> list[tuple[int, int]]:
    from vitrail.cli.main import parse_size

    sizes = [parse_size(part.strip()) for part in text.split(",")] if text is not None else []
    return list(dict.fromkeys(size for size in sizes if size is not None))


def parse_ratios(text: str | None) -> list[float]:
    if text is None:
        return []
    try:
        ratios = [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{text!r} is not a list of crop ratios: write 0.8,0.9,1.0.") from None
    for ratio in ratios:
        if not 0.0 < ratio <= 1.0:
            raise UserError(f"A crop ratio is above 0 and at most 1, not {ratio:g}.")
    return list(dict.fromkeys(ratios))
