"""Figures of embeddings: principal directions, curves by level, and the commands that draw them."""

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.images import make_folder
from vitrail.errors import UserError
from vitrail.evaluation.embedding_figures import choose_family, level_figure, method_name, principal_directions
from vitrail.evaluation.probes.levels import Grid


def test_principal_directions_are_those_of_the_largest_variance():
    """Points on a circle: their coordinates, rotated."""
    angles = torch.arange(12) * torch.pi / 6
    plane = torch.linalg.qr(torch.randn(5, 2, dtype=torch.float64)).Q
    points = torch.stack([angles.cos(), angles.sin()], 1).double()
    found = principal_directions(3 * points @ plane.T)
    torch.testing.assert_close(found @ found.T, points @ points.T)
    with pytest.raises(UserError, match="at least three images"):
        principal_directions(torch.ones(2, 5))


def test_the_family_with_most_images_and_two_classes_is_shown():
    fine, coarse = np.array([0, 0, 0, 0, 1, 2, 2, -1]), np.array([0, 0, 0, 0, 1, 1, 1, 1])
    own, name = choose_family(fine, coarse, {0: "one", 1: "two"})
    assert (own.tolist(), name) == ([False] * 4 + [True] * 4, "two")


def test_curves_have_a_point_for_each_training_level():
    scores = {"knn": [[0.9, 0.8, 0.7], [0.2, 0.6, 0.1]]}
    models, levels = (
        ["runs/grafit_coarse/best.safetensors", "runs/grafit_fine", "runs/baseline_coarse"],
        ["coarse", "fine", "coarse"],
    )
    figure = level_figure(Grid(models, levels, ["coarse", "fine"], scores))
    same, finest = figure.axes
    curves = {line.get_label(): line.get_xydata().tolist() for line in same.lines}
    assert curves == {"grafit": [[0, 90], [1, pytest.approx(60)]], "baseline": [[0, pytest.approx(70)]]}
    assert finest.lines[0].get_ydata().tolist() == [20, 60]
    assert method_name("weights.pth", "coarse") == "weights"


def test_the_commands_draw(tmp_path, run_cli, cli_error):
    photos = make_folder(tmp_path / "photos", count=6)
    (tmp_path / "map.csv").write_text("red,warm\ngreen,cold\nblue,cold\n")
    weights = tmp_path / "tiny.safetensors"
    vitrail.save(vitrail.create("vitrail_mini", 0, 16, width=16, depth=1), weights)
    levels, scatter = tmp_path / "levels.png", tmp_path / "scatter.png"
    options = ["--device", "cpu", "--workers", 0]
    out = run_cli(
        "probe", "levels", f"label={weights}", photos, "--map", tmp_path / "map.csv", "--score", "knn", "--plot", levels, *options
    )
    assert out.returncode == 0, out.stderr
    assert "coarse_label (2)" in out.stdout
    assert Image.open(levels).size[0] > 500
    out = run_cli("probe", "scatter", weights, photos, "--within", "label=red", "--plot", scatter, *options)
    assert "6 images ->" in out.stdout
    assert Image.open(scatter).size[0] > 500
    assert "There is no class 'pink'" in cli_error(
        "probe", "scatter", weights, photos, "--within", "label=pink", "--plot", scatter
    )
    assert "no coarser class" in cli_error("probe", "knn", weights, photos, "--map", write(tmp_path / "few.csv", "red,warm\n"))


def write(path, text):
    path.write_text(text)
    return path
