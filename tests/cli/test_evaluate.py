"""vitrail predict, evaluate and disagree on the command line."""

import csv
import io
import json
import os
import re
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.images import make_folder, make_image, write_invalid_image
from vitrail.cli import evaluation_page
from vitrail.cli import predict as predicting
from vitrail.cli.evaluate import draw_mistakes, shorten_paths
from vitrail.data.class_matching import match_classes
from vitrail.data.datasets.lookup import open_sources
from vitrail.evaluation.calibration import Bin
from vitrail.evaluation.evaluate import Calibration, Scores, list_wrong
from vitrail.formatting import escape_control
from vitrail.interpret import mistakes
from vitrail.pages.charts import LIGHT

NAMES = ["blue", "green", "new\nline\t[bold]"]


def small(path, classes, names, distilled=False, seed=0):
    torch.manual_seed(seed)
    name = "deit_tiny_distilled_patch16" if distilled else "deit_tiny_patch16"
    model = vitrail.create(name, classes, 16, patch_size=4, width=16, depth=1, heads=2)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.class_names = names
    return vitrail.save(model, path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("evaluating")


@pytest.fixture(scope="module")
def weights(folder):
    return small(folder / "model.safetensors", 3, NAMES)


@pytest.fixture(scope="module")
def images(folder):
    return make_folder(folder / "data", NAMES[:2], 6)


# --- predicting


@pytest.fixture(scope="module")
def many(folder):
    """60 images, one in ten broken in a way of its own."""
    root = make_folder(folder / "many", ["a", "b"], 27)
    content = (root / "a" / "000.png").read_bytes()
    (root / "a" / "truncated.png").write_bytes(content[: len(content) // 2])
    (root / "a" / "empty.jpg").touch()
    write_invalid_image(root / "b" / "text.jpg")
    (root / "b" / "folder.jpg").mkdir()
    os.symlink(root / "gone.jpg", root / "b" / "link.jpg")
    os.mkfifo(root / "b" / "pipe.webp")
    (root / "a" / "wrong.jpg").write_bytes(content)  # a PNG by another name: nothing is wrong with it
    (root / "a" / "notes.txt").write_text("not an image, and not called one")
    return root


BROKEN = {"truncated.png", "empty.jpg", "text.jpg", "folder.jpg", "link.jpg", "pipe.webp"}


@pytest.mark.parametrize("format", ["table", "json", "csv"])
def test_readable_images_are_predicted_and_others_reported(run_cli, weights, many, format):
    code, said, complaints = run_cli("predict", weights, many, "--format", format, "--workers", 2, "--batch-size", 7)
    assert code == 1
    *named, summary = complaints.splitlines()
    assert {line.split(": ")[0].rpartition("/")[2] for line in named} == BROKEN
    assert len(named) == 6
    assert summary == "6 images could not be read, 55 were predicted."
    if format == "json":
        found = [json.loads(line)["image"] for line in said.splitlines()]
    elif format == "csv":
        found = [row["image"] for row in csv.DictReader(io.StringIO(said))]
    else:
        found = [line.split()[0] for line in said.splitlines() if "/many/" in line]
    expected = sorted(str(path) for path in many.rglob("*.*g") if path.name not in BROKEN)
    if format == "table":
        assert len(found) >= 55
    else:
        assert sorted(found) == expected


def test_paths_are_not_wrapped(run_cli, weights, tmp_path, monkeypatch):
    path = make_image(tmp_path / ("long" * 30) / ("path" * 30) / "cat.png")
    assert str(path) in run_cli("predict", weights, path)[1]
    prediction = vitrail.predict(weights, path)[0]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    text = predicting.render_table([prediction], False, True)
    assert any("athpath/cat.png" in line and "…" in line for line in text.splitlines())


def test_exit_code_if_no_image_is_readable(run_cli, weights, tmp_path):
    bad = [write_invalid_image(tmp_path / "a.png"), tmp_path / "none.png"]
    code, said, complaints = run_cli("predict", weights, *bad, "--out", tmp_path / "out.csv")
    assert (code, said) == (2, "")
    assert complaints.splitlines()[-1] == "No image could be read."
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png"]


def test_names_that_would_break_a_table(run_cli, weights, tmp_path):
    path = make_image(tmp_path / "line\nend\x1b[31m.png")
    code, said, _ = run_cli("predict", weights, path)
    assert code == 0
    assert "next 2 classes" in said  # of three classes, though five are the default
    assert "new\\nline\\t[bold]" in said.replace("\n", "")
    assert "\x1b" not in said
    said = run_cli("predict", weights, path, "--format", "csv", "--top", 3)[1]
    (row,) = csv.DictReader(io.StringIO(said, newline=""))
    assert row["image"] == str(path)
    assert {row["class_1"], row["class_2"], row["class_3"]} == set(NAMES)
    assert sum(float(row[f"probability_{place}"]) for place in (1, 2, 3)) == pytest.approx(1, abs=1e-5)
    assert escape_control("a\tb\u2028c") == "a\\tb\\u2028c"


@pytest.mark.skipif(sys.platform == "darwin", reason="this file system takes text only")
def test_file_names_that_are_not_valid_utf8(run_cli, weights, tmp_path):
    strange = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.png")
    os.rename(make_image(tmp_path / "a.png"), strange)
    assert json.loads(run_cli("predict", weights, tmp_path, "--json")[1])["image"] == strange
    assert run_cli("predict", weights, tmp_path, "--format", "csv")[1].splitlines()[1].startswith(strange)
    assert "\\udcff.png" in run_cli("predict", weights, tmp_path)[1]


def test_a_list_on_standard_input(run_cli, weights, images):
    given = "\n".join(map(str, sorted(images.glob("blue/*.png"))[:3])) + "\n"
    code, said, _ = run_cli("predict", weights, "-", "--json", stdin=given.encode())
    assert (code, len(said.splitlines())) == (0, 3)
    code, said, _ = run_cli("predict", weights, "-", images / "green", "--json", stdin=given.replace("\n", "\0").encode())
    assert (code, len(said.splitlines())) == (0, 9)
    assert run_cli("predict", weights, "-")[0] == 2


def test_into_a_file(run_cli, cli_error, weights, images, tmp_path):
    for name, first in (("a.csv", "image,class_1"), ("b.jsonl", '{"image"'), ("c.txt", "image")):
        code, said, _ = run_cli("predict", weights, images, "--out", tmp_path / "new" / name)
        assert (code, said) == (0, "")
        assert (tmp_path / "new" / name).read_text().startswith(first)
    assert "is a folder" in cli_error("predict", weights, images, "--out", tmp_path)
    assert "cannot be written" in cli_error("predict", weights, images, "--out", tmp_path / "new" / "a.csv" / "b.csv")
    assert "two formats" in cli_error("predict", weights, images, "--json", "--format", "csv")
    assert "--format xml is not known" in cli_error("predict", weights, images, "--format", "xml")


def test_long_tables_are_printed_in_blocks(run_cli, weights, images, monkeypatch):
    monkeypatch.setattr(predicting, "BLOCK", 5)
    said = run_cli("predict", weights, images)[1]
    assert said.count("prediction") == 3


# --- evaluating


def test_evaluate(run_cli, weights, images, tmp_path):
    words = ("evaluate", weights, images, "--device", "cpu", "--workers", 0)
    code, said, error = run_cli(*words, "--out", tmp_path / "out", "--sizes", "16,16x24", "--crop-ratios", "0.8,1.0")
    assert (code, error) == (0, "")
    assert all(part in said for part in ("top-1", "ECE", "2 classes, by name; predictions among these 2", "16x24", "everything"))
    assert "top-5" not in said
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("curves.png", "evaluation.json", "reliability.png", "report.html", "sweep.png"),
    ]
    content = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    page = (tmp_path / "out" / "report.html").read_text()
    assert f"{100 * content['evaluations'][0]['top1']:.2f} %" in page
    found = content["evaluations"][0]
    assert page.count("data:image/png;base64,") == 6 + 2 * len(
        found["wrong"]
    )  # three charts, each for light and dark; thumbnails and maps
    for name in ("reliability.png", "sweep.png", "curves.png"):
        with Image.open(tmp_path / "out" / name) as image:
            assert len(np.unique(np.asarray(image))) > 20
    assert len(content["sweep"]) == 4
    assert page.count("<figure>") == len(found["wrong"]) > 0
    assert f'<small title="{found["wrong"][0]["image"]}">{os.path.basename(found["wrong"][0]["image"])}</small>' in page
    for title in ("Classes", "Precision-recall and ROC curves", "Thresholds", "Most confident errors"):
        assert f"<h2>{title}</h2>" in page
    assert json.loads(run_cli(*words, "--json")[1])["evaluations"] == content["evaluations"]


def test_maps_of_wrong_predictions_are_those_of_the_predicted_class(monkeypatch, images):
    """Also where classes have equal names, or the data others than the model; a target of several classes has none of its own."""
    model = vitrail.create("deit_tiny_patch16", 4, 16, patch_size=4, width=16, depth=1, heads=2)
    model.class_names = ["a", "b", "a", "c"]
    drawn = []
    monkeypatch.setattr(mistakes, "draw_maps", lambda *arguments: drawn.append(arguments[3].tolist()) or [""] * 2)
    source = open_sources(str(images))["train"]
    scores = Scores(np.array([0, 1]), np.array([0, 0]), torch.tensor([[0.0, 1, 9, 0], [0, 8, 0, 0]]), 2)
    for names, class_map, expected in [
        (["a", "b", "a", "c"], None, [2, 1]),
        (["x", "y", "z"], {"x": 3, "y": [0, 1], "z": 2}, [2, -1]),
    ]:
        draw_mistakes(model, source, list_wrong(scores, match_classes(model.class_names, 4, names, class_map=class_map), source))
        assert drawn.pop() == expected


def test_maps_of_a_single_head_are_those_of_its_predictions(run_cli, images, tmp_path):
    """The page is that of a model whose only output is this head."""
    model = vitrail.load(small(tmp_path / "both.safetensors", 2, NAMES[:2], distilled=True, seed=2))
    model.architecture = model.architecture.replace(fusion="class")
    vitrail.save(model, tmp_path / "class.safetensors")
    maps = []
    for weights, head in (("both", "class"), ("class", "both"), ("both", "both")):
        words = ("evaluate", tmp_path / f"{weights}.safetensors", images, "--head", head, "--workers", 0)
        assert run_cli(*words, "--out", tmp_path / "report")[0] == 0
        page = (tmp_path / "report" / "report.html").read_text()
        maps.append(re.findall(r'alt="map of the prediction" src="([^"]*)', page))
    assert maps[0] == maps[1] != maps[2]
    assert len(maps[0]) > 0


def test_precision_recall_and_wrong_images(run_cli, weights, images, tmp_path):
    code, said, error = run_cli("evaluate", weights, images, "--wrong", tmp_path / "wrong.csv", "--workers", 0)
    assert (code, error) == (0, "")
    assert f"wrote {tmp_path / 'wrong.csv'}\n" in said  # not wrapped, however long
    assert all(part in said for part in ("precision", "recall", "F1", "AP", "AUC", "macro average", "weighted average"))
    assert "95 % interval" in said
    assert "chance 50.0 %, always the most frequent class 50.0 %." in said
    assert "Only 12 images: the interval is ±" in said
    found = json.loads(run_cli("evaluate", weights, images, "--json", "--workers", 0)[1])["evaluations"][0]
    matrix = np.array(found["confusion"]["matrix"])
    for index, row in enumerate(found["per_class"]):
        assert row["recall"] == pytest.approx(matrix[index, index] / matrix[index].sum())
        assert row["precision"] == pytest.approx(matrix[index, index] / max(matrix[:, index].sum(), 1))
    assert found["averages"]["macro"]["recall"] == pytest.approx(found["mean_per_class"])
    assert found["averages"]["weighted"]["recall"] == pytest.approx(found["top1"])
    assert [each["name"] for each in found["curves"]] == NAMES[:2]
    rows = list(csv.DictReader((tmp_path / "wrong.csv").open()))
    assert len(rows) == len(found["wrong"]) == round(12 * (1 - found["top1"]))
    assert 0 < len(rows) < 12
    for row, each in zip(rows, found["wrong"], strict=True):
        assert (row["image"], row["label"], row["prediction"]) == (each["image"], each["label"], each["prediction"])
        assert os.path.basename(os.path.dirname(row["image"])) == row["label"] != row["prediction"]
        assert float(row["probability"]) + float(row["label_probability"]) == pytest.approx(1, abs=1e-5)
    confident = [float(row["probability"]) for row in rows]
    assert confident == sorted(confident, reverse=True)


def test_thresholds_of_two_classes(run_cli, cli_error, weights, images, folder):
    words = ("evaluate", weights, images, "--workers", 0, "--precision", 0.8)
    said = run_cli(*words)[1]
    assert "Thresholds for the probability of green" in said
    assert "precision of at least 80 %" in said
    found = json.loads(run_cli(*words, "--positive", "blue", "--json")[1])["evaluations"][0]["thresholds"]
    assert found["positive"] == "blue"
    assert [row["goal"] for row in found["rows"]][1:] == ["highest F1", "precision of at least 80 %"]
    assert all(row["held_out"] for row in found["rows"])
    assert "--positive red is not a class: choose blue or green." in cli_error(*words, "--positive", "red")
    three = make_folder(folder / "three", NAMES, 2)
    assert "and there are 3: remove it." in cli_error("evaluate", weights, three, "--positive", "blue")
    assert "Thresholds" not in run_cli("evaluate", weights, three)[1]
    assert "is a folder" in cli_error("evaluate", weights, images, "--wrong", folder)


def test_bars_of_the_calibration_chart(monkeypatch):
    """Bars start at zero on a linear scale, and are not drawn over each other."""
    figures = []
    monkeypatch.setattr(evaluation_page, "render_png", lambda figure: figures.append(figure) or b"")
    bins = [Bin(0.4, 0.5, 30, 0.45, 0.5), Bin(0.5, 0.6, 2, 0.55, 1.0), Bin(0.6, 0.7, 0, 0.0, 0.0)]
    evaluation_page.draw_reliability(Calibration(0.5, 0.1, 0.1, bins), LIGHT)
    bars, counts = figures[0].axes
    assert [bar.get_height() for bar in bars.patches] == [50, 100]
    assert [bar.get_height() for bar in counts.patches] == [30, 2]
    assert all(bar.get_y() == 0 for bar in (*bars.patches, *counts.patches))
    assert counts.get_yscale() == "linear"
    assert bars.get_legend() is None  # it would cover bars
    assert [text.get_text() for text in figures[0].legends[0].texts] == ["95 % interval", "mean confidence", "accuracy"]


def test_a_second_test_set(run_cli, weights, images, folder):
    other = make_folder(folder / "other <b>", NAMES[:2], 3, (30, 20))
    said = run_cli("evaluate", weights, images, other, "--out", folder / "two")[1]
    assert "difference" in said
    first, second = json.loads((folder / "two" / "evaluation.json").read_text())["evaluations"]
    assert f"{100 * (second['top1'] - first['top1']):+.2f}" in said
    page = (folder / "two" / "report.html").read_text()
    assert "other &lt;b&gt;" in page
    assert "other <b>" not in page


def test_imagenet_weights_without_names_on_ten_classes(run_cli, cli_error, folder):
    weights = small(folder / "thousand.safetensors", 1000, None)
    some = make_folder(folder / "some", ["goldfish", "n02123045", "Golden_Retriever"], 2)
    found = json.loads(run_cli("evaluate", weights, some, "--json")[1])["evaluations"][0]
    assert (found["classes"], found["top5"], found["among"]) == (3, None, "subset")
    every = json.loads(run_cli("evaluate", weights, some, "--json", "--among", "all")[1])["evaluations"][0]
    assert every["loss"] > found["loss"]
    assert every["top5"] is not None
    wrong = make_folder(folder / "wrong", ["goldfish", "zzz"], 2)
    assert "1 of 2 are unknown to the model ('zzz')" in cli_error("evaluate", weights, wrong)
    (folder / "map.json").write_text('{"zzz": ["tabby", "n02123159"]}')
    code, said, _ = run_cli("evaluate", weights, wrong, "--map", folder / "map.json")
    assert code == 0
    assert "by the map" in said
    (folder / "map.json").write_text('{"zz": "tabby"}')
    assert "no class of" in cli_error("evaluate", weights, wrong, "--map", folder / "map.json")


def test_several_valid_labels(run_cli, cli_error, weights, images, folder):
    (folder / "labels.json").write_text(json.dumps([[0, 1]] * 11 + [[]]))
    code, said, _ = run_cli("evaluate", weights, images, "--labels", folder / "labels.json")
    assert code == 0
    assert "100.00 %" in said
    assert "any label: 11 images; 1 without a label are not counted" in said
    (folder / "labels.json").write_text("[[0]]")
    assert "1 lists of labels for the 12 images" in cli_error("evaluate", weights, images, "--labels", folder / "labels.json")


def test_invalid_arguments(cli_error, weights, images, tmp_path):
    plain = make_image(tmp_path / "plain" / "a.png").parent
    assert "has no labels" in cli_error("evaluate", weights, plain)
    assert "does not exist" in cli_error("evaluate", weights, tmp_path / "none")
    assert "There is no file" in cli_error("evaluate", tmp_path / "none.safetensors", images)
    assert "--head last is not known" in cli_error("evaluate", weights, images, "--head", "last")
    assert "has no distillation head" in cli_error("evaluate", weights, images, "--head", "distillation")
    assert "--among some is not known" in cli_error("evaluate", weights, images, "--among", "some")
    assert "not an image size" in cli_error("evaluate", weights, images, "--sizes", "16,,")
    assert "not a list of crop ratios" in cli_error("evaluate", weights, images, "--crop-ratios", "a")
    assert "at most 1, not nan" in cli_error("evaluate", weights, images, "--crop-ratios", "nan")
    assert "no split called last" in cli_error("evaluate", weights, images, "--split", "last")
    assert "is a file" in cli_error("evaluate", weights, images, "--out", weights)
    assert "at least two models" in cli_error("disagree", images)
    assert "One model cannot be compared" in cli_error("disagree", weights, images)
    assert "call it differ.png" in cli_error("disagree", weights, weights, images, "--out", "a.jpg")


# --- comparing


def test_disagree(run_cli, weights, images, tmp_path):
    other = small(tmp_path / "other.safetensors", 3, list(reversed(NAMES)), distilled=True, seed=4)
    words = ("disagree", weights, other, images, "--heads", "--workers", 0)
    found = json.loads(run_cli(*words, "--json", "--out", tmp_path / "sheet.png")[1])
    assert found["names"] == [
        "label",
        "model.safetensors",
        *(f"other.safetensors, {h}" for h in ("both", "class", "distillation")),
    ]
    assert np.array(found["differ"]).shape == (5, 5)
    single = json.loads(run_cli("evaluate", other, images, "--head", "class", "--json")[1])["evaluations"][0]
    assert found["differ"][0][3] == pytest.approx(1 - single["top1"])
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.format == "PNG"
    code, said, _ = run_cli(*words)
    assert code == 0
    assert all(part in said for part in ("label", "Cohen's kappa", "Error consistency", "A and B", "D other.safetensors, dist"))


def test_equal_predictions(run_cli, weights, images, tmp_path):
    code, said, _ = run_cli("disagree", weights, weights, images, "--out", tmp_path / "sheet.png")
    assert code == 0
    assert "All predictions are equal" in said
    assert list(tmp_path.iterdir()) == []


def test_shortest_distinct_paths():
    assert shorten_paths(["runs/a/best.safetensors", "runs/b/best.safetensors"]) == ["a/best.safetensors", "b/best.safetensors"]
    assert shorten_paths(["x", "x"]) == ["x (1)", "x (2)"]


def test_help_has_examples(run_cli):
    for command in ("evaluate", "disagree", "predict"):
        assert f"vitrail {command} runs/" in " ".join(run_cli(command, "--help")[1].split())
