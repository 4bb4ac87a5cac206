"""The comparison of first trainings: features, sets, times and the table; no training."""

import importlib
import itertools
import json
import math
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from tests.images import make_folder, make_image
from vitrail.errors import UserError
from vitrail.formatting import format_time_span

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def first_use(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("first_use")


@pytest.fixture
def image_set(first_use, tmp_path):
    for split in ("train", "test"):
        make_folder(tmp_path / "photos" / split, count=10, size=(20, 16))
    return first_use.open_set(tmp_path / "photos")


@pytest.mark.parametrize("angle", [0, 20, 60, 90, 140])
def test_hog_finds_the_angle_of_stripes(first_use, angle):
    y, x = np.indices((128, 128))
    radians = math.radians(angle)
    waves = 128 + 100 * np.sin(0.4 * (x * math.cos(radians) + y * math.sin(radians)))
    blocks = first_use.gradient_histograms(np.repeat(waves[..., None], 3, -1)).reshape(15, 15, 4, 9)
    assert np.allclose((blocks**2).sum((-2, -1)), 1, atol=1e-4)
    share = blocks.sum((0, 1, 2)) / blocks.sum()
    doubled = np.exp(2j * np.pi * (np.arange(9) + 0.5) / 9)  # bins are centered at 10, 30, ... degrees, modulo 180
    assert math.degrees(np.angle((share * doubled).sum())) / 2 % 180 == pytest.approx(angle, abs=2)


def test_color_histograms_are_those_of_the_regions(first_use):
    hsv = np.zeros((8, 8, 3), np.uint8)
    hsv[4:, 4:] = 255
    squares = first_use.color_histograms(hsv).reshape(4, 512) ** 2
    assert squares.sum(1) == pytest.approx(1)
    assert squares[:3, 0] == pytest.approx(1)
    assert squares[3, 511] == pytest.approx(1)


@pytest.mark.parametrize("seconds", [41, 12 * 60, 2 * 3600, 3 * 3600 + 5 * 60, 86400, 5 * 86400 + 18 * 3600])
def test_printed_times_are_read_back(first_use, seconds):
    assert first_use.parse_time_span(format_time_span(seconds)) == seconds


def test_svm_separates_colors(first_use, image_set):
    assert first_use.fit_svm(image_set)["accuracy"] == 1


def test_resnet_trains_until_the_time_is_over(first_use, image_set, monkeypatch):
    monkeypatch.setattr(first_use, "RESNET_SIZE", 16)
    monkeypatch.setattr(first_use, "RESNET_WIDTH", 8)
    monkeypatch.setattr(first_use, "time", SimpleNamespace(perf_counter=itertools.count().__next__))  # a second per look
    result = first_use.train_resnet(image_set, seconds=31, seed=0)
    assert result["epochs"] == 30  # each step sees all 30 images
    assert result["accuracy"] > 0.9


def test_sets_need_the_same_classes(first_use, image_set):
    make_folder(image_set.folder / "test", classes=("yellow",), count=1)
    with pytest.raises(UserError, match="different classes: yellow"):
        first_use.open_set(image_set.folder)
    with pytest.raises(UserError, match="has no folder train"):
        first_use.open_set(image_set.folder / "train")


def test_table_has_means_over_sets_and_spreads_over_seeds(first_use):
    def row(name, *accuracies):
        runs = [{"accuracy": accuracy, "forecast_s": 100.0, "wall_s": 110.0} for accuracy in accuracies]
        sizes = {"set": name, "classes": 3, "train_images": 60, "test_images": 1000}
        return sizes | {"vitrail": runs, "svm": {"accuracy": 0.4}}

    lines = first_use.format_table([row("a", 0.7, 0.8), row("b", 0.5, 0.5)], ["vitrail", "svm"]).splitlines()
    assert lines[2] == "| a | 3 | 60 | 1,000 | 75.0 ± 7.1 (72.2 to 77.6) | 40.0 (37.0 to 43.1) | 100 | 110 | 1.10 |"
    assert lines[4] == "| mean |  |  |  | 62.5 | 40.0 | 100 | 110 | 1.10 |"


def test_results_of_several_files_are_merged(first_use, tmp_path):
    def write(name, **methods):
        row = {"set": "a", "classes": 3, "train_images": 60, "test_images": 1000} | methods
        (tmp_path / name).write_text(json.dumps({"rows": [row]}))
        return tmp_path / name

    runs = [{"seed": seed, "accuracy": 0.5 + seed / 10, "forecast_s": 100.0, "wall_s": 100.0} for seed in range(3)]
    files = write("2.json", vitrail=runs[2:]), write("0.json", vitrail=runs[:2]), write("svm.json", svm={"accuracy": 0.25})
    (merged,) = first_use.merge_results(files)
    assert merged["vitrail"] == runs
    assert first_use.accuracy_of(merged, "vitrail") == pytest.approx(0.6)
    assert first_use.accuracy_of(merged, "svm") == 0.25


def test_the_page_has_the_stored_results(first_use, monkeypatch, capsys, tmp_path):
    stored = BENCHMARKS / "first_use_results.json"
    monkeypatch.setattr("sys.argv", ["first_use.py", "--merge", str(stored), "--out", str(tmp_path / "merged.json")])
    first_use.main()
    table = capsys.readouterr().out
    assert table.count("\n| ") == 7  # a line below the titles, five sets, their mean
    assert table in (BENCHMARKS.parent / "docs" / "first-use.md").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "merged.json").read_text()) == json.loads(stored.read_text())


@pytest.fixture
def sets(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("first_use_sets")


def make_set(sets, monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["first_use_sets.py", "satellite", *map(str, words)])
    sets.main()


def test_sets_have_no_duplicates_and_bounded_sizes(sets, tmp_path, monkeypatch):
    """Of 40 images of a class three are copies; the class with few images is left out."""
    for folder, count in (("aGrass", 37), ("bField", 37), ("cRiver", 4)):
        for number in range(count):
            pattern = np.random.default_rng([ord(folder[0]), number]).integers(0, 255, (6, 8, 3), np.uint8)
            path = tmp_path / "clone" / folder / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pattern).resize((400, 300), Image.Resampling.NEAREST).save(path)
    for number in range(3):
        shutil.copy(tmp_path / "clone/aGrass/5.jpg", tmp_path / f"clone/aGrass/copy{number}.jpg")
    options = (tmp_path / "clone", tmp_path / "out", "--train", 20, "--test", 15, "--side", 64)
    make_set(sets, monkeypatch, *options)
    files = sorted((tmp_path / "out").rglob("*.jpg"))
    counts = Counter(path.relative_to(tmp_path / "out").parent.as_posix() for path in files)
    assert counts == {"train/Grass": 20, "test/Grass": 15, "train/Field": 20, "test/Field": 15}
    assert {Image.open(path).size for path in files} == {(64, 48)}
    pixels = {Image.open(path).tobytes() for path in files}
    assert len(pixels) == len(files)
    with pytest.raises(UserError, match="give a new folder"):
        make_set(sets, monkeypatch, *options)
    with pytest.raises(UserError, match="no images of palewithout/RSSCN7"):
        make_set(sets, monkeypatch, tmp_path / "out", tmp_path / "other")


def test_the_split_of_a_repository_is_kept(sets, tmp_path):
    for split, number in (("train", 1), ("test", 2), ("train", 3)):
        make_image(tmp_path / "dataset" / split / "Fruit" / "Apple" / f"{number}.jpg", number, size=(30, 20))
    found = sets.find_images(tmp_path, sets.SETS["grocery"])
    drawn = sets.draw(found["Apple"], train=5, test=5)
    assert {split: sorted(path.stem for path in paths) for split, paths in drawn.items()} == {"train": ["1", "3"], "test": ["2"]}
