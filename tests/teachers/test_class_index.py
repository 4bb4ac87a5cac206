"""The student's classes among the teacher's."""

import pytest
import torch

import vitrail
from tests.teachers.predictions import make_source
from tests.teachers.test_teacher import HALF, Little
from vitrail.teachers import Teacher, match_teacher
from vitrail.teachers.class_index import match_source
from vitrail.teachers.network import ConvNetwork


def teacher(names, classes=None):
    return Teacher(ConvNetwork(Little()), HALF, classes or len(names), names)


def test_by_name_in_another_order():
    index = match_teacher(teacher(["cat", "dog", "ant", "bee"]), ["bee", "cat"])
    assert index.tolist() == [3, 0]
    assert index.dtype == torch.int64
    assert match_teacher(teacher(["cat", "dog"]), ["cat", "dog"]).tolist() == [0, 1]


def test_without_names_by_equal_counts():
    assert match_teacher(teacher(None, 3), ["x", "y", "z"]).tolist() == [0, 1, 2]
    with pytest.raises(vitrail.UserError, match="3 classes without names"):
        match_teacher(teacher(None, 3), ["x", "y"])


def test_imagenet_without_names_by_wordnet_id():
    index = match_teacher(teacher(None, 1000), ["n01443537", "n01440764"])
    assert index.tolist() == [1, 0]
    assert match_teacher(teacher(None, 1000), ["fish", "tench"], ids={"fish": "n01443537"}).tolist() == [1, 0]


def test_wordnet_ids_of_the_data_are_used(tmp_path):
    source = make_source(tmp_path / "photos", 1)
    with pytest.raises(vitrail.UserError, match=r"3 of 3 are unknown to the model.*; paint them\.$"):
        match_source(teacher(None, 1000), source, "paint them")
    (tmp_path / "photos" / "wordnet_ids.json").write_text(
        '{"blue": "n01443537", "green": "n01440764", "red": "n03126707", "x": 1}'
    )
    found = match_source(teacher(None, 1000), source, "paint them")
    assert (found.indices.tolist(), found.names, found.method) == ([1, 0, 517], ["blue", "green", "red"], "by WordNet id")


def test_ambiguous_names():
    with pytest.raises(vitrail.UserError, match=r"134 and 517: give mapping=.*, or WordNet ids"):
        match_teacher(teacher(None, 1000), ["crane", "goldfish"])
    assert match_teacher(teacher(None, 1000), ["crane", "goldfish"], {"crane": 517}).tolist() == [517, 1]
    assert match_teacher(teacher(None, 1000), ["crane", "goldfish"], ids={"crane": "n02012849"}).tolist() == [134, 1]


def test_mapping():
    names = ["cat", "dog", "ant", "bee"]
    assert match_teacher(teacher(names), ["insect", "dog"], {"insect": "ant"}).tolist() == [2, 1]
    assert match_teacher(teacher(None, 4), ["a", "b"], {"a": 3, "b": 0}).tolist() == [3, 0]


@pytest.mark.parametrize(
    ("students", "mapping", "says"),
    [
        (["cat", "cow", "pig"], None, r"'cow', 'pig'.*'dog', 'ant', 'bee'"),
        (["insect", "dog"], {"insect": ["ant", "bee"]}, "2 classes of the teacher: give exactly one"),
        (["insect", "dog", "cat"], {"insect": None}, "0 classes of the teacher: give exactly one"),
        (["insect", "fly", "dog"], {"insect": "ant", "fly": "ant"}, "'insect' and 'fly' the same class"),
        (["cat", "dog"], {"cow": "ant"}, "'cow'"),
        ([], None, "no classes"),
    ],
)
def test_mismatches(students, mapping, says):
    with pytest.raises(vitrail.UserError, match=says):
        match_teacher(teacher(["cat", "dog", "ant", "bee"]), students, mapping)
