"""vitrail compare and vitrail ablate."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.training.runs import make_run
from vitrail.cli.compare import ablate, compare
from vitrail.errors import UserError
from vitrail.recipes import lookup

ROOT = Path(__file__).parents[2]
SMALL = ["architecture.width=16", "architecture.depth=1", "batch_size=128", "validation.every=50%"]


@pytest.fixture
def runs(tmp_path):
    """Two groups of three seeds, and one run that is not finished."""
    recipe = lookup("laptop")
    for name, tree, values in (
        ("plain", recipe, (0.90, 0.92, 0.91)),
        ("no-[bold]clip", recipe.set({"optimizer.clip_grad_norm": 0}), (0.94, 0.95, 0.96)),
    ):
        for seed, value in enumerate(values):
            facts = {"recipe": tree.set({"seed": seed}).to_dict(), "best": {"top1": value, "top5": 1.0, "loss": 1 - value}}
            make_run(tmp_path / name / f"seed-{seed}", seed, **facts)
    make_run(tmp_path / "begun", steps=None)
    return tmp_path


def test_a_table(runs, capsys):
    compare([runs / "plain", runs / "no-[bold]clip", runs / "begun"], plot=runs / "plot.png")
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0] == "Validation top-1 of the best weights, %; sd over seeds"
    assert lines[2].split() == ["plain", "3", "91.00", "1.00", "88.52", "to", "93.48"]
    assert lines[3].startswith("no-[bold]clip")
    assert "+4.00" in lines[3]
    assert "paired t-test by seed" in lines[4]
    assert lines[-1] == "no-[bold]clip: optimizer.clip_grad_norm 1.0 -> 0.0"
    assert said.err == f"{runs / 'begun'} is ignored: it is not finished.\n"
    assert np.asarray(Image.open(runs / "plot.png").convert("L")).std() > 5


def test_as_json(runs, capsys):
    compare([runs / "plain", runs / "no-[bold]clip"], metric="loss", as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert [group["n"] for group in found["groups"]] == [3, 3]
    assert found["groups"][1]["difference"]["mean"] == pytest.approx(-0.04)


def test_by_folder_and_other_images(runs, capsys):
    make_run(runs / "other" / "seed-0", data={"fingerprint": "xyz"})
    compare([runs / "plain", runs / "other"], by="folder")
    said = capsys.readouterr()
    assert "used different images" in said.err
    assert str(runs / "other") in said.out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metric": "speed"}, "choose from primary, top1, top5, knn, agreement, loss, test"),
        ({"at": "first"}, "choose best or last"),
        ({"by": "name"}, "choose recipe or folder"),
        ({"plot": Path("plot.pdf")}, "ends in .png"),
        ({"metric": "test"}, "no finished run"),
    ],
)
def test_what_cannot_be_compared(runs, options, words):
    with pytest.raises(UserError, match=words):
        compare([runs / "plain"], **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"drop": ["glue"]}, "--drop glue: there is no such part; choose from mixing"),
        ({"vary": ["optimizer.rat=1,2"]}, "no 'optimizer.rat'"),
        ({"vary": ["optimizer.lr"]}, "--vary takes KEY=VALUE"),
        ({}, "There is nothing to compare"),
        ({"drop": ["clip_grad_norm"], "changes": ["seed=3"]}, "give the first with --seed"),
        ({"drop": ["clip_grad_norm"], "pick": True, "metric": "test"}, "must not choose by the test images"),
        ({"drop": ["clip_grad_norm"], "source": "/no/such/place"}, "/no/such/place"),
        ({"drop": ["clip_grad_norm"], "device": "cuda:x"}, "cuda:x"),
    ],
)
def test_what_cannot_be_ablated(options, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words):
        ablate(**{"recipe": "laptop", "seeds": 1, "seed": 0} | options)
    assert list(tmp_path.iterdir()) == []


def test_an_ablation_that_was_killed_continues(tmp_path, capsys):
    """The same command does not repeat finished trainings."""
    out = tmp_path / "out"
    words = [
        "ablate",
        "laptop",
        "digits",
        "--drop",
        "clip_grad_norm",
        "--seeds",
        "1",
        "--epochs",
        "2",
        "--out",
        out,
    ]
    words += [word for change in SMALL for word in ("--set", change)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "vitrail", *map(str, words)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as first:
        next(line for line in first.stderr if line.startswith("no-clip_grad_norm, seed 0 (2 of 2)"))
        first.send_signal(signal.SIGKILL)
    finished = out / "base" / "seed-0"
    before = (finished / "run.json").stat().st_mtime_ns

    ablate("laptop", drop=["clip_grad_norm"], seeds=1, epochs=2, out=out, changes=SMALL, pick=True)
    said = capsys.readouterr()
    assert "no-clip_grad_norm, seed 0 (1 of 1)" in said.err
    assert "base, seed 0" not in said.err
    assert (finished / "run.json").stat().st_mtime_ns == before
    assert "no-clip_grad_norm: optimizer.clip_grad_norm 1.0 -> 0.0" in said.out
    assert "so there is no winner" in said.err  # two epochs are too few
    found = json.loads((out / "table.json").read_text())
    assert [group["name"] for group in found["groups"]] == ["base", "no-clip_grad_norm"]

    compare([out], images=True, as_json=True)
    table = json.loads(capsys.readouterr().out)
    (answers,) = table["images"]
    assert answers["mean"] == pytest.approx(table["groups"][1]["difference"]["mean"])  # the images say what the runs have said
    assert answers["low"] <= answers["mean"] <= answers["high"]
    assert 0 < answers["mcnemar"] <= 1


def test_help_has_examples(run_cli):
    assert "vitrail compare runs/" in run_cli("compare", "--help").stdout
    assert "vitrail ablate laptop" in run_cli("ablate", "--help").stdout
