"""How many directions features use: the eigenvalues of their covariance, and the share of energy that the first ones hold.

The flatter the curve, the richer the features; a classifier's features bend near its number of classes (Grafit, arXiv
2011.12982, Figure 2.1).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.atomic_files import write_aside
from vitrail.errors import UserError

ROWS = 1 << 14
SHARES = (0.5, 0.8, 0.9, 0.95, 0.99)


class Spectrum(NamedTuple):
    eigenvalues: Tensor  # float64 [D], largest first: the variance along each principal direction
    images: int

    @property
    def energy(self) -> Tensor:
        """[D]: the share of all variance in the first 1, 2, ... D directions."""
        return self.eigenvalues.cumsum(0) / self.eigenvalues.sum()

    def components(self, share: float) -> int:
        """How many directions hold that share of the variance."""
        # A hair less than the share: sums of shares end in 1 - 1e-16.
        return int(torch.searchsorted(self.energy, share - 1e-12)) + 1

    @property
    def effective(self) -> float:
        """exp of the entropy of the shares: as many equal directions would be as spread out."""
        share = self.eigenvalues / self.eigenvalues.sum()
        return float(torch.special.entr(share).sum().exp())


def spectrum(vectors: Tensor) -> Spectrum:
    """Of features [N, D]; computed in float64, a part at a time."""
    if len(vectors) < 2:
        raise UserError("A spectrum needs at least two images: give more.")
    width, device = vectors.shape[1], vectors.device
    parts = vectors.split(ROWS)
    mean = torch.zeros(width, dtype=torch.float64, device=device)
    for part in parts:
        mean += part.double().sum(0)
    mean /= len(vectors)
    covariance = torch.zeros(width, width, dtype=torch.float64, device=device)
    for part in parts:
        centred = part.double() - mean
        covariance += centred.T @ centred
    values = torch.linalg.eigvalsh(covariance / (len(vectors) - 1)).flip(0).clamp(min=0).cpu()
    if not values[0] > 0:
        raise UserError("The features of all images are the same: they have no spectrum.")
    return Spectrum(values, len(vectors))


def check_figure(path: Path) -> None:
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UserError(f"A figure ends in .png, .svg or .pdf, not {path.name!r}.")


def draw(found: Mapping[str, Spectrum], path: Path) -> None:
    """The curves of cumulative energy, one per name, as PNG, SVG or PDF by the path's ending."""
    check_figure(path)
    from matplotlib.figure import Figure

    figure = Figure((6, 4), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="principal directions", ylabel="share of the variance", ylim=(0, 1.02))
    for name, each in found.items():
        axes.plot(range(1, len(each.eigenvalues) + 1), each.energy.numpy(), label=name.replace("$", r"\$"))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    write_aside(path, lambda side: figure.savefig(side, format=path.suffix[1:].lower(), dpi=150))
