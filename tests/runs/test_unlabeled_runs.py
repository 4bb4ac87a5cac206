"""A task without labels on a flat folder: train, resume, plan, inspect, embed; commands that need labels say so."""

import json
import shutil

import pytest
from pyarrow import parquet
from safetensors.torch import load_file

import vitrail
from tests.images import make_folder, make_image, write_invalid_image
from tests.tasks import color_regression  # registers the task
from vitrail.errors import UserError
from vitrail.runs.plan import plan
from vitrail.runs.request import TrainRequest
from vitrail.training.trainer import Options

CHANGES = {
    "task": color_regression.NAME,
    "architecture.width": 16,
    "architecture.depth": 1,
    "batch_size": 8,
    "precision": "fp32",
    "schedule.length": "6 steps",
    "validation.every": "3 steps",
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """30 images, one that is unreadable, a text file and a hidden file."""
    folder = tmp_path_factory.mktemp("data") / "photos"
    for number in range(30):
        make_image(folder / f"{number:02}.png", number, (20, 18))
    write_invalid_image(folder / "damaged.jpg")
    write_invalid_image(folder / ".hidden.png")
    (folder / "notes.txt").write_text("text")
    return folder


def train(source, out, **more):
    return vitrail.train(source, "laptop", out=out, changes=CHANGES | more, workers=0, options=Options(save_steps=2, keep=9))


@pytest.fixture(scope="module")
def finished(photos, tmp_path_factory):
    return train(photos, tmp_path_factory.mktemp("runs") / "run")


def test_it_trains_without_labels(finished, photos):
    run = json.loads((finished.folder / "run.json").read_text())
    assert finished.finished
    assert run["data"] | {"fingerprint": ""} == {
        "name": str(photos),
        "train": 28,
        "validation": 3,
        "classes": [],
        "fingerprint": "",
    }
    assert run["best"]["images"] in (2, 3)  # without the unreadable one, wherever it is
    assert "baselines" not in run
    assert "verdict" not in run
    assert vitrail.load(finished.artifact).class_names is None
    assert "color error" in (finished.folder / "report.html").read_text()


def test_it_resumes(finished, photos, tmp_path):
    copy = shutil.copytree(photos, tmp_path / "photos")
    folder = train(copy, tmp_path / "run").folder
    for name in ("last.safetensors", "best.safetensors", "report.html"):
        (folder / name).unlink()
    for path in sorted((folder / "checkpoints").iterdir())[2:]:
        path.unlink()
    assert vitrail.resume(folder, workers=0).finished
    ours, theirs = load_file(folder / "last.safetensors"), load_file(finished.folder / "last.safetensors")
    assert all(ours[name].equal(value) for name, value in theirs.items())
    make_image(copy / "new.png")
    with pytest.raises(UserError, match=r"are not those that .* was started with"):
        vitrail.resume(folder, workers=0)


def test_it_is_planned(photos):
    messages = plan(TrainRequest(str(photos), "laptop", changes=CHANGES, workers=0))
    assert f"{photos}: 28 training and 3 validation images, no labels" in messages
    assert "1 file skipped: 1 .txt" in messages


def test_the_labels_of_labeled_data_do_not_matter(tmp_path):
    """An empty class and one that only the validation has; the reason why a classifier refuses is printed."""
    root = make_folder(tmp_path / "photos" / "train", count=6).parent
    (root / "train" / "empty").mkdir()
    make_folder(root / "val", ("red", "new"), count=2)
    messages = plan(TrainRequest(str(root), "laptop", changes=CHANGES, workers=0))
    assert f"The class folder {root}/train/empty holds no images: add some or remove it." in messages
    assert train(root, tmp_path / "run").finished
    with pytest.raises(UserError, match=r"The class folder .*empty holds no images"):
        plan(TrainRequest(str(root), "laptop", workers=0))


def test_class_balanced_sampling_needs_labels(photos):
    with pytest.raises(UserError, match=r"photos has no labels, which data\.class_balanced needs: set it to false\."):
        plan(TrainRequest(str(photos), "laptop", changes=CHANGES | {"data.class_balanced": True}, workers=0))


def test_inspection(photos, run_cli, tmp_path):
    done = run_cli("data", "inspect", photos, "--workers", "0", "--out", tmp_path / "sheet.png", "--recipe", "laptop")
    assert done.returncode == 0, done.stderr
    assert "No class labels in train: usable for prediction and self-supervised training." in done.stdout
    assert "1 of 31 train images cannot be read" in done.stdout
    assert (tmp_path / "sheet.png").stat().st_size > 0
    assert (tmp_path / "sheet-laptop.png").stat().st_size > 0


def test_features(finished, photos, run_cli, tmp_path):
    done = run_cli("embed", finished.folder, photos, "--out", tmp_path / "f.parquet", "--workers", "0")
    assert done.returncode == 1, done.stderr  # one image is unreadable
    table = parquet.read_table(tmp_path / "f.parquet")
    assert table.column_names == ["image", "index", "features"]
    assert table.num_rows == 30


def test_commands_that_need_labels(finished, photos, run_cli, cli_error, tmp_path):
    weights = finished.folder
    for command in (("probe", "knn"), ("probe", "random-labels"), ("probe", "levels"), ("evaluate",)):
        assert "photos has no labels: put the images into one folder per class" in cli_error(*command, weights, photos)
    for split in ("train", "val"):
        make_image(tmp_path / "splits" / split / "a.png")
    assert "train has no labels" in cli_error("probe", "knn", weights, tmp_path / "splits")
    assert "no classifier" in cli_error("predict", weights, photos)
    other = train(photos, tmp_path / "other", seed=1).folder
    assert "--images compares predicted classes" in run_cli("compare", weights, other, "--images").stderr
    for arguments in ((), ("--recipe", "laptop")):
        message = cli_error("train", photos, *arguments, "--out", tmp_path / "run")
        assert "one folder per class" in message
        assert "--recipe dino_small" in message
