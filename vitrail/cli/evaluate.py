"""vitrail evaluate and disagree."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import typer

from vitrail.cli.console import print_json
from vitrail.cli.dense_prediction import ProtocolOptions
from vitrail.cli.detect import measure_objects
from vitrail.cli.evaluation_tables import print_disagreement, print_evaluations, print_line
from vitrail.cli.options import (
    SOURCE,
    HardwareOptions,
    JsonOption,
    SeedOption,
    WeightsArgument,
    check_choice,
    expand_options,
    parse_sizes,
)
from vitrail.cli.segment import measure_masks
from vitrail.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from vitrail.data.class_matching import Among, ClassMatch
    from vitrail.data.source import Source
    from vitrail.evaluation.evaluate import Evaluation, EvaluationData, EvaluationOptions, HeldOut, Scores, WrongImage
    from vitrail.evaluation.model import Head, Model
    from vitrail.models.vision_transformer import VisionTransformer
    from vitrail.recipes import Recipe


TABLE_SUFFIXES = (".csv", ".tsv")
MAX_THUMBNAILS = 24  # of wrong predictions in the page


class DataOptions(NamedTuple):
    """Options of `vitrail evaluate` and `vitrail disagree`."""

    split: Annotated[
        str | None, typer.Option(help="train, validation or test; default: test, else validation, else all images.")
    ] = None
    among: Annotated[
        str, typer.Option(help="Classes to predict: those of the data (subset) or all classes of the model (all).")
    ] = "subset"
    class_map: Annotated[
        Path | None,
        typer.Option(
            "--map",
            metavar="FILE",
            help="JSON: the classes of the model for each class of the data. CSV, or for a run with a map: a coarser class for "
            "each, as in `vitrail train`.",
        ),
    ] = None
    as_json: JsonOption = False
    hardware: HardwareOptions = HardwareOptions()

    def evaluation(self, head: "Head" = "both") -> "EvaluationOptions":
        from vitrail.evaluation.evaluate import EvaluationOptions

        among = cast("Among", check_choice("--among", self.among, ("subset", "all")))
        return EvaluationOptions(among, head, self.hardware.batch_size, self.hardware.workers)


@expand_options
def evaluate(
    weights: WeightsArgument,
    sources: Annotated[
        list[str], typer.Argument(metavar="SOURCE...", help=f"{SOURCE} Further sources are compared with the first.")
    ],
    head: Annotated[str, typer.Option(help="Head of a distilled model: both, class or distillation.")] = "both",
    labels: Annotated[
        Path | None, typer.Option(help="JSON with all valid classes of each image of the first SOURCE, as in ReaL.")
    ] = None,
    sizes: Annotated[str | None, typer.Option(help="Image sizes to compare: 160,192,224 or 192x256 (height x width).")] = None,
    crop_ratios: Annotated[str | None, typer.Option(help="Crop ratios to compare: 0.8,0.9,1.0.")] = None,
    positive: Annotated[
        str | None, typer.Option(metavar="CLASS", help="Of two classes, the one that thresholds are for; default: the second.")
    ] = None,
    precision: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="With two classes: minimum precision of a threshold.")
    ] = 0.95,
    wrong: Annotated[
        Path | None, typer.Option(metavar="CSV", help="Write a table of the wrongly classified images with their predictions.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for report.html, its plots and evaluation.json.")] = None,
    *,
    segmentation: ProtocolOptions,
    shared: DataOptions,
) -> None:
    """Evaluate a model: accuracy, precision, recall, confusions, calibration; several data sets, image sizes and crop ratios.

    Weights of a segmentation are evaluated by mIoU, per class and near boundaries; those of a detection by COCO's AP.

    Example: [bold]vitrail evaluate runs/photos-finetune photos/ --out report --wrong wrong.csv[/bold]
    """
    from vitrail.atomic_files import check_writable, check_writable_folder, reject_overwrite
    from vitrail.data.progress import progress
    from vitrail.evaluation.evaluate import check_positive, sweep_sizes
    from vitrail.evaluation.model import HEADS, check_head, check_size, open_model, single_head
    from vitrail.heads.task_heads import CALLS
    from vitrail.models.vision_transformer import VisionTransformer

    image_sizes, ratios = parse_sizes(sizes), parse_ratios(crop_ratios)
    options = shared.evaluation(cast("Head", check_choice("--head", head, HEADS)))
    check_writable_folder(out)
    check_writable(wrong)
    reject_overwrite(wrong, *str(weights).split("+"), *sources)
    if wrong is not None and wrong.is_dir():
        raise UserError(f"{wrong} is a folder: give --wrong the name of a CSV file.")
    model = open_model(weights, shared.hardware.device)
    if isinstance(model, VisionTransformer) and model.task in CALLS:
        evaluate_dense(model, weights, sources[0], segmentation, shared, out)
        return
    check_head(model, options.head)
    for size in image_sizes:
        check_size(model, size)
    training = find_training(weights)
    coarser, class_map = divide_map(shared.class_map, training)
    data = [open_labeled(path, shared.split, training, coarser) for path in sources]
    matchings = match_sources(model, data, sources, class_map)
    for matching in matchings:
        check_positive(matching.names, positive)
    results = [
        evaluate_source(model, each, path, matching, options, labels if number == 0 else None, positive, precision)
        for number, (each, path, matching) in enumerate(zip(data, sources, matchings, strict=True))
    ]
    evaluations = [result.evaluation for result in results]
    sweep: list[dict[str, Any]] = []
    if image_sizes or ratios:
        total = len(data[0].source) * max(len(image_sizes), 1) * max(len(ratios), 1)
        with progress("sizes and crops", total) as advance:
            sweep = list(sweep_sizes(model, data[0].source, matchings[0], image_sizes, ratios, options, advance))
    content = {
        "weights": str(weights),
        "model": model.name,
        "head": head,
        "preprocessing": model.preprocessing.to_dict(),
        "evaluations": [each.evaluation.to_dict() | {"wrong": [vars(row) for row in each.wrong]} for each in results],
        "sweep": sweep,
    }
    title = f"{model.name or Path(weights).name} on {Path(sources[0]).name or sources[0]}"
    written = []
    if out is not None:
        with single_head(model, options.head):
            mistakes = draw_mistakes(model, data[0].source, results[0].wrong)
        written += write_report(out, title, evaluations, sweep, content, mistakes)
    if wrong is not None:
        write_wrong(wrong, [row for each in results for row in each.wrong])
        written.append(wrong)
    if shared.as_json:
        print_json(replace_nan(content))
        return
    print_evaluations(evaluations, sweep)
    for file in written:
        print_line(f"wrote {file}")


def evaluate_dense(
    model: "VisionTransformer", weights: Path, path: str, protocol: ProtocolOptions, shared: DataOptions, out: Path | None
) -> None:
    """Evaluate weights of a segmentation or a detection."""
    from vitrail.evaluation.evaluate import open_evaluation_data

    training = find_training(weights)
    data = open_evaluation_data(path, shared.split, training.held_out_of(path) if training is not None else None)
    measure = measure_objects if model.task == "detection" else measure_masks
    measured = measure(model, data.source, path, protocol, shared.hardware)
    content = {"weights": str(weights), "source": path, "split": data.split} | measured.content
    written = measured.write_report(out, content, measured.draw_examples()) if out is not None else []
    if shared.as_json:
        print_json(content)
        return
    measured.print_tables(content)
    for file in written:
        print_line(f"wrote {file}")


@expand_options
def disagree(
    paths: Annotated[
        list[str], typer.Argument(metavar="WEIGHTS... SOURCE", help=f"Checkpoints or run directories, then the data. {SOURCE}")
    ],
    heads: Annotated[bool, typer.Option("--heads", help="Compare each head of a distilled model.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write a PNG sheet of images with different predictions.")] = None,
    seed: SeedOption = 0,
    *,
    shared: DataOptions,
) -> None:
    """Compare the predictions of models image by image: how often they differ, and whether they are wrong on the same images.

    Example: [bold]vitrail disagree runs/teacher runs/student photos/ --out differ.png[/bold]
    """
    import numpy as np

    from vitrail.atomic_files import atomic_write, check_writable
    from vitrail.evaluation.disagreement import compare, draw_sheet

    if out is not None and out.suffix != ".png":
        raise UserError(f"The sheet is a PNG image: call it differ.png, not {out.name!r}.")
    check_writable(out)
    *files, path = paths
    if not files:
        raise UserError("Give the weights of at least two models, then the data.")
    shared.evaluation()  # raises for an unknown --among before the data is opened
    training = find_training(Path(files[0]))
    coarser, class_map = divide_map(shared.class_map, training)
    data = open_labeled(path, shared.split, training, coarser)
    names, predictions, scores, classes = predict_with_all(files, path, data, shared._replace(class_map=class_map), heads)
    labeled = np.flatnonzero(scores.label >= 0)
    labels, image, predictions = scores.label[labeled], scores.image[labeled], predictions[:, labeled]
    comparison = compare(names, predictions, labels, classes)
    if out is not None:
        title = f"Disagreement on {Path(path).name or path}"
        sheet = draw_sheet(data.source, image, predictions, labels, names, classes, title, seed)
        if sheet is not None:
            atomic_write(out, lambda file: sheet.save(file, "PNG"))
    if shared.as_json:
        print_json({"source": path, "split": data.split} | replace_nan(comparison.to_dict()))
        return
    print_disagreement(comparison)
    if out is not None:
        differ = (predictions != predictions[0]).any()
        print_line(f"wrote {out}" if differ else "All predictions are equal: no sheet was written.")


def predict_with_all(
    files: Sequence[str], path: str, data: "EvaluationData", shared: DataOptions, heads: bool
) -> "tuple[list[str], np.ndarray, Scores, list[str]]":
    """Names [M], predictions [M, N], the scores of the first model, and the class names; one model is in memory at a time."""
    import numpy as np

    from vitrail.evaluation.model import HEADS, has_distillation_head, open_model

    names: list[str] = []
    predictions: list[np.ndarray] = []
    first: tuple[ClassMatch, Scores] | None = None
    for name, file in zip(shorten_paths(files), files, strict=True):
        model = open_model(file, shared.hardware.device)
        (matching,) = match_sources(model, [data], [path], shared.class_map)
        compared: tuple[Head, ...] = HEADS if heads and has_distillation_head(model) else ("both",)
        for head in compared:
            scores = compute_scores(model, data.source, matching, shared.evaluation(head), name)
            first = first or (matching, scores)
            if matching.names != first[0].names or not np.array_equal(scores.image, first[1].image):
                raise UserError(f"{file} does not have the same classes as {files[0]}: a map must group both alike.")
            predictions.append(np.minimum(scores.prediction, len(matching.names)))
            names.append(f"{name}, {head}" if len(compared) > 1 else name)
    if len(predictions) < 2:
        raise UserError("One model cannot be compared: give the weights of another, or --heads for a distilled model.")
    assert first is not None
    return names, np.stack(predictions), first[1], first[0].names


def shorten_paths(files: Sequence[str]) -> list[str]:
    """The shortest ends of the paths that are distinct."""
    parts = [Path(file).parts for file in files]
    for depth in range(1, max(map(len, parts), default=1) + 1):
        short = ["/".join(each[-depth:]) for each in parts]
        if len(set(short)) == len(short):
            return short
    return [f"{file} ({number})" for number, file in enumerate(files, 1)]


class Training(NamedTuple):
    """What a run was trained on."""

    source: str
    classes: list[str]
    recipe: "Recipe"
    folder: Path

    def was_on(self, path: str) -> bool:
        return self.source == path or os.path.realpath(self.source) == os.path.realpath(path)

    def held_out_of(self, path: str) -> "HeldOut | None":
        """How validation images were chosen if the data is that of the training."""
        from vitrail.evaluation.evaluate import HeldOut

        return HeldOut(self.classes, self.recipe.data.validation_fraction, self.recipe.fold) if self.was_on(path) else None

    def find_map(self, path: str) -> str:
        """The map of the recipe; UserError if it is not a table beside the run, the data or here.

        A run.json may come from anywhere. Other files that it names are not opened: messages and reports show parts of a map.
        """
        name = self.recipe.data.map
        file = Path(os.path.realpath(os.path.expanduser(name)))
        folders = [os.path.realpath(folder) for folder in (self.folder, path, ".")]
        valid = file.suffix.lower() in (*TABLE_SUFFIXES, ".json") and any(file.is_relative_to(folder) for folder in folders)
        if name and not valid:
            raise UserError(
                f"{self.folder / 'run.json'} names the map {name[:200]}, which is not a CSV, TSV or JSON file in the run "
                "directory, the folder of the data or the current folder: if you trust it, give it with --map."
            )
        return name


def find_training(weights: Path) -> Training | None:
    """What the run was trained on that the weights belong to; None if they belong to none."""
    from vitrail.json_files import read_json
    from vitrail.recipes import Recipe

    for folder in (weights, weights.parent):
        try:
            run = read_json(folder / "run.json")
            classes = list(run["data"].get("classes") or ())
            return Training(str(run["source"]), classes, Recipe.from_dict(run["recipe"]), folder)
        except (UserError, KeyError, TypeError, AttributeError):
            continue
    return None


def divide_map(given: Path | None, training: Training | None) -> tuple[str, Path | None]:
    """What `--map` names: a file of coarser classes, as those of a training, or a file of classes of the model."""
    of_map = training is not None and training.recipe.data.map != ""
    is_coarser = given is not None and (given.suffix.lower() in TABLE_SUFFIXES or of_map)
    return (str(given), None) if is_coarser else ("", given)


def open_labeled(path: str, split: str | None, training: Training | None, coarser: str = "") -> "EvaluationData":
    """A source with the labels of the training, if it was on this data, or with the labels of a map of coarser classes."""
    from vitrail.data.datasets.lookup import require_labels
    from vitrail.data.label_choice import choose_labels
    from vitrail.evaluation.evaluate import open_evaluation_data

    held_out = training.held_out_of(path) if training is not None else None
    chosen = training.recipe.data if training is not None else None
    data = open_evaluation_data(path, split, held_out, chosen.label if chosen is not None and held_out is not None else "")
    parts = [part for part in (data.source, data.calibration) if part is not None]
    if coarser:
        choose_labels(parts, chosen.label if chosen is not None and chosen.map else "", coarser)
    elif training is not None and held_out is not None:
        choose_labels(parts, training.recipe.data.label, training.find_map(path))
    require_labels(data.source)
    return data


def match_sources(
    model: "Model", data: "Sequence[EvaluationData]", paths: Sequence[str], class_map: Path | None
) -> "list[ClassMatch]":
    from vitrail.data.class_matching import match_classes, read_class_map, read_wordnet_ids
    from vitrail.evaluation.model import count_classes

    rules = read_class_map(class_map) if class_map is not None else None
    known = {name for each in data for name in each.source.classes}
    matchings = []
    for path, each in zip(paths, data, strict=True):
        names, own = each.source.classes, rules
        if rules is not None and all(name in known for name in rules):
            own = {name: value for name, value in rules.items() if name in names} or None
        ids = read_wordnet_ids(each.source.name)
        matchings.append(match_classes(model.class_names, count_classes(model), names, path, own, ids))
    return matchings


class Result(NamedTuple):
    """The evaluation of one source, and its wrongly classified images."""

    evaluation: "Evaluation"
    wrong: "list[WrongImage]"


def evaluate_source(
    model: "Model",
    data: "EvaluationData",
    path: str,
    matching: "ClassMatch",
    options: "EvaluationOptions",
    labels: Path | None,
    positive: str | None,
    precision: float,
) -> Result:
    from vitrail.evaluation.evaluate import list_wrong, summarize_scores
    from vitrail.evaluation.multilabel import read_valid_labels

    valid_labels = read_valid_labels(labels, data.source) if labels is not None else None
    scores = compute_scores(model, data.source, matching, options, "evaluating")
    calibration = None
    if data.calibration is not None:
        calibration = compute_scores(model, data.calibration, matching, options, "fitting the temperature")
    evaluation = summarize_scores(
        scores, matching, path, data.split, options.among, calibration, valid_labels, positive, precision
    )
    return Result(evaluation, list_wrong(scores, matching, data.source))


def compute_scores(
    model: "Model", source: "Source", matching: "ClassMatch", options: "EvaluationOptions", title: str
) -> "Scores":
    from vitrail.data.progress import progress
    from vitrail.evaluation.evaluate import collect_scores, open_loader

    with open_loader(model, source, options.workers) as loader, progress(title, len(source)) as advance:
        return collect_scores(model, loader, matching, options, advance)


def write_report(
    out: Path,
    title: str,
    evaluations: "Sequence[Evaluation]",
    sweep: Sequence[dict[str, Any]],
    content: dict[str, Any],
    mistakes: Sequence[dict[str, Any]],
) -> list[Path]:
    from vitrail.atomic_files import atomic_write_text
    from vitrail.cli.evaluation_page import write_evaluation_report

    atomic_write_text(out / "evaluation.json", json.dumps(replace_nan(content), indent=1) + "\n")
    return [*write_evaluation_report(out, title, evaluations, sweep, mistakes), out / "evaluation.json"]


def draw_mistakes(model: "Model", source: "Source", wrong: "Sequence[WrongImage]") -> list[dict[str, Any]]:
    """The most confident wrong predictions with a thumbnail, for the page."""
    import numpy as np

    from vitrail.data.decode import decode
    from vitrail.evaluation.confusion import thumbnail
    from vitrail.evaluation.model import decode_side
    from vitrail.models.vision_transformer import VisionTransformer
    from vitrail.pages import image_url

    shown = wrong[:MAX_THUMBNAILS]
    maps = [""] * len(shown)
    if isinstance(model, VisionTransformer):
        from vitrail.interpret.mistakes import draw_maps

        pairs = np.array([(row.index, row.predicted_class) for row in shown], dtype=np.int64).reshape(-1, 2)
        maps = draw_maps(model, source, pairs[:, 0], pairs[:, 1])
    return [
        {
            "url": image_url(thumbnail(decode(source.encoded(row.index), decode_side(model)))),
            "label": row.label,
            "prediction": row.prediction,
            "confidence": row.probability,
            "location": row.image,
            "map": image_url(image) if image else "",
        }
        for row, image in zip(shown, maps, strict=True)
    ]


def write_wrong(path: Path, wrong: "Sequence[WrongImage]") -> None:
    """Write one row per wrong prediction: image, label, prediction, and the probabilities of prediction and label."""
    from vitrail.cli.predict import csv_line, open_output

    with open_output(path) as stream:
        stream.write(csv_line(["image", "label", "prediction", "probability", "label_probability"]))
        for row in wrong:
            probabilities = (f"{value:.6g}" for value in (row.probability, row.label_probability))
            stream.write(csv_line([row.image, row.label, row.prediction, *probabilities]))


def replace_nan(value: Any) -> Any:
    """The content with null for NaN and Inf, which JSON does not have."""
    if isinstance(value, dict):
        return {name: replace_nan(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
