"""Charts: colors and style shared by all plots, and PNG output."""

import io
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Palette:
    """Colors of a chart, distinguishable for color-blind readers."""

    background: str
    foreground: str
    muted: str
    grid: str
    blue: str
    orange: str
    green: str


LIGHT = Palette("#ffffff", "#24292f", "#6e7781", "#e6e8eb", "#0969da", "#d9730d", "#1a7f5a")
DARK = Palette("#16181d", "#e6e8eb", "#8b949e", "#2b2f36", "#58a6ff", "#f0a050", "#4cc38a")


def series_colors(count: int) -> list[str]:
    """A color for each series of a chart: those of the light palette for up to three, else distinct ones of a color map."""
    if count <= 3:
        return [LIGHT.blue, LIGHT.orange, LIGHT.green][:count]
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(color) for color in colormaps["viridis"](np.linspace(0, 0.95, count))]


@contextmanager
def new_figure(palette: Palette, size: tuple[float, float] | None = None) -> Iterator["Figure"]:
    """Yield a figure to draw on, independent of pyplot's global state and of the user's matplotlib settings."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.family": "DejaVu Sans", "font.size": 10, "axes.unicode_minus": False, "text.usetex": False}):
        yield Figure(figsize=size, dpi=150, facecolor=palette.background)


def render_png(figure: "Figure") -> bytes:
    """Render a figure as PNG with 256 colors, chosen so that gray text stays gray beside colored images."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3]
    file = io.BytesIO()
    few = Image.fromarray(np.ascontiguousarray(pixels)).quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(file, "PNG", optimize=True)
    return file.getvalue()


def style_axes(axes: "Axes", title: str, palette: Palette) -> None:
    axes.set_facecolor(palette.background)
    axes.set_title(title, loc="left", color=palette.foreground, fontweight="bold", fontsize=11, parse_math=False)
    axes.grid(color=palette.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=palette.muted, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def add_legend(axes: "Axes", palette: Palette, placeholder: str) -> None:
    """Add a legend where it covers the fewest points, or the placeholder text if nothing was plotted."""
    if not axes.lines:
        axes.text(0.5, 0.5, placeholder, transform=axes.transAxes, ha="center", va="center", color=palette.muted)
        axes.tick_params(labelleft=False)
    elif axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", frameon=False, labelcolor=palette.foreground, fontsize=9)


def use_integer_ticks(axes: "Axes") -> None:
    """Label only whole numbers of the x axis, such as layers."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def marker_style(values: Sized) -> dict[str, Any]:
    """Return plot arguments that mark each point if there are few: a line through a single point would be invisible."""
    return {"marker": "o", "markersize": 4, "clip_on": False} if len(values) <= 40 else {}
