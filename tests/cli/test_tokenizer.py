"""vitrail tokenizer train and info, and BEiT with the tokenizer that they write."""

import json
import re

import pytest
from typer.testing import CliRunner

import vitrail
from tests.images import make_image, write_invalid_image
from tests.trainers import CPU
from vitrail.cli import main
from vitrail.errors import UserError
from vitrail.tasks.tokenizer import open_tokenizer

SMALL = ["architecture.width=16", "architecture.depth=1", "task_options.width=8", "schedule.length=6 steps", "precision=fp32"]


def run_cli(*words):
    """What the command prints; errors as they are."""
    result = CliRunner().invoke(main.app, [*map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    settings = [f"--set={setting}" for setting in SMALL]
    command = ["tokenizer", "train", "digits", "--out", folder / "tok.safetensors", "--run", folder / "run", "--codes", 12]
    assert "codes are used, reconstruction error" in run_cli(*command, "--device=cpu", "--workers=0", *settings)
    return folder


def test_the_file_is_a_tokenizer_and_the_run_is_kept(trained):
    model = open_tokenizer(str(trained / "tok.safetensors"), CPU)
    assert model.architecture.classes == 12
    assert (trained / "tok.safetensors").read_bytes() == (trained / "run" / "best.safetensors").read_bytes()
    assert "Images and their reconstructions" in (trained / "run" / "report.html").read_text()
    best = json.loads((trained / "run" / "run.json").read_text())["best"]
    assert 1 <= best["codes_used"] <= 12
    assert 1 <= best["perplexity"] <= 12


def test_info(trained):
    usage = json.loads(run_cli("tokenizer", "info", trained / "tok.safetensors", "digits", "--device=cpu", "--json"))
    assert usage["codes"] == 12
    assert usage["patches"] == 1437 * 16
    assert 1 / 12 <= usage["most_frequent"] <= 1
    shown = run_cli("tokenizer", "info", trained / "tok.safetensors", "digits", "--device=cpu", "--split=test")
    assert "most frequent code" in shown
    assert f"{360 * 16:,} patches" in shown


def test_info_of_images_that_cannot_be_read(trained, tmp_path):
    command = ["tokenizer", "info", str(trained / "tok.safetensors"), str(tmp_path), "--device=cpu", "--workers=0"]
    write_invalid_image(tmp_path / "bad.png")
    with pytest.raises(UserError, match=r"No image of .* could be read"):
        CliRunner().invoke(main.app, command, catch_exceptions=False)
    make_image(tmp_path / "good.png")
    result = CliRunner().invoke(main.app, command, catch_exceptions=False)
    assert (result.exit_code, "16 patches" in result.output) == (1, True)


def test_beit_with_it_is_a_backbone_to_go_on_from(trained, tmp_path):
    small = {f"architecture.{name}": value for name, value in {"width": 16, "depth": 1, "heads": 2}.items()}
    changes = small | {"batch_size": 64, "precision": "fp32"}
    shared = {"workers": 0, "device": "cpu"}
    beit = vitrail.train(
        "digits",
        "beit_small",
        tokenizer=trained / "tok.safetensors",
        epochs=0.2,
        changes=changes,
        out=tmp_path / "beit",
        **shared,
    )
    assert {"masked_accuracy", "majority_code", "loss", "knn"} <= beit.best.keys()
    assert vitrail.load(beit.artifact).architecture.classes == 0
    test = json.loads((tmp_path / "beit" / "run.json").read_text())["test"]
    assert "knn" in test
    assert not {"loss", "masked_accuracy"} & test.keys()  # the head is of another step than the best weights
    labels = vitrail.train("digits", from_=tmp_path / "beit", epochs=0.2, out=tmp_path / "labels", **shared)
    assert labels.best["top1"] >= 0
    assert vitrail.load(labels.artifact).architecture.classes == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tokenizer", "train", "digits", "--out", "tok"], "give the name of a .safetensors file"),
        (["tokenizer", "train", "digits", "--out", "tok.safetensors", "--set", "task_options.width=0"], "width at least 1"),
        (["tokenizer", "info", "vitrail_tiny", "digits"], "vitrail_tiny is not a tokenizer: run `vitrail tokenizer train"),
        (["train", "digits", "--recipe", "beit_small"], "beit_small needs a tokenizer: run `vitrail tokenizer train"),
        (
            ["train", "digits", "--recipe", "beit_small", "--tokenizer", "no.safetensors"],
            "There is no tokenizer at no.safetensors",
        ),
        (["train", "digits", "--tokenizer", "no.safetensors"], "task_options.tokenizer has no effect on training from labels"),
    ],
)
def test_one_sentence_each(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=re.escape(message)):
        run_cli(*arguments, "--device=cpu")
    assert not list(tmp_path.iterdir())
