"""Whole trainings from Python: the files of a run, pre-trained weights, and errors in one line."""

import base64
import io
import json
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import vitrail
from tests.images import make_folder, make_image, write_invalid_image
from tests.trainers import initial_model
from vitrail.data.datasets.lookup import open_splits
from vitrail.recipes import lookup
from vitrail.runs import finish
from vitrail.runs.initial_model import adapt, open_pretrained
from vitrail.runs.request import TrainRequest, resolve_recipe
from vitrail.runs.run_directory import own_state
from vitrail.tasks import classification
from vitrail.training.metrics import read_metrics
from vitrail.training.trainer import Options

TINY = {"precision": "fp32", "architecture.width": 16, "architecture.depth": 1, "batch_size": 8, "schedule.length": "6 steps"}
VIT = TINY | {"model": "deit_tiny_patch16", "architecture.patch_size": 4, "architecture.heads": 2, "augmentation.image_size": 16}


def train(source, out, changes=None, **options):
    return vitrail.train(str(source), "laptop", out=out, changes=TINY | (changes or {}), device="cpu", workers=0, **options)


@pytest.fixture(autouse=True)
def no_reports(monkeypatch):
    """Plotting takes longer than these trainings; the run of `done` is finished before this and has its report."""
    monkeypatch.setattr(finish, "write_report", lambda folder: None)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Three classes, with a test split."""
    root = tmp_path_factory.mktemp("data") / "colors"
    make_folder(root / "train")
    make_folder(root / "val", count=5)
    make_folder(root / "test", count=4)
    return root


@pytest.fixture(scope="module")
def done(images, tmp_path_factory):
    return train(images, tmp_path_factory.mktemp("runs") / "colors", {"optimizer.lr": 0.01}, options=Options(log_steps=1))


@pytest.fixture(scope="module")
def plain(done):
    return json.loads((done.folder / "run.json").read_text())


def test_files_of_a_run(done, plain):
    names = {path.name for path in done.folder.iterdir() if not path.name.startswith(".")}
    assert names == {
        *("run.json", "recipe.yaml", "metrics.jsonl", "tensorboard", "checkpoints"),
        *("best.safetensors", "last.safetensors", "report.html", "report.png"),
    }
    assert [path.name for path in (done.folder / "checkpoints").iterdir()] == ["step-000000006.safetensors"]
    assert done.finished
    assert done.best == plain["best"]
    assert plain["steps"] == 6
    assert plain["data"]["classes"] == ["blue", "green", "red"]
    assert (plain["data"]["train"], plain["data"]["validation"], plain["best"]["images"]) == (36, 15, 15)
    assert plain["seconds"] > 0
    assert plain["architecture"]["classes"] == 3
    lines = read_metrics(done.folder)
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert max(line["top1"] for line in lines if line["kind"] == "validation") == done.best["top1"]


def test_the_commit_of_the_package_is_recorded(plain, tmp_path):
    """In any working directory: a checkout's commit, else the version; not the commit of a repository around the package."""
    assert plain["code"] == own_state()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    package = tmp_path / "vitrail"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert own_state(package) == vitrail.__version__
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "theirs"], check=True)
    assert own_state(package) == vitrail.__version__
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "ours"], check=True)
    commit = own_state(package)
    assert re.fullmatch("[0-9a-f]{40}", commit)
    (package / "__init__.py").write_text("changed")
    assert own_state(package) == f"{commit} with changes"


def test_memory_is_logged_on_a_cpu(done):
    memory = [line["speed"]["memory"] for line in read_metrics(done.folder) if line["kind"] == "train"]
    assert min(memory) > 50e6  # torch alone takes more
    # Linux counts the pages of each core apart: the peak it reports may fall by a few pages.
    assert all(later > earlier - 2**20 for earlier, later in pairwise(memory))


def test_the_artifact_is_self_contained(done, plain):
    model = vitrail.load(done.artifact)
    assert model.class_names == ["blue", "green", "red"]
    assert model.preprocessing.image_size == (16, 16)
    assert vitrail.Recipe.from_dict(json.loads(model.notes["recipe"])) == vitrail.Recipe.from_dict(plain["recipe"])
    assert json.loads(model.notes["metrics"])["top1"] == done.best["top1"]
    assert (
        vitrail.load(done.folder).state_dict().keys() == model.state_dict().keys()
    )  # a run directory is loaded as its best weights


def test_the_resolved_recipe_is_written_out(done, plain):
    written = vitrail.Recipe.from_dict(yaml.safe_load((done.folder / "recipe.yaml").read_text()))
    assert written == vitrail.Recipe.from_dict(plain["recipe"])
    assert written.augmentation.image_size == (16, 16)
    assert written.architecture["patch_size"] == 2


def test_errors_and_test_images_are_evaluated(done, plain):
    matrix = np.array(plain["confusion"]["matrix"])
    assert matrix.sum() == 15
    assert np.trace(matrix) / 15 == pytest.approx(plain["best"]["top1"])
    rights = [each["top1"] * each["images"] for each in plain["per_class"]]
    assert rights == pytest.approx(np.diag(matrix).tolist())
    assert plain["test"]["images"] == 12
    assert 0 <= plain["test"]["top1"] <= 1
    assert len(plain["mistakes"]) == matrix.sum() - np.trace(matrix)


def test_the_most_confident_errors_are_listed(images, tmp_path):
    """The validation images of two classes are exchanged, which the model predicts by their color."""
    data = shutil.copytree(images, tmp_path / "data")
    for source, target in (("red", "exchanged"), ("blue", "red"), ("exchanged", "blue")):
        (data / "val" / source).rename(data / "val" / target)
    run = json.loads((train(data, tmp_path / "run", {"optimizer.lr": 0.01}).folder / "run.json").read_text())
    assert run["confusion"]["matrix"] == [[0, 0, 5], [0, 5, 0], [5, 0, 0]]
    assert sorted(mistake["label"] for mistake in run["mistakes"]) == ["blue"] * 5 + ["red"] * 5
    for mistake in run["mistakes"]:
        assert {mistake["label"], mistake["prediction"]} == {"blue", "red"}
        assert Path(mistake["location"]).parent.name == mistake["label"]
        assert Path(mistake["location"]).is_file()
        assert Image.open(io.BytesIO(base64.b64decode(mistake["image"]))).size == (16, 16)
        assert Image.open(io.BytesIO(base64.b64decode(mistake["map"])))
    confidences = [mistake["confidence"] for mistake in run["mistakes"]]
    assert confidences == sorted(confidences, reverse=True)


def test_the_report_shows_them(done, plain):
    page = (done.folder / "report.html").read_text()
    assert "Test top-1" in page
    assert "(12 images)" in page
    assert "always the most frequent class 33.3 %" in page
    assert ("Most confident errors" in page) == bool(plain["mistakes"])
    assert page.count("<figure>") == len(plain["mistakes"])


def test_many_validation_images_are_not_searched_for_mistakes(images, tmp_path, monkeypatch):
    monkeypatch.setattr(classification, "MAX_IMAGES_FOR_MISTAKES", 14)
    run = json.loads((train(images, tmp_path / "run").folder / "run.json").read_text())
    assert "confusion" not in run
    assert "mistakes" not in run
    assert run["test"]["images"] == 12


def test_an_unreadable_test_split_is_skipped(images, tmp_path, capsys):
    data = shutil.copytree(images, tmp_path / "data")
    for path in (data / "test").rglob("*.png"):
        write_invalid_image(path)
    run = json.loads((train(data, tmp_path / "run").folder / "run.json").read_text())
    assert "test" not in run
    assert "confusion" in run
    assert "None of the validation images could be read" in capsys.readouterr().err


def test_the_written_recipe_gives_the_same_training(done, images, tmp_path):
    recipe = vitrail.Recipe.from_dict(yaml.safe_load((done.folder / "recipe.yaml").read_text()))
    again = vitrail.train(str(images), recipe, out=tmp_path / "again", options=Options(log_steps=1), device="cpu", workers=0)
    first, second = vitrail.load(done.artifact), vitrail.load(again.artifact)
    assert all(torch.equal(first.state_dict()[name], tensor) for name, tensor in second.state_dict().items())
    assert learned(again.folder) == learned(done.folder)


def learned(folder):
    """The numbers that do not depend on the machine."""
    return [{name: value for name, value in line.items() if name != "speed"} for line in read_metrics(folder)]


def test_folders_are_numbered(images, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changes = {"schedule.length": "1 steps", "name": "a strange/name"}
    assert [str(train(images, None, changes).folder) for _ in range(2)] == [
        "runs/colors-a-strange-name",
        "runs/colors-a-strange-name-2",
    ]


# --- from weights


@pytest.fixture(scope="module")
def trained(images, tmp_path_factory):
    """A small ViT of 16 x 16 pixels in patches of 4."""
    return train(images, tmp_path_factory.mktemp("runs") / "vit", VIT).folder


def started(folder, source, changes=None, recipe="finetune"):
    """The model at the start of a training from weights."""
    changes = {"init.weights": str(folder), "augmentation.image_size": 16} | (changes or {})
    return initial_model(resolve(recipe, changes), open_splits(str(source)).train)


def resolve(recipe, changes=None):
    return resolve_recipe(TrainRequest(recipe=recipe, changes=changes or {}), "cpu")


def same(model, other, *names):
    return [bool(torch.equal(model.state_dict()[name], other.state_dict()[name])) for name in names]


def test_training_inside_a_run_directory_does_not_load_its_weights(trained, monkeypatch):
    monkeypatch.chdir(trained)
    assert not resolve("laptop").init.weights


def test_names_of_other_libraries_and_old_keys(trained):
    """They choose the default recipe and change it like the current keys."""
    for weights, lr in (("weights", "lr"), ("start.weights", "optimiser.rate"), ("init.weights", "optimizer.lr")):
        recipe = resolve(None, {weights: str(trained), lr: 0.25, "epochs": 7})
        assert (recipe.name, recipe.init.weights) == ("finetune", str(trained / "best.safetensors"))
        assert (recipe.optimizer.lr, recipe.schedule.length) == (0.25, "7 epochs")
        assert resolve(None, {weights: ""}).name == "laptop"


def test_the_same_classes_keep_their_classifier(trained, images):
    before = vitrail.load(trained)
    model = started(trained, images, {"init.zero_head": False})
    assert all(same(model, before, *before.state_dict()))
    assert started(trained, images, {"init.zero_head": False, "architecture.drop_path": 0.3}).architecture.drop_path == 0.3


def test_zero_head(trained, images):
    model = started(trained, images)
    assert model.head.weight.abs().max() == 0
    assert same(model, vitrail.load(trained), "blocks.0.ffn.branches.0.body.fc1.weight") == [True]


def test_other_classes_get_a_new_classifier(trained, tmp_path):
    before = vitrail.load(trained)
    for names in (("a", "b"), ("one", "two", "three")):  # another count, and the same count of others
        source = make_folder(tmp_path / "-".join(names), names, 3)
        model = started(trained, source, {"init.zero_head": False, "init.head_bias": -4.0})
        assert model.class_names == sorted(names)
        assert model.head.weight.shape[0] == len(names)
        assert model.head.weight.abs().max() > 0
        assert model.head.bias.eq(-4).all()
        assert same(model, before, "stem.proj.weight", "prefix", "norm.weight") == [True] * 3


def test_the_bias_of_a_kept_classifier_is_unchanged(trained, images):
    model = started(trained, images, {"init.zero_head": False, "init.head_bias": -10.0})
    assert same(model, vitrail.load(trained), "head.bias") == [True]


def test_another_size_and_other_patches(trained, images):
    model = started(trained, images, {"augmentation.image_size": "24x32"})
    assert (model.grid, model.preprocessing.image_size) == ((6, 8), (24, 32))
    assert started(trained, images, {"architecture.patch_size": 8}).grid == (2, 2)


def test_a_recipe_without_size_takes_that_of_the_weights(trained, tmp_path, capsys):
    source = make_folder(tmp_path / "large", size=(60, 50), count=3)
    run = vitrail.train(
        str(source), out=tmp_path / "run", changes={"init.weights": str(trained), "schedule.length": "1 steps"}, workers=0
    )
    assert vitrail.load(run.artifact).architecture.image_size == (16, 16)
    output = capsys.readouterr().err
    assert "image size set to 16 x 16: " in output
    assert "with a new classifier" in output


def test_pre_logits_can_be_dropped(tmp_path, images):
    model = vitrail.create("deit_tiny_patch16", 3, 16, patch_size=4, width=16, depth=1, heads=2, pre_logits=8)
    model.class_names = ["blue", "green", "red"]
    vitrail.save(model, tmp_path / "with.safetensors")
    after = started(tmp_path / "with.safetensors", images, {"architecture.pre_logits": 0, "init.zero_head": False})
    assert after.head.weight.shape == (3, 16)


def test_per_class_queries_belong_to_the_classifier(tmp_path, images):
    model = vitrail.create("deit_tiny_patch16", 5, 16, patch_size=4, width=16, depth=1, heads=2, pooling="per_class")
    vitrail.save(model, tmp_path / "queries.safetensors")
    after = started(tmp_path / "queries.safetensors", images)
    assert after(torch.zeros(1, 3, 16, 16)).shape == (1, 3)


def test_weights_of_another_architecture(trained):
    for changes, model, message in (
        ({"architecture.stem": "conv"}, None, "stem=linear, but stem=conv was requested"),
        ({}, "deit_small_patch16", "width=16, but width=384 was requested"),
    ):
        with pytest.raises(vitrail.UserError, match=message):
            open_pretrained(resolve("finetune", {"init.weights": str(trained)} | changes), model)


def test_weights_of_another_format(tmp_path, images):
    model = vitrail.create("deit_tiny_patch16", 3, 16, patch_size=4, width=64, depth=1, heads=1)
    path = vitrail.save(model, tmp_path / "vit.pth", "deit")
    assert started(path, images, {"architecture.heads": 4}).architecture.heads == 4  # which the file does not state
    model, fresh = adapt(vitrail.load(path), lookup("laptop").set({"augmentation.image_size": 16}), ["a", "b", "c"])
    assert (fresh, model.architecture.classes) == (False, 3)  # nor which classes: as many may be the same


def test_resuming_does_not_need_the_pretrained_weights(trained, images, tmp_path):
    weights = shutil.copy(trained / "best.safetensors", tmp_path / "weights.safetensors")
    changes = {"init.weights": str(weights), "augmentation.image_size": 16}
    run = train(images, tmp_path / "run", changes, options=Options(save_steps=3))
    assert vitrail.load(run.artifact).architecture.mixer == "attention"  # that of the weights, not of the recipe's model
    (run.folder / "checkpoints" / "step-000000006.safetensors").unlink()
    (tmp_path / "weights.safetensors").unlink()
    before = learned(run.folder)
    assert vitrail.resume(run.folder, device="cpu", workers=0).finished
    assert learned(run.folder) == before


# --- errors

ERRORS = {
    "lr 0": ({"optimizer.lr": 0}, {}, "optimizer.lr=0 never changes a weight"),
    "lr nan": ({"optimizer.lr": float("nan")}, {}, "optimizer.lr=nan is not a finite number"),
    "no step": ({"schedule.length": "0.01 epochs"}, {}, "less than one step, of which an epoch has 4"),
    "negative": ({"schedule.length": "-1 epochs"}, {}, "is not a duration"),
    "betas": ({"optimizer.betas": [0.9, 1.0]}, {}, r"optimizer.betas must lie in \[0, 1\)"),
    "view": ({"validation.interpolation": "box"}, {}, "interpolation='box' is not known"),
    "small size": ({"architecture.patch_size": 32, "augmentation.image_size": 16}, {}, "smaller than one patch of 32"),
    "large size": ({"augmentation.image_size": 60000}, {}, "A single image needs about .* GB"),
    "classes": ({"architecture.classes": 7}, {}, "architecture.classes follows from the data"),
    "seed": ({"seed": 1 << 70}, {}, "seed must be an integer from 0"),
    "micro-batch": ({}, {"micro_batch_size": 0}, "at least 1"),
    "workers": ({}, {"workers": -1}, "0 or more"),
    "device": ({}, {"device": "meta"}, "Device 'meta' is not supported"),
    "model": ({}, {"model": "deit_smal"}, "nearest are deit_small_patch16"),
    "weights": ({"init.weights": "nothing.pth"}, {}, "There is no file nothing.pth"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_before_anything_is_written(case, images, tmp_path):
    changes, options, message = ERRORS[case]
    out = tmp_path / "runs" / "bad"
    with pytest.raises(vitrail.UserError, match=message):
        vitrail.train(str(images), "laptop", out=out, changes=TINY | changes, **({"device": "cpu", "workers": 0} | options))
    assert list(tmp_path.iterdir()) == []


def test_a_finetuning_recipe_needs_weights(images, tmp_path):
    with pytest.raises(vitrail.UserError, match="starts from pre-trained weights, such as those of deit_base: give --from"):
        vitrail.train(str(images), "deit_base_to_384", out=tmp_path / "run")


def test_data_that_cannot_be_trained_on(tmp_path):
    def check(source, message):
        with pytest.raises(vitrail.UserError, match=message):
            train(source, tmp_path / "run")
        assert not (tmp_path / "run").exists()

    check(tmp_path / "nowhere", "does not exist")
    (tmp_path / "empty").mkdir()
    check(tmp_path / "empty", "holds no images")
    check(make_folder(tmp_path / "one", ["a"]), "has only one class")
    check(make_folder(tmp_path / "few", ["a", "b"], 1), "too few images per class")
    for name in "abcdefghij":
        make_image(tmp_path / "flat" / f"{name}.png")
    check(tmp_path / "flat", "has no labels")
    other = make_folder(tmp_path / "other" / "train", ["a", "b"], 3).parent
    make_folder(other / "val", ["a", "c"], 3)
    check(other, "The class c of .* is not a class of the training split")
    bad = make_folder(tmp_path / "bad" / "train", ["a", "b"], 3).parent
    for name in ("a", "b"):
        write_invalid_image(bad / "val" / name / "0.png")
    check(bad, "None of the 2 images sampled from .*val is readable")


def test_a_failed_start_leaves_no_files(images, tmp_path):
    data = shutil.copytree(images, tmp_path / "data")
    write_invalid_image(data / "train" / "red" / "bad.png")
    with pytest.raises(vitrail.UserError, match=r"bad.png cannot be read"):
        train(data, tmp_path / "some" / "where" / "run", unreadable="fatal")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]
    (tmp_path / "mine").mkdir()
    with pytest.raises(vitrail.UserError):
        train(data, tmp_path / "mine", unreadable="fatal")
    assert list((tmp_path / "mine").iterdir()) == []  # which was there before


def test_unreadable_images_are_skipped(images, tmp_path, capsys):
    data = shutil.copytree(images, tmp_path / "data")
    write_invalid_image(data / "train" / "red" / "bad.png")
    write_invalid_image(data / "val" / "red" / "bad.png")
    run = train(data, tmp_path / "run")
    output = capsys.readouterr().err
    assert run.best["images"] == 15
    assert "1 unreadable image was replaced by others" in output
    assert "1 of 16 validation images could not be read" in output


def test_folders_that_cannot_be_a_run_directory(images, done, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    for out, message in (
        (done.folder, "already holds a run"),
        (tmp_path / "file", "is a file"),
        (tmp_path / "file" / "below", "cannot be written"),
        (tmp_path / "mine", "is not empty"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        with pytest.raises(vitrail.UserError, match=message):
            train(images, out)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "mine", "thesis.txt"]


@pytest.mark.parametrize(("mode", "ending"), [("L", "png"), ("RGBA", "png"), ("CMYK", "jpg"), ("1", "gif")])
def test_images_of_all_modes_and_sizes(mode, ending, tmp_path):
    source = make_folder(tmp_path / "data with spaces", ["Größe", "日本語"], 4, (20, 14), mode, ending)
    make_image(source / "Größe" / f"tiny.{ending}", size=(1, 1), mode=mode)
    run = train(source, tmp_path / "ünï code", {"schedule.length": "1 steps", "augmentation.image_size": "24x32"})
    assert vitrail.load(run.artifact).class_names == ["Größe", "日本語"]


def test_a_size_that_is_not_a_multiple_of_the_patch_size(images, tmp_path, capsys):
    train(images, tmp_path / "run", VIT | {"augmentation.image_size": 18, "schedule.length": "1 steps"})
    assert "18 pixels are not a multiple of the patch size 4: the last 2 are ignored" in capsys.readouterr().err


def test_finding_the_name_of_a_model_with_small_images():
    """A model of the same width and depth with patches of 32 must not raise."""
    small = vitrail.create("deit_tiny_patch16", 3, 30, device="meta")
    assert vitrail.build(small.architecture, device="meta").name == "deit_tiny_patch16"


def test_options_for_checkpoints(run_cli, images, tmp_path):
    args = [arg for key, value in TINY.items() for arg in ("--set", f"{key}={value}")]
    args += ["--recipe", "laptop", "--device", "cpu", "--workers", 0, "--set", "schedule.length=5 steps"]
    code, _, output = run_cli("train", images, *args, "--out", tmp_path / "run", "--save-every", 0, "--keep", 3)
    assert code == 0, output
    found = [path.name for path in sorted((tmp_path / "run" / "checkpoints").iterdir())]
    assert found == [f"step-{step:09d}.safetensors" for step in (3, 4, 5)]
    for step in (4, 5):
        (tmp_path / "run" / "checkpoints" / f"step-{step:09d}.safetensors").unlink()
    code, _, output = run_cli("resume", tmp_path / "run", "--workers", 0, "--keep", 1, "--save-every", 60)
    assert code == 0, output
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000000005.safetensors"]
    for name, value in (("keep", 0), ("save_seconds", -1.0)):
        with pytest.raises(vitrail.UserError, match=f"{name} is "):
            train(images, tmp_path / "other", options=Options(**{name: value}))
