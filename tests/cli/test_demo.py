"""`vitrail demo` on a few of the photographs."""

import contextlib
import io
import json
import re
import shutil
import sys

import numpy as np
import pytest

from vitrail.cli import main
from vitrail.cli.demo import own_name
from vitrail.data.datasets import lookup
from vitrail.data.datasets.pets import open_pets
from vitrail.data.source import Subset


def small_pets():
    """Three images of each breed to train, one to validate, two to test: a demo in seconds."""
    whole = open_pets()
    return {
        split: Subset(part, np.sort(np.concatenate([np.flatnonzero(part.label.values == breed)[:count] for breed in range(12)])))
        for (split, part), count in zip(whole.items(), (3, 1, 2), strict=True)
    }


@pytest.fixture(autouse=True)
def use_small_pets(tmp_path, monkeypatch):
    monkeypatch.setattr(lookup, "open_pets", small_pets)
    monkeypatch.chdir(tmp_path)


SHORT = ("demo", "--epochs", "1", "--seed", "3", "--device", "cpu")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished demo: its folder, which tests do not change, and its output."""
    place, printed = tmp_path_factory.mktemp("demo"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(lookup, "open_pets", small_pets)
        patch.setattr(sys, "argv", ["vitrail", *SHORT])
        patch.chdir(place)
        with pytest.raises(SystemExit) as ended:
            main.main()
    assert not ended.value.code
    return place / "runs" / "pets-demo", printed.getvalue()


def test_page_and_results(finished):
    folder, printed = finished
    assert "adapted from vitrail_tiny, attention only" in printed
    assert "24 test images of 12 breeds (± standard error), seed 3; chance level 8.3 %." in printed
    assert "vitrail train photos/\n" in printed
    page = (folder / "report.html").read_text()
    for title in ("Comparison", "Most confident errors", "Attention", "Confusions", "Next: your own images"):
        assert f"<h2>{title}</h2>" in page
    assert page.count("<tr><td>") == 2  # one row per training
    assert "CC BY-SA 4.0" in page
    assert page.count("data:image/jpeg") > 5
    assert not re.search(r"(src|href)=[\"'](?!data:)", page)
    runs = [json.loads((folder / name / "run.json").read_text()) for name in ("adapted", "scratch")]
    assert [sorted(run["baselines"]) for run in runs] == [["majority", "probe"], ["majority"]]
    recipes = [run["recipe"] for run in runs]
    different = {key for key in recipes[0] if recipes[0][key] != recipes[1][key]}
    assert different == {"model", "init", "optimizer"} or different == {"init", "optimizer"}
    assert (recipes[0]["init"]["weights"], recipes[0]["init"]["scope"]) == ("vitrail_tiny", "attention")
    assert (recipes[1]["init"]["weights"], recipes[1]["init"]["scope"]) == ("", "full")
    shares = re.findall(r"([\d.]+) % ± ([\d.]+)", printed)
    assert [float(share) for share, _ in shares] == [round(100 * run["test"]["top1"], 1) for run in runs]
    adapted, scratch = json.loads((folder / "results.json").read_text())["trainings"]
    assert adapted["test_images"] == scratch["test_images"] == 24
    assert adapted["trained_parameters"] < scratch["trained_parameters"] / 3
    assert scratch["trained_parameters"] == scratch["parameters"]


def test_an_interrupted_demo_continues(finished, run_cli, tmp_path):
    """The finished first training is kept; other settings are rejected."""
    shutil.copytree(finished[0], tmp_path / "mine")
    for path in (tmp_path / "mine" / "report.html", tmp_path / "mine" / "results.json"):
        path.unlink()
    shutil.rmtree(tmp_path / "mine" / "scratch")
    before = (tmp_path / "mine" / "adapted" / "best.safetensors").read_bytes()
    result = run_cli(*SHORT, "--out", "mine")
    assert result.returncode == 0, result.stderr
    assert "This run is finished" in result.stderr
    assert (tmp_path / "mine" / "adapted" / "best.safetensors").read_bytes() == before
    assert (tmp_path / "mine" / "report.html").exists()
    other = run_cli("demo", "--out", "mine", "--epochs", 1, "--seed", 9, "--device", "cpu")
    assert (other.returncode, other.stderr) == (
        2,
        "mine holds a demo with other --epochs or --seed: give the same, or a new folder with --out.\n",
    )


@pytest.mark.parametrize("name", ["pets", "vitrail_tiny"])
def test_names_of_data_and_weights_must_not_exist_as_files(run_cli, tmp_path, name):
    (tmp_path / name).mkdir()
    result = run_cli("demo")
    assert result.returncode == 2
    message = f"A file or folder called {name} is in the current folder and would be used instead: run the demo elsewhere.\n"
    assert result.stderr == message


@pytest.mark.parametrize("name", ["pets", "./vitrail_tiny"])
def test_output_folder_must_not_hide_data_or_weights(run_cli, tmp_path, name):
    result = run_cli("demo", "--out", name)
    assert result.returncode == 2
    assert "has the name of the demo's weights or images: give a folder with another name" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("epochs", ["inf", "-inf", "nan", "0", "-1", "1e9", "0.001"])
def test_invalid_epochs(run_cli, tmp_path, monkeypatch, epochs):
    monkeypatch.setattr(lookup, "open_pets", None)  # nothing is opened
    result = run_cli("demo", "--epochs", epochs)
    assert result.returncode == 2
    message = f"--epochs {float(epochs):g} is not a valid length: give a number from 0.1 to 10000.\n"
    assert (result.stdout, result.stderr) == ("", message)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["{", ""])
def test_unreadable_settings(run_cli, tmp_path, content):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "demo.json").write_text(content)
    result = run_cli("demo", "--out", "mine")
    assert (result.returncode, result.stderr) == (2, "mine/demo.json cannot be read: give a new folder with --out.\n")


def test_folder_with_other_files(run_cli, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    result = run_cli("demo", "--out", "mine")
    assert (result.returncode, result.stderr) == (2, "mine is not empty: give a new folder with --out.\n")
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["thesis.txt"]


def test_a_demo_that_cannot_start_leaves_no_folder(run_cli, tmp_path):
    assert run_cli("demo", "--out", "mine", "--epochs", 0.5).returncode == 2  # less than a step of so few images
    assert not (tmp_path / "mine").exists()


def test_next_command_uses_the_path_of_the_script(monkeypatch, tmp_path):
    """By its path where the shell does not find it."""
    script = tmp_path / "an env" / "bin" / "vitrail"
    script.parent.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(script.with_name("python")))
    assert own_name() == "vitrail"  # there is no such script: run from its source, for example
    script.touch(mode=0o755)
    assert own_name() == "'an env/bin/vitrail'"
    monkeypatch.setenv("PATH", str(script.parent))
    assert own_name() == "vitrail"
