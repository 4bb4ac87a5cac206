"""Tables of evaluations and of comparisons of models, printed on the screen."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.text import Text

from vitrail.cli.console import make_console, print_table
from vitrail.formatting import escape_control, percent, shorten_path

if TYPE_CHECKING:
    from vitrail.evaluation.disagreement import Disagreement
    from vitrail.evaluation.evaluate import Evaluation

RATES, AREAS = ("precision", "recall", "f1"), ("average_precision", "auc")
CLASS_COLUMNS = ("precision", "recall", "F1", "AP", "AUC", "images")
THRESHOLD_COLUMNS = ("threshold for", "probability", "precision", "recall", "F1")
MAX_PATH = 40  # characters of a path in a table
MAX_ROWS = 10  # classes and confusions on the screen; the report and the JSON have more
TEXT_COLUMNS = ("", "source", "class", "hardest classes", "label", "prediction", "models", "threshold for")


def print_evaluations(evaluations: "Sequence[Evaluation]", sweep: Sequence[dict[str, Any]]) -> None:
    first = evaluations[0]
    rows = []
    for each in evaluations:
        calibration = each.calibration
        row = [
            f"{shorten_path(each.source, MAX_PATH)}, {each.split}",
            f"{each.images:,}",
            each.verdict.plus_minus,
            f"{100 * (each.top1 - first.top1):+.2f}" if each is not first else "",
            format_share(each.top5),
            format_share(each.averages["macro"]["f1"]),
            format_share(each.multilabel.top1) if each.multilabel else "",
            f"{each.loss:.4f}",
            *(format_share(calibration.ece), format_share(calibration.adaptive_ece)),
            *(f"{calibration.temperature:.3f}" if calibration.temperature else "", format_share(calibration.ece_after)),
        ]
        rows.append(row)
    accuracies, calibrations = (
        ("top-1", "difference", "top-5", "macro F1", "any label"),
        ("ECE", "adaptive ECE", "T", "ECE with T"),
    )
    print_used(("source", "images", *accuracies, "loss", *calibrations), rows)
    for each in evaluations:
        print_notes(each, f"{each.source}: " if len(evaluations) > 1 else "")
    if sweep:
        print_line("")
        cells = [
            (each["size"], f"{each['crop_ratio']:g}", *map(format_share, (each["top1"], each["top5"])), f"{each['loss']:.4f}")
            for each in sweep
        ]
        print_used(("size", "crop ratio", "top-1", "top-5", "loss"), cells)
    print_classes(first)
    print_thresholds(first)


def print_notes(evaluation: "Evaluation", prefix: str) -> None:
    classes = f"{evaluation.classes} classes, {evaluation.matched}"
    if evaluation.matched != "the same classes":
        classes += (
            f"; predictions among {'all classes of the model' if evaluation.among == 'all' else f'these {evaluation.classes}'}"
        )
    notes = [f"{classes}.", *evaluation.verdict.describe()]
    if evaluation.unreadable:
        notes.append(f"{evaluation.unreadable:,} images could not be read; `vitrail data inspect` lists them.")
    if evaluation.unlabeled:
        notes.append(f"{evaluation.unlabeled:,} images without a label or of an excluded class are not counted.")
    if evaluation.multilabel is not None:
        multilabel = evaluation.multilabel
        notes.append(f"any label: {multilabel.images:,} images; {multilabel.unlabeled:,} without a label are not counted.")
    fitted = evaluation.calibration.temperature is not None
    notes.append(f"{'T: temperature fitted on' if fitted else 'No temperature:'} {evaluation.calibration.fitted_on}.")
    for note in notes:
        print_line(f"{prefix}{note}", "dim")


def print_classes(evaluation: "Evaluation") -> None:
    from vitrail.runs.report import confused_pairs

    confusion = evaluation.confusion
    if "matrix" in confusion:
        pairs = confused_pairs(confusion["matrix"], confusion["names"], MAX_ROWS)
    else:
        pairs = confusion["pairs"][:MAX_ROWS]
    print_line("")
    rows = list_classes(evaluation, MAX_ROWS)
    print_used(("class" if len(evaluation.per_class) <= MAX_ROWS else "hardest classes", *CLASS_COLUMNS), rows)
    if pairs:
        print_line("")
        rows = [(pair["label"], pair["prediction"], f"{pair['count']} of {pair['of']}") for pair in pairs]
        print_used(("label", "prediction", "images"), rows)


def list_classes(evaluation: "Evaluation", count: int) -> list[tuple[str, ...]]:
    """Name, precision, recall, F1, average precision, AUC and images of the classes, or of those with the lowest F1; averages."""
    classes, curves = evaluation.per_class, {each.name: each.curve for each in evaluation.curves}
    if len(classes) > count:
        classes = sorted(classes, key=lambda each: float(each["f1"]))[:count]
    rows = [
        (
            str(each["name"]),
            *(format_share(each[name]) for name in RATES),
            *(f"{getattr(curves[each['name']], name):.3f}" if each["name"] in curves else "" for name in AREAS),
            f"{each['images']:,}",
        )
        for each in classes
    ]
    for kind, averages in evaluation.averages.items():
        areas = ["", ""]
        if curves and kind == "macro":
            areas = [f"{fmean(getattr(curve, name) for curve in curves.values()):.3f}" for name in AREAS]
        rows.append((f"{kind} average", *(format_share(averages[name]) for name in RATES), *areas, f"{evaluation.images:,}"))
    return rows


def print_thresholds(evaluation: "Evaluation") -> None:
    if evaluation.thresholds is None:
        return
    print_line("")
    print_line(f"Thresholds for the probability of {evaluation.thresholds.positive}", "bold")
    rows = list_thresholds(evaluation)
    print_used(THRESHOLD_COLUMNS, rows)
    print_line(describe_thresholds(evaluation), "dim")


def list_thresholds(evaluation: "Evaluation") -> list[tuple[str, ...]]:
    """Goal, threshold, precision, recall and F1."""
    rows = evaluation.thresholds.rows if evaluation.thresholds else []
    return [(row.goal, "none" if row.threshold is None else f"{row.threshold:.4g}", *map(format_share, row[2:5])) for row in rows]


def describe_thresholds(evaluation: "Evaluation") -> str:
    if evaluation.thresholds and all(row.held_out for row in evaluation.thresholds.rows):
        return "Precision, recall and F1 are those of held-out images: each part with the threshold of the others."
    return "Too few images to hold some out: precision, recall and F1 are those of the same images and optimistic."


def print_disagreement(comparison: "Disagreement") -> None:
    from vitrail.evaluation.disagreement import LABEL, letter

    letters = [letter(index) for index in range(len(comparison.names))]
    print_line(f"Share of {comparison.images:,} images with different predictions", "bold")
    rows = [
        (title, *(f"{value:.3f}" for value in line))
        for title, line in zip(
            [LABEL, *map(" ".join, zip(letters, comparison.names, strict=True))], comparison.differ, strict=True
        )
    ]
    print_used(("", "labels", *letters), rows)
    for title, values in (
        ("Cohen's kappa of the predictions", comparison.kappa),
        ("Error consistency: Cohen's kappa of correct and wrong", comparison.error_consistency),
    ):
        print_line("")
        print_line(title, "bold")
        cells = [
            (f"{letters[row]} {name}", *(f"{value:.3f}" if math.isfinite(value) else "–" for value in values[row]))
            for row, name in enumerate(comparison.names)
        ]
        print_used(("", *letters), cells)
    print_line("")
    print_line("Correct and wrong predictions, in images", "bold")
    by_name = dict(zip(comparison.names, letters, strict=True))
    print_used(
        ("models", "both correct", "only the first", "only the second", "same error", "different errors"),
        [
            (" and ".join(by_name[name] for name in pair["models"]), *(f"{value:,}" for value in list(pair.values())[1:]))
            for pair in comparison.pairs
        ],
    )
    correct = comparison.correct
    print_line(f"Correct by all models: {correct['all']:,}, by some: {correct['some']:,}, by none: {correct['none']:,}.", "dim")
    if comparison.classes:
        print_line("")
        print_line("Classes with the largest difference in accuracy", "bold")
        rows = [(each["name"], str(each["images"]), *map(percent, each["top1"].values())) for each in comparison.classes]
        print_used(("class", "images", *letters), rows)


def print_used(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table without its empty columns."""
    used = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    cells = [[escape_control(row[index]) for index in used] for row in rows]
    print_table([columns[index] for index in used], cells, left=TEXT_COLUMNS)


def print_line(text: str, style: str = "") -> None:
    make_console().print(Text(escape_control(text), style=style), soft_wrap=True)


def format_share(value: float | None) -> str:
    return "" if value is None else "–" if not math.isfinite(value) else percent(value, 2)
