"""Eigenvalues against NumPy's singular values, and known spectra."""

import math

import numpy as np
import pytest
import torch

from vitrail.errors import UserError
from vitrail.evaluation.probes import spectrum as spectrum_module
from vitrail.evaluation.probes.spectrum import compute_spectrum, plot_spectra


@pytest.mark.parametrize("rows", [1 << 14, 13])
@pytest.mark.parametrize(("count", "width"), [(200, 7), (5, 12)])
def test_eigenvalues_against_singular_values(monkeypatch, rows, count, width):
    monkeypatch.setattr(spectrum_module, "ROWS", rows)
    x = np.random.default_rng(0).normal(3.0, 2.0, (count, width)).astype(np.float32)
    found = compute_spectrum(torch.from_numpy(x))
    centred = x.astype(np.float64) - x.astype(np.float64).mean(0)
    expected = np.zeros(width)
    values = np.linalg.svd(centred, compute_uv=False) ** 2 / (count - 1)
    expected[: len(values)] = values[:width]
    assert np.allclose(found.eigenvalues.numpy(), expected, rtol=1e-9, atol=1e-9)
    assert np.allclose(found.energy.numpy(), expected.cumsum() / expected.sum())
    assert found.images == count


def test_spectra_that_are_known():
    axes = torch.eye(8).repeat(2, 1) * torch.tensor([1.0, -1.0]).repeat_interleave(8)[:, None]
    flat = compute_spectrum(axes)
    assert flat.effective == pytest.approx(8)
    assert [flat.components(share) for share in (0.125, 0.5, 0.9, 1.0)] == [1, 4, 8, 8]
    line = compute_spectrum(torch.arange(10.0)[:, None] * torch.tensor([[1.0, 2.0, -1.0]]) + 5)
    assert line.components(0.99) == 1
    assert line.effective == pytest.approx(1, abs=1e-6)


def test_more_directions_make_a_flatter_curve():
    rng = np.random.default_rng(0)
    few, many = (torch.from_numpy(rng.normal(size=(300, rank)) @ rng.normal(size=(rank, 32))) for rank in (4, 20))
    assert (compute_spectrum(few).energy >= compute_spectrum(many).energy - 1e-12).all()
    assert compute_spectrum(few).components(0.99) <= 4 < compute_spectrum(many).components(0.99)
    assert math.isclose(float(compute_spectrum(few).energy[-1]), 1)


def test_features_without_variance():
    with pytest.raises(UserError, match="at least two images"):
        compute_spectrum(torch.ones(1, 3))
    with pytest.raises(UserError, match="are equal"):
        compute_spectrum(torch.ones(5, 3))


def test_curves_are_drawn(tmp_path):
    found = {"a $b_c$": compute_spectrum(torch.randn(20, 5)), "[x]": compute_spectrum(torch.randn(20, 9))}
    for ending in ("png", "svg"):
        plot_spectra(found, tmp_path / f"curves.{ending}")
    assert (tmp_path / "curves.png").read_bytes()[1:4] == b"PNG"
    assert "principal directions" in (tmp_path / "curves.svg").read_text() or (tmp_path / "curves.svg").stat().st_size > 5000
    with pytest.raises(UserError, match=r"is a \.png"):
        plot_spectra(found, tmp_path / "curves.txt")
