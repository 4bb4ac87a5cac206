"""The curves of a run as an image: losses, accuracies, learning rate and speed over the epochs."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from PIL import Image

from vitrail.runs.reference_curves import Band
from vitrail.training.metrics import Smoothed, figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = tuple[np.ndarray, np.ndarray]  # epochs and values


@dataclass(frozen=True)
class Look:
    """The colors of an image; the hues can be told apart by color-blind readers."""

    paper: str
    ink: str
    faint: str
    grid: str
    blue: str
    orange: str
    green: str


LIGHT = Look("#ffffff", "#24292f", "#6e7781", "#e6e8eb", "#0969da", "#d9730d", "#1a7f5a")
DARK = Look("#16181d", "#e6e8eb", "#8b949e", "#2b2f36", "#58a6ff", "#f0a050", "#4cc38a")


@dataclass(frozen=True)
class Curves:
    """A run's lines as columns, ready to draw; `total` is the number of epochs that the whole training has, `best` the one whose
    weights it kept, as the run itself says.
    """

    lines: Sequence[dict[str, Any]]
    total: float
    band: Band | None = None
    best: float | None = None

    def of(self, kind: str, name: str) -> Points:
        """Epochs and values of one quantity, finite ones only."""
        found = []
        for line in self.lines:
            value = line.get(name, line.get("speed", {}).get(name))
            if line["kind"] == kind and value is not None and math.isfinite(value):
                found.append((line["epoch"], value))
        columns = np.array(found, float).reshape(-1, 2)
        return columns[:, 0], columns[:, 1]

    def smooth_losses(self) -> Points:
        """The training loss as the display and the bands see it."""
        epochs, losses = self.of("train", "loss")
        smoothed = Smoothed()
        return epochs, np.array([smoothed.add(epoch / self.total, loss) for epoch, loss in zip(epochs, losses, strict=True)])

    def draw(self, look: Look = LIGHT, columns: int = 2) -> bytes:
        """The image as PNG; one column is for telephones."""
        # The object interface rather than pyplot: no global state, no display needed, whatever the user has set up.
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        with rc_context({"font.family": "DejaVu Sans", "font.size": 10, "axes.unicode_minus": False, "path.simplify": True}):
            size, heights = ((11, 6.6), (3, 2)) if columns == 2 else ((5, 12), (3, 3, 2, 2))
            figure = Figure(figsize=size, dpi=150, facecolor=look.paper)
            # Margins by hand: matplotlib's own search for them takes as long as everything else.
            width, height = size
            figure.subplots_adjust(0.8 / width, 0.6 / height, 1 - 0.2 / width, 1 - 0.4 / height, wspace=0.18, hspace=0.22)
            panels = figure.subplots(len(heights), columns, sharex=True, squeeze=False, height_ratios=heights)
            for axes, title, draw in zip(
                panels.flat,
                ("Loss", "Validation accuracy", "Learning rate", "Images per second"),
                (self._losses, self._accuracies, self._rate, self._speed),
                strict=True,
            ):
                dress(axes, title, look)
                draw(axes, look)
            for axes in panels[-1]:
                axes.set_xlabel("epoch", color=look.faint)
                axes.set_xlim(0, self.total or 1)
            return png_of(figure)

    def _losses(self, axes: "Axes", look: Look) -> None:
        epochs, losses = self.of("train", "loss")
        tested_epochs, tested = self.of("validation", "loss")
        self._shade(axes, look, "loss")
        if len(epochs):
            smooth = self.smooth_losses()[1]
            axes.plot(epochs, losses, color=look.blue, alpha=0.22, linewidth=0.8)
            axes.plot(epochs, smooth, color=look.blue, linewidth=1.8, label=f"training  {figures(smooth[-1])}")
        if len(tested_epochs):
            label = f"validation  {figures(tested[-1])}"
            axes.plot(tested_epochs, tested, color=look.orange, linewidth=1.8, label=label, **dots(tested))
        positive = np.concatenate([losses, tested])
        # A loss that falls a hundredfold is a flat line on an even scale.
        if len(positive) and positive.min() > 0 and positive.max() > 50 * positive.min():
            axes.set_yscale("log")
        close(axes, look, "no loss was recorded")

    def _accuracies(self, axes: "Axes", look: Look) -> None:
        self._shade(axes, look, "top1")
        for name, label, color in (("top5", "top-5", look.blue), ("top1", "top-1", look.green)):
            epochs, shares = self.of("validation", name)
            if len(epochs):
                axes.plot(
                    epochs, 100 * shares, color=color, linewidth=1.8, label=f"{label}  {100 * shares[-1]:.2f} %", **dots(shares)
                )
        if best := self.marked():
            epoch, share = best
            axes.plot(epoch, 100 * share, "o", color=look.green, ms=8, mfc=look.paper, mew=1.8, clip_on=False, zorder=5)
            axes.annotate(
                f"best {100 * share:.2f} %",
                (epoch, 100 * share),
                (0, -26),
                textcoords="offset points",
                ha="right" if epoch > self.total * 0.8 else "left" if epoch < self.total * 0.2 else "center",
                color=look.green,
            )
        axes.yaxis.set_major_formatter("{x:g} %")
        close(axes, look, "no validation was made", "lower right")

    def marked(self) -> tuple[float, float] | None:
        """Epoch and top-1 of the best, where the curve has it."""
        epochs, shares = self.of("validation", "top1")
        if not len(epochs) or self.best is None:
            return None
        place = int(abs(epochs - self.best).argmin())
        return float(epochs[place]), float(shares[place])

    def _rate(self, axes: "Axes", look: Look) -> None:
        epochs, rates = self.of("train", "lr")
        if len(epochs):
            axes.plot(epochs, rates, color=look.blue, linewidth=1.8)
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter("{x:g}")
        close(axes, look, "no learning rate was recorded")

    def _speed(self, axes: "Axes", look: Look) -> None:
        epochs, speeds = self.of("train", "images_per_second")
        if len(epochs):
            axes.plot(epochs, speeds, color=look.blue, linewidth=1.0, alpha=0.8)
            middle = float(np.median(speeds))
            axes.set_ylim(0, max(1.25 * float(np.percentile(speeds, 99)), 1e-9))
            axes.set_title(f"median {middle:,.0f}", loc="right", color=look.faint, fontsize=9)
            axes.yaxis.set_major_formatter("{x:,.0f}")
        close(axes, look, "no speed was recorded")

    def _shade(self, axes: "Axes", look: Look, name: str) -> None:
        if not self.band:
            return
        scale = 100 if name == "top1" else 1
        low, high = (np.array(getattr(self.band, f"{name}_{end}"), float) * scale for end in ("low", "high"))
        if not np.isnan(low).all():
            epochs = np.array(self.band.progress) * self.total
            label = f"{self.band.seeds} reference seeds"
            axes.fill_between(epochs, low, high, color=look.faint, alpha=0.22, linewidth=0, label=label)


def dots(values: np.ndarray) -> dict[str, Any]:
    """Validations are few at times: then each is marked, and a single one is seen at all."""
    return {"marker": "o", "markersize": 4, "clip_on": False} if len(values) <= 40 else {}


def png_of(figure: "Figure") -> bytes:
    """The figure in 128 colors, which lines and letters need no more of."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3]
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).quantize(128, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return file.getvalue()


def dress(axes: "Axes", title: str, look: Look) -> None:
    axes.set_facecolor(look.paper)
    axes.set_title(title, loc="left", color=look.ink, fontweight="bold", fontsize=11)
    axes.grid(color=look.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=look.faint, length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def close(axes: "Axes", look: Look, empty: str, place: Literal["upper right", "lower right"] = "upper right") -> None:
    """The legend, or a word about why there is nothing to see."""
    if not axes.lines:
        axes.text(0.5, 0.5, empty, transform=axes.transAxes, ha="center", va="center", color=look.faint)
        axes.tick_params(labelleft=False)
    elif axes.get_legend_handles_labels()[0]:
        axes.legend(loc=place, frameon=False, labelcolor=look.ink, fontsize=9)
