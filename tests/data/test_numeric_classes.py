"""Classes that are named by numbers are in numerical order, and match the classes of a model by index."""

import json

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

import vitrail
from tests.images import make_folder
from tests.training.small import FAST_PATCHES, SHORT, start
from vitrail.data.class_matching import imagenet, match_classes
from vitrail.data.datasets import folder as folders
from vitrail.data.datasets.lookup import open_source, open_splits
from vitrail.data.source import Labels, reorder_classes
from vitrail.errors import UserError
from vitrail.runs.prepare import prepare_resumed
from vitrail.training.distributed import Devices

NUMBERS = [str(number) for number in range(12)]
AS_TEXT = sorted(NUMBERS)  # the order of earlier versions


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("numbered"), NUMBERS, 4, (8, 8))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["1", "10", "2"], ["1", "2", "10"]),
        (["007", "1", "20"], ["1", "007", "20"]),
        (["1", "10", "2", "a"], ["1", "10", "2", "a"]),
        (["-1", "10", "2"], ["-1", "10", "2"]),
        (["1", "10", "²"], ["1", "10", "²"]),
        (["9" * 5000, "8"], ["8", "9" * 5000]),
        ([], []),
    ],
)
def test_order_of_names(names, expected):
    assert folders.sort_classes(names) == expected


def test_folders(numbered, tmp_path):
    source = open_source(numbered)
    assert source.classes == NUMBERS
    for index in range(len(source)):
        assert source.location(index).split("/")[-2] == source.classes[source.label.values[index]]
    mixed = open_source(make_folder(tmp_path, ["1", "10", "2", "x"], 1, (8, 8)))
    assert mixed.classes == ["1", "10", "2", "x"]


def test_a_text_column_of_numbers(tmp_path, numbered):
    image = (numbered / "0" / "000.png").read_bytes()
    table = pyarrow.table({"image": [image] * 3, "label": ["10", "2", "1"]})
    parquet.write_table(table, tmp_path / "data.parquet")
    source = open_source(tmp_path / "data.parquet")
    assert (source.classes, source.label.values.tolist()) == (["1", "2", "10"], [2, 1, 0])


def test_numbers_are_indices_of_a_model_without_names():
    assert match_classes(None, 12, NUMBERS).groups == [[number] for number in range(12)]
    assert match_classes(None, 12, AS_TEXT).groups == [[int(name)] for name in AS_TEXT]
    assert match_classes(None, 12, ["3", "11"]).groups == [[3], [11]]
    assert match_classes(None, 1000, [str(number) for number in range(1000)]).groups[10] == [10]
    names = [name for _, name in imagenet()]
    assert match_classes(names, 1000, [str(number) for number in range(1000)]).groups[10] == [10]
    with pytest.raises(UserError, match="12 classes without names"):
        match_classes(None, 12, ["3", "12"])
    with pytest.raises(UserError, match="do not match"):  # ten digits are not ten of ImageNet's classes
        match_classes(None, 1000, NUMBERS[:10])


def test_a_model_with_numbers_as_names_is_matched_by_name():
    found = match_classes(AS_TEXT, 12, NUMBERS)
    assert (found.groups, found.method) == ([[AS_TEXT.index(name)] for name in NUMBERS], "by name")


def test_evaluation_of_a_model_without_names(numbered, tmp_path, run_cli):
    """Every image of class k has the color k, and the model predicts the color's number."""
    model = vitrail.create("deit_tiny_patch16", 12, 16, patch_size=4, width=16, depth=1, heads=2)
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.zero_()
        model.head.bias[10] = 1.0
    weights = vitrail.save(model, tmp_path / "model.safetensors")
    done = run_cli("evaluate", weights, numbered, "--json")
    (found,) = json.loads(done.stdout)["evaluations"]
    assert found["matched"] == f"by index, since the classes of {numbered} are numbers"
    assert {each["name"] for each in found["per_class"] if each["top1"] == 1} == {"10"}


def test_reorder_classes():
    labels = Labels(np.array([2, -1, 0]), ["a", "b", "c"])
    moved = reorder_classes(labels, ["c", "a", "b"])
    assert (moved.values.tolist(), moved.names) == ([0, -1, 1], ["c", "a", "b"])
    assert reorder_classes(labels, ["a", "b"]) is labels
    assert reorder_classes(labels, [1, None, "c"]) is labels  # a damaged run.json


def test_an_old_run_keeps_its_order_of_classes(numbered, tmp_path, monkeypatch):
    for owner, name, value in FAST_PATCHES:
        monkeypatch.setattr(owner, name, value)
    with monkeypatch.context() as patch:
        patch.setattr(folders, "sort_classes", lambda names: names)
        before = open_splits(numbered)
        start(tmp_path / "run", SHORT | {"schedule.length": "2 steps", "validation.every": "2 steps"}, source=str(numbered))
    assert before.train.classes == AS_TEXT
    assert open_splits(numbered).train.classes == NUMBERS
    splits = prepare_resumed(tmp_path / "run", Devices(torch.device("cpu")), None, 0, {}).splits
    for one, other in zip(before[:2], splits[:2], strict=True):
        assert (one.classes, one.label.values.tolist()) == (other.classes, other.label.values.tolist())
        assert [one.location(0), len(one)] == [other.location(0), len(other)]
