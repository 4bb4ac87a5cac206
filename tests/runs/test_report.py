"""The report: well-formed, self-contained, escaped, and there for any run."""

import base64
import io
import json
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from tests.training.runs import NAMES, describe, make_run
from vitrail.errors import UserError
from vitrail.runs import reference_curves
from vitrail.runs.curves import DARK, Curves
from vitrail.runs.page import duration, embedded, number, plain
from vitrail.runs.reference_curves.__main__ import make_band, write_band
from vitrail.runs.report import confused_pairs, curves_of, read_run, thumbnail, write_report
from vitrail.training.metrics import Metrics, read_metrics

EMPTY = ("meta", "img", "br", "source", "link", "hr")


class Page(HTMLParser):
    """Checks that tags are closed in order, and gathers tags, attributes and text."""

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
    mistake = {"image": thumbnail(np.zeros((8, 9, 3), np.uint8)), "truth": NAMES[1], "guess": NAMES[2], "confidence": 0.75}
    broken = {"image": "javascript:alert(1)", "truth": "a", "guess": 'b" onerror="x'}
    matrix = [[8, 2, 0], [5, 4, 1], [0, 0, 10]]
    make_run(folder, confusion={"matrix": matrix, "names": NAMES}, mistakes=[mistake, broken])
    assert write_report(folder) == folder / "report.html"
    return folder


def test_the_page_says_it_in_one_sentence(full):
    page = Page((full / "report.html").read_text())
    assert (
        "deit_tiny on some/where/pets, recipe little, reached a validation top-1 of 80.00 % (top-5 99.00 %) at epoch 4 of 4"
        in page.text
    )
    assert ", in 65 s on 2 × CPU." in page.text
    for words in ("5.72 M", "1.26 G", "vitrail train pets --note '<b>'", "0123abc", "optimizer", "4 epochs", "4 of 10"):
        assert (words in page.text) == (words != "4 of 10"), words
    assert "5 of 10" in page.text
    assert page.tags.count("details") > 8


def test_the_page_needs_nothing_else_and_runs_nothing(full):
    page = Page((full / "report.html").read_text())
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    addresses = [value for name, value in page.attributes if name in ("src", "srcset", "href")]
    assert all(value == "" or value.startswith("data:image/") for value in addresses)
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert page.text.count("<script>alert('x')</script>") >= 4
    assert 'b" onerror="x' in page.text
    assert ("name", "viewport") in page.attributes


def test_the_images_open(full):
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
    ("options", "sentence"),
    [
        ({"validations": ()}, "was trained for 4 epochs to a training loss of 0.2"),
        ({"validations": (100,)}, "top-1 of 80.00 % (top-5 99.00 %) at epoch 4 of 4"),
        ({"last": 40}, "top-1 of 20.00 % (top-5 99.00 %) after 1.6 of 4 epochs"),
        ({"last": 40, "best": None, "seconds": None, "machine": None}, "top-1 of 20.00 % (top-5 99.00 %) after 1.6 of 4 epochs."),
        ({"last": 5, "steps": None}, "was trained for 0.2 epochs"),
        ({"last": 0}, "has not logged anything yet."),
        ({"shift": float("nan"), "best": {}}, "top-1 of 20.00 %"),  # of equals the first, as in a run
    ],
)
def test_any_run_has_a_report(tmp_path, monkeypatch, options, sentence):
    monkeypatch.setattr(Curves, "draw", lambda *_: b"")
    assert sentence in Page(write_report(make_run(tmp_path, **options)).read_text()).text


@pytest.mark.parametrize(
    "options", [{"validations": ()}, {"validations": (100,)}, {"last": 0}, {"shift": float("inf")}, {"shift": 300}]
)
def test_any_run_has_a_image(tmp_path, recwarn, options):
    folder = make_run(tmp_path, **options)
    drawn = curves_of(read_run(folder), read_metrics(folder)).draw()
    assert Image.open(io.BytesIO(drawn)).size == (1650, 990)
    assert [str(warning.message) for warning in recwarn] == []


def test_a_bare_run_has_a_report(tmp_path, monkeypatch):
    monkeypatch.setattr(Curves, "draw", lambda *_: b"")
    (tmp_path / "run.json").write_text("{}")
    assert "The model has not logged anything yet." in write_report(tmp_path).read_text()


def test_the_band_is_shaded_and_judged(tmp_path, monkeypatch):
    monkeypatch.setattr(reference_curves, "FOLDER", tmp_path / "bands")
    runs = [make_run(tmp_path / str(seed), seed) for seed in range(3)]
    band = make_band(runs)
    write_band(band, tmp_path / "bands" / "little.json")
    drawn = []
    monkeypatch.setattr(Curves, "draw", lambda curves, *_: drawn.append(curves.band) or b"")
    assert "on track: within the band of 3 seeds" in write_report(runs[0]).read_text()
    assert "worse than the band of 3 seeds" in write_report(make_run(tmp_path / "bad", 5, shift=1.0)).read_text()
    assert all(found == band for found in drawn)


def test_the_band_changes_the_image(tmp_path):
    runs = [make_run(tmp_path / str(seed), seed) for seed in range(2)]
    lines = [
        {"kind": "train", "step": 50, "epoch": 2.0, "loss": 1.0},
        {"kind": "validation", "step": 50, "epoch": 2.0, "top1": 0.5},
    ]
    assert Curves(lines, 4.0).draw(DARK) != Curves(lines, 4.0, make_band(runs)).draw(DARK)


def test_confused_pairs():
    assert confused_pairs([[8, 2, 0], [5, 4, 1], [0, 0, 10]], "abc") == [
        {"truth": "b", "guess": "a", "count": 5, "of": 10},
        {"truth": "a", "guess": "b", "count": 2, "of": 10},
        {"truth": "b", "guess": "c", "count": 1, "of": 10},
    ]
    assert confused_pairs([[1, 0], [0, 1]], "ab") == []


@pytest.mark.parametrize(
    ("confusion", "shown"),
    [({"pairs": [{"truth": "a<", "guess": "b", "count": 1234}]}, "1,234"), ({"matrix": [[1, 2], [0, 3]]}, "2 of 3"), ({}, None)],
)
def test_confusions_come_as_pairs_or_as_a_matrix(tmp_path, monkeypatch, confusion, shown):
    monkeypatch.setattr(Curves, "draw", lambda *_: b"")
    page = Page(write_report(make_run(tmp_path, confusion=confusion)).read_text())
    assert ("Most confused" in page.text) == (shown is not None)
    assert shown is None or shown in page.text


def test_bad_folders_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Curves, "draw", lambda *_: b"")
    with pytest.raises(UserError, match=r"no run\.json"):
        write_report(tmp_path)
    for text, words in (("{", "cannot be read"), ("[]", "does not describe"), ('{"model": 3}', "does not describe")):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(UserError, match=words):
            write_report(tmp_path)
    Metrics(tmp_path).close()
    for matrix in ([[1, 2]], [[1], [2]], [[1] * 4] * 4):
        (tmp_path / "run.json").write_text(json.dumps(describe(confusion={"matrix": matrix})))
        with pytest.raises(UserError, match="not square"):
            write_report(tmp_path)


def test_a_thumbnail_is_small_and_opens():
    pixels = np.random.default_rng(0).integers(0, 256, (300, 200, 3), np.uint8)
    image = Image.open(io.BytesIO(base64.b64decode(thumbnail(pixels))))
    assert (image.format, image.size) == ("JPEG", (64, 96))
    tiny = Image.open(io.BytesIO(base64.b64decode(thumbnail(pixels[:32, :32]))))
    assert (tiny.format, tiny.size) == ("PNG", (32, 32))
    assert (np.asarray(tiny) == pixels[:32, :32]).all()
    assert embedded(thumbnail(pixels)).startswith("data:image/jpeg;base64,")
    assert embedded("AAAA") == embedded(None) == embedded("é") == ""


def test_numbers_in_words():
    assert [duration(seconds) for seconds in (41, 600, 11_100, 187_200)] == ["41 s", "10 min", "3 h 5 min", "2 d 4 h"]
    assert [number(value) for value in (5_717_416, 86e9, 12, "x", True)] == ["5.72 M", "86.0 G", "12", "x", "True"]
    assert [plain(value) for value in ({}, None, [1, 2000], ["a"] * 13, {"train": 3000})] == [
        "–",
        "–",
        "1, 2,000",
        "13",
        "train 3,000",
    ]


def test_the_best_that_is_marked_is_the_run_s_own(tmp_path):
    """Of equal accuracies the run keeps the one with the least loss; where it does not say, the same rule finds it."""
    with Metrics(tmp_path) as metrics:
        for step, loss in ((1, 2.0), (2, 1.0), (3, 1.5), (4, float("nan"))):
            metrics.write("validation", step, step, {"loss": loss, "top1": 0.5 if step < 4 else 0.9})
    for best, epoch in (({"top1": 0.5, "epoch": 3}, 3), ({}, 2)):
        (tmp_path / "run.json").write_text(json.dumps(describe(best=best, steps=4)))
        curves = curves_of(read_run(tmp_path), read_metrics(tmp_path))
        assert curves.best == epoch
        assert curves.marked() == (epoch, 0.5)
    assert Curves([], 1.0).marked() is None
