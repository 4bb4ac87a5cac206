"""Trainings with DINO: reported, continued with labels."""

import json

import pytest
import torch
from safetensors.torch import load_file

import vitrail
from tests.tasks.trainings import DINO
from vitrail.training.metrics import read_metrics


def newest_checkpoint(folder):
    return load_file(max((folder / "checkpoints").glob("*.safetensors")))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dino") / "run"
    return vitrail.train("digits", "dino_small", out=folder, changes=DINO, workers=0, device="cpu")


def test_it_is_logged_and_reported(finished):
    lines = read_metrics(finished.folder)
    logged = {"teacher_entropy", "kl", "global_std", "local_std"}
    assert all(logged <= line.keys() for line in lines if line["kind"] == "train")
    measured = {"knn", "agreement", "effective_rank", "output_entropy", "mean_output_entropy", "information"}
    validations = [line for line in lines if line["kind"] == "validation"]
    assert len(validations) == 2
    assert all(measured | {"teacher_student_gap"} <= line.keys() for line in validations)
    assert "k-NN" in (finished.folder / "report.html").read_text()
    run = json.loads((finished.folder / "run.json").read_text())
    assert "output_entropy" not in run["test"]  # the best weights are not those that the heads belong to
    assert run["recipe"]["task_options"]["center_momentum"] == 0.9  # all options are recorded


def test_the_artifact_is_the_teacher(finished):
    model, saved = vitrail.load(finished.folder / "last.safetensors"), newest_checkpoint(finished.folder)
    assert model.architecture.classes == 0
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, saved[f"task:module.teacher.model.{name}"]), name
    assert any(not torch.equal(tensor, saved[f"model:{name}"]) for name, tensor in model.state_dict().items())
    assert {"task:module.center", "task:module.head.direction", "task:module.teacher.head.gain"} <= saved.keys()
    assert saved["task:module.center"].abs().sum() > 0
    assert "task:module.output_sum" not in saved


def test_it_continues_with_labels_and_from_other_weights(finished, tmp_path):
    short = {"schedule.length": "2 steps", "validation.every": "2 steps", "precision": "fp32", "batch_size": 16}
    tuned = vitrail.train("digits", "finetune", out=tmp_path / "labels", from_=finished.folder, changes=short, workers=0)
    assert vitrail.load(tuned.artifact).architecture.classes == 10
    changes = {name: value for name, value in DINO.items() if name.startswith("task_options")} | short
    again = vitrail.train("digits", "dino_small", out=tmp_path / "more", from_=tuned.artifact, changes=changes, workers=0)
    assert vitrail.load(again.artifact).architecture.classes == 0
