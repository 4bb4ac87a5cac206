"""vitrail explain, as typed: the page, the files, the table of scores, and one sentence for what is wrong."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

import vitrail
from tests.images import make_masked_folder
from tests.interpret.trained import trained
from tests.small import structures
from vitrail.cli.main import run_interruptible as run
from vitrail.data.datasets.lookup import open_source
from vitrail.models.registry import build


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Photographs, weights with and without a classifier, a file that is no image, and images with masks."""
    folder = tmp_path_factory.mktemp("explain")
    source = open_source("pets", "test")
    (folder / "photos").mkdir()
    for index in (0, 40):
        (folder / "photos" / f"[b]{index}.jpg").write_bytes(source.encoded(index))
    vitrail.save(trained("cait"), folder / "cait.safetensors")
    vitrail.save(trained("patchconvnet"), folder / "queries.safetensors")
    for file, name in (("features", "deit_tiny_patch16"), ("cait-features", "cait_xxs24"), ("convnet-features", "resnet18")):
        vitrail.save(build(structures()[name].replace(classes=0)), folder / f"{file}.safetensors")
    (folder / "page.jpg").write_text("<html><script>alert(1)</script>")
    make_masked_folder(folder / "boxes", 6, (24, 24), ("background", "red", "blue"))
    return folder


@pytest.fixture
def explain(place, monkeypatch, capsys):
    monkeypatch.chdir(place)

    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["vitrail", "explain", *map(str, arguments)])
        return run(), *capsys.readouterr()

    return call


def test_a_report(explain, place):
    code, out, _ = explain(
        "vitrail_tiny", "photos", "--layer", 3, "--head", 1, "--method", "rollout", "--maps", "npy", "--out", "a"
    )
    assert code == 0
    assert out.startswith("2 images, rollout, attention:3:1: a/index.html")
    page = (place / "a" / "index.html").read_text()
    assert "attention of layer 3, head 1" in page
    assert "Mean attention distance of every head and layer" in page
    assert "Cross-patch mosaics need linear layers over the patches" in page
    assert "28 principal components of filters need more than 28 filters of more than 28 values" in page
    assert not (place / "a" / "figure-filters.png").exists()
    assert "<script" not in page
    assert np.load(place / "a" / "[b]0-rollout.npy").sum() == pytest.approx(1, abs=1e-4)
    for name in (
        "[b]0-image.png",
        "[b]40-rollout.png",
        "[b]0-attention-3-1.png",
        "[b]0-heads.png",
        "[b]0-thresholded.png",
        "figure-position.png",
    ):
        assert np.asarray(Image.open(place / "a" / name).convert("L")).std() > 5


def test_images_in_the_folder_of_the_report_are_kept(explain, place, tmp_path):
    """Files of the report have other names; an image with the name of one is refused before it is overwritten."""
    shutil.copy(place / "photos" / "[b]0.jpg", tmp_path / "cat.png")
    content = (tmp_path / "cat.png").read_bytes()
    arguments = ("cait.safetensors", "--no-figures", "--method", "attention", "--out", tmp_path)
    assert explain(*arguments, tmp_path / "cat.png")[0] == 0
    assert (tmp_path / "cat.png").read_bytes() == content
    written = (tmp_path / "cat-image.png").read_bytes()
    code, _, err = explain(*arguments, tmp_path / "cat.png", tmp_path / "cat-image.png")
    assert code == 2
    assert err.strip().endswith("cat-image.png is an input and would be overwritten: give another folder as --out.")
    assert (tmp_path / "cat-image.png").read_bytes() == written


def test_files_of_images_with_similar_and_long_names(explain, place, tmp_path):
    """Every image and every figure has files of its own, also where a name ends like that of a file of the report."""
    (tmp_path / "other").mkdir()
    names = [
        "cat-attention.jpg",
        "cat.png",
        "cat.jpg",
        "figure-position.png",
        "other/cat.png",
        "é" * 125 + ".jpg",
        "é" * 124 + ".jpg",
    ]
    for index, name in enumerate(names):
        Image.new("RGB", (30, 30), (30 * index, 0, 0)).save(tmp_path / name)
    images = [tmp_path / name for name in names]
    code, _, err = explain("vitrail_tiny", *images, "--method", "attention", "--maps", "npy", "--out", tmp_path / "report")
    assert code == 0, err
    files = [path.name for path in (tmp_path / "report").iterdir()]
    assert len([name for name in files if name.endswith("-image.png")]) == len(names)
    assert len([name for name in files if name.endswith("-attention.npy")]) == len(names)
    for stem in ("cat-attention", "cat", "cat-2", "cat-3", "figure-position", "é" * 75, "é" * 75 + "-2"):
        assert {f"{stem}-image.png", f"{stem}-attention.png", f"{stem}-attention.npy"} <= set(files)
    assert Image.open(tmp_path / "report" / "cat-2-image.png").getpixel((9, 9))[0] in range(55, 65)
    assert np.asarray(Image.open(tmp_path / "report" / "figure-position.png").convert("L")).std() > 5


def test_class_attention_and_a_chosen_class(explain, place):
    code, out, _ = explain("cait.safetensors", "photos/[[]b]0.jpg", "--class", 7, "--maps", "json", "--top", 2, "--out", "b")
    assert code == 0, out
    page = (place / "b" / "index.html").read_text()
    assert "class 7" in page
    assert "heads of the class-attention blocks" in page
    assert "CaiT, Fig. 7" in page
    values = json.loads((place / "b" / "[b]0-class_attention.json").read_text())
    assert np.shape(values) == (6, 6)
    assert (place / "b" / "figure-saliency.png").is_file()


def test_drawings_of_a_query_per_class_are_those_of_the_class(explain, place, tmp_path):
    """Without --class they are those of the predicted class."""
    image = place / "photos" / "[b]0.jpg"
    predicted = vitrail.predict(place / "queries.safetensors", image)[0].classes[0].index
    drawn = {}
    for index in (None, predicted, (predicted + 1) % 10):
        chosen = () if index is None else ("--class", index)
        arguments = ("queries.safetensors", "photos/[[]b]0.jpg", *chosen, "--no-figures", "--out", tmp_path / str(index))
        assert explain(*arguments)[0] == 0
        drawn[index] = (tmp_path / str(index) / "[b]0-thresholded.png").read_bytes()
    assert drawn[None] == drawn[predicted] != drawn[(predicted + 1) % 10]


@pytest.mark.parametrize(
    ("weights", "methods"),
    [("features", "attention, rollout, thresholded_heads"), ("cait-features", "class_attention, attention, rollout")],
)
def test_weights_without_a_classifier(explain, place, tmp_path, weights, methods):
    """As after a training without labels: maps of attention and the figures of the model, and no classes."""
    code, out, err = explain(f"{weights}.safetensors", "photos", "--top", 3, "--out", tmp_path)
    assert (code, out) == (0, f"2 images, {methods}: {tmp_path}/index.html\n"), err
    page = (tmp_path / "index.html").read_text()
    for words in ("class 0", "top ", "%</b>"):
        assert words not in page
    assert "Norm of the residual branches" in page
    for name in (*methods.split(", "), "heads", "thresholded"):
        assert np.asarray(Image.open(tmp_path / f"[b]0-{name}.png").convert("L")).std() > 5


def test_names_are_escaped(explain, place, tmp_path):
    """Of classes, images and weights, which may come from anywhere; in the page and in the text of figures."""
    model = vitrail.load(place / "cait.safetensors")
    model.class_names = [f"<script>alert({index})</script> $_{{" for index in range(10)]
    weights, image = tmp_path / "<script>alert(10).safetensors", tmp_path / "<script>alert(11).jpg"
    vitrail.save(model, weights)
    shutil.copy(place / "photos" / "[b]0.jpg", image)
    code, _, err = explain(weights, image, "--top", 10, "--out", tmp_path / "report")
    assert code == 0, err
    page = (tmp_path / "report" / "index.html").read_text()
    assert "<script" not in page
    for name in ("&lt;script&gt;alert(0)&lt;/script&gt;", "alert(10).safetensors", "alert(11).jpg"):
        assert name in page


def test_unreadable_images_are_named_and_the_others_explained(explain, place):
    code, out, err = explain("cait.safetensors", "page.jpg", "photos", "--no-figures", "--out", "c")
    assert code == 0
    assert "page.jpg" in err
    assert out.startswith("2 images")
    assert not list((place / "c").glob("figure-*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cait.safetensors",), "There are no images: give files, folders or patterns"),
        (("cait.safetensors", "missing.jpg"), "No image could be read"),
        (("cait.safetensors", "page.jpg"), "No image could be read"),
        (("missing.safetensors", "photos"), "missing.safetensors"),
        (("features.safetensors", "photos", "--class", "3"), "This model has no classifier, so there is no class to explain"),
        (("features.safetensors", "--score", "boxes"), "This model has no classifier, so there is no class to explain"),
        (("features.safetensors", "photos", "--method", "occlusion"), "occlusion is not available: this model has no classifier"),
        (("convnet-features.safetensors", "photos"), "This model has no classifier, and its last layer no attention"),
        (("cait.safetensors", "photos", "--class", "zebra"), "The model has no class 'zebra'"),
        (("cait.safetensors", "photos", "--class", "10"), "The model has no class 10: it has 10 classes"),
        (("cait.safetensors", "photos", "--layer", "9"), "Layer 9 does not exist: this model has 5 layers"),
        (("cait.safetensors", "photos", "--layer", "0", "--head", "8"), "Head 8 does not exist: layer 0 has 4 heads"),
        (("cait.safetensors", "photos", "--head", "0"), "--head chooses a head of a layer: give --layer too"),
        (("cait.safetensors", "photos", "--method", "magic"), "The method 'magic' is not known"),
        (("cait.safetensors", "photos", "--method", "evidence"), "The method evidence is not available: its classifier"),
        (("cait.safetensors", "photos", "--maps", "png"), "--maps png is not known: choose npy or json"),
        (("cait.safetensors", "photos", "--out", "page.jpg"), "page.jpg"),
        (("cait.safetensors", "--score", "digits"), "mask"),
        (("cait.safetensors", "--score", "boxes", "--head", "0"), "--head chooses a head of a layer: give --layer too"),
        (("cait.safetensors", "--score", "boxes", "--class", "1"), "--score explains the predicted classes"),
    ],
)
def test_what_cannot_be_explained(explain, arguments, message):
    code, _, err = explain(*arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) <= 2  # the problem of a file, and what follows


def test_scores_of_two_checkpoints(explain, place):
    shutil.copy(place / "cait.safetensors", place / "again.safetensors")
    code, out, err = explain("cait.safetensors", "again.safetensors", "--score", "boxes", "--method", "rollout", "--images", 4)
    assert code == 0, err
    lines = [line.split() for line in out.splitlines()]
    assert [line[:3] for line in lines[1:]] == [
        [weights, method, "4"]
        for weights in ("cait.safetensors", "again.safetensors")
        for method in ("rollout", "center", "random")
    ]
    assert "boxes, train: in percent with 95 % intervals" in err
    found = json.loads(explain("cait.safetensors", "--score", "boxes", "--images", 4, "--json")[1])
    assert {row["method"] for row in found} >= {"class_attention", "occlusion", "center"}
    assert set(found[0]) == {
        "weights",
        "source",
        "split",
        "method",
        "n",
        "pointing",
        "pointing_interval",
        "iou",
        "deletion",
        "insertion",
        "to_center",
    }
