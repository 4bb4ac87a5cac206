"""vitrail compare and ablate as a person types them."""

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
    assert said.err == f"{runs / 'begun'} is left out: it is not finished.\n"
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
    assert "did not have the same images" in said.err
    assert str(runs / "other") in said.out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metric": "speed"}, "choose from top1, top5, loss, test"),
        ({"at": "first"}, "choose from best, last"),
        ({"by": "name"}, "choose from recipe, folder"),
        ({"plot": Path("plot.pdf")}, "ends in .png"),
        ({"metric": "test"}, "no finished training"),
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
        ({}, "Nothing is left to compare"),
        ({"drop": ["clip"], "changes": ["seed=3"]}, "give the first with --seed"),
        ({"drop": ["clip"], "pick": True, "metric": "test"}, "would spoil the test images"),
        ({"drop": ["clip"], "source": "/no/such/place"}, "/no/such/place"),
        ({"drop": ["clip"], "devices": "cuda:x"}, "cuda:x"),
    ],
)
def test_what_cannot_be_ablated(options, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words):
        ablate(**{"recipe": "laptop", "seeds": 1, "seed": 0} | options)
    assert list(tmp_path.iterdir()) == []


def test_an_ablation_that_is_killed_goes_on(tmp_path, capsys):
    """Its trainings end with it; the same command leaves the finished ones alone and does the rest."""
    out = tmp_path / "out"
    words = ["ablate", "laptop", "digits", "--drop", "clip", "--seeds", "1", "--jobs", "2", "--epochs", "2", "--out", out]
    words += [word for change in SMALL for word in ("--set", change)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "vitrail", *map(str, words)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as first:
        line = next(line for line in first.stderr if " is done: " in line)
        first.send_signal(signal.SIGKILL)
    finished = out / line.split()[0]
    before = (finished / "run.json").stat().st_mtime_ns
    assert json.loads((finished / "run.json").read_text())["command"].startswith("vitrail train digits --recipe ")

    ablate("laptop", drop=["clip"], seeds=1, jobs=2, epochs=2, out=out, changes=SMALL, pick=True)
    said = capsys.readouterr()
    assert f"{line.split()[0]} begins" not in said.err
    assert (finished / "run.json").stat().st_mtime_ns == before
    assert "no-clip: optimizer.clip_grad_norm 1.0 -> 0.0" in said.out
    assert "\nvitrail train digits --recipe laptop --set architecture.width=16" in said.out
    found = json.loads((out / "table.json").read_text())
    assert [group["name"] for group in found["groups"]] == ["base", "no-clip"]

    compare([out], images=True, as_json=True)
    table = json.loads(capsys.readouterr().out)
    (answers,) = table["images"]
    assert answers["mean"] == pytest.approx(table["groups"][1]["difference"]["mean"])  # the images say what the runs have said
    assert answers["low"] <= answers["mean"] <= answers["high"]
    assert 0 < answers["mcnemar"] <= 1


def test_help_has_examples(typed):
    assert "vitrail compare runs/" in typed("compare", "--help").stdout
    assert "vitrail ablate laptop" in typed("ablate", "--help").stdout
