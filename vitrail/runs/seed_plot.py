"""Groups of runs as an image: a dot for every seed, the mean and its confidence interval."""

import textwrap
from collections.abc import Sequence

import numpy as np

from vitrail.pages.charts import LIGHT, new_figure, render_png, style_axes
from vitrail.runs.comparison import Row, title
from vitrail.training.metrics import Metric

WIDTH = 9.0  # inches
ROW_HEIGHT = 0.42  # inches
NAME_WIDTH = 44  # characters per line


def draw_seed_plot(rows: Sequence[Row], metric: Metric, at: str) -> bytes:
    """Draw the groups as PNG, the first at the top with its mean as a dotted line through all."""
    scale = 100 if metric.percent else 1
    names = ["\n".join(textwrap.wrap(row.group.name, NAME_WIDTH, break_on_hyphens=False)[:2]) or " " for row in rows]
    longest = max(len(line) for name in names for line in name.split("\n"))
    height = 1.1 + ROW_HEIGHT * len(rows)
    with new_figure(LIGHT, (WIDTH, height)) as figure:
        left = 0.35 + 0.085 * longest
        figure.subplots_adjust(left / WIDTH, 0.45 / height, 1 - 0.3 / WIDTH, 1 - 0.45 / height)
        axes = figure.subplots()
        style_axes(axes, title(metric, at), LIGHT)
        axes.grid(axis="y", visible=False)
        axes.axvline(scale * rows[0].spread.mean, color=LIGHT.muted, linewidth=1, linestyle=":")
        for index, row in enumerate(rows):
            color = LIGHT.blue if index else LIGHT.green
            values, spread = scale * np.array(row.group.values), row.spread
            if spread.low is not None and spread.high is not None:
                ends = [scale * metric.clip(end) for end in (spread.low, spread.high)]
                axes.plot(ends, [index, index], color=color, linewidth=5, alpha=0.25)
            # Seeds with equal results would cover each other on one line.
            offsets = np.linspace(-0.16, 0.16, len(values)) if len(values) > 1 else np.zeros(1)
            axes.plot(values, index + offsets, "o", color=color, markersize=4.5, alpha=0.75, markeredgewidth=0)
            axes.plot([scale * spread.mean] * 2, [index - 0.26, index + 0.26], color=color, linewidth=2)
        axes.set_yticks(range(len(rows)), names, color=LIGHT.foreground, parse_math=False)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.ticklabel_format(axis="x", useOffset=False)
        axes.set_title("dots: seeds, line: mean, bar: 95 % interval", loc="right", color=LIGHT.muted, fontsize=9)
        return render_png(figure)
