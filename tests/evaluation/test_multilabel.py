"""Several valid labels per image."""

import json

import numpy as np
import pytest

from tests.images import make_folder, make_image
from vitrail.data.datasets.lookup import open_source
from vitrail.errors import UserError
from vitrail.evaluation.multilabel import multilabel_accuracy, read_valid_labels


@pytest.fixture
def source(tmp_path):
    return open_source(str(make_folder(tmp_path / "data", ("a", "b", "c"), 2)))


def written(tmp_path, content):
    path = tmp_path / "labels.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_list_in_the_order_of_the_data(source, tmp_path):
    path = written(tmp_path, [[0], [0, 2], [], ["b"], ["c", 0], [2]])
    assert read_valid_labels(path, source) == [{0}, {0, 2}, set(), {1}, {2, 0}, {2}]


def test_an_object_of_file_names(source, tmp_path):
    names = {f"{each}/{number:03}.png": [place] for place, each in enumerate("abc") for number in (0, 1)}
    assert read_valid_labels(written(tmp_path, names), source) == [{0}, {0}, {1}, {1}, {2}, {2}]
    del names["b/001.png"]
    with pytest.raises(UserError, match=r"has no labels for .*b/001\.png"):
        read_valid_labels(written(tmp_path, names), source)


def test_the_order_of_the_published_file(tmp_path):
    """ReaL's list goes by the numbers in the names, while a folder of class folders goes by class."""
    for name, number in (("x", 3), ("x", 1), ("y", 2)):
        make_image(tmp_path / "val" / name / f"ILSVRC2012_val_{number:08}.png")
    source = open_source(str(tmp_path / "val"))
    path = written(tmp_path, [[0], [1], [], [1]])
    assert [(source.location(index)[-5:], set(labels)) for index, labels in enumerate(read_valid_labels(path, source))] == [
        ("1.png", {0}),
        ("3.png", set()),
        ("2.png", {1}),
    ]
    with pytest.raises(UserError, match=r"2 lists of labels, .* an image number 3"):
        read_valid_labels(written(tmp_path, [[0], [1]]), source)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([[0]], "1 lists of labels for the 6 images"),
        ([0, 1, 2, 0, 1, 2], "0 where a list of labels should be"),
        ([[3], [0], [0], [0], [0], [0]], "label 3, which is no class"),
        ([[-1], [0], [0], [0], [0], [0]], "label -1"),
        ([[True], [0], [0], [0], [0], [0]], "label True"),
        ([["d"], [0], [0], [0], [0], [0]], "label 'd'"),
        ("3", "neither a list"),
        ("{", "cannot be read as JSON"),
    ],
)
def test_invalid_files(source, tmp_path, content, words):
    with pytest.raises(UserError, match=words):
        read_valid_labels(written(tmp_path, content), source)
    with pytest.raises(UserError, match="There is no file"):
        read_valid_labels(tmp_path / "none.json", source)


def test_images_without_valid_labels_are_not_counted():
    labels = [frozenset(each) for each in ([0], [0, 2], [], [1], [3])]
    found = multilabel_accuracy(np.array([0, 1, 2, 3, 4]), np.array([0, 2, 0, 0, 1]), labels, np.array([0, 1, 2, -1]))
    assert found == (pytest.approx(2 / 3), 3, 2)  # class 3 is left out, so its image has no right answer either
    some = multilabel_accuracy(np.array([3, 1]), np.array([1, 1]), labels, np.array([0, 1, 2, -1]))
    assert some == (0.5, 2, 0)
    assert np.isnan(multilabel_accuracy(np.array([2]), np.array([0]), labels, np.arange(4)).top1)
