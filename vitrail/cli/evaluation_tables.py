"""An evaluation, or a comparison of models, as tables on the screen."""

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitrail.cli.predict import one_line
from vitrail.formatting import percent

if TYPE_CHECKING:
    from vitrail.evaluation.disagreement import Disagreement
    from vitrail.evaluation.evaluate import Evaluation

LISTED = 10  # classes and confusions on the screen; the page and the JSON have more


def show(measured: "Sequence[Evaluation]", found: Sequence[dict[str, Any]]) -> None:
    first = measured[0]
    rows = []
    for each in measured:
        mended = each.calibration
        row = [
            f"{each.source}, {each.split}",
            f"{each.images:,}",
            f"{cell(each.top1)} ± {100 * each.top1_error:.2f}",
            f"{100 * (each.top1 - first.top1):+.2f}" if each is not first else "",
            cell(each.top5),
            cell(each.multilabel.top1) if each.multilabel else "",
            f"{each.loss:.4f}",
            *(cell(mended.ece), cell(mended.adaptive_ece)),
            *(f"{mended.temperature:.3f}" if mended.temperature else "", cell(mended.ece_after)),
        ]
        rows.append(row)
    columns = ("source", "images", "top-1", "difference", "top-5", "any label", "loss", "ECE", "adaptive", "T", "ECE with T")
    show_table(columns, rows)
    for each in measured:
        where = f"{each.source}: " if len(measured) > 1 else ""
        asked = f"; answers among {'all classes of the model' if each.among == 'all' else f'these {each.classes}'}"
        say(f"{where}{each.classes} classes, {each.matched}{asked if each.matched != 'the same classes' else ''}.", "dim")
        if each.unread:
            say(f"{where}{each.unread:,} images could not be read; `vitrail data inspect` lists them.", "dim")
        if each.unlabelled:
            say(f"{where}{each.unlabelled:,} images without a label or of a class that is left out do not count.", "dim")
        if each.multilabel is not None:
            say(
                f"{where}any label: {each.multilabel.images:,} images; {each.multilabel.without:,} without one do not count.",
                "dim",
            )
        fitted = each.calibration.temperature is not None
        say(
            f"{where}{'T: the temperature of the least loss on' if fitted else 'No temperature:'} {each.calibration.fitted_on}.",
            "dim",
        )
    if found:
        say("")
        cells = [
            (each["size"], f"{each['crop_ratio']:g}", cell(each["top1"]), cell(each["top5"]), f"{each['loss']:.4f}")
            for each in found
        ]
        show_table(("size", "crop ratio", "top-1", "top-5", "loss"), cells)
    show_classes(first)


def show_classes(found: "Evaluation") -> None:
    from vitrail.runs.report import confused_pairs

    worst = [each for each in sorted(found.per_class, key=lambda each: each["top1"])[:LISTED] if each["top1"] < 1]
    matrix = found.confusion.get("matrix")
    pairs = confused_pairs(matrix, found.confusion["names"], LISTED) if matrix else found.confusion["pairs"][:LISTED]
    if worst:
        say("")
        show_table(
            ("hardest classes", "top-1", "images"),
            [(each["name"], cell(each["top1"]), str(each["images"])) for each in worst],
        )
    if pairs:
        say("")
        rows = [(pair["truth"], f"{pair['count']} of {pair['of']}", pair["guess"]) for pair in pairs]
        show_table(("is", "times", "was taken for"), rows)


def show_disagreement(found: "Disagreement") -> None:
    from vitrail.evaluation.disagreement import letter

    everyone = ["truth", *found.names]
    letters = [letter(place) for place in range(len(found.names))]
    say(f"Share of {found.images:,} images answered differently", "bold")
    marks = ["", *letters]
    rows = [
        (f"{mark} {name}".strip(), *(f"{value:.3f}" for value in line))
        for mark, name, line in zip(marks, everyone, found.differ, strict=True)
    ]
    show_table(("", "truth", *letters), rows)
    for title, values in (
        ("Cohen's kappa of the answers", found.kappa),
        ("Error consistency: Cohen's kappa of right and wrong", found.error_consistency),
    ):
        say("")
        say(title, "bold")
        cells = [
            (f"{letters[place]} {name}", *(f"{value:.3f}" if math.isfinite(value) else "–" for value in values[place]))
            for place, name in enumerate(found.names)
        ]
        show_table(("", *letters), cells)
    say("")
    say("Who errs where, in images", "bold")
    place_of = dict(zip(found.names, letters, strict=True))
    show_table(
        ("models", "both right", "only the first", "only the second", "wrong alike", "wrong differently"),
        [
            (" and ".join(place_of[name] for name in pair["models"]), *(f"{value:,}" for value in list(pair.values())[1:]))
            for pair in found.pairs
        ],
    )
    right = found.right
    say(f"Recognized by all {right['all']:,}, by some {right['some']:,}, by none {right['none']:,}.", "dim")
    if found.classes:
        say("")
        say("Classes on which their accuracies are furthest apart", "bold")
        lines = [(each["name"], str(each["images"]), *map(percent, each["top1"].values())) for each in found.classes]
        show_table(("class", "images", *letters), lines)


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns without anything in them are left out."""
    used = [place for place in range(len(columns)) if any(row[place] for row in rows)]
    table = Table(box=None, header_style="bold", pad_edge=False)
    for place in used:
        words = any(name in columns[place] for name in ("source", "class", "is", "taken")) or not columns[place]
        table.add_column(columns[place], justify="left" if words else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(one_line(row[place])) for place in used))
    console().print(table)


def say(text: str, style: str = "") -> None:
    console().print(Text(text if not text else one_line(text), style=style))


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120)


def cell(value: float | None) -> str:
    return "" if value is None else "–" if not math.isfinite(value) else percent(value, 2)
