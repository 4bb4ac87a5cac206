"""The end of a training without labels: warnings, messages, what to do next, and that commands on several runs work."""

import functools
import json
import re
import shlex

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import vitrail
from vitrail.cli.main import app
from vitrail.data.datasets.lookup import open_splits
from vitrail.errors import UserError
from vitrail.recipes import lookup
from vitrail.runs import finish
from vitrail.runs.comparison import group_results
from vitrail.runs.curves import Curves
from vitrail.runs.finish import list_warnings
from vitrail.runs.plan import plan
from vitrail.runs.predictions import compare_predictions
from vitrail.runs.request import TrainRequest
from vitrail.runs.results import choose_metric, read_results
from vitrail.tasks.masked_patches import MaskedPatches
from vitrail.training.metrics import read_metrics
from vitrail.training.trainer import Options

CHANGES = {
    "architecture.width": 16,
    "architecture.depth": 1,
    "architecture.heads": 2,
    "architecture.patch_size": 4,
    "augmentation.image_size": [16, 16],
    "batch_size": 8,
    "precision": "fp32",
    "schedule.length": "6 epochs",
    "validation.every": "1 epochs",
    "optimizer.lr": 1e-7,
    "schedule.min_lr": 0.0,
    "schedule.warmup_lr": 0.0,
}


@pytest.fixture(scope="module", autouse=True)
def no_charts():
    """Drawing takes longer than these trainings; tests/runs/test_report.py has tests of the charts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Curves, "draw", lambda *_: b"")
        yield


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of images without labels."""
    folder = tmp_path_factory.mktemp("some photos")
    rng = np.random.default_rng(0)
    for index in range(24):
        Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(folder / f"{index}.png")
    return folder


@pytest.fixture(scope="module")
def finished(photos, tmp_path_factory):
    """A run whose predictions stay worse than a constant, and what it printed."""
    messages, log = [], finish.finish_run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitrail.runs.train.finish_run", lambda prepared, _: log(prepared, messages.append))
        run = vitrail.train(photos, "masked_small", out=tmp_path_factory.mktemp("runs") / "a run", changes=CHANGES, workers=0)
    return run, messages


def test_messages_and_report_of_a_run_without_labels(finished, photos):
    run, messages = finished
    content = json.loads((run.folder / "run.json").read_text())
    assert content["metric"]["name"] == "agreement"
    assert not content.keys() & {"verdict", "baselines"}
    (warning,) = content["warnings"]
    assert (warning["epoch"], warning["last_epoch"]) == (5.0, 6.0)
    assert messages[0].startswith("warning, epochs 5 to 6: the predictions of masked patches are not better than a constant (")
    assert re.fullmatch(r"best weights of epoch \d: validation neighbor agreement 100.00 %", messages[1])  # of two images
    assert messages[2].startswith("report ")
    train, probe = (shlex.split(part) for part in messages[3].split("`")[1::2])
    assert train == ["vitrail", "train", "LABELED_IMAGES", "--from", str(run.folder)]
    assert probe == ["vitrail", "probe", "knn", str(run.folder), "LABELED_IMAGES"]
    page = (run.folder / "report.html").read_text()
    assert "Warning, epochs 5 to 6: the predictions" in page
    assert "Last validation effective rank" in page


def test_a_run_that_is_stopped_leaves_a_report(photos, tmp_path):
    with pytest.raises(UserError, match="Stopped at epoch 5: the predictions of masked patches are not better"):
        vitrail.train(
            photos, "masked_small", out=tmp_path / "run", changes=CHANGES | {"task_options.on_collapse": "stop"}, workers=0
        )
    (warning,) = json.loads((tmp_path / "run" / "run.json").read_text())["warnings"]
    assert warning["message"].startswith("Stopped at epoch 5: ")
    assert "Warning, epoch 5: Stopped at epoch 5" in (tmp_path / "run" / "report.html").read_text()
    assert (tmp_path / "run" / "report.png").is_file()


@pytest.mark.slow
def test_the_best_weights_of_a_compiled_training_are_evaluated(monkeypatch, tmp_path):
    """The evaluation includes maps by gradients, which compiled blocks do not give."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch.nn.Module, "compile", functools.partialmethod(torch.nn.Module.compile, backend="aot_eager"))
    changes = {
        key: value for key, value in CHANGES.items() if key not in ("optimizer.lr", "schedule.min_lr", "schedule.warmup_lr")
    }
    changes |= {"model": "deit_tiny_patch16", "schedule.length": "10 steps", "batch_size": 64, "validation.every": "10 steps"}
    run = vitrail.train("digits", "laptop", out=tmp_path / "run", changes=changes, options=Options(compile=True), workers=0)
    content = json.loads((run.folder / "run.json").read_text())
    assert {"confusion", "per_class", "mistakes", "test"} <= content.keys()
    assert content["mistakes"]
    assert all(mistake["map"] for mistake in content["mistakes"])


class Doctor:
    """A task that finds nothing, one problem, another, nothing, and the first again."""

    def diagnose(self, values, epoch):
        if values["state"] == 3:
            raise UserError(f"Stopped: rank {epoch}.")
        return {0: "", 1: f"rank {epoch} of 9.5", 2: f"spread {epoch}"}[values["state"]]


def test_equal_warnings_in_a_row_are_one():
    lines = [{"kind": "validation", "epoch": float(i), "state": s} for i, s in enumerate((0, 1, 1, 2, 0, 1, 3))]
    found = list_warnings(Doctor(), [{"kind": "train", "epoch": 0.5, "state": 1}, *lines])
    assert [(each["epoch"], each["last_epoch"], each["message"]) for each in found] == [
        (1.0, 2.0, "rank 2.0 of 9.5"),
        (3.0, 3.0, "spread 3.0"),
        (5.0, 5.0, "rank 5.0 of 9.5"),
        (6.0, 6.0, "Stopped: rank 6.0."),
    ]


def test_next_commands_name_the_trained_vector_of_models_with_a_class_token(finished, photos):
    """The folder of the run is quoted; with labels the data are those of the run."""
    task = MaskedPatches(lookup("masked_small"), open_splits("digits").train, "cpu")
    model = vitrail.create("vit_small_patch16", 0, 32, width=16, depth=1, heads=2)
    text = task.suggest_next(model, finished[0].folder, "digits")
    assert f"`vitrail train digits --from {shlex.quote(str(finished[0].folder))}` trains" in text
    assert "digits --vector mean` tests" in text


def test_it_is_planned(photos):
    messages = plan(TrainRequest(str(photos), "masked_small", changes=CHANGES, workers=0))
    assert "8 of 16 patches are corrupted: 6 masked, 1 replaced by others, 1 unchanged" in messages
    assert any("epochs of " in message and " steps, about" in message for message in messages)


def test_ablation_and_comparison_by_the_metric_of_the_data(photos, tmp_path):
    """The task's metric is the k-NN accuracy, of data without labels the neighbor agreement."""
    changes = [f"--set={key}={value}" for key, value in CHANGES.items()]
    command = ["ablate", "masked_small", str(photos), "--vary=task_options.corrupted=0.25", "--seeds=1", "--pick", *changes]
    done = CliRunner().invoke(app, [*command, "--epochs=1", "--workers=0", "--device=cpu", f"--out={tmp_path}", "--json"])
    assert done.exit_code == 0, done.output
    table = json.loads((tmp_path / "table.json").read_text())
    assert table["metric"] == "agreement"
    assert [row["name"] for row in table["groups"]] == ["base", "task_options.corrupted=0.25"]
    expected = read_metrics(tmp_path / "base" / "seed-0")[-1]["agreement"]
    assert table["groups"][0]["mean"] == pytest.approx(expected)
    groups, _ = group_results(read_results([tmp_path], choose_metric([tmp_path], "primary"))[0], False)
    with pytest.raises(UserError, match="--images compares predicted classes, which these runs do not have"):
        compare_predictions(groups)
