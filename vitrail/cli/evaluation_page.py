"""An evaluation as images and one self-contained page."""

import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.atomic_files import write_aside
from vitrail.evaluation.evaluate import Calibration, Evaluation
from vitrail.runs.curves import DARK, LIGHT, Look, dress
from vitrail.runs.page import PAGE, address, heat_map, section, share, table
from vitrail.runs.report import confused_pairs
from vitrail.training.metrics import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ALT = {"reliability.png": "Share of right answers over confidence", "sweep.png": "Top-1 over sizes and crop ratios"}
LISTED = 24  # classes and confusions
MATRIX = 40  # classes; a larger matrix cannot be read


def write_pages(folder: Path, title: str, evaluations: Sequence[Evaluation], sweep: Sequence[dict[str, Any]]) -> list[Path]:
    """report.html, reliability.png and, where sizes or crops were swept, sweep.png."""
    first = evaluations[0]
    drawn = {"reliability.png": lambda look: reliability(first.calibration, look)}
    if len(sweep) > 1:
        drawn["sweep.png"] = lambda look: sweep_chart(sweep, look)
    images = {name: (draw(LIGHT), draw(DARK)) for name, draw in drawn.items()}
    for name, (light, _) in images.items():
        write_aside(folder / name, lambda side, content=light: side.write_bytes(content))  # type: ignore[misc]
    shown = {name: both(*versions, alt=ALT[name]) for name, versions in images.items()}
    parts = [
        cards(first),
        section("Sources", several(evaluations) if len(evaluations) > 1 else ""),
        section("Sizes and crops", swept(sweep) + shown.get("sweep.png", "") if sweep else ""),
        section("Calibration", shown["reliability.png"] + calibration_words(first.calibration)),
        section("Hardest classes", hardest(first)),
        section("Most confused", confused(first)),
        section("How it was measured", table(circumstances(first))),
    ]
    text = PAGE.format(title=escape(title), body="\n".join(part for part in parts if part))
    write_aside(folder / "report.html", lambda side: side.write_text(text, encoding="utf-8"))
    return [folder / name for name in ("report.html", *images)]


def cards(found: Evaluation) -> str:
    facts = [("top-1", f"{share(found.top1)}"), ("top-5", share(found.top5)), ("loss", figures(found.loss))]
    facts += [("calibration error", share(found.calibration.ece)), ("images", f"{found.images:,}")]
    if found.multilabel is not None:
        facts.insert(1, ("any right label", share(found.multilabel.top1)))
    inside = "".join(f"<div><strong>{escape(value)}</strong><span>{escape(name)}</span></div>" for name, value in facts if value)
    return f'<div class="cards">{inside}</div>'


def several(evaluations: Sequence[Evaluation]) -> str:
    first = evaluations[0]
    head = row("th", ("source", "images", "top-1", "difference", "top-5", "loss", "calibration error"))
    rows = [
        row(
            "td",
            (
                f"{each.source}, {each.split}",
                f"{each.images:,}",
                f"{share(each.top1)} ± {100 * each.top1_error:.2f}",
                f"{100 * (each.top1 - first.top1):+.2f}" if each is not first else "",
                share(each.top5),
                figures(each.loss),
                share(each.calibration.ece),
            ),
        )
        for each in evaluations
    ]
    return f"<div class='wide'><table class='pairs'>{head}{''.join(rows)}</table></div>"


def swept(sweep: Sequence[dict[str, Any]]) -> str:
    head = row("th", ("size", "crop ratio", "top-1", "top-5", "loss"))
    rows = [
        row("td", (each["size"], f"{each['crop_ratio']:g}", share(each["top1"]), share(each["top5"]), figures(each["loss"])))
        for each in sweep
    ]
    return f"<table class='pairs'>{head}{''.join(rows)}</table>"


def row(kind: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{kind}>{escape(cell)}</{kind}>" for cell in cells) + "</tr>"


def calibration_words(found: Calibration) -> str:
    rows = [
        ("Mean confidence", share(found.confidence)),
        ("Expected calibration error, 15 bins of equal width", share(found.ece)),
        ("The same, 15 bins of as many images", share(found.adaptive_ece)),
    ]
    if found.temperature is None:
        rows.append(("Temperature", f"none: {found.fitted_on}"))
    else:
        rows += [
            (f"Temperature, fitted on {found.fitted_on}", figures(found.temperature)),
            ("Calibration error with it, equal width", share(found.ece_after)),
            ("Calibration error with it, as many images", share(found.adaptive_ece_after)),
            ("Loss with it", figures(found.loss_after or 0.0)),
        ]
    return table([(label, escape(value)) for label, value in rows])


def hardest(found: Evaluation) -> str:
    worst = [each for each in sorted(found.per_class, key=lambda each: each["top1"])[:LISTED] if each["top1"] < 1]
    return table([(each["name"], f"{share(each['top1'])} of {each['images']:,}") for each in worst])


def confused(found: Evaluation) -> str:
    names, matrix = found.confusion.get("names", []), found.confusion.get("matrix")
    pairs = confused_pairs(matrix, names, LISTED) if matrix else found.confusion["pairs"]
    if not pairs:
        return ""
    head = row("th", ("is", "was taken for", "times"))
    rows = [row("td", (pair["truth"], pair["guess"], f"{pair['count']:,} of {pair['of']:,}")) for pair in pairs]
    heat = heat_map(matrix, names) if matrix and len(names) <= MATRIX else ""
    return f"<table class='pairs'>{head}{''.join(rows)}</table>{heat}"


def circumstances(found: Evaluation) -> list[tuple[str, str]]:
    rows = [
        ("Source", f"{found.source}, {found.split}"),
        ("Classes", f"{found.classes:,}, {found.matched}"),
        ("Answers among", "all classes of the model" if found.among == "all" else "the classes of the data"),
        ("Mean accuracy per class", share(found.mean_per_class)),
        ("Standard error of top-1", f"{100 * found.top1_error:.2f} points"),
        ("Images that could not be read", f"{found.unread:,}"),
        ("Images without a label", f"{found.unlabelled:,}"),
    ]
    if found.multilabel is not None:
        rows.append(
            ("Images with lists of right labels", f"{found.multilabel.images:,}; {found.multilabel.without:,} without any")
        )
    return [(label, escape(value)) for label, value in rows]


def both(light: bytes, dark: bytes, alt: str) -> str:
    dim = "(prefers-color-scheme: dark)"
    return (
        f'<image><source media="{dim}" srcset="{address(dark)}">'
        f'<img class="curves" alt="{escape(alt)}" src="{address(light)}"></image>'
    )


def reliability(found: Calibration, look: Look) -> bytes:
    """Share of right answers over confidence, before and after the temperature, and how many images each bin has."""
    sides = [("As it is", found.bins, found.ece)]
    if found.bins_after is not None and found.temperature is not None and found.ece_after is not None:
        sides.append((f"Temperature {found.temperature:.3g}", found.bins_after, found.ece_after))
    figure = sheet((4.6 * len(sides) + 0.4, 5.2), look)
    panels = figure.subplots(2, len(sides), squeeze=False, height_ratios=(4, 1), sharex=True)
    wide = figure.get_figwidth()
    figure.subplots_adjust(0.8 / wide, 0.11, 1 - 0.3 / wide, 0.93, wspace=0.18, hspace=0.08)
    for column, (title, bins, error) in enumerate(sides):
        axes, counts = panels[0, column], panels[1, column]
        dress(axes, title, look)
        dress(counts, "", look)
        axes.set_title(f"calibration error {100 * error:.2f} %", loc="right", color=look.faint, fontsize=9)
        axes.plot((0, 100), (0, 100), color=look.faint, linewidth=1, linestyle=(0, (4, 3)))
        middle, width = 100 * np.array([(each.low + each.high) / 2 for each in bins]), 100 / len(bins)
        filled = np.array([each.images > 0 for each in bins])
        right, sure = (100 * np.array([getattr(each, name) for each in bins]) for name in ("right", "confidence"))
        axes.bar(middle[filled], right[filled], 0.9 * width, color=look.blue, alpha=0.75, label="right")
        lows, tall = np.minimum(right, sure), np.abs(right - sure)
        axes.bar(
            middle[filled],
            tall[filled],
            0.9 * width,
            lows[filled],
            color="none",
            edgecolor=look.orange,
            hatch="////",
            label="gap",
        )
        axes.set_ylim(0, 100)
        axes.yaxis.set_major_formatter("{x:g} %")
        axes.legend(loc="upper left", frameon=False, labelcolor=look.ink, fontsize=9)
        counts.bar(middle, [each.images for each in bins], 0.9 * width, color=look.faint, alpha=0.6)
        if max(each.images for each in bins) > 20:
            counts.set_yscale("log")
            counts.set_ylim(bottom=0.7)
            counts.minorticks_off()
        counts.set_xlim(0, 100)
        counts.xaxis.set_major_formatter("{x:g} %")
        counts.set_xlabel("confidence", color=look.faint)
    panels[0, 0].set_ylabel("share of right answers", color=look.faint)
    panels[1, 0].set_ylabel("images", color=look.faint)
    return as_png(figure)


def sweep_chart(sweep: Sequence[dict[str, Any]], look: Look) -> bytes:
    """Top-1 over sizes with a line per crop ratio, or over crop ratios with a line per size, whichever is longer."""
    sizes = list(dict.fromkeys(each["size"] for each in sweep))
    ratios = list(dict.fromkeys(each["crop_ratio"] for each in sweep))
    along, lines = ("size", ratios) if len(sizes) >= len(ratios) else ("crop_ratio", sizes)
    other = "crop_ratio" if along == "size" else "size"
    places = sizes if along == "size" else ratios
    figure = sheet((7, 3.6), look)
    axes = figure.subplots()
    figure.subplots_adjust(0.11, 0.15, 0.97, 0.9)
    dress(axes, "Top-1", look)
    colors = (look.blue, look.orange, look.green, look.faint)
    for number, line in enumerate(lines):
        shares = [100 * each["top1"] for place in places for each in sweep if each[along] == place and each[other] == line]
        label = f"{'crop ratio' if other == 'crop_ratio' else 'size'} {line}"
        style = ("-", "--", ":")[number // len(colors) % 3]
        axes.plot(range(len(places)), shares, style, color=colors[number % len(colors)], marker="o", label=label, clip_on=False)
    ticks(axes, [str(place) for place in places])
    axes.set_xlabel(along.replace("_", " "), color=look.faint)
    axes.yaxis.set_major_formatter("{x:g} %")
    axes.legend(loc="best", frameon=False, labelcolor=look.ink, fontsize=9)
    return as_png(figure)


def ticks(axes: "Axes", names: Sequence[str]) -> None:
    axes.set_xticks(range(len(names)), names, rotation=45 if len(names) > 10 else 0)


def sheet(size: tuple[float, float], look: Look) -> "Figure":
    # The object interface rather than pyplot: no global state, no display needed, whatever the user has set up.
    from matplotlib.figure import Figure

    return Figure(figsize=size, dpi=150, facecolor=look.paper)


def as_png(figure: "Figure") -> bytes:
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    file = io.BytesIO()
    with rc_context({"font.family": "DejaVu Sans", "font.size": 10, "axes.unicode_minus": False}):
        FigureCanvasAgg(figure).print_png(file)
    return file.getvalue()
