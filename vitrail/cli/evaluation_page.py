"""The report of an evaluation: charts and one self-contained page."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.atomic_files import atomic_write
from vitrail.cli.evaluation_tables import CLASS_COLUMNS, THRESHOLD_COLUMNS, describe_thresholds, list_classes, list_thresholds
from vitrail.evaluation.evaluate import Calibration, ClassCurve, Evaluation
from vitrail.evaluation.statistics import wilson
from vitrail.formatting import escape_control, format_significant
from vitrail.pages import png_url, write_page
from vitrail.pages.charts import DARK, LIGHT, Palette, new_figure, render_png, style_axes
from vitrail.runs.report import DARK_MODE, MAX_MATRIX_CLASSES, Rows, confused_pairs, format_accuracy, format_pairs

MAX_ROWS = 24  # of confusions
MAX_CLASSES = 100  # rows of the table of classes


def write_evaluation_report(
    folder: Path,
    title: str,
    evaluations: Sequence[Evaluation],
    sweep: Sequence[dict[str, Any]],
    mistakes: Sequence[dict[str, Any]] = (),
) -> list[Path]:
    """Write report.html, reliability.png, curves.png for up to 20 classes, and sweep.png for several sizes or crop ratios.

    `mistakes` have the keys url, label, prediction, confidence and location.
    """
    first = evaluations[0]
    charts = {"reliability.png": draw_light_and_dark(lambda palette: draw_reliability(first.calibration, palette))}
    if first.curves:
        charts["curves.png"] = draw_light_and_dark(lambda palette: draw_curves(first.curves, palette))
    if len(sweep) > 1:
        charts["sweep.png"] = draw_light_and_dark(lambda palette: draw_sweep(sweep, palette))
    for name, (light, _) in charts.items():
        atomic_write(folder / name, lambda temporary, content=light: temporary.write_bytes(content))  # type: ignore[misc]
    matrix, names = first.confusion.get("matrix"), first.confusion.get("names", [])
    write_page(
        folder / "report.html",
        "evaluation.html.j2",
        title=title,
        cards=list_highlights(first),
        sources=list_sources(evaluations) if len(evaluations) > 1 else [],
        sweep=list_sweep(sweep),
        sweep_chart=chart_versions(*charts["sweep.png"]) if "sweep.png" in charts else None,
        reliability=chart_versions(*charts["reliability.png"]),
        calibration=list_calibration(first.calibration),
        verdict=first.verdict.describe(),
        class_columns=("class", *CLASS_COLUMNS),
        classes=list_classes(first, MAX_CLASSES),
        curves_chart=chart_versions(*charts["curves.png"]) if first.curves else None,
        positive=first.thresholds.positive if first.thresholds else None,
        threshold_columns=THRESHOLD_COLUMNS,
        thresholds=list_thresholds(first),
        thresholds_note=describe_thresholds(first),
        errors=mistakes,
        pairs=format_pairs(confused_pairs(matrix, names, MAX_ROWS) if matrix else first.confusion["pairs"]),
        matrix=matrix if len(names) <= MAX_MATRIX_CLASSES else None,
        names=names,
        settings=list_settings(first),
    )
    return [folder / name for name in ("report.html", *charts)]


def draw_light_and_dark(draw: Callable[[Palette], bytes]) -> tuple[bytes, bytes]:
    return draw(LIGHT), draw(DARK)


def chart_versions(light: bytes, dark: bytes) -> list[tuple[str, str]]:
    """Return (media query, data URL) of a chart for dark and for light mode."""
    return [(DARK_MODE, png_url(dark)), ("", png_url(light))]


def list_highlights(evaluation: Evaluation) -> Rows:
    rows = [
        ("top-1", evaluation.verdict.plus_minus),
        ("top-1 with several labels", format_accuracy(evaluation.multilabel.top1 if evaluation.multilabel else None)),
        ("top-5", format_accuracy(evaluation.top5)),
        ("macro F1", format_accuracy(evaluation.averages["macro"]["f1"])),
        ("loss", format_significant(evaluation.loss)),
        ("calibration error", format_accuracy(evaluation.calibration.ece)),
        ("images", f"{evaluation.images:,}"),
    ]
    return [(label, value) for label, value in rows if value]


def list_sources(evaluations: Sequence[Evaluation]) -> list[tuple[str, ...]]:
    first = evaluations[0]
    return [
        (
            f"{evaluation.source}, {evaluation.split}",
            f"{evaluation.images:,}",
            evaluation.verdict.plus_minus,
            f"{100 * (evaluation.top1 - first.top1):+.2f}" if evaluation is not first else "",
            format_accuracy(evaluation.top5),
            format_significant(evaluation.loss),
            format_accuracy(evaluation.calibration.ece),
        )
        for evaluation in evaluations
    ]


def list_sweep(sweep: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (
            row["size"],
            f"{row['crop_ratio']:g}",
            format_accuracy(row["top1"]),
            format_accuracy(row["top5"]),
            format_significant(row["loss"]),
        )
        for row in sweep
    ]


def list_calibration(calibration: Calibration) -> Rows:
    rows = [
        ("Mean confidence", format_accuracy(calibration.confidence)),
        ("Expected calibration error, 15 bins of equal width", format_accuracy(calibration.ece)),
        ("Expected calibration error, 15 bins of equal size", format_accuracy(calibration.adaptive_ece)),
    ]
    if calibration.temperature is None:
        return [*rows, ("Temperature", f"none: {calibration.fitted_on}")]
    return [
        *rows,
        (f"Temperature, fitted on {calibration.fitted_on}", format_significant(calibration.temperature)),
        ("Calibration error with temperature, bins of equal width", format_accuracy(calibration.ece_after)),
        ("Calibration error with temperature, bins of equal size", format_accuracy(calibration.adaptive_ece_after)),
        ("Loss with temperature", format_significant(calibration.loss_after or 0.0)),
    ]


def list_settings(evaluation: Evaluation) -> Rows:
    rows = [
        ("Source", f"{evaluation.source}, {evaluation.split}"),
        ("Classes", f"{evaluation.classes:,}, {evaluation.matched}"),
        ("Predictions among", "all classes of the model" if evaluation.among == "all" else "the classes of the data"),
        ("Mean accuracy per class", format_accuracy(evaluation.mean_per_class)),
        ("Standard error of top-1", f"{100 * evaluation.top1_error:.2f} points"),
        ("Unreadable images", f"{evaluation.unreadable:,}"),
        ("Images without a label", f"{evaluation.unlabeled:,}"),
    ]
    if evaluation.multilabel is not None:
        multilabel = evaluation.multilabel
        rows.append(("Images with several labels", f"{multilabel.images:,}; {multilabel.unlabeled:,} without any"))
    return rows


def draw_reliability(calibration: Calibration, palette: Palette) -> bytes:
    """Draw accuracy with its 95 % interval over confidence, and the number of images per bin, without and with temperature."""
    sides = [("Without temperature", calibration.bins, calibration.ece)]
    if calibration.bins_after is not None and calibration.temperature is not None and calibration.ece_after is not None:
        sides.append((f"Temperature {calibration.temperature:.3g}", calibration.bins_after, calibration.ece_after))
    width = 4.6 * len(sides) + 0.4
    with new_figure(palette, (width, 5.2)) as figure:
        panels = figure.subplots(2, len(sides), squeeze=False, height_ratios=(4, 1), sharex=True)
        figure.subplots_adjust(0.8 / width, 0.17, 1 - 0.3 / width, 0.93, wspace=0.26, hspace=0.08)
        for column, (title, bins, error) in enumerate(sides):
            axes, histogram = panels[0, column], panels[1, column]
            style_axes(axes, title, palette)
            style_axes(histogram, "", palette)
            axes.set_title(f"calibration error {100 * error:.2f} %", loc="right", color=palette.muted, fontsize=9)
            axes.plot((0, 100), (0, 100), color=palette.muted, linewidth=1, linestyle=(0, (4, 3)))
            filled = [bin for bin in bins if bin.images]
            centers, bar_width = 100 * np.array([(bin.low + bin.high) / 2 for bin in filled]), 90 / len(bins)
            accuracy = 100 * np.array([bin.accuracy for bin in filled])
            confidence = 100 * np.array([bin.confidence for bin in filled])
            intervals = 100 * np.array([wilson(bin.accuracy, bin.images) for bin in filled]).T
            axes.bar(centers, accuracy, bar_width, color=palette.blue, alpha=0.5, label="accuracy")
            axes.vlines(centers, *intervals, color=palette.foreground, linewidth=1, label="95 % interval")
            axes.hlines(confidence, centers - bar_width / 2, centers + bar_width / 2, color=palette.orange, linewidth=2.5)
            axes.plot([], color=palette.orange, linewidth=2.5, label="mean confidence")
            axes.set_ylim(0, 101)
            axes.yaxis.set_major_formatter("{x:g} %")
            histogram.bar(centers, [bin.images for bin in filled], bar_width, color=palette.muted, alpha=0.6)
            histogram.yaxis.get_major_locator().set_params(integer=True, nbins=3)
            histogram.set_xlim(0, 100)
            histogram.xaxis.set_major_formatter("{x:g} %")
            histogram.tick_params(axis="x", pad=7)  # below the 0 of the other axis
            histogram.set_xlabel("confidence", color=palette.muted)
        panels[0, 0].set_ylabel("accuracy", color=palette.muted)
        panels[1, 0].set_ylabel("images", color=palette.muted)
        handles, labels = panels[0, 0].get_legend_handles_labels()  # below both: bars and lines may be anywhere
        figure.legend(handles, labels, loc="lower center", ncols=3, frameon=False, labelcolor=palette.foreground, fontsize=9)
        return render_png(figure)


def draw_curves(curves: Sequence[ClassCurve], palette: Palette) -> bytes:
    """Draw precision over recall, and recall over the false positive rate, with a line per class."""
    colors = (palette.blue, palette.orange, palette.green, palette.muted, palette.foreground)
    with new_figure(palette, (11, 5)) as figure:
        panels = figure.subplots(1, 2)
        figure.subplots_adjust(0.07, 0.13, 0.75, 0.91, wspace=0.3)
        for axes, title in zip(panels, ("Precision-recall", "ROC"), strict=True):
            style_axes(axes, title, palette)
            axes.set(xlim=(0, 100), ylim=(0, 101))
            axes.xaxis.set_major_formatter("{x:g} %")
            axes.yaxis.set_major_formatter("{x:g} %")
            axes.tick_params(pad=8)
        left, right = panels
        left.set(xlabel="recall", ylabel="precision")
        right.set(xlabel="false positive rate", ylabel="recall")
        right.plot((0, 100), (0, 100), color=palette.muted, linewidth=1, linestyle=(0, (4, 3)))
        for index, (name, curve) in enumerate(curves):
            style = {"color": colors[index % len(colors)], "linestyle": ("-", "--", ":", "-.")[index // len(colors) % 4]}
            recall = 100 * np.append(0.0, curve.recall)
            left.step(recall, 100 * np.append(curve.precision[0], curve.precision), where="pre", linewidth=1.5, **style)
            label = f"{shorten(name)}  {curve.average_precision:.3f}  {curve.auc:.3f}"
            right.plot(100 * np.append(0.0, curve.false_positive_rate), recall, linewidth=1.5, label=label, **style)
        legend = right.legend(
            loc="upper left", bbox_to_anchor=(1.02, 1.02), frameon=False, labelcolor=palette.foreground, fontsize=8
        )
        legend.set_title("class, AP, AUC", prop={"size": 8})
        legend.get_title().set_color(palette.muted)
        for axes in panels:
            axes.xaxis.label.set_color(palette.muted)
            axes.yaxis.label.set_color(palette.muted)
        return render_png(figure)


def shorten(name: str, length: int = 16) -> str:
    """A name of at most so many printable characters, without the symbols that start a formula in matplotlib."""
    name = escape_control(name).replace("$", r"\$")
    return name if len(name) <= length else f"{name[: length - 1]}…"


def draw_sweep(sweep: Sequence[dict[str, Any]], palette: Palette) -> bytes:
    """Draw top-1 over sizes with a line per crop ratio, or over crop ratios with a line per size, whichever has more points."""
    sizes = list(dict.fromkeys(row["size"] for row in sweep))
    ratios = list(dict.fromkeys(row["crop_ratio"] for row in sweep))
    x, line = ("size", "crop_ratio") if len(sizes) >= len(ratios) else ("crop_ratio", "size")
    positions, lines = (sizes, ratios) if x == "size" else (ratios, sizes)
    colors = (palette.blue, palette.orange, palette.green, palette.muted)
    with new_figure(palette, (7, 3.6)) as figure:
        axes = figure.subplots()
        figure.subplots_adjust(0.11, 0.15, 0.97, 0.9)
        style_axes(axes, "Top-1", palette)
        for index, value in enumerate(lines):
            top1 = [100 * row["top1"] for position in positions for row in sweep if row[x] == position and row[line] == value]
            style, color = ("-", "--", ":")[index // len(colors) % 3], colors[index % len(colors)]
            label = f"{line.replace('_', ' ')} {value}"
            axes.plot(range(len(positions)), top1, style, color=color, marker="o", label=label, clip_on=False)
        axes.set_xticks(
            range(len(positions)), [str(position) for position in positions], rotation=45 if len(positions) > 10 else 0
        )
        axes.set_xlabel(x.replace("_", " "), color=palette.muted)
        axes.yaxis.set_major_formatter("{x:g} %")
        axes.legend(loc="best", frameon=False, labelcolor=palette.foreground, fontsize=9)
        return render_png(figure)
