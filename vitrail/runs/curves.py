"""The curves of a run as an image: losses, accuracies, learning rate, throughput and the task's other metrics over the epochs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.formatting import format_significant
from vitrail.pages.charts import LIGHT, Palette, add_legend, marker_style, new_figure, render_png, style_axes
from vitrail.runs.reference_curves import ReferenceBand
from vitrail.training.metrics import TOP1, Metric, SmoothedValue

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = tuple[np.ndarray, np.ndarray]  # epochs and values
# Entries of metrics.jsonl that are no metrics of the task, or that have a panel of their own.
KNOWN = frozenset(("step", "epoch", "kind", "speed", "loss", "gradient_norm", "lr", "skipped", "top1", "top5", "images"))
CONSTANTS = ("majority_", "constant_")  # prefixes of what a constant prediction gives, drawn with the metric itself
MAX_PANELS = 16  # of other metrics
PANEL, GAP = 1.2, 0.65  # height of such a panel and of its title and labels, in inches


@dataclass(frozen=True)
class Curves:
    """The metrics of a run; `total` is the number of epochs of the whole training, `best` the epoch of the best weights."""

    lines: Sequence[dict[str, Any]]  # of metrics.jsonl
    total: float
    band: ReferenceBand | None = None
    best: float | None = None
    metric: Metric = TOP1

    def points(self, kind: str, name: str) -> Points:
        """Return epochs and finite values of a metric; `kind` is "train" or "validation"."""
        pairs = []
        for line in self.lines:
            value = line.get(name, line.get("speed", {}).get(name))
            if line["kind"] == kind and value is not None and math.isfinite(value):
                pairs.append((line["epoch"], value))
        columns = np.array(pairs, float).reshape(-1, 2)
        return columns[:, 0], columns[:, 1]

    def smooth_losses(self) -> Points:
        """Return the training loss, smoothed as in the progress display and the reference bands."""
        return self.smooth_points("loss")

    def smooth_points(self, name: str) -> Points:
        """Return a metric of the training, smoothed."""
        epochs, values = self.points("train", name)
        smoothed, total = SmoothedValue(), self.total or 1
        return epochs, np.array([smoothed.add(epoch / total, value) for epoch, value in zip(epochs, values, strict=True)])

    def best_point(self) -> tuple[float, float] | None:
        """Return epoch and metric of the best weights, None if they were not validated."""
        epochs, accuracies = self.points("validation", self.metric.name)
        if not len(epochs) or self.best is None:
            return None
        index = int(abs(epochs - self.best).argmin())
        return float(epochs[index]), float(accuracies[index])

    def other_metrics(self) -> list[str]:
        """Return the names of the task's metrics besides loss and primary metric, in the order of the file."""
        return list(dict.fromkeys(name for line in self.lines for name in line if name not in KNOWN | {self.metric.name}))

    def draw(self, palette: Palette = LIGHT, columns: int = 2) -> bytes:
        """Draw the curves as PNG; one column is for narrow screens."""
        width, height = (11, 6.6) if columns == 2 else (5, 12)
        heights = (3, 2) if columns == 2 else (3, 3, 2, 2)
        found = self.other_metrics()
        others = [name for name in found if not any(prefix + part == name for prefix in CONSTANTS for part in found)][:MAX_PANELS]
        rows = math.ceil(len(others) / (2 * columns))
        below = rows * (PANEL + GAP)
        height += below
        with new_figure(palette, (width, height)) as figure:
            # Fixed margins: matplotlib's automatic layout takes as long as all the drawing.
            sides = {"left": 0.8 / width, "right": 1 - 0.2 / width}
            vertical = {"bottom": (0.6 + below) / height, "top": 1 - 0.4 / height}
            grid = figure.add_gridspec(
                len(heights), columns, **sides, **vertical, wspace=0.18, hspace=0.22, height_ratios=heights
            )
            panels = grid.subplots(sharex=True, squeeze=False)
            for axes, title, draw in zip(
                panels.flat,
                ("Loss", f"Validation {self.metric.title}", "Learning rate", "Images per second"),
                (self._draw_losses, self._draw_accuracies, self._draw_lr, self._draw_throughput),
                strict=True,
            ):
                style_axes(axes, title, palette)
                draw(axes, palette)
            for axes in panels[-1]:
                axes.set_xlabel("epoch", color=palette.muted)
                axes.set_xlim(0, self.total or 1)
            if others:
                vertical = {"bottom": 0.35 / height, "top": (below - GAP / 2) / height}
                grid = figure.add_gridspec(rows, 2 * columns, **sides, **vertical, wspace=0.3, hspace=GAP / PANEL)
                for index, name in enumerate(others):
                    self._draw_other(figure.add_subplot(grid[index]), palette, name)
            return render_png(figure)

    def _draw_losses(self, axes: "Axes", palette: Palette) -> None:
        epochs, losses = self.points("train", "loss")
        validation_epochs, validation_losses = self.points("validation", "loss")
        self._draw_band(axes, palette, "loss")
        if len(epochs):
            smooth = self.smooth_losses()[1]
            axes.plot(epochs, losses, color=palette.blue, alpha=0.22, linewidth=0.8)
            axes.plot(epochs, smooth, color=palette.blue, linewidth=1.8, label=f"training  {format_significant(smooth[-1])}")
        if len(validation_epochs):
            label = f"validation  {format_significant(validation_losses[-1])}"
            style = marker_style(validation_losses)
            axes.plot(validation_epochs, validation_losses, color=palette.orange, linewidth=1.8, label=label, **style)
        values = np.concatenate([losses, validation_losses])
        # On a linear scale a loss that falls to a hundredth becomes a flat line.
        if len(values) and values.min() > 0 and values.max() > 50 * values.min():
            axes.set_yscale("log")
        add_legend(axes, palette, "no loss recorded")

    def _draw_accuracies(self, axes: "Axes", palette: Palette) -> None:
        self._draw_band(axes, palette, "top1")
        metric, scale = self.metric, 100 if self.metric.percent else 1
        second = (("top5", "top-5", palette.blue),) if metric.name == "top1" else ()
        for name, title, color in (*second, (metric.name, metric.title, palette.green)):
            epochs, values = self.points("validation", name)
            if len(epochs):
                label = f"{title}  {metric.format(values[-1])}"
                axes.plot(epochs, scale * values, color=color, linewidth=1.8, label=label, **marker_style(values))
        if best := self.best_point():
            epoch, value = best
            style: dict[str, Any] = {
                "color": palette.green,
                "markersize": 8,
                "markerfacecolor": palette.background,
                "markeredgewidth": 1.8,
            }
            # In the legend: a text at the point would cover the curves.
            label = f"best  {metric.format(value)}"
            axes.plot(epoch, scale * value, "o", **style, clip_on=False, zorder=5, label=label)
        axes.yaxis.set_major_formatter("{x:g} %" if metric.percent else "{x:g}")
        add_legend(axes, palette, "no validation")

    def _draw_lr(self, axes: "Axes", palette: Palette) -> None:
        epochs, rates = self.points("train", "lr")
        if len(epochs):
            axes.plot(epochs, rates, color=palette.blue, linewidth=1.8)
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter("{x:g}")
        add_legend(axes, palette, "no learning rate recorded")

    def _draw_throughput(self, axes: "Axes", palette: Palette) -> None:
        epochs, speeds = self.points("train", "images_per_second")
        if len(epochs):
            axes.plot(epochs, speeds, color=palette.blue, linewidth=1.0, alpha=0.8)
            axes.set_ylim(0, max(1.25 * float(np.percentile(speeds, 99)), 1e-9))
            axes.set_title(f"median {np.median(speeds):,.0f}", loc="right", color=palette.muted, fontsize=9)
            axes.yaxis.set_major_formatter("{x:,.0f}")
        add_legend(axes, palette, "no throughput recorded")

    def _draw_other(self, axes: "Axes", palette: Palette, name: str) -> None:
        """Draw a metric of the task, with that of a constant prediction if there is one."""
        style_axes(axes, name.replace("_", " "), palette)
        axes.tick_params(labelsize=8)
        axes.xaxis.set_major_formatter("{x:g}")
        epochs, values = self.smooth_points(name)
        if len(epochs):
            axes.plot(epochs, values, color=palette.blue, linewidth=1.4)
        last = values[-1:]
        for prefix, color, style in (*((prefix, palette.muted, "--") for prefix in CONSTANTS), ("", palette.orange, "-")):
            epochs, values = self.points("validation", prefix + name)
            if len(epochs):
                marks = marker_style(values) if not prefix else {}
                axes.plot(epochs, values, style, color=color, linewidth=1.4, **marks | ({"markersize": 3} if marks else {}))
        for value in values[-1:] if len(values) else last:
            axes.set_title(format_significant(value), loc="right", color=palette.muted, fontsize=9)
        axes.set_xlim(0, self.total or 1)

    def _draw_band(self, axes: "Axes", palette: Palette, name: str) -> None:
        if not self.band:
            return
        scale = 100 if name == "top1" else 1
        low, high = (np.array(getattr(self.band, f"{name}_{end}"), float) * scale for end in ("low", "high"))
        if not np.isnan(low).all():
            epochs = np.array(self.band.progress) * self.total
            label = f"{self.band.seeds} reference seeds"
            axes.fill_between(epochs, low, high, color=palette.muted, alpha=0.22, linewidth=0, label=label)
