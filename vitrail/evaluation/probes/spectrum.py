"""Spectrum of features: the eigenvalues of their covariance, and the share of the variance in the first principal directions.

The flatter the curve, the richer the features; the curve of a classifier's features bends near its number of classes (Grafit,
arXiv 2011.12982, Figure 2.1).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.atomic_files import atomic_write
from vitrail.errors import UserError

ROWS = 1 << 14
SHARES = (0.5, 0.8, 0.9, 0.95, 0.99)


class Spectrum(NamedTuple):
    eigenvalues: Tensor  # float64 [D], largest first: the variance along each principal direction
    images: int

    @property
    def energy(self) -> Tensor:
        """[D]: the share of the variance in the first 1, 2, ... D directions."""
        return self.eigenvalues.cumsum(0) / self.eigenvalues.sum()

    def components(self, share: float) -> int:
        """The number of directions that contain this share of the variance."""
        return int(torch.searchsorted(self.energy, share - 1e-12)) + 1  # sums of shares are 1 only up to rounding

    @property
    def effective(self) -> float:
        """The effective number of directions: exp of the entropy of their shares."""
        share = self.eigenvalues / self.eigenvalues.sum()
        return float(torch.special.entr(share).sum().exp())


def compute_spectrum(vectors: Tensor) -> Spectrum:
    """The spectrum of features [N, D], in float64."""
    if len(vectors) < 2:
        raise UserError("A spectrum needs at least two images: give more.")
    width, device = vectors.shape[1], vectors.device
    chunks = vectors.split(ROWS)
    mean = torch.zeros(width, dtype=torch.float64, device=device)
    for chunk in chunks:
        mean += chunk.double().sum(0)
    mean /= len(vectors)
    covariance = torch.zeros(width, width, dtype=torch.float64, device=device)
    for chunk in chunks:
        centered = chunk.double() - mean
        covariance += centered.T @ centered
    values = torch.linalg.eigvalsh(covariance / (len(vectors) - 1)).flip(0).clamp(min=0).cpu()
    if not values[0] > 0:
        raise UserError("The features of all images are equal: their variance is 0.")
    return Spectrum(values, len(vectors))


def check_plot_path(path: Path) -> None:
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UserError(f"A plot is a .png, .svg or .pdf file, not {path.name!r}.")


def plot_spectra(spectra: Mapping[str, Spectrum], path: Path) -> None:
    """Plot the cumulative shares of the variance, one curve per name, as PNG, SVG or PDF."""
    check_plot_path(path)
    from matplotlib.figure import Figure

    figure = Figure((6, 4), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="principal directions", ylabel="share of the variance", ylim=(0, 1.02))
    for name, spectrum in spectra.items():
        axes.plot(range(1, len(spectrum.eigenvalues) + 1), spectrum.energy.numpy(), label=name.replace("$", r"\$"))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    atomic_write(path, lambda file: figure.savefig(file, format=path.suffix[1:].lower(), dpi=150))
