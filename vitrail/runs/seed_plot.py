"""Groups of trainings as an image: a dot for every seed, the mean, and the interval around it."""

import textwrap
from collections.abc import Sequence

import numpy as np

from vitrail.runs.comparison import MEASURES, Row, title
from vitrail.runs.curves import LIGHT, Look, dress, png_of

WIDTH = 9.0  # inches
LINE = 0.42  # of a group
NAME = 44  # letters of a name in one line


def draw_points(rows: Sequence[Row], metric: str, at: str, look: Look = LIGHT) -> bytes:
    """The image as PNG, the first group at the top with its mean as a dotted line through all."""
    # The object interface rather than pyplot: no global state, no display needed, whatever the user has set up.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    scale = 100 if MEASURES[metric].percent else 1
    names = ["\n".join(textwrap.wrap(row.group.name, NAME, break_on_hyphens=False)[:2]) or " " for row in rows]
    longest = max(len(line) for name in names for line in name.split("\n"))
    height = 1.1 + LINE * len(rows)
    with rc_context({"font.family": "DejaVu Sans", "font.size": 10, "axes.unicode_minus": False, "text.usetex": False}):
        figure = Figure(figsize=(WIDTH, height), dpi=150, facecolor=look.paper)
        left = 0.35 + 0.085 * longest
        figure.subplots_adjust(left / WIDTH, 0.45 / height, 1 - 0.3 / WIDTH, 1 - 0.45 / height)
        axes = figure.subplots()
        dress(axes, title(metric, at), look)
        axes.grid(axis="y", visible=False)
        axes.axvline(scale * rows[0].spread.mean, color=look.faint, linewidth=1, linestyle=":")
        for place, row in enumerate(rows):
            color = look.blue if place else look.green
            values, spread = scale * np.array(row.group.values), row.spread
            if spread.low is not None and spread.high is not None:
                axes.plot([scale * spread.low, scale * spread.high], [place, place], color=color, linewidth=5, alpha=0.25)
            # Seeds that reached the same would hide each other on one line.
            offsets = np.linspace(-0.16, 0.16, len(values)) if len(values) > 1 else np.zeros(1)
            axes.plot(values, place + offsets, "o", color=color, markersize=4.5, alpha=0.75, markeredgewidth=0)
            axes.plot([scale * spread.mean] * 2, [place - 0.26, place + 0.26], color=color, linewidth=2)
        axes.set_yticks(range(len(rows)), names, color=look.ink, parse_math=False)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.ticklabel_format(axis="x", useOffset=False)
        axes.set_title("dots: seeds, line: mean, bar: 95 % interval", loc="right", color=look.faint, fontsize=9)
        return png_of(figure)
