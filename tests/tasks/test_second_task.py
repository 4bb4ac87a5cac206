"""A task defined in the tests trains, resumes, is planned, reported and ablated without a change in training/ or runs/."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import vitrail
from tests.tasks import color_regression  # registers the task
from tests.training.processes import environment, side_by_side
from vitrail.errors import UserError
from vitrail.recipes import lookup
from vitrail.runs.plan import plan
from vitrail.runs.request import TrainRequest
from vitrail.tasks.registry import find_task
from vitrail.training.metrics import read_metrics

CHANGES = {
    "task": color_regression.NAME,
    "architecture.width": 16,
    "architecture.depth": 1,
    "batch_size": 32,
    "precision": "fp32",
    "ema.decay": 0.9,
    "schedule.length": "12 steps",
    "validation.every": "6 steps",
}
SET = [f"--set={key}={value}" for key, value in CHANGES.items()]
COMMAND = ["-m", "tests.tasks.color_regression"]
TRAIN = [*COMMAND, "train", "digits", "--recipe=laptop", "--workers=0", "--device=cpu", *SET]


def train(folder, changes=None, **more):
    return vitrail.train("digits", "laptop", out=folder, changes=CHANGES | (changes or {}), workers=0, **more)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return train(tmp_path_factory.mktemp("color") / "run")


def tensors(path: Path):
    return load_file(path)


def test_it_trains_validates_and_reports(finished):
    assert finished.finished
    lines = read_metrics(finished.folder)
    assert all("mae" in line for line in lines if line["kind"] == "train")
    errors = [line["mse"] for line in lines if line["kind"] == "validation"]
    assert finished.best["mse"] == min(errors)
    run = json.loads((finished.folder / "run.json").read_text())
    assert run["metric"]["name"] == "mse"
    assert run["test"]["images"] == 360
    page = (finished.folder / "report.html").read_text()
    assert "color error" in page
    assert "top-1" not in page


def test_the_artifact_is_the_backbone(finished):
    model = vitrail.load(finished.artifact)
    assert model.architecture.classes == 0
    assert model(torch.zeros(1, 3, 8, 8)).shape == (1, 16)


def test_the_head_and_the_state_are_in_the_checkpoint(finished):
    saved = tensors(max((finished.folder / "checkpoints").glob("*.safetensors")))
    assert {"task:module.project.weight", "task:module.mask_token", "task:state.mean_color"} <= saved.keys()
    assert any(name.startswith("optimizer:task.project.weight/") for name in saved)
    assert saved["task:state.mean_color"].abs().sum() > 0


def test_killed_and_resumed_bit_for_bit(finished, tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, *TRAIN, f"--out={folder}", "--save-steps=5"]
    killed = subprocess.run(command, env=environment(KILL_AT_STEP="7"), capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000000005.safetensors"]
    assert vitrail.resume(folder, workers=0).finished
    for name in ("last.safetensors", "best.safetensors"):
        ours, theirs = tensors(folder / name), tensors(finished.folder / name)
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs), name


def test_two_processes_are_one(tmp_path):
    """Sums are formed in another order, so the weights agree up to rounding."""
    one = train(tmp_path / "one")
    codes, outputs = side_by_side(*[[*TRAIN, f"--out={tmp_path / 'two'}"]] * 2)
    assert codes == [0, 0], outputs
    ours, theirs = tensors(one.folder / "last.safetensors"), tensors(tmp_path / "two" / "last.safetensors")
    for key, value in ours.items():
        torch.testing.assert_close(value, theirs[key], rtol=1e-4, atol=1e-5)


def test_it_is_planned():
    request = TrainRequest("digits", "laptop", changes=CHANGES | {"task_options.mask_ratio": 0.25}, workers=0)
    messages = plan(request)
    assert "0.25 of the patches are masked" in messages
    assert any("12 steps, about" in message for message in messages)


def test_it_is_ablated(tmp_path):
    command = [*COMMAND, "ablate", "laptop", "digits", "--vary=task_options.mask_ratio=0.25", "--seeds=1", "--metric=primary"]
    done = subprocess.run(
        [sys.executable, *command, "--workers=0", "--device=cpu", f"--out={tmp_path / 'ablation'}", "--json", *SET],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    assert [row["name"] for row in table["groups"]] == ["base", "task_options.mask_ratio=0.25"]
    assert "color error" in (tmp_path / "ablation" / "table.md").read_text()


def test_unknown_tasks():
    with pytest.raises(UserError, match="There is no task 'colour_regression'; did you mean color_regression"):
        find_task("colour_regression")
    recipe = lookup("laptop").set({"task": "os.system"})
    with pytest.raises(UserError, match=r"There is no task 'os\.system'"):
        find_task(recipe.task)
