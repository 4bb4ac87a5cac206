"""Figures of embeddings: two principal directions of the images of a class, and scores by level (Grafit, Figures 2.4 and 2.5)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.atomic_files import atomic_write
from vitrail.errors import UserError
from vitrail.evaluation.probes.levels import Grid
from vitrail.evaluation.probes.spectrum import check_plot_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_COLORS = 20  # classes with a color of their own; images of smaller ones are gray


def principal_directions(vectors: Tensor, count: int = 2) -> Tensor:
    """Coordinates [N, count] of normalized features [N, D] along their first principal directions; signs are fixed."""
    if len(vectors) < 3:
        raise UserError(f"A scatter plot needs at least three images, and there are {len(vectors)}: choose another class.")
    centered = F.normalize(vectors.double().cpu(), dim=1)
    centered = centered - centered.mean(0)
    basis = torch.linalg.svd(centered, full_matrices=False).Vh[:count]
    signs = basis.gather(1, basis.abs().argmax(1, keepdim=True)).sign()
    points: Tensor = centered @ (basis * signs).T
    return points


def scatter_figure(vectors: Tensor, labels: Tensor, names: Sequence[str], title: str) -> "Figure":
    """A point per image, in the color of its class; the classes with most images are in the legend."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    points, values = principal_directions(vectors).numpy(), labels.cpu().numpy()
    found, counts = np.unique(values[values >= 0], return_counts=True)
    shown = found[np.argsort(-counts, kind="stable")][:MAX_COLORS]
    figure = Figure((7, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="first principal direction", ylabel="second principal direction")
    axes.set_title(plain(title))
    others = ~np.isin(values, shown)
    if others.any():
        axes.scatter(points[others, 0], points[others, 1], s=8, color="#c8c8cc", label="others")
    for number, value in enumerate(shown):
        own = values == value
        axes.scatter(points[own, 0], points[own, 1], s=12, color=colormaps["tab20"](number % 20), label=plain(names[value]))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    return figure


def level_figure(grid: Grid) -> "Figure":
    """As Figure 2.4: for every score, training and evaluation at the same level, and evaluation at the finest level.

    Models of one name are one curve; the training levels are the horizontal axis.
    """
    from matplotlib.figure import Figure

    figure = Figure((10, 3.6 * len(grid.scores)), layout="constrained")
    axes = figure.subplots(len(grid.scores), 2, squeeze=False)
    for row, score in enumerate(grid.scores):
        for column, title in enumerate(("evaluated at the training level", f"evaluated at {grid.test[-1]}")):
            draw_curves(axes[row][column], grid, score, same_level=not column)
            axes[row][column].set(title=plain(title), xlabel="training level", ylabel=f"{score}, %")
            axes[row][column].grid(alpha=0.3)
    axes[0][-1].legend(fontsize=8)
    return figure


def draw_curves(axes: Any, grid: Grid, score: str, same_level: bool) -> None:
    curves: dict[str, list[tuple[int, float]]] = {}
    levels = {level: place for place, level in enumerate(grid.test)}
    for column, (name, train) in enumerate(zip(grid.models, grid.train, strict=True)):
        if train in levels:
            row = levels[train] if same_level else len(grid.test) - 1
            curves.setdefault(method_name(name, train), []).append((levels[train], 100 * grid.scores[score][row][column]))
    for name, points in curves.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=plain(name))
    axes.set_xticks(range(len(grid.test)), [plain(level) for level in grid.test])


def method_name(name: str, level: str) -> str:
    """The name of weights without their level: runs/grafit_genus and runs/grafit_family are one curve."""
    path = Path(name)
    base = path.parent.name if path.suffix == ".safetensors" and path.stem in ("best", "last") else path.stem
    return base.replace(level, "").strip("-_ ") or base


def plain(text: str) -> str:
    """Text that matplotlib does not read as a formula."""
    return text.replace("$", r"\$")


def save_figure(figure: "Figure", path: Path) -> None:
    check_plot_path(path)
    atomic_write(path, lambda file: figure.savefig(file, format=path.suffix[1:].lower(), dpi=150))


def figure_pixels(figure: "Figure") -> np.ndarray:
    """The pixels uint8 [height, width, 3] of a figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[:, :, :3])


def choose_family(fine: np.ndarray, coarse: np.ndarray, names: Mapping[int, str]) -> tuple[np.ndarray, str]:
    """Images of the coarse class with most images among those with two fine classes or more, and its name; all without any."""
    best, chosen = 0, -1
    for value in np.unique(coarse[coarse >= 0]):
        own = (coarse == value) & (fine >= 0)
        if own.sum() > best and len(np.unique(fine[own])) > 1:
            best, chosen = int(own.sum()), int(value)
    return (np.ones(len(fine), dtype=bool), "") if chosen < 0 else (coarse == chosen, names[chosen])
