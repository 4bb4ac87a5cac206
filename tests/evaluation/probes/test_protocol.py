"""Which images are remembered and which are asked about; settings; rankings with coarse labels; files of features."""

import json

import numpy as np
import pyarrow.parquet
import pytest
import torch

import vitrail
from tests.evaluation.probes.test_knn import clouds
from tests.evaluation.probes.test_levels import Labelled, embedded
from tests.images import make_folder, make_image
from vitrail.data.source import Labels
from vitrail.errors import UserError
from vitrail.evaluation.embeddings import write_embedding
from vitrail.evaluation.features import Readout, embed
from vitrail.evaluation.probes.protocol import (
    PROBES,
    Settings,
    Sides,
    column,
    embed_sides,
    known,
    open_for_embedding,
    open_sides,
    rank,
    usual_vector,
)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return vitrail.create("deit_tiny_patch16", 3, 16, patch_size=4, width=16, depth=1, heads=2).eval()


def test_sides_by_what_there_is(tmp_path):
    make_folder(tmp_path / "one", count=10)
    sides = open_sides(str(tmp_path / "one"))
    assert (len(sides.memory), len(sides.queries)) == (27, 3)
    for split, count in (("train", 4), ("val", 2), ("test", 3)):
        make_folder(tmp_path / "three" / split, count=count)
    sides = open_sides(str(tmp_path / "three"))
    assert (sides.memory_name, sides.queries_name) == ("train", "test")
    assert (len(sides.memory), len(sides.queries)) == (12, 9)
    sides = open_sides(str(tmp_path / "three"), "val", "train", most=5)
    assert (sides.memory_name, len(sides.memory), sides.queries_name, len(sides.queries)) == ("validation", 5, "train", 5)
    again = open_sides(str(tmp_path / "three"), "val", "train", most=5)
    assert np.array_equal(again.memory.indices, sides.memory.indices)
    with pytest.raises(UserError, match="name two splits"):
        open_sides("digits", queries="train")
    with pytest.raises(UserError, match="no validation split"):
        open_sides("digits", queries="val")
    with pytest.raises(UserError, match="no split called tset"):
        open_sides("digits", queries="tset")


def test_an_unlabelled_test_split_is_not_asked(tmp_path):
    make_folder(tmp_path / "train", count=3)
    make_folder(tmp_path / "val", count=2)
    make_image(tmp_path / "test" / "a.png")
    assert open_sides(str(tmp_path)).queries_name == "validation"


def test_columns_by_name():
    source = Labelled(np.array([0, 1, 2]))
    assert column(source).names == ["a", "b", "c", "d"]
    assert column(source, "coarse_label").names == ["low", "high"]
    with pytest.raises(UserError, match="no labels called color; there are label, coarse_label"):
        column(source, "color")


def test_every_probe_on_images_of_colors(model, tmp_path):
    sides = open_sides(str(make_folder(tmp_path, count=20)))
    data = known(sides, *embed_sides(model, sides, Readout(), 16, 0))
    for name, probe in PROBES.items():
        result = probe(data, Settings(decays=(1e-2, 1e-3)))
        assert result.score > 0.8, name  # colors are easy, even for a model that has learned nothing
        assert probe(data, Settings(decays=(1e-2, 1e-3))) == result
        assert result.details["queries"] == 6
    assert PROBES["knn"](data, Settings(k=500)).details["k"] == 54
    assert usual_vector("fewshot", model) == "penultimate"
    assert usual_vector("knn", model) == "pooled"


def test_one_class_or_none_is_refused():
    vectors = torch.randn(6, 3)
    one = Labelled(np.zeros(6, dtype=np.int64))
    sides = Sides(one, one, "train", "test")
    with pytest.raises(UserError, match="only one class in label"):
        known(sides, embedded(vectors, one), embedded(vectors, one))
    none = Labelled(np.full(6, -1))
    sides = Sides(none, none, "train", "test")
    with pytest.raises(UserError, match=r"No image of made up \(train\)"):
        known(sides, embedded(vectors, none), embedded(vectors, none))
    other = Labelled(np.array([0, 1]))
    other.label = Labels(other.label.values, ["b", "a", "c", "d"])
    with pytest.raises(UserError, match="name other classes"):
        known(Sides(Labelled(np.array([0, 1])), other, "train", "test"), embedded(vectors[:2], one), embedded(vectors[:2], one))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"kk": 3}, "unknown setting 'kk'"),
        ({"k": "many"}, "not a number"),
        ({"k": 2.5}, "not a number"),
        ({"k": 0}, "k must be at least 1"),
        ({"temperature": 0}, "temperature must be above 0"),
        ({"temperature": float("nan")}, "temperature must be above 0"),
        ({"decays": [-1]}, "decays must be"),
        ({"decays": []}, "decays must be"),
        ({"decays": ".inf"}, "not a number"),
        ({"decays": float("inf")}, "decays must be"),
        ({"share": 1}, "between 0 and 1"),
        ({"protocol": "x"}, "no protocol"),
        ({"shots": 0}, "shots must be"),
        ({"penalty": -3}, "penalty must be"),
    ],
)
def test_settings_that_make_no_sense(values, reason):
    with pytest.raises(UserError, match=reason):
        Settings.from_dict(values, "Task 1")


def test_settings_from_text():
    assert Settings.from_dict({"decays": ["1e-3", 1], "k": "5", "penalty": "2"}, "") == Settings(
        decays=(1e-3, 1.0), k=5, penalty=2.0
    )


def test_rankings_with_coarse_labels(model):
    memory, labels, queries, truth = clouds(90, 50)
    sides = Sides(Labelled(labels.numpy()), Labelled(truth.numpy()), "train", "test")
    parts = embedded(memory, sides.memory), embedded(queries, sides.queries)
    plain = rank(sides, *parts)
    for by in ("memory", "neighbours"):
        found = rank(sides, *parts, coarse="coarse_label", by=by)
        assert found["cosine"] == plain["cosine"]
        assert found["cosine"].mean < found["conditional"].mean < found["oracle"].mean
    with pytest.raises(UserError, match="does not name the 2 classes of coarse_label"):
        rank(sides, *parts, coarse="coarse_label", by=model)


def test_a_classifier_of_coarse_labels_may_condition(tmp_path):
    make_folder(tmp_path, ["blue", "green", "red"], 10)
    torch.manual_seed(0)
    model = vitrail.create("deit_tiny_patch16", 2, 16, patch_size=4, width=16, depth=1, heads=2).eval()
    sides = open_sides(str(tmp_path))
    for side in (sides.memory, sides.queries):
        side.extra = {"coarse_label": Labels((side.label.values == 2).astype(np.int64), ["cold", "warm"])}
    parts = embed_sides(model, sides, Readout(), 16, 0)
    logits = embed(model, sides.queries, Readout("logits"), workers=0).vectors
    found = rank(sides, *parts, coarse="coarse_label", by=model, workers=0)
    from vitrail.evaluation.probes.retrieval import Conditioning, mean_average_precision

    data = known(sides, *parts)
    chances = Conditioning(parts[0].extra["coarse_label"], logits.softmax(1))
    assert found["conditional"] == mean_average_precision(*data[:4], chances)


def test_what_is_embedded(tmp_path):
    folder = make_folder(tmp_path / "photos", count=2)
    source, problems = open_for_embedding([str(folder)])
    assert source.label is not None
    assert (len(source), problems) == (6, [])
    source, problems = open_for_embedding([str(folder / "red" / "000.png")])
    assert (len(source), source.label, problems) == (1, None, [])
    source, problems = open_for_embedding([str(folder / "red"), str(folder / "green" / "000.png"), str(tmp_path / "gone.png")])
    assert (len(source), source.label, len(problems)) == (3, None, 1)
    flat, _ = open_for_embedding([str(folder / "red")])
    assert (len(flat), flat.label) == (2, None)
    assert len(open_for_embedding(["digits"], "test")[0]) == 360
    with pytest.raises(UserError, match="no splits"):
        open_for_embedding([str(folder / "red" / "000.png")], "train")
    with pytest.raises(UserError, match="There is nothing at"):
        open_for_embedding([str(tmp_path / "gone")])


def test_features_as_files(model, tmp_path):
    folder = make_folder(tmp_path / "photos", count=2)
    source, _ = open_for_embedding([str(folder)])
    source.extra = {"coarse_label": Labels(np.array([0, 0, 1, -1, 1, 1]), ["x", "y"])}
    found = embed(model, source, Readout(unit=True), workers=0)
    (path,) = write_embedding(found, source, tmp_path / "f.parquet", Readout(unit=True), "w")
    table = pyarrow.parquet.read_table(path)
    assert table.column_names == ["image", "number", "label", "coarse_label", "features"]
    assert str(table.schema.field("features").type) == "fixed_size_list<element: float>[16]"
    assert np.array_equal(np.stack(table["features"].to_numpy()), found.vectors.numpy())
    assert table["coarse_label"].to_pylist() == [0, 0, 1, None, 1, 1]
    assert table["image"].to_pylist()[0] == str(folder / "blue" / "000.png")
    about = json.loads(table.schema.metadata[b"vitrail"])
    assert about["classes"] == {"label": ["blue", "green", "red"], "coarse_label": ["x", "y"]}
    assert (about["vector"], about["unit"]) == ("pooled", True)
    array, beside = write_embedding(found, source, tmp_path / "f.npy", Readout(unit=True), "w")
    assert np.array_equal(np.load(array), found.vectors.numpy())
    content = json.loads(beside.read_text())
    assert content["labels"] == {"label": [0, 0, 1, 1, 2, 2], "coarse_label": [0, 0, 1, None, 1, 1]}
    assert content["images"] == table["image"].to_pylist()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["f.json", "f.npy", "f.parquet", "photos"]
    with pytest.raises(UserError, match=r"as \.parquet or \.npy"):
        write_embedding(found, source, tmp_path / "f.txt", Readout(), "w")
