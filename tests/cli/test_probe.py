"""vitrail embed, probe and suite on the command line, in this process: a new one would import torch each time."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

import vitrail
from tests.images import make_folder, write_invalid_image


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("probe")
    torch.manual_seed(0)
    model = vitrail.create("deit_tiny_patch16", 3, 16, patch_size=4, width=16, depth=1, heads=2)
    model.class_names = ["[red]", "green", "blue"]
    vitrail.save(model, folder / "[b].safetensors")
    rows = ["path,label,coarse_label,split"]
    for split, count in (("train", 8), ("test", 3)):
        make_folder(folder / split, ["[red]", "green", "blue"], count)
        for name, coarse in (("[red]", "warm"), ("green", "cold"), ("blue", "cold")):
            rows += [f"{split}/{name}/{number:03}.png,{name},{coarse},{split}" for number in range(count)]
    (folder / "all.csv").write_text("\n".join(rows))
    return folder


@pytest.fixture
def cli_error(run_cli):
    """Exit code 2 and one sentence on standard error."""

    def errors(*words):
        result = run_cli(*words)
        assert (result.returncode, result.stdout) == (2, ""), result
        assert result.stderr.count("\n") == 1
        return result.stderr.strip()

    return errors


def test_help_has_examples(run_cli):
    for words in (("embed",), ("suite",), *(("probe", name) for name in ("knn", "linear", "fewshot", "retrieval", "spectrum"))):
        assert f"Example: vitrail {' '.join(words)}" in run_cli(*words, "--help").stdout
    for name in ("random-labels", "levels"):
        assert f"Example: vitrail probe {name}" in run_cli("probe", name, "--help").stdout


def test_help_does_not_import_torch():
    code = "import sys, vitrail.cli.main; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_knn_as_a_table_and_as_json(place, run_cli):
    result = run_cli("probe", "knn", place / "[b].safetensors", place / "all.csv", "-k", 3, "--workers", 0)
    assert result.returncode == 0, result.stderr
    assert "memory: 24 images (train), queries: 9 images (test), 3 classes, 16 features (pooled)." in result.stdout
    assert "top-5" not in result.stdout  # of three classes
    assert "from 9 images; chance 33.3 %." in result.stdout
    assert "Only 9 images: the interval is ± " in result.stdout
    words = ("--protocol", "grafit", "--labels", "coarse_label", "--vector", "mean", "--workers", 0, "--json")
    content = json.loads(run_cli("probe", "knn", place / "[b].safetensors", place / "all.csv", *words).stdout)
    assert (content["classes"], content["feature_kind"]["vector"], content["temperature"]) == (2, "mean", 0.05)
    assert content["k"] in content["chosen_from"]


def test_retrieval_three_ways(place, run_cli, cli_error):
    words = (place / "[b].safetensors", place / "all.csv", "--coarse", "coarse_label", "--workers", 0)
    content = json.loads(run_cli("probe", "retrieval", *words, "--json").stdout)
    assert 0 < content["cosine"]["mean"] <= content["oracle"]["mean"] <= 1
    assert "are not the 2 classes of coarse_label" in cli_error("probe", "retrieval", *words, "--coarse-by", "softmax")


def test_levels_and_their_names(place, run_cli, cli_error):
    file = place / "[b].safetensors"
    result = run_cli("probe", "levels", file, f"coarse_label={file}", place / "all.csv", "--workers", 0)
    assert result.returncode == 0, result.stderr
    assert all(text in result.stdout for text in ("coarse_label (2)", "label (3)", "[b].safetensors", "coarse to fine"))
    assert "has no level 'color'" in cli_error("probe", "levels", f"color={file}", place / "all.csv")


def test_embed_data_and_images(place, tmp_path, run_cli):
    file = place / "[b].safetensors"
    result = run_cli("embed", file, place / "all.csv", "--split", "test", "--out", tmp_path / "f.npy", "--workers", 0)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"9 images, 16 features each -> {tmp_path / 'f.npy'} and {tmp_path / 'f.json'}\n"
    image = place / "test" / "green" / "001.png"
    bad = write_invalid_image(tmp_path / "bad.png")
    result = run_cli("embed", file, image, bad, "--out", tmp_path / "one.npy")
    assert result.returncode == 1
    assert str(bad) in result.stderr
    names = json.loads((tmp_path / "f.json").read_text())["images"]
    row = np.load(tmp_path / "f.npy")[names.index(str(image))]
    assert np.allclose(np.load(tmp_path / "one.npy"), row[None], atol=1e-5)
    assert json.loads((tmp_path / "one.json").read_text())["labels"] == {}


def test_spectrum_and_its_figure(place, tmp_path, run_cli):
    file = place / "[b].safetensors"
    result = run_cli("probe", "spectrum", file, place / "all.csv", "--plot", tmp_path / "e.png", "--workers", 0, "--json")
    assert result.returncode == 0, result.stderr
    (found,) = json.loads(result.stdout).values()
    assert (found["images"], len(found["energy"])) == (24, 16)
    assert (tmp_path / "e.png").stat().st_size > 1000


def test_suite_prints_one_table_and_continues(place, run_cli):
    tasks = "tasks:\n- {name: '[x]', source: all.csv, probe: knn, settings: {k: 3}}\n- {source: all.csv, probe: retrieval}"
    (place / "tasks.yaml").write_text(tasks)
    words = ("suite", place / "tasks.yaml", place / "[b].safetensors", "--workers", 0)
    result = run_cli(*words)
    assert result.returncode == 0, result.stderr
    assert all(text in result.stdout for text in ("[x]", "all.csv retrieval", "mean"))
    assert len(list((place / "tasks.results").glob("*.json"))) == 2
    assert run_cli(*words).stdout == result.stdout
    content = json.loads(run_cli(*words, "--json").stdout)
    assert content["means"] == {
        str(place / "[b].safetensors"): pytest.approx({"mean": sum(r["score"] for r in content["results"]) / 2})
    }


def test_errors_are_one_line(place, tmp_path, cli_error):
    file, data = place / "[b].safetensors", place / "all.csv"
    make_folder(tmp_path / "one", ["only"], 12)
    make_folder(tmp_path / "flat" / "x", [""], 3)
    (tmp_path / "empty").mkdir()
    for words, reason in (
        (("probe", "knn", tmp_path / "gone.safetensors", data), "gone.safetensors"),
        (("probe", "knn", file, tmp_path / "empty"), "holds no images"),
        (("probe", "linear", file, tmp_path / "one"), "only one class"),
        (("probe", "fewshot", file, tmp_path / "flat" / "x"), "no labels"),
        (("probe", "knn", file, data, "--labels", "color"), "no labels called color; there are label, coarse_label"),
        (("probe", "knn", file, data, "--vector", "distillation"), "no distillation token"),
        (("probe", "knn", file, data, "--temperature", "-1"), "temperature must be above 0"),
        (("embed", file, data, "--out", tmp_path / "f.txt"), "as .parquet or .npy"),
    ):
        assert reason in cli_error(*words)
