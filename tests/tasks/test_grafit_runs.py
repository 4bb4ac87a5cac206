"""Trainings with Grafit: from the command line, with a map, without labels, continued."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import vitrail
from tests.tasks.trainings import GRAFIT, open_few_digits
from vitrail.data.datasets.lookup import open_source
from vitrail.data.source import Labels
from vitrail.errors import UserError
from vitrail.evaluation.features import FeatureKind, embed
from vitrail.recipes import lookup
from vitrail.runs.initial_model import build_initial
from vitrail.runs.request import describe_pretrained
from vitrail.tasks.grafit import Grafit
from vitrail.training.metrics import read_metrics

SMALL = {name: value for name, value in GRAFIT.items() if not name.startswith("task_options")}
SMALL |= {"task_options.outputs": 8, "task_options.hidden": 16, "schedule.length": "4 steps", "validation.every": "4 steps"}


@pytest.fixture(scope="module")
def parity(tmp_path_factory):
    path = tmp_path_factory.mktemp("maps") / "parity.csv"
    path.write_text("digit,parity\n" + "".join(f"{digit},{'odd' if digit % 2 else 'even'}\n" for digit in range(10)))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory, parity):
    folder = tmp_path_factory.mktemp("grafit") / "run"
    return vitrail.train("digits", "grafit_small", map=parity, out=folder, changes=SMALL, workers=0, device="cpu")


def newest_checkpoint(folder):
    return load_file(max((folder / "checkpoints").glob("*.safetensors")))


def test_it_is_logged_and_validated_at_the_finer_level(finished, parity):
    lines = read_metrics(finished.folder)
    assert all({"neighbor", "instance"} <= line.keys() for line in lines if line["kind"] == "train")
    (validation,) = [line for line in lines if line["kind"] == "validation"]
    assert validation["knn"] > validation["knn_label"] > 0.1  # two classes are easier than ten
    run = json.loads((finished.folder / "run.json").read_text())
    assert run["recipe"]["data"]["map"] == str(parity)
    assert run["data"]["classes"] == ["even", "odd"]
    assert run["recipe"]["task_options"]["temperature"] == 0.05  # all options are recorded


def test_the_memory_and_the_target_network_are_in_the_checkpoint(finished):
    saved = newest_checkpoint(finished.folder)
    assert {"task:module.memory", "task:module.labels", "task:module.target.task_head.layers.0.weight"} <= saved.keys()


def test_the_artifact_has_the_projector_and_a_transfer_only_the_trunk(finished, tmp_path):
    model = vitrail.load(finished.artifact)
    assert model.task_head.config.outputs == 8
    images = open_source("digits", "test")
    projected = embed(model, images, FeatureKind("projected", normalize=True))
    assert projected.vectors.shape[1] == 8
    torch.testing.assert_close(projected.vectors.norm(dim=1), torch.ones(len(projected.vectors)))
    again = tmp_path / "again.safetensors"
    vitrail.save(model, again)
    assert torch.equal(
        embed(vitrail.load(again), images, FeatureKind("projected")).vectors,
        embed(model, images, FeatureKind("projected")).vectors,
    )
    size = {"augmentation.image_size": [8, 8]}
    classifier = build_initial(lookup("finetune").set(size), ["a", "b", "c"], vitrail.load(finished.artifact))
    assert classifier.task_head is None
    assert classifier.architecture.classes == 3
    assert torch.equal(
        classifier.blocks[0].state_dict()["mix.branches.0.norm.weight"],
        model.blocks[0].state_dict()["mix.branches.0.norm.weight"],
    )
    recipe = lookup("grafit_small").set(SMALL)
    more = Grafit(recipe, open_few_digits().train, torch.device("cpu"))
    assert "without a classifier" in describe_pretrained(vitrail.load(finished.artifact), recipe, more.class_names)[0]
    more.attach(build_initial(recipe, None, vitrail.load(finished.artifact)))
    assert "the projector of the weights is trained further" in more.messages
    assert torch.equal(more.module.model.task_head.layers[0].weight, model.task_head.layers[0].weight)


def test_without_labels_the_views_alone_are_learned(tmp_path, capsys):
    changes = SMALL | {"data.label": "none"}
    run = vitrail.train("digits", "grafit_small", out=tmp_path / "none", changes=changes, workers=0, device="cpu")
    assert "the k-NN loss is 0" in capsys.readouterr().err
    lines = read_metrics(run.folder)
    assert all(line["neighbor"] == 0 for line in lines if line["kind"] == "train")
    assert [line["knn_label"] > 0.1 for line in lines if line["kind"] == "validation"] == [True]
    alone = changes | {"task_options.instance_weight": 0.0}
    with pytest.raises(UserError, match="less than two classes"):
        vitrail.train("digits", "grafit_small", out=tmp_path / "two", changes=alone, workers=0, device="cpu")
    with pytest.raises(UserError, match=r"only one class .* grafit_small"):
        vitrail.train("digits", "laptop", out=tmp_path / "three", changes={"data.label": "none"}, workers=0, device="cpu")


def test_images_without_a_label_are_no_second_class():
    splits = open_few_digits()
    splits.train.label = Labels(np.arange(40) % 2 - 1, ["even"])
    with pytest.raises(UserError, match="less than two classes"):
        Grafit.check_data(lookup("grafit_small").set({"task_options.instance_weight": 0.0}), splits)


def test_clusters_of_other_weights_are_classes(finished, parity, tmp_path, capsys):
    changes = SMALL | {f"task_options.{name}": 0.0 for name in ("neighbor_weight", "instance_weight")}
    changes |= {"task_options.class_weight": 1.0, "task_options.projector": "none", "task_options.clusters": 12}
    with pytest.raises(UserError, match="ClusterFit trains on clusters"):
        vitrail.train("digits", "grafit_small", out=tmp_path / "a", map=parity, changes=changes, workers=0)
    changes["task_options.clusters_from"] = str(finished.folder)
    run = vitrail.train("digits", "grafit_small", out=tmp_path / "b", map=parity, changes=changes, workers=0, device="cpu")
    assert "12 clusters of 1,295 training images" in capsys.readouterr().err
    assert vitrail.load(run.artifact).architecture.classes == 12
    saved = newest_checkpoint(run.folder)
    assert saved["task:module.labels"].unique().tolist() == list(range(12))
    assert "task:module.memory" not in saved


def test_a_classifier_of_coarse_labels_is_validated_at_the_finer_level(parity, tmp_path, run_cli, monkeypatch):
    changes = {name: value for name, value in SMALL.items() if not name.startswith("task_options")}
    run = vitrail.train("digits", "laptop", map=parity, out=tmp_path / "coarse", changes=changes, workers=0, device="cpu")
    assert 0.1 < run.best["knn_label"] < 1
    assert vitrail.load(run.artifact).class_names == ["even", "odd"]
    monkeypatch.chdir(parity.parent)  # a map that a run.json names is read in the current folder, not anywhere
    done = run_cli("evaluate", run.folder, "digits", "--json", "--workers", 0, "--device", "cpu")
    assert done.returncode == 0, done.stderr[-500:]
    (evaluation,) = json.loads(done.stdout[done.stdout.index("{") :])["evaluations"]
    assert (evaluation["classes"], evaluation["images"]) == (2, 360)
