"""vitrail segment, and predict, evaluate and inspect with segmentations, as typed."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.images import make_masked_folder, write_mask
from vitrail.cli.main import run_interruptible as run
from vitrail.data.decode import decode_mask


@pytest.fixture(scope="module")
def boxes(tmp_path_factory):
    return make_masked_folder(tmp_path_factory.mktemp("boxes"), 8, (48, 40))


def command(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["vitrail", *map(str, arguments)])
    code = run()
    return code, *capsys.readouterr()


@pytest.fixture(scope="module")
def segmented(boxes, tmp_path_factory):
    """The output of `vitrail segment` with masks of five of eight images."""
    folder = tmp_path_factory.mktemp("segmented")
    some = folder / "some"
    shutil.copytree(boxes / "masks", some)
    shutil.copy(boxes / "classes.json", some)
    for number in range(5, 8):
        (some / f"{number:03}.png").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "sys.argv", ["vitrail", "segment", str(boxes / "images"), "--masks", str(some), "--out", str(folder / "out")]
        )
        assert run() == 0
    return folder / "out"


def test_masks_from_a_few_masks(segmented, boxes):
    lines = json.loads((segmented / "segmentation.json").read_text())
    assert len(lines) == 8
    right = []
    for line in lines[5:]:  # without a mask
        predicted = decode_mask((segmented / line["mask"]).read_bytes())
        label = decode_mask((boxes / "masks" / line["mask"].split("/")[-1]).read_bytes())
        right.append((predicted == label)[label != 255].mean())
        assert Image.open(segmented / line["overlay"]).size[0] >= 48
        assert {each["name"] for each in line["classes"]} <= {"ground", "red", "blue"}
    assert np.mean(right) > 0.85
    assert vitrail.load(segmented / "segmenter.safetensors").class_names is None


def test_predict(segmented, boxes, monkeypatch, capsys, tmp_path):
    weights, image = segmented / "segmenter.safetensors", boxes / "images" / "006.png"
    code, out, err = command(monkeypatch, capsys, "predict", weights, image, "--out", tmp_path / "overlay.png")
    assert code == 0
    assert "ground" in out
    assert "protocol: shorter side 256 pixels, whole images, scale 1" in err
    mask = Image.open(tmp_path / "overlay-mask.png")
    assert (mask.mode, mask.size) == ("P", (48, 40))
    assert np.array_equal(np.asarray(mask), decode_mask((segmented / "masks" / "006.png").read_bytes()))
    code, out, err = command(monkeypatch, capsys, "predict", weights, boxes / "images", "--json", "--scales", "0.5,1", "--flip")
    assert code == 0
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["height"] for line in lines] == [40] * 8
    code, out, err = command(monkeypatch, capsys, "predict", weights, boxes / "images", "--out", tmp_path / "all")
    assert len(list((tmp_path / "all" / "overlays").iterdir())) == 8
    for _ in range(2):  # also into a folder that exists
        code, out, _ = command(monkeypatch, capsys, "predict", weights, boxes / "images", "--json", "--out", tmp_path / "both")
        assert code == 0
        rows = [json.loads(line) for line in out.splitlines()]
        assert rows == json.loads((tmp_path / "both" / "segmentation.json").read_text())
        assert all((tmp_path / "both" / row["overlay"]).is_file() for row in rows)
    code, out, _ = command(monkeypatch, capsys, "predict", weights, image, "--json", "--out", tmp_path / "one.jsonl")
    assert (code, out) == (0, (tmp_path / "one.jsonl").read_text())
    (tmp_path / "bad.png").write_text("no image")
    code, _, err = command(monkeypatch, capsys, "predict", weights, image, tmp_path / "bad.png", "--out", tmp_path / "some")
    assert code == 1
    assert "bad.png" in err
    assert len(list((tmp_path / "some" / "masks").iterdir())) == 1
    code, out, err = command(monkeypatch, capsys, "predict", weights, boxes / "images", "--out", tmp_path / "one.png")
    assert (code, err.splitlines()[-1]) == (2, "8 images cannot be drawn in one file: give a folder as --out.")


def test_evaluate(segmented, boxes, monkeypatch, capsys, tmp_path):
    weights = segmented / "segmenter.safetensors"
    code, out, _ = command(monkeypatch, capsys, "evaluate", weights, boxes, "--out", tmp_path / "report", "--workers", "0")
    assert code == 0
    for text in ("IoU", "within 2 of a boundary", "most confused", "protocol: shorter side 256", "mIoU ", "everything, 8 images"):
        assert text in out
    page = (tmp_path / "report" / "report.html").read_text()
    assert page.count("data:image/") >= 8
    code, out, _ = command(monkeypatch, capsys, "evaluate", weights, boxes, "--json", "--workers", "0", "--window", "64")
    content = json.loads(out)
    assert content["miou"] > 0.5
    assert "windows of 64 with stride 43" in content["protocol"]
    assert sum(map(sum, content["confusion"]["matrix"])) == 8 * 48 * 39  # the first row of each mask is ignored


def test_the_images_that_a_training_held_out(segmented, boxes, monkeypatch, capsys, tmp_path):
    shutil.copy(segmented / "segmenter.safetensors", tmp_path / "best.safetensors")
    for seed in (0, 1):
        recipe = {"seed": seed, "data": {"folds": 4}}
        (tmp_path / "run.json").write_text(json.dumps({"source": str(boxes), "data": {}, "recipe": recipe}))
        code, out, _ = command(monkeypatch, capsys, "evaluate", tmp_path, boxes, "--json", "--workers", "0")
        assert code == 0
        found = json.loads(out)
        assert (found["split"], found["images"]) == ("validation", 2)


def test_other_classes(segmented, boxes, monkeypatch, capsys, tmp_path):
    shutil.copytree(boxes, tmp_path / "data")
    (tmp_path / "data" / "classes.json").write_text('["ground", "car", "blue"]')
    arguments = ("evaluate", segmented / "segmenter.safetensors", tmp_path / "data", "--workers", "0")
    code, out, _ = command(monkeypatch, capsys, *arguments)
    assert code == 0
    assert "ignored, since the weights do not have them: car" in out
    (tmp_path / "data" / "classes.json").write_text('["x", "y", "z"]')
    code, _, err = command(monkeypatch, capsys, *arguments)
    assert code == 2
    assert "has none of the classes of the weights (ground, red, blue, …)" in err


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("names", "None of the 8 masks in"),
        ("ids", "the mask has the id 9, but the classes are 0-2 and ignored are 255"),
        ("ignored", "all pixels of its mask are ignored"),
        ("binary", "have one class only (id 0; ignored 255): name the other ids in classes.json"),
        ("no folder", "is not a folder: give a folder of images and --masks"),
    ],
)
def test_bad_masks(boxes, monkeypatch, capsys, tmp_path, change, sentence):
    shutil.copytree(boxes / "masks", tmp_path / "masks")
    shutil.copy(boxes / "classes.json", tmp_path / "masks")
    for path in (tmp_path / "masks").glob("*.png"):
        if change == "names":
            path.rename(path.with_stem(f"x{path.stem}"))
        elif change == "binary":
            write_mask(path, np.where(decode_mask(path.read_bytes()) == 1, 255, 0).astype(np.uint8))
            (tmp_path / "masks" / "classes.json").unlink(missing_ok=True)
        else:
            write_mask(path, np.full((40, 48), 9 if change == "ids" else 255, dtype=np.uint8))
    masks = tmp_path / ("none" if change == "no folder" else "masks")
    code, _, err = command(monkeypatch, capsys, "segment", boxes / "images", "--masks", masks, "--out", tmp_path / "out")
    assert code == 2
    assert sentence in err.splitlines()[-1]


def test_neighbors(boxes, monkeypatch, capsys, tmp_path):
    arguments = ("segment", boxes / "images", "--masks", boxes / "masks", "--method", "knn", "--short-side", "64")
    code, out, _ = command(monkeypatch, capsys, *arguments, "--out", tmp_path / "out")
    assert code == 0
    assert "4-fold cross-validation of 8 labeled images" in out
    assert not (tmp_path / "out" / "segmenter.safetensors").exists()


def test_fine_tuning(boxes, monkeypatch, capsys, tmp_path):
    """Seconds of training start at the closed-form head, whose result is the first that is validated."""
    torch.manual_seed(0)
    model = vitrail.create("vitrail_mini", classes=2, image_size=32, width=16, depth=3, patch_size=8)
    arguments = (
        "segment",
        boxes / "images",
        "--masks",
        boxes / "masks",
        "--from",
        vitrail.save(model, tmp_path / "trunk.safetensors"),
    )
    options = ("--short-side", "32", "--fine-tune", "0.02", "--device", "cpu", "--out", tmp_path / "out")
    code, out, err = command(monkeypatch, capsys, *arguments, *options)
    assert code == 0
    assert "the segmentation head of the weights is trained further" in " ".join(err.split())
    assert str(tmp_path / "out" / "run" / "best.safetensors") in out
    assert len(json.loads((tmp_path / "out" / "segmentation.json").read_text())) == 8
    steps = [json.loads(line) for line in (tmp_path / "out" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps[0]["miou"] > 0


def test_inspect_draws_masks(boxes, monkeypatch, capsys, tmp_path):
    code, out, _ = command(monkeypatch, capsys, "data", "inspect", boxes, "--out", tmp_path / "sheet.png", "--workers", "0")
    assert code == 0
    assert (tmp_path / "sheet-masks.png").is_file()
    assert "ground" in out
    assert "consider training at a smaller image size" not in out  # masks are trained on larger images


def test_packed_masks_keep_their_classes(boxes, monkeypatch, capsys, tmp_path):
    code, _, _ = command(monkeypatch, capsys, "data", "pack", boxes, tmp_path / "packed", "--workers", "0")
    assert code == 0
    from vitrail.data.datasets.lookup import open_sources

    source = open_sources(tmp_path / "packed")["train"]
    assert source.mask_classes.names == ("ground", "red", "blue")
    assert source.has_masks
