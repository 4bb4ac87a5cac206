"""vitrail annotate and store info, run in this process: importing torch in a new one takes seconds."""

import json
import subprocess
import sys

import pytest
import torch

from tests.convnets import timm_state
from tests.images import make_folder, make_image, write_invalid_image
from tests.teachers.predictions import network
from tests.teachers.test_tokenlabeling import write_maps
from vitrail.cli import annotate as command
from vitrail.data.datasets.lookup import open_source
from vitrail.errors import UserError
from vitrail.teachers.label_store import LabelStore


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("annotate")
    torch.save(timm_state(network(3)), folder / "[b]net.pth")
    for split, count in (("train", 6), ("test", 4)):
        make_folder(folder / "photos" / split, count=count, size=(20 if split == "train" else 18, 16))
    return folder


def annotate(run_cli, place, out, *more):
    return run_cli("annotate", place / "[b]net.pth", place / "photos", "--out", out, "--size", 32, "--device", "cpu", *more)


def test_annotate_and_info(run_cli, place, tmp_path):
    result = annotate(run_cli, place, tmp_path / "s", "--outputs", "logits,tokens", "--top-k", 2, "--views", 2, "--batch-size", 5)
    assert result.returncode == 0, result.stderr
    assert "18 images in 1 shard," in result.stdout
    assert "bytes per image" in result.stdout
    again = annotate(run_cli, place, tmp_path / "s", "--outputs", "tokens, logits", "--top-k", 2, "--views", 2, "--batch-size", 5)
    assert "1 from an earlier run" in again.stdout
    shown = run_cli("store", "info", tmp_path / "s", "--check")
    assert "[b]net.pth" in shown.stdout  # as text, not as markup
    assert "plain, mirrored" in shown.stdout
    assert "All shards match their digests." in shown.stdout
    facts = json.loads(run_cli("store", "info", tmp_path / "s", "--json").stdout)
    assert (facts["outputs"], facts["top_k"], facts["images"], facts["complete"]) == (["logits", "tokens"], 2, 18, True)
    assert facts["bytes"] == sum(file.stat().st_size for file in (tmp_path / "s").glob("*.safetensors"))
    store = LabelStore.open(tmp_path / "s")
    assert store.rows(open_source(str(place / "photos"))).tolist() == list(range(18))


def test_every_split_and_class_names(run_cli, place, tmp_path):
    (tmp_path / "names.txt").write_text("green\nred\nblue\n")
    result = annotate(run_cli, place, tmp_path / "s", "--split", "all", "--classes", tmp_path / "names.txt")
    assert "30 images" in result.stdout, result.stderr
    store = LabelStore.open(tmp_path / "s")
    assert store.class_names == ["blue", "green", "red"]  # the data's, in its order
    assert "3 of the teacher's 3 classes are those of the data (by name): only these are stored" in result.stdout
    assert store.rows(open_source(str(place / "photos"), "test")).min() >= 18
    assert "12 images" in annotate(run_cli, place, tmp_path / "t", "--split", "test").stdout


def test_classes_of_the_data_or_all_classes(run_cli, place, cli_error, tmp_path):
    torch.save(timm_state(network(5)), tmp_path / "net.pth")
    (tmp_path / "names.txt").write_text("red\ncyan\nblue\npink\ngreen\n")
    (tmp_path / "net.pth.teacher.json").write_text('{"classes": "names.txt", "size": 32}')  # as --classes and --size
    words = ("annotate", tmp_path / "net.pth", place / "photos", "--device", "cpu", "--top-k", 2)
    result = run_cli(*words, "--out", tmp_path / "few")
    assert "3 of the teacher's 5 classes are those of the data (by name): only these are stored" in result.stdout
    assert LabelStore.open(tmp_path / "few").class_names == ["blue", "green", "red"]
    facts = json.loads(run_cli("store", "info", tmp_path / "few", "--json").stdout)
    assert (facts["classes"], facts["teacher_classes"], facts["size"]) == (3, 5, [32, 32])
    result = run_cli(*words, "--out", tmp_path / "all", "--all-classes")
    assert "(by name): all are stored." in result.stdout
    assert LabelStore.open(tmp_path / "all").match(["blue", "green", "red"]).tolist() == [2, 4, 0]
    assert "written for 3 (blue, green, …) classes, not 5 (red, cyan, …)" in cli_error(
        *words, "--out", tmp_path / "few", "--all-classes"
    )


def test_unmatched_classes_are_reported_before_the_computation(run_cli, place, tmp_path, monkeypatch):
    def busy(*words, **more):
        raise UserError("working")

    monkeypatch.setattr("vitrail.teachers.annotation.find_unique_images", busy)
    (tmp_path / "names.txt").write_text("oak\nelm\nred\n")
    result = annotate(run_cli, place, tmp_path / "s", "--classes", tmp_path / "names.txt")
    first, last = result.stderr.splitlines()
    assert first.startswith("Warning: all 3 classes of the teacher are stored")
    assert "2 of 3 are unknown to the model ('blue', 'green')" in first
    assert "--classes" in first
    assert "--map" not in first
    assert last == "working"
    # Features have no classes.
    result = annotate(run_cli, place, tmp_path / "s", "--classes", tmp_path / "names.txt", "--outputs", "features")
    assert result.stderr.splitlines() == ["working"]
    make_image(tmp_path / "flat" / "a.png", 1)
    words = ("annotate", place / "[b]net.pth", tmp_path / "flat", "--out", tmp_path / "s", "--size", 32, "--device", "cpu")
    assert "has no classes: all 3 classes of the teacher are stored." in run_cli(*words).stdout


def test_unreadable_images_are_named(run_cli, place, tmp_path):
    write_invalid_image(make_folder(tmp_path / "p", count=3) / "red" / "bad[1].png")
    result = run_cli("annotate", place / "[b]net.pth", tmp_path / "p", "--out", tmp_path / "s", "--size", 32, "--device", "cpu")
    assert result.returncode == 0
    assert "Skipped 1 unreadable image." in result.stderr
    assert "red/bad[1].png: not a JPEG" in result.stderr


def test_published_maps(run_cli, cli_error, tmp_path):
    source = open_source(str(make_folder(tmp_path / "p", count=3)))
    write_maps(tmp_path / "maps", source)
    words = ("annotate", tmp_path / "p", "--from-published", tmp_path / "maps", "--out", tmp_path / "s")
    assert "there are 3 classes: give --classes" in cli_error(*words)
    result = run_cli(*words, "--classes", 1000)
    assert "9 images" in result.stdout, result.stderr
    assert "center square" in run_cli("store", "info", tmp_path / "s").stdout
    assert "give only the data" in cli_error("annotate", "teacher.pth", *words[1:])


def test_teacher_without_preprocessing(run_cli, cli_error, place, tmp_path):
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 3)).eval()
    program = torch.export.export(module, (torch.zeros(2, 3, 16, 16),))
    torch.export.save(program, tmp_path / "net.pt2")
    words = ("annotate", tmp_path / "net.pt2", place / "photos", "--out", tmp_path / "s", "--device", "cpu")
    assert "give preprocessing" in cli_error(*words)
    (tmp_path / "prepared.json").write_text('{"image_size": 16, "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}')
    assert "There is no file" in cli_error(*words, "--preprocessing", tmp_path / "none.json")
    result = run_cli(*words, "--preprocessing", tmp_path / "prepared.json")
    assert "18 images" in result.stdout, result.stderr


def test_invalid_arguments(run_cli, cli_error, place, tmp_path):
    net, photos, out = place / "[b]net.pth", place / "photos", tmp_path / "s"
    end = ("--out", out, "--device", "cpu")
    assert "There is no file" in cli_error("annotate", tmp_path / "none.pth", photos, *end)
    assert "does not exist" in cli_error("annotate", net, tmp_path / "none", *end)
    assert "not 1 arguments" in cli_error("annotate", net, *end)
    assert "'color'" in cli_error("annotate", net, photos, *end, "--outputs", "color")
    assert "not 'nothing'" in cli_error("annotate", net, photos, *end, "--outputs", ",")
    assert "Unknown split rest" in cli_error("annotate", net, photos, *end, "--split", "rest")
    assert "no validation split" in cli_error("annotate", net, photos, *end, "--split", "validation")
    assert "not an image size" in cli_error("annotate", net, photos, *end, "--size", "big")
    assert "3 classes, but 4 were given" in cli_error("annotate", net, photos, *end, "--classes", 4)
    assert "There is no file" in cli_error("annotate", net, photos, *end, "--classes", tmp_path / "none.txt")
    assert "Unknown kind of teacher" in cli_error("annotate", net, photos, *end, "--kind", "robot")
    assert "Unknown device" in cli_error("annotate", net, photos, "--out", out, "--device", "abacus")
    assert "is inside the data" in cli_error("annotate", net, photos, "--out", photos / "answers", "--device", "cpu")
    assert "There is no label store" in cli_error("store", "info", tmp_path / "none")
    assert not out.exists()


def test_other_options_after_a_failed_run(run_cli, cli_error, place, tmp_path, monkeypatch):
    """Out of memory first, then other options."""

    def short(*words, **more):
        raise torch.OutOfMemoryError("no")

    words = ("annotate", place / "[b]net.pth", place / "photos", "--out", tmp_path / "s", "--size", 32, "--device", "cpu")
    with monkeypatch.context() as patch:
        patch.setattr("vitrail.teachers.annotation.Annotator.predict_batch", short)
        assert "Out of device memory with batch size 64: give a smaller --batch-size" in cli_error(*words)
    assert not (tmp_path / "s").exists()
    assert run_cli(*words, "--batch-size", 8, "--top-k", 2).returncode == 0
    assert "written with batch size 8, not 64" in cli_error(*words, "--top-k", 2)


def test_help_has_examples_and_loads_no_torch():
    code = "import sys; from vitrail.cli import annotate; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert all("Example:" in (each.__doc__ or "") for each in (command.annotate, command.info))
