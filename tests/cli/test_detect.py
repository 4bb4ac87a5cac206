"""predict, evaluate and inspect with detections, as typed."""

import json

import pytest
import torch
from faster_coco_eval import COCO
from PIL import Image

import vitrail
from tests.shapes import make_coco
from vitrail.cli.main import run_interruptible as run
from vitrail.heads.task_heads import DetectionConfig
from vitrail.models.registry import create


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return make_coco(tmp_path_factory.mktemp("shapes"), 6)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """An untrained detector: its objects are wrong, their number is not."""
    torch.manual_seed(0)
    config = DetectionConfig(("box", "triangle"), 64, channels=8, hidden=16, candidates=40, proposals=20)
    model = create("vitrail_mini", 0, 64, width=16, depth=1, patch_size=8).set_task_head(config)
    return vitrail.save(model, tmp_path_factory.mktemp("weights") / "detector.safetensors")


@pytest.fixture
def command(monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["vitrail", *map(str, arguments)])
        code = run()
        return code, *capsys.readouterr()

    return call


def test_predict(command, weights, shapes, tmp_path):
    image = shapes / "images" / "000.png"
    code, out, err = command("predict", weights, image, "--out", tmp_path / "overlay.png", "--threshold", "0.1")
    assert code == 0
    assert "score" in out
    assert "protocol: shorter side 64 pixels, whole images; scores from 0.05 on" in err
    assert Image.open(tmp_path / "overlay.png").size == (64, 56)
    code, out, _ = command("predict", weights, image, "--json", "--threshold", "0.1")
    (line,) = out.splitlines()
    assert json.loads(line)["objects"][0]["segmentation"]["size"] == [56, 64]
    code, out, _ = command("predict", weights, shapes / "images", "--out", tmp_path / "all", "--threshold", "0.1")
    assert len(list((tmp_path / "all" / "overlays").iterdir())) == 6
    results = json.loads((tmp_path / "all" / "detections.json").read_text())
    content = {"images": [{"id": number, "height": 56, "width": 64} for number in range(1, 7)], "annotations": []}
    truth = COCO(content | {"categories": [{"id": 1, "name": "box"}, {"id": 2, "name": "triangle"}]})
    assert len(truth.loadRes(results).anns) == len(results) > 0  # COCO's tools read it
    code, _, err = command("predict", weights, shapes / "images", "--out", tmp_path / "one.png")
    assert (code, err.splitlines()[-1]) == (2, "6 images cannot be drawn in one file: give a folder as --out.")
    code, _, err = command("predict", weights, image, "--flip")
    assert (code, "are for segmentations" in err) == (2, True)


def test_evaluate(command, weights, shapes, tmp_path):
    code, out, _ = command("evaluate", weights, shapes, "--out", tmp_path / "report", "--workers", "0")
    assert code == 0
    for text in ("triangle", "AP75", "protocol: shorter side 64", "COCO's AP", "box AP ", "everything, 6 images"):
        assert text in out
    assert (tmp_path / "report" / "report.html").read_text().count("data:image/") >= 6
    code, out, _ = command("evaluate", weights, shapes, "--json", "--workers", "0", "--window", "48")
    content = json.loads(out)
    assert "tiles of 48 with stride 36" in content["protocol"]
    listed = json.loads((shapes / "annotations.json").read_text())["annotations"]
    assert (sum(row["objects"] for row in content["per_class"]), content["images"]) == (len(listed), 6)
    code, _, err = command("evaluate", weights, "digits")
    assert (code, "has no boxes" in err) == (2, True)


def test_inspect(command, shapes, tmp_path):
    path = tmp_path / "data"
    make_coco(path, 5)
    content = json.loads((path / "annotations.json").read_text())
    content["annotations"][0]["bbox"] = [1, 1, 0, 5]
    content["annotations"][-1]["bbox"] = [50, 40, 30, 30]
    content["annotations"].append({"id": 99, "image_id": 2, "category_id": 3, "bbox": [1, 1, 5, 5]})
    content["annotations"].append({"id": 100, "image_id": 77, "category_id": 7, "bbox": [1, 1, 5, 5]})
    (path / "annotations.json").write_text(json.dumps(content))
    code, out, _ = command("data", "inspect", path, "--out", tmp_path / "sheet.png", "--workers", "0")
    assert code == 0
    assert (tmp_path / "sheet-objects.png").is_file()
    text = " ".join(out.split())
    for part in (
        "triangle",
        "small",
        "a box without area",
        "outside of the image, which is cut",
        "a class that is not listed",
        "1 annotation of",
    ):
        assert part in text
    code, out, _ = command("data", "inspect", path, "--json", "--workers", "0")
    report = json.loads(out)["splits"]["train"]["object_report"]
    assert len(report["no_area"]) == len(report["outside"]) == len(report["unknown"]) == 1
    for annotation in content["annotations"]:
        annotation["bbox"] = [1, 1, -5, 5]
    (path / "annotations.json").write_text(json.dumps(content))
    code, out, err = command("data", "inspect", path, "--out", tmp_path / "sheet.png", "--workers", "0")
    assert code == 2
    assert "is not a box: its sides are negative" in " ".join(out.split())
    assert "None of the objects" in err


def test_packing_says_what_it_leaves_out(command, shapes, tmp_path):
    code, _, err = command("data", "pack", shapes, tmp_path / "packed", "--workers", "0")
    assert (code, "boxes and masks of objects are not written" in err) == (0, True)
