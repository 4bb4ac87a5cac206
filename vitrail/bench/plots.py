"""A benchmark as an image: bars side by side, or a line per model over what a curve runs through."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vitrail.bench.measurement import Cell
from vitrail.bench.settings import Curve
from vitrail.models.config import show_size
from vitrail.runs.curves import LIGHT, Look, dress, png_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 9.0  # inches
LINE = 0.34  # of a bar
STYLES = {"vitrail": "-", "timm": "--"}
TITLES = {"resolution": "side of the image, pixels", "batch": "batch", "depth": "blocks"}


def draw(cells: Sequence[Cell], curve: Curve | None, machine: str, look: Look = LIGHT) -> bytes:
    """PNG of the cells that have numbers."""
    # The object interface rather than pyplot: no global state, no display needed, whatever the user has set up.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    shown = [cell for cell in cells if cell.seconds]
    with rc_context({"font.family": "DejaVu Sans", "font.size": 10, "axes.unicode_minus": False, "text.usetex": False}):
        figure = Figure(dpi=150, facecolor=look.paper)
        if curve:
            draw_curve(figure, shown, curve, look)
        else:
            draw_bars(figure, shown, look)
        figure.text(0.99, 0.01, machine, ha="right", va="bottom", color=look.faint, fontsize=8, parse_math=False)
        return png_of(figure)


def draw_bars(figure: "Figure", cells: Sequence[Cell], look: Look) -> None:
    """A panel for each setting, a bar for each contender: images per second."""
    panels: dict[str, list[Cell]] = {}
    for cell in cells:
        panels.setdefault(f"{cell.task}, {cell.precision}, {cell.mode}, batch {cell.batch}", []).append(cell)
    names = {id(cell): bar_name(cell, cells) for cell in cells}
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
        dress(axes, title, look)
        axes.grid(axis="y", visible=False)
        axes.set_title("images per second", loc="right", color=look.faint, fontsize=9)
        places = range(len(panel))
        colors = [look.orange if cell.project == "timm" else look.blue for cell in panel]
        errors = [cell.rate * cell.spread for cell in panel]
        axes.barh(places, [cell.rate for cell in panel], 0.62, color=colors, xerr=errors, ecolor=look.ink)
        for place, cell in zip(places, panel, strict=True):
            axes.annotate(
                f" {cell.rate:,.4g} ",
                (cell.rate * (1 + cell.spread), place),
                va="center",
                color=look.ink,
                fontsize=9,
            )
        axes.set_xlim(0, 1.15 * max(cell.rate * (1 + cell.spread) for cell in panel))
        axes.set_yticks(places, [names[id(cell)] for cell in panel], color=look.ink, parse_math=False)
        axes.set_ylim(len(panel) - 0.5, -0.5)


def bar_name(cell: Cell, cells: Sequence[Cell]) -> str:
    """The model, whose it is where others take part, and what differs between bars of one panel."""
    parts = [cell.model]
    if len({each.project for each in cells}) > 1:
        parts.append(cell.project)
    own = [each for each in cells if each.model == cell.model]
    if len({each.size for each in own}) > 1:
        parts.append(show_size(cell.size))
    if len({each.depth for each in own}) > 1:
        parts.append(f"depth {cell.depth}")
    return ", ".join(parts)


def draw_curve(figure: "Figure", cells: Sequence[Cell], curve: Curve, look: Look) -> None:
    """Images per second and milliseconds per image, and the peak of the memory where it is known."""
    values = [("Images per second", lambda cell: cell.rate), ("Milliseconds per image", lambda cell: 1e3 / cell.rate)]
    if any(cell.memory for cell in cells):
        values.append(("Peak memory, GB", lambda cell: (cell.memory or math.nan) / 1e9))
    figure.set_size_inches(4.4 * len(values), 4.4)
    figure.subplots_adjust(0.7 / (4.4 * len(values)), 0.2, 1 - 0.2 / (4.4 * len(values)), 0.9, wspace=0.24)
    lines: dict[str, list[Cell]] = {}
    for cell in cells:
        lines.setdefault(line_name(cell, cells, curve), []).append(cell)
    colors: dict[str, str] = {}
    for cell in cells:
        colors.setdefault(cell.model, hues(look)[len(colors) % len(hues(look))])
    for axes, (title, value) in zip(figure.subplots(1, len(values), squeeze=False).flat, values, strict=True):
        dress(axes, title, look)
        axes.set_xlabel(TITLES[curve], color=look.faint)
        for name, line in lines.items():
            line = sorted(line, key=lambda cell: where(cell, curve))
            places, heights = [where(cell, curve) for cell in line], [value(cell) for cell in line]
            style = {"color": colors[line[0].model], "linestyle": STYLES.get(line[0].project, ":")}
            axes.plot(places, heights, marker="o", markersize=4, linewidth=1.6, label=name, **style)
        finish(axes, cells, curve, look)


def finish(axes: "Axes", cells: Sequence[Cell], curve: Curve, look: Look) -> None:
    axes.set_yscale("log")
    places = sorted({where(cell, curve) for cell in cells})
    if curve == "batch":
        axes.set_xscale("log", base=2)
    axes.minorticks_off()
    axes.set_xticks(places, [str(place) for place in places])
    axes.yaxis.set_major_formatter(lambda value, place: f"{value:,.4g}")
    low, high = axes.get_ylim()
    if high / low < 12:  # too little for powers of ten: a scale from zero tells more
        axes.set_yscale("linear")
        axes.set_ylim(0, high)
    if axes.lines:
        axes.legend(frameon=False, labelcolor=look.ink, fontsize=8)


def hues(look: Look) -> tuple[str, ...]:
    return (look.blue, look.orange, look.green, look.ink, look.faint)


def where(cell: Cell, curve: Curve) -> int:
    return {"resolution": max(cell.size), "batch": cell.batch, "depth": cell.depth}[curve]


def line_name(cell: Cell, cells: Sequence[Cell], curve: Curve) -> str:
    """What tells the lines apart, and nothing else."""
    parts = [cell.model]
    for name in ("project", "task", "precision", "mode"):
        if len({getattr(each, name) for each in cells}) > 1:
            parts.append(getattr(cell, name))
    if curve != "batch" and len({each.batch for each in cells}) > 1:
        parts.append(f"batch {cell.batch}")
    if curve != "resolution" and len({each.size for each in cells if each.model == cell.model}) > 1:
        parts.append(show_size(cell.size))
    return ", ".join(parts)
