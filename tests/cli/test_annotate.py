"""vitrail annotate and store info as a person types them; in this process, for a new one loads torch for seconds each time."""

import json
import subprocess
import sys

import pytest
import torch

from tests.images import make_folder, make_image, spoil
from tests.teachers.predictions import network
from tests.teachers.test_tokenlabeling import write_maps
from vitrail.cli import annotate as command
from vitrail.data.datasets.lookup import open_source
from vitrail.errors import UserError
from vitrail.teachers.label_store import Store


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("annotate")
    torch.save(network(3).state_dict(), folder / "[b]net.pth")
    for split, count in (("train", 6), ("test", 4)):
        make_folder(folder / "photos" / split, count=count, size=(20 if split == "train" else 18, 16))
    return folder


def annotate(typed, place, out, *more):
    return typed("annotate", place / "[b]net.pth", place / "photos", "--out", out, "--size", 32, "--device", "cpu", *more)


def test_annotate_and_info(typed, place, tmp_path):
    result = annotate(typed, place, tmp_path / "s", "--what", "logits,tokens", "--top-k", 2, "--views", 2, "--batch", 5)
    assert result.returncode == 0, result.stderr
    assert "18 images in 1 shard," in result.stdout
    assert "bytes each" in result.stdout
    again = annotate(typed, place, tmp_path / "s", "--what", "tokens, logits", "--top-k", 2, "--views", 2, "--batch", 5)
    assert "1 of them from an earlier run" in again.stdout
    shown = typed("store", "info", tmp_path / "s", "--check")
    assert "[b]net.pth" in shown.stdout  # as text, not as markup
    assert "plain, mirrored" in shown.stdout
    assert "Every shard is what its digest says." in shown.stdout
    facts = json.loads(typed("store", "info", tmp_path / "s", "--json").stdout)
    assert (facts["keeps"], facts["top_k"], facts["images"], facts["complete"]) == (["logits", "tokens"], 2, 18, True)
    assert facts["bytes"] == sum(file.stat().st_size for file in (tmp_path / "s").glob("*.safetensors"))
    store = Store.open(tmp_path / "s")
    assert store.rows(open_source(str(place / "photos"))).tolist() == list(range(18))


def test_every_split_and_class_names(typed, place, tmp_path):
    (tmp_path / "names.txt").write_text("green\nred\nblue\n")
    result = annotate(typed, place, tmp_path / "s", "--split", "all", "--classes", tmp_path / "names.txt")
    assert "30 images" in result.stdout, result.stderr
    store = Store.open(tmp_path / "s")
    assert store.class_names == ["blue", "green", "red"]  # the data's, in its order
    assert "3 of the teacher's 3 classes are the data's (by name): answers are kept about these alone" in result.stdout
    assert store.rows(open_source(str(place / "photos"), "test")).min() >= 18
    assert "12 images" in annotate(typed, place, tmp_path / "t", "--split", "test").stdout


def test_the_classes_of_the_data_alone_or_all(typed, place, refused, tmp_path):
    torch.save(network(5).state_dict(), tmp_path / "net.pth")
    (tmp_path / "names.txt").write_text("red\ncyan\nblue\npink\ngreen\n")
    (tmp_path / "net.pth.teacher.json").write_text('{"classes": "names.txt", "size": 32}')  # as --classes and --size
    words = ("annotate", tmp_path / "net.pth", place / "photos", "--device", "cpu", "--top-k", 2)
    result = typed(*words, "--out", tmp_path / "few")
    assert "3 of the teacher's 5 classes are the data's (by name): answers are kept about these alone" in result.stdout
    assert Store.open(tmp_path / "few").class_names == ["blue", "green", "red"]
    facts = json.loads(typed("store", "info", tmp_path / "few", "--json").stdout)
    assert (facts["classes"], facts["teacher_classes"], facts["size"]) == (3, 5, [32, 32])
    result = typed(*words, "--out", tmp_path / "all", "--all-classes")
    assert "answers are kept about all." in result.stdout
    assert Store.open(tmp_path / "all").match(["blue", "green", "red"]).tolist() == [2, 4, 0]
    assert "begun about 3 (blue, green, …) classes, not 5 (red, cyan, …)" in refused(
        *words, "--out", tmp_path / "few", "--all-classes"
    )


def test_classes_that_cannot_be_matched_are_told_before_any_work(typed, place, tmp_path, monkeypatch):
    def busy(*words, **more):
        raise UserError("working")

    monkeypatch.setattr("vitrail.teachers.annotation.shelve", busy)
    (tmp_path / "names.txt").write_text("oak\nelm\nred\n")
    result = annotate(typed, place, tmp_path / "s", "--classes", tmp_path / "names.txt")
    first, last = result.stderr.splitlines()
    assert first.startswith("Warning: answers are kept about all 3 of the teacher's classes")
    assert "unknown to the model are 2 of 3 ('blue', 'green')" in first
    assert "--classes" in first
    assert "--map" not in first
    assert last == "working"
    # Features have no classes.
    result = annotate(typed, place, tmp_path / "s", "--classes", tmp_path / "names.txt", "--what", "features")
    assert result.stderr.splitlines() == ["working"]
    make_image(tmp_path / "flat" / "a.png", 1)
    words = ("annotate", place / "[b]net.pth", tmp_path / "flat", "--out", tmp_path / "s", "--size", 32, "--device", "cpu")
    assert "has no classes: answers are kept about all 3 of the teacher's." in typed(*words).stdout


def test_unreadable_images_are_named(typed, place, tmp_path):
    spoil(make_folder(tmp_path / "p", count=3) / "red" / "bad[1].png")
    result = typed("annotate", place / "[b]net.pth", tmp_path / "p", "--out", tmp_path / "s", "--size", 32, "--device", "cpu")
    assert result.returncode == 0
    assert "Left out, because unreadable: 1 image." in result.stderr
    assert "red/bad[1].png: not a JPEG" in result.stderr


def test_published_maps(typed, refused, tmp_path):
    source = open_source(str(make_folder(tmp_path / "p", count=3)))
    write_maps(tmp_path / "maps", source)
    words = ("annotate", tmp_path / "p", "--from-published", tmp_path / "maps", "--out", tmp_path / "s")
    assert "3: say with --classes" in refused(*words)
    result = typed(*words, "--classes", 1000)
    assert "9 images" in result.stdout, result.stderr
    assert "centre square" in typed("store", "info", tmp_path / "s").stdout
    assert "give the data alone" in refused("annotate", "teacher.pth", *words[1:])


def test_a_teacher_that_does_not_say_its_preprocessing(typed, refused, place, tmp_path):
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 3)).eval()
    program = torch.export.export(module, (torch.zeros(2, 3, 16, 16),))
    torch.export.save(program, tmp_path / "net.pt2")
    words = ("annotate", tmp_path / "net.pt2", place / "photos", "--out", tmp_path / "s", "--device", "cpu")
    assert "give its preprocessing" in refused(*words)
    (tmp_path / "prepared.json").write_text('{"image_size": 16, "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}')
    assert "There is no file" in refused(*words, "--preprocessing", tmp_path / "none.json")
    result = typed(*words, "--preprocessing", tmp_path / "prepared.json")
    assert "18 images" in result.stdout, result.stderr


def test_refusals(typed, refused, place, tmp_path):
    net, photos, out = place / "[b]net.pth", place / "photos", tmp_path / "s"
    end = ("--out", out, "--device", "cpu")
    assert "There is no file" in refused("annotate", tmp_path / "none.pth", photos, *end)
    assert "There is nothing at" in refused("annotate", net, tmp_path / "none", *end)
    assert "not 1 things" in refused("annotate", net, *end)
    assert "'color'" in refused("annotate", net, photos, *end, "--what", "color")
    assert "not 'nothing'" in refused("annotate", net, photos, *end, "--what", ",")
    assert "no split called" in refused("annotate", net, photos, *end, "--split", "rest")
    assert "no validation split" in refused("annotate", net, photos, *end, "--split", "validation")
    assert "not an image size" in refused("annotate", net, photos, *end, "--size", "big")
    assert "3 classes, but 4 were named" in refused("annotate", net, photos, *end, "--classes", 4)
    assert "There is no file" in refused("annotate", net, photos, *end, "--classes", tmp_path / "none.txt")
    assert "no kind of teacher" in refused("annotate", net, photos, *end, "--kind", "robot")
    assert "There is no device" in refused("annotate", net, photos, "--out", out, "--device", "abacus")
    assert "lies inside" in refused("annotate", net, photos, "--out", photos / "answers", "--device", "cpu")
    assert "There is no store" in refused("store", "info", tmp_path / "none")
    assert not out.exists()


def test_what_could_not_be_done_binds_nobody(typed, refused, place, tmp_path, monkeypatch):
    """Once with too little memory, then with other options."""

    def short(*words, **more):
        raise torch.OutOfMemoryError("no")

    words = ("annotate", place / "[b]net.pth", place / "photos", "--out", tmp_path / "s", "--size", 32, "--device", "cpu")
    with monkeypatch.context() as patch:
        patch.setattr("vitrail.teachers.annotation.Annotator.ask", short)
        assert "too small for 64 images at a time: give a smaller --batch" in refused(*words)
    assert not (tmp_path / "s").exists()
    assert typed(*words, "--batch", 8, "--top-k", 2).returncode == 0
    assert "begun with batch 8, not 64" in refused(*words, "--top-k", 2)


def test_help_has_examples_and_loads_no_torch():
    code = "import sys; from vitrail.cli import annotate; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert all("Example:" in (each.__doc__ or "") for each in (command.annotate, command.info))
