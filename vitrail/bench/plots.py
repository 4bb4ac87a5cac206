"""Plots of a benchmark: bars, or one line per model over image size, batch size or depth."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vitrail.bench.measurement import Measurement
from vitrail.bench.settings import Curve
from vitrail.models.config import format_size
from vitrail.pages.charts import LIGHT, Palette, new_figure, render_png, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 9.0  # inches
LINE = 0.34  # height of a bar, inches
STYLES = {"vitrail": "-", "timm": "--"}
TITLES = {"resolution": "image size, pixels", "batch": "batch size", "depth": "blocks"}


def draw(measurements: Sequence[Measurement], curve: Curve | None, machine: str, palette: Palette = LIGHT) -> bytes:
    """PNG of the measurements that have times."""
    shown = [measurement for measurement in measurements if measurement.seconds]
    with new_figure(palette) as figure:
        if curve:
            draw_curve(figure, shown, curve, palette)
        else:
            draw_bars(figure, shown, palette)
        figure.text(0.99, 0.01, machine, ha="right", va="bottom", color=palette.muted, fontsize=8, parse_math=False)
        return render_png(figure)


def draw_bars(figure: "Figure", measurements: Sequence[Measurement], palette: Palette) -> None:
    """A panel for each setting, a bar for each candidate: images per second."""
    panels: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        title = f"{measurement.task}, {measurement.precision}, {measurement.mode}, batch size {measurement.batch_size}"
        panels.setdefault(title, []).append(measurement)
    names = {id(measurement): bar_name(measurement, measurements) for measurement in measurements}
    longest = max((len(name) for name in names.values()), default=10)
    rows = [len(panel) for panel in panels.values()] or [1]
    height = sum(rows) * LINE + 0.75 * len(rows) + 0.55
    figure.set_size_inches(WIDTH, height)
    figure.subplots_adjust(
        (0.35 + 0.085 * longest) / WIDTH,
        0.55 / height,
        1 - 0.3 / WIDTH,
        1 - 0.4 / height,
        hspace=0.75 * len(rows) / sum(rows) / LINE,
    )
    for axes, (title, panel) in zip(
        figure.subplots(len(rows), squeeze=False, height_ratios=rows).flat, panels.items(), strict=False
    ):
        style_axes(axes, title, palette)
        axes.grid(axis="y", visible=False)
        axes.set_title("images per second", loc="right", color=palette.muted, fontsize=9)
        rows_of_bars = range(len(panel))
        colors = [palette.orange if measurement.project == "timm" else palette.blue for measurement in panel]
        errors = [measurement.images_per_second * measurement.spread for measurement in panel]
        axes.barh(
            rows_of_bars,
            [measurement.images_per_second for measurement in panel],
            0.62,
            color=colors,
            xerr=errors,
            ecolor=palette.foreground,
        )
        for row, measurement in zip(rows_of_bars, panel, strict=True):
            axes.annotate(
                f" {measurement.images_per_second:,.4g} ",
                (measurement.images_per_second * (1 + measurement.spread), row),
                va="center",
                color=palette.foreground,
                fontsize=9,
            )
        axes.set_xlim(0, 1.15 * max(measurement.images_per_second * (1 + measurement.spread) for measurement in panel))
        axes.set_yticks(
            rows_of_bars, [names[id(measurement)] for measurement in panel], color=palette.foreground, parse_math=False
        )
        axes.set_ylim(len(panel) - 0.5, -0.5)


def bar_name(measurement: Measurement, measurements: Sequence[Measurement]) -> str:
    """The model, its project if there are several, and what differs between bars of one panel."""
    parts = [measurement.model]
    if len({each.project for each in measurements}) > 1:
        parts.append(" ".join(filter(None, (measurement.project, measurement.configuration))))
    same_model = [each for each in measurements if each.model == measurement.model]
    if len({each.size for each in same_model}) > 1:
        parts.append(format_size(measurement.size))
    if len({each.depth for each in same_model}) > 1:
        parts.append(f"depth {measurement.depth}")
    return ", ".join(parts)


def draw_curve(figure: "Figure", measurements: Sequence[Measurement], curve: Curve, palette: Palette) -> None:
    """Panels for images per second, milliseconds per image and, if known, peak memory."""
    values: list[tuple[str, Callable[[Measurement], float]]] = [
        ("Images per second", lambda measurement: measurement.images_per_second),
        ("Milliseconds per image", lambda measurement: 1e3 / measurement.images_per_second),
    ]
    if any(measurement.memory for measurement in measurements):
        values.append(("Peak memory, GB", lambda measurement: (measurement.memory or math.nan) / 1e9))
    figure.set_size_inches(4.4 * len(values), 4.4)
    figure.subplots_adjust(0.7 / (4.4 * len(values)), 0.2, 1 - 0.2 / (4.4 * len(values)), 0.9, wspace=0.24)
    lines: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        lines.setdefault(line_name(measurement, measurements, curve), []).append(measurement)
    colors: dict[str, str] = {}
    for measurement in measurements:
        colors.setdefault(measurement.model, line_colors(palette)[len(colors) % len(line_colors(palette))])
    for axes, (title, value) in zip(figure.subplots(1, len(values), squeeze=False).flat, values, strict=True):
        style_axes(axes, title, palette)
        axes.set_xlabel(TITLES[curve], color=palette.muted)
        for name, line in lines.items():
            line = sorted(line, key=lambda measurement: x_value(measurement, curve))
            xs, ys = [x_value(each, curve) for each in line], [value(each) for each in line]
            style = {"color": colors[line[0].model], "linestyle": STYLES.get(line[0].project, ":")}
            axes.plot(xs, ys, marker="o", markersize=4, linewidth=1.6, label=name, **style)
        scale_axes(axes, measurements, curve, palette)


def scale_axes(axes: "Axes", measurements: Sequence[Measurement], curve: Curve, palette: Palette) -> None:
    axes.set_yscale("log")
    ticks = sorted({x_value(measurement, curve) for measurement in measurements})
    if curve == "batch":
        axes.set_xscale("log", base=2)
    axes.minorticks_off()
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.yaxis.set_major_formatter(lambda value, index: f"{value:,.4g}")
    low, high = axes.get_ylim()
    if high / low < 12:  # too narrow for a logarithmic scale
        axes.set_yscale("linear")
        axes.set_ylim(0, high)
    if axes.lines:
        axes.legend(frameon=False, labelcolor=palette.foreground, fontsize=8)


def line_colors(palette: Palette) -> tuple[str, ...]:
    return (palette.blue, palette.orange, palette.green, palette.foreground, palette.muted)


def x_value(measurement: Measurement, curve: Curve) -> int:
    return {"resolution": max(measurement.size), "batch": measurement.batch_size, "depth": measurement.depth}[curve]


def line_name(measurement: Measurement, measurements: Sequence[Measurement], curve: Curve) -> str:
    """The model and the attributes that differ between lines."""
    parts = [measurement.model]
    for name in ("project", "task", "precision", "mode"):
        if len({getattr(each, name) for each in measurements}) > 1:
            parts.append(getattr(measurement, name))
    if curve != "batch" and len({each.batch_size for each in measurements}) > 1:
        parts.append(f"batch size {measurement.batch_size}")
    if curve != "resolution" and len({each.size for each in measurements if each.model == measurement.model}) > 1:
        parts.append(format_size(measurement.size))
    return ", ".join(parts)
