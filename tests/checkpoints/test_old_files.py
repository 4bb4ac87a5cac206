"""Files written before the renames: artifacts predict the same, runs resume to the same weights, recipes and labels are read."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import vitrail
from vitrail.aliases import upgrade_checkpoint_key
from vitrail.checkpoints.readers import read_safetensors
from vitrail.data.datasets.lookup import open_source
from vitrail.data.source import Subset
from vitrail.recipes import Recipe
from vitrail.runs.report import write_report
from vitrail.runs.run_json import read_run_info
from vitrail.teachers.label_store import LabelStore
from vitrail.training.metrics import read_metrics

FOLDER = Path(__file__).parents[1] / "old_files"
ARTIFACT = FOLDER / "finished_run" / "best.safetensors"
LOGITS = json.loads((FOLDER / "logits.json").read_text())
# Another CPU or another version of torch may sum in another order.
SAME_ARITHMETIC = (torch.__version__, torch.backends.cpu.get_cpu_capability()) == (LOGITS["torch"], LOGITS["cpu"])


def assert_same(actual, recorded):
    if SAME_ARITHMETIC:
        assert torch.equal(actual, recorded)
    else:
        torch.testing.assert_close(actual, recorded, rtol=1e-4, atol=1e-5)


@pytest.fixture
def run(tmp_path):
    """A copy of a stored run directory, by its name."""
    return lambda name: Path(shutil.copytree(FOLDER / name, tmp_path / name))


def test_artifact_predicts_the_same_logits():
    model, recorded = vitrail.load(FOLDER / "finished_run"), torch.tensor(LOGITS["finished_run"])
    images = torch.randn(len(recorded), 3, *model.architecture.image_size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert_same(model(images), recorded)


def test_notes_of_an_artifact_are_upgraded():
    notes = vitrail.load(ARTIFACT).notes
    recipe = json.loads(notes["recipe"])
    assert (recipe["batch_size"], recipe["optimizer"]["lr"], recipe["about"]["paper"]) == (16, 0.002, "vitrail")
    assert recipe["architecture"]["pooling_depth"] == 1
    assert Recipe.from_dict(recipe).ema.decay == 0.8
    metrics = json.loads(notes["metrics"])
    assert "pictures" not in metrics
    assert metrics["images"] == 142


def test_training_checkpoint_is_read_as_weights():
    """The recipe of the run evaluates the EMA weights."""
    path = FOLDER / "interrupted_run" / "checkpoints" / "step-000000004.safetensors"
    state = vitrail.load(path).state_dict()
    stored = {upgrade_checkpoint_key(key): tensor for key, tensor in read_safetensors(path)[0].items()}
    assert {key.split(".")[0] for key in state} >= {"pos_embed", "pooling"}
    for key, tensor in state.items():
        assert torch.equal(tensor, stored[f"ema:{key}"])


def test_delta_fits_its_base():
    base, model = vitrail.load(ARTIFACT), vitrail.load(ARTIFACT, delta=FOLDER / "delta.safetensors")
    assert torch.equal(model.head.bias, base.head.bias + 1)
    assert torch.equal(model.pos_embed[0].table, base.pos_embed[0].table * 2)
    assert torch.equal(model.pooling.queries, base.pooling.queries)


def test_interrupted_run_resumes(run):
    """Augmentation and stochastic depth draw other numbers since then, so the two steps that follow are near the old ones."""
    folder = run("interrupted_run")
    vitrail.resume(folder)
    resumed, recorded, begun = (
        vitrail.load(path).state_dict()
        for path in (
            folder / "last.safetensors",
            FOLDER / "finished_run" / "last.safetensors",
            FOLDER / "interrupted_run" / "checkpoints" / "step-000000004.safetensors",
        )
    )
    assert resumed.keys() == recorded.keys()
    for key, tensor in resumed.items():
        if tensor.is_floating_point() and "running" not in key:
            assert (tensor - begun[key]).norm() <= 2 * (recorded[key] - begun[key]).norm() + 1e-6, key


def test_run_directory_is_read(run):
    folder = run("finished_run")
    lines = [line for line in read_metrics(folder) if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all("lr" in line and "rate" not in line for line in lines)
    metadata = read_run_info(folder)
    assert (metadata["best"]["images"], metadata["micro_batches"], metadata["recipe"]["batch_size"]) == (142, 1, 16)
    assert metadata["architecture"]["pooling"] == "class_attention"


def test_report_and_comparison_of_a_run_directory(run, run_cli):
    folder = run("finished_run")
    assert "9.86" in write_report(folder).read_text()
    compared = run_cli("compare", folder, folder, "--json")
    assert compared.returncode == 0, compared.stderr


def test_recipe_with_old_keys_is_the_recipe_with_new_keys():
    old = Recipe.from_dict(yaml.safe_load((FOLDER / "recipe.yaml").read_text()))
    new = {
        "name": "by hand",
        "model": "vitrail_tiny",
        "architecture": {"layerscale_init": 0.01, "pooling": "mean"},
        "batch_size": 32,
        "init": {"weights": "vitrail_tiny", "scope": "last:2"},
        "augmentation": {"image_size": 64, "crop": "center", "hflip": 0.0, "color_jitter": 0.2},
        "loss": {"label_smoothing": 0.1},
        "optimizer": {"lr": 3e-4, "weight_decay": 0.02, "clip_grad_norm": 1.0},
        "schedule": {"length": "3 epochs", "kind": "step", "step_size": "1 epochs", "min_lr": 1e-6},
        "ema": {"decay": 0.99, "evaluate": True},
        "validation": {"interpolation": "bilinear"},
    }
    assert old == Recipe.from_dict(new)
    assert Recipe.from_dict(old.to_dict()) == old
    written = Recipe.from_dict(yaml.safe_load((FOLDER / "finished_run" / "recipe.yaml").read_text()))
    assert written == Recipe.from_dict(json.loads(vitrail.load(ARTIFACT).notes["recipe"]))


def test_label_store_is_read():
    store = LabelStore.open(FOLDER / "label_store")
    assert (len(store), store.classes, store.views, store.covers, store.grid) == (6, 10, 2, "whole", (2, 2))
    assert (store.outputs, store.manifest["batch_size"]) == (["logits", "tokens"], 4)
    rows = store.rows(Subset(open_source("digits", "test"), np.arange(6)), workers=0)
    assert rows.tolist() == [0, 1, 2, 3, 4, 5]
    values, classes = store.logits(rows)
    assert values.shape == classes.shape == (6, 3)


def test_label_store_of_published_maps_is_read(run):
    folder = run("label_store")
    manifest = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(manifest.replace('"covers": "whole"', '"covers": "centre"'))
    assert LabelStore.open(folder).covers == "center"
