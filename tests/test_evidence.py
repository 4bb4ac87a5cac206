"""The claims can be trained: every cell of every claim builds, and one claim goes all the way to its table."""

import json

import pytest
import torch

from benchmarks.evidence.__main__ import main
from benchmarks.evidence.claims import CLAIMS
from vitrail.models.catalogue import create
from vitrail.recipes import lookup

NEEDS = {"distillation.teacher", "tokens.labels", "start.weights"}
CELLS = [(name, cell) for name, claim in CLAIMS.items() for cell in claim.cells]


@pytest.mark.parametrize(("name", "cell"), CELLS, ids=lambda part: part)
def test_a_cell_is_a_network(name, cell):
    claim = CLAIMS[name]
    changes = {key: value for key, value in (claim.base | claim.cells[cell]).items() if key not in NEEDS}
    changes.pop("first", None)
    recipe = lookup(claim.recipe).set(changes)
    if claim.recipe == "finetune":
        return
    size, patch = (64, 8) if claim.data == "tiny-imagenet" else (32, 4)
    parts = {"patch_size": patch} | recipe.architecture
    with torch.device("meta"):
        create(recipe.model, 10, size, **parts)


def test_from_cells_to_a_table(tmp_path, capsys):
    small = ["--set=architecture.depth=2", "--set=architecture.width=48", "--set=architecture.heads=2", "--set=batch=64"]
    words = [
        "run",
        "class attention",
        "--data=digits",
        "--epochs=1",
        "--seeds=2",
        "--cells",
        "class token",
        "mean",
        "--device=cpu",
    ]
    words += ["--set=precision=fp32", *small, f"--results={tmp_path}"]
    main(words)
    file = tmp_path / "class-attention.json"
    content = file.read_text()
    runs = json.loads(content)["runs"]
    assert [(run["cell"], run["seed"]) for run in runs] == [("class token", 0), ("mean", 0), ("class token", 1), ("mean", 1)]
    assert all(0 <= run["top1"] <= 1 and run["versions"]["torch"] and run["seconds"] > 0 for run in runs)
    main(words)  # everything is there already
    assert file.read_text() == content
    capsys.readouterr()
    main(["table", f"--results={tmp_path}"])
    page = capsys.readouterr().out
    assert "## Class attention" in page
    assert "| class token | 0.1 M |" in page
    assert page.count(" | 2 | ") == 2


def test_a_cell_of_two_stages(tmp_path):
    small = ["--set=architecture.depth=1", "--set=architecture.width=48", "--set=architecture.heads=2", "--set=batch=64"]
    words = ["run", "resolution", "--data=digits", "--epochs=1", "--seeds=1", "--device=cpu", "--set=precision=fp32"]
    main([*words, *small, f"--results={tmp_path}"])
    once, twice = json.loads((tmp_path / "resolution.json").read_text())["runs"]
    assert once["size"] == twice["size"] == [32, 32]
    assert abs(once["steps"] - twice["steps"]) <= 2
