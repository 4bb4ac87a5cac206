"""The report: well-formed, self-contained, escaped, and written for any run."""

import base64
import io
import json
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from tests.training.runs import NAMES, describe, make_run
from vitrail.errors import UserError
from vitrail.evaluation.confusion import thumbnail
from vitrail.formatting import format_count, format_time_span, format_value
from vitrail.pages import image_url
from vitrail.pages.charts import DARK
from vitrail.runs import curves, reference_curves
from vitrail.runs.curves import Curves
from vitrail.runs.reference_curves.__main__ import make_reference_band, write_reference_band
from vitrail.runs.report import confused_pairs, make_curves, write_report
from vitrail.runs.run_json import read_run_info
from vitrail.training.metrics import MetricsWriter, read_metrics

EMPTY = ("meta", "img", "br", "source", "link", "hr")


class Page(HTMLParser):
    """Checks that tags are nested correctly, and collects tags, attributes and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.text += data


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "run"
    mistake = {"image": thumbnail(np.zeros((8, 9, 3), np.uint8)), "label": NAMES[1], "prediction": NAMES[2], "confidence": 0.75}
    broken = {"image": "javascript:alert(1)", "label": "a", "prediction": 'b" onerror="x'}
    matrix = [[8, 2, 0], [5, 4, 1], [0, 0, 10]]
    make_run(folder, confusion={"matrix": matrix, "names": NAMES}, mistakes=[mistake, broken])
    assert write_report(folder) == folder / "report.html"
    return folder


def test_summary_and_content(full):
    page = Page((full / "report.html").read_text())
    assert (
        "deit_tiny on some/where/pets, recipe little, reached a validation top-1 of 80.00 % (top-5 99.00 %) at epoch 4 of 4"
        in page.text
    )
    assert ", in 65 s on 2 × CPU." in page.text
    for expected in ("5.72 M", "1.26 G", "vitrail train pets --note '<b>'", "0123abc", "optimizer", "4 epochs", "4 of 10"):
        assert (expected in page.text) == (expected != "4 of 10"), expected
    assert "5 of 10" in page.text
    assert page.tags.count("details") > 8


def test_page_is_self_contained_and_escaped(full):
    page = Page((full / "report.html").read_text())
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    addresses = [value for name, value in page.attributes if name in ("src", "srcset", "href")]
    assert all(value == "" or value.startswith("data:image/") for value in addresses)
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert page.text.count("<script>alert('x')</script>") >= 4
    assert 'b" onerror="x' in page.text
    assert ("name", "viewport") in page.attributes


def test_charts_and_thumbnails_can_be_decoded(full):
    image = Image.open(full / "report.png")
    image.load()
    assert image.size == (1650, 990)
    assert len(image.convert("RGB").getcolors(1 << 24)) > 10
    page = Page((full / "report.html").read_text())
    sizes = []
    for name, value in page.attributes:
        if name in ("src", "srcset") and value:
            sizes.append(Image.open(io.BytesIO(base64.b64decode(value.split(",")[1]))).size)
    assert sizes == [(750, 1800), (1650, 990), (750, 1800), (1650, 990), (9, 8)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validations": ()}, "was trained for 4 epochs to a training loss of 0.2"),
        ({"validations": (100,)}, "top-1 of 80.00 % (top-5 99.00 %) at epoch 4 of 4"),
        ({"last": 40}, "top-1 of 20.00 % (top-5 99.00 %) after 1.6 of 4 epochs"),
        ({"last": 40, "best": None, "seconds": None, "machine": None}, "top-1 of 20.00 % (top-5 99.00 %) after 1.6 of 4 epochs."),
        ({"last": 5, "steps": None}, "was trained for 0.2 epochs"),
        ({"last": 0}, "has not logged anything yet."),
        ({"shift": float("nan"), "best": {}}, "top-1 of 20.00 %"),  # the first of equal accuracies, as in a run
    ],
)
def test_report_of_incomplete_runs(tmp_path, monkeypatch, options, message):
    monkeypatch.setattr(Curves, "draw", lambda *_: b"")
    assert message in Page(write_report(make_run(tmp_path, **options)).read_text()).text


@pytest.mark.parametrize(
    "options", [{"validations": ()}, {"validations": (100,)}, {"last": 0}, {"shift": float("inf")}, {"shift": 300}]
)
def test_chart_of_incomplete_runs(tmp_path, recwarn, options):
    folder = make_run(tmp_path, **options)
    drawn = make_curves(read_run_info(folder), read_metrics(folder)).draw()
    assert Image.open(io.BytesIO(drawn)).size == (1650, 990)
    assert [str(warning.message) for warning in recwarn] == []


def test_report_of_an_empty_run(tmp_path, monkeypatch):
    monkeypatch.setattr(Curves, "draw", lambda *_: b"")
    (tmp_path / "run.json").write_text("{}")
    assert "The model has not logged anything yet." in write_report(tmp_path).read_text()


def test_reference_band_status(tmp_path, monkeypatch):
    monkeypatch.setattr(reference_curves, "FOLDER", tmp_path / "bands")
    runs = [make_run(tmp_path / str(seed), seed) for seed in range(3)]
    band = make_reference_band(runs)
    write_reference_band(band, tmp_path / "bands" / "little.json")
    drawn = []
    monkeypatch.setattr(Curves, "draw", lambda curves, *_: drawn.append(curves.band) or b"")
    assert "within the reference band (3 seeds)" in write_report(runs[0]).read_text()
    assert "worse than the reference band (3 seeds)" in write_report(make_run(tmp_path / "bad", 5, shift=1.0)).read_text()
    assert all(found == band for found in drawn)


def test_reference_band_is_drawn(tmp_path):
    runs = [make_run(tmp_path / str(seed), seed) for seed in range(2)]
    lines = [
        {"kind": "train", "step": 50, "epoch": 2.0, "loss": 1.0},
        {"kind": "validation", "step": 50, "epoch": 2.0, "top1": 0.5},
    ]
    assert Curves(lines, 4.0).draw(DARK) != Curves(lines, 4.0, make_reference_band(runs)).draw(DARK)


def test_confused_pairs():
    assert confused_pairs([[8, 2, 0], [5, 4, 1], [0, 0, 10]], "abc") == [
        {"label": "b", "prediction": "a", "count": 5, "of": 10},
        {"label": "a", "prediction": "b", "count": 2, "of": 10},
        {"label": "b", "prediction": "c", "count": 1, "of": 10},
    ]
    assert confused_pairs([[1, 0], [0, 1]], "ab") == []


@pytest.mark.parametrize(
    ("confusion", "shown"),
    [
        ({"pairs": [{"label": "a<", "prediction": "b", "count": 1234}]}, "1,234"),
        ({"matrix": [[1, 2], [0, 3]]}, "2 of 3"),
        ({}, None),
    ],
)
def test_confusions_from_pairs_or_matrix(tmp_path, monkeypatch, confusion, shown):
    monkeypatch.setattr(Curves, "draw", lambda *_: b"")
    page = Page(write_report(make_run(tmp_path, confusion=confusion)).read_text())
    assert ("Most frequent confusions" in page.text) == (shown is not None)
    assert shown is None or shown in page.text


def test_invalid_runs_are_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(Curves, "draw", lambda *_: b"")
    with pytest.raises(UserError, match=r"no run\.json"):
        write_report(tmp_path)
    for text, message in (("{", "cannot be read"), ("[]", "does not describe"), ('{"model": 3}', "value of model is not")):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(UserError, match=message):
            write_report(tmp_path)
    MetricsWriter(tmp_path).close()
    for matrix in ([[1, 2]], [[1], [2]], [[1] * 4] * 4):
        (tmp_path / "run.json").write_text(json.dumps(describe(confusion={"matrix": matrix})))
        with pytest.raises(UserError, match="not square"):
            write_report(tmp_path)


def test_names_that_are_not_utf8(tmp_path, monkeypatch):
    """File names that are not UTF-8 have lone surrogates."""
    monkeypatch.setattr(Curves, "draw", lambda *_: b"")
    mistake = {"image": None, "label": "a\udcff", "prediction": "b\ud800", "confidence": 0.5, "location": "\udce9.jpg"}
    text = write_report(make_run(tmp_path, mistakes=[mistake])).read_text(encoding="utf-8")
    assert r"label a\udcff" in text
    assert r">\udce9.jpg</small>" in text


def test_thumbnails():
    pixels = np.random.default_rng(0).integers(0, 256, (300, 200, 3), np.uint8)
    image = Image.open(io.BytesIO(base64.b64decode(thumbnail(pixels))))
    assert (image.format, image.size) == ("JPEG", (64, 96))
    tiny = Image.open(io.BytesIO(base64.b64decode(thumbnail(pixels[:32, :32]))))
    assert (tiny.format, tiny.size) == ("PNG", (32, 32))
    assert (np.asarray(tiny) == pixels[:32, :32]).all()
    assert image_url(thumbnail(pixels)).startswith("data:image/jpeg;base64,")
    assert image_url("AAAA") == image_url(None) == image_url("é") == ""


def test_number_formatting():
    assert [format_time_span(seconds) for seconds in (41, 600, 11_100, 187_200)] == [
        "41 s",
        "10 min",
        "3 h 5 min",
        "2 days 4 hours",
    ]
    assert [format_count(value) for value in (5_717_416, 86e9, 12, "x", True)] == ["5.72 M", "86.0 G", "12", "x", "True"]
    assert [format_value(value) for value in ({}, None, [1, 2000], ["a"] * 13, {"train": 3000})] == [
        "–",
        "–",
        "1, 2,000",
        "13",
        "train 3,000",
    ]


def test_best_epoch_follows_the_rule_of_the_trainer(tmp_path):
    """Of equal accuracies the one with the lowest loss is kept; without a record in run.json the same rule selects it."""
    with MetricsWriter(tmp_path) as metrics:
        for step, loss in ((1, 2.0), (2, 1.0), (3, 1.5), (4, float("nan"))):
            metrics.write("validation", step, step, {"loss": loss, "top1": 0.5 if step < 4 else 0.9})
    for best, epoch in (({"top1": 0.5, "epoch": 3}, 3), ({}, 2)):
        (tmp_path / "run.json").write_text(json.dumps(describe(best=best, steps=4)))
        curves = make_curves(read_run_info(tmp_path), read_metrics(tmp_path))
        assert curves.best == epoch
        assert curves.best_point() == (epoch, 0.5)
    assert Curves([], 1.0).best_point() is None


def test_the_best_value_is_in_the_legend_and_not_over_the_curve(full, monkeypatch):
    figures = []
    monkeypatch.setattr(curves, "render_png", lambda figure: figures.append(figure) or b"")
    make_curves(read_run_info(full), read_metrics(full)).draw()
    accuracies = figures[0].axes[1]
    assert [text.get_text() for text in accuracies.get_legend().get_texts()] == [
        "top-5  99.00 %",
        "top-1  80.00 %",
        "best  80.00 %",
    ]
    assert not accuracies.texts


def test_accuracy_with_its_interval_and_baselines(tmp_path, monkeypatch):
    monkeypatch.setattr(Curves, "draw", lambda *_: b"")
    best = {"step": 100, "epoch": 4.0, "top1": 0.8, "loss": 0.3, "images": 50}
    rows = [{"name": "cat", "top1": 0.5, "precision": 0.25, "recall": 0.5, "f1": 1 / 3, "images": 8}]
    make_run(tmp_path, best=best, baselines={"majority": 0.4, "probe": 0.76}, per_class=rows, test={"top1": 0.7, "images": 400})
    text = Page(write_report(tmp_path).read_text()).text
    assert "reached a validation top-1 of 80.00 % ± 10.9" in text
    assert "95 % interval 67.0 to 88.8 % from 50 images; chance 33.3 %, always the most frequent class 40.0 %, a probe" in text
    assert "Only 50 images: the interval is ± 11 points; differences below that are noise." in text
    assert "the validations next to it have 50.0 %" in text
    assert "70.00 % ± 4.5 (400 images)" in text
    assert all(part in text for part in ("precision", "25.00 %", "33.33 %"))


KNN = {"name": "knn", "title": "k-NN", "higher_is_better": True, "percent": True}


def write_self_supervised(folder, validations=4):
    """A run without a classifier: its validations have metrics that the task names."""
    folder.mkdir(parents=True, exist_ok=True)
    with MetricsWriter(folder) as metrics:
        for epoch in range(1, validations + 1):
            metrics.write("train", 25 * epoch, epoch, {"loss": 2.0 / epoch, "lr": 1e-3, "accuracy": 0.1, "$entropy": 1.5})
            values = {"knn": 0.2 * epoch, "loss": 1.0 / epoch, "images": 50, "effective_rank": 4.5 + epoch, "feature_std": 0.25}
            metrics.write("validation", 25 * epoch, epoch, values | {"accuracy": 0.375, "majority_accuracy": 0.125})
    warning = {"epoch": 2.0, "last_epoch": 4.0, "message": "features are <nearly> equal"}
    best = {"epoch": 4.0, "knn": 0.8, "loss": 0.25}
    run = describe(best=best, metric=KNN, warnings=[warning, warning | {"epoch": 4.0}], test={"knn": 0.7, "images": 40})
    (folder / "run.json").write_text(json.dumps(run))
    return folder


def test_report_of_a_run_without_accuracy(tmp_path, monkeypatch):
    monkeypatch.setattr(Curves, "draw", lambda *_: b"")
    text = Page(write_report(write_self_supervised(tmp_path)).read_text()).text
    assert "reached a validation k-NN of 80.00 % at epoch 4 of 4" in text
    assert "Warning, epochs 2 to 4: features are <nearly> equal" in text
    assert "Warning, epoch 4: features" in text
    assert "interval" not in text
    assert "top-1" not in text
    for row in ("effective rank8.500", "feature std0.2500", "accuracy0.3750", "majority accuracy0.1250", "Test k-NN70.00 %"):
        assert row in text


@pytest.mark.parametrize("columns", [1, 2])
def test_metrics_of_the_task_have_small_panels(tmp_path, monkeypatch, columns):
    """One each, with training and validation in one panel, and what a constant prediction gives as a dashed line."""
    figures = []
    monkeypatch.setattr(curves, "render_png", lambda figure: figures.append(figure) or b"")
    write_self_supervised(tmp_path)
    drawn = make_curves(read_run_info(tmp_path), read_metrics(tmp_path))
    drawn.draw(columns=columns)
    panels = {axes.get_title(loc="left"): axes for axes in figures[0].axes[4:]}
    assert list(panels) == ["accuracy", "$entropy", "effective rank", "feature std"]
    assert panels["effective rank"].get_title(loc="right") == "8.500"
    assert panels["$entropy"].get_title(loc="right") == "1.500"
    lines = panels["accuracy"].lines
    assert [line.get_linestyle() for line in lines] == ["-", "--", "-"]
    assert [list(line.get_ydata()) for line in lines[1:]] == [[0.125] * 4, [0.375] * 4]
    boxes = [axes.get_position() for axes in figures[0].axes]
    for index, box in enumerate(boxes):
        assert 0 < box.x0 < box.x1 < 1
        assert 0 < box.y0 < box.y1 < 1
        assert not any(box.overlaps(other) for other in boxes[:index])
    monkeypatch.undo()
    assert Image.open(io.BytesIO(drawn.draw(DARK, columns))).size == ((750, 2355) if columns == 1 else (1650, 1267))
