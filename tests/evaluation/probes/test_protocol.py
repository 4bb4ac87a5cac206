"""Memory and queries of the probes, settings, rankings with coarse labels, files of features."""

import json

import numpy as np
import pyarrow.parquet
import pytest
import torch

import vitrail
from tests.evaluation.probes.test_knn import clouds
from tests.evaluation.probes.test_levels import LabeledSource, embedded
from tests.images import make_folder, make_image
from vitrail.data.source import Labels
from vitrail.errors import UserError
from vitrail.evaluation.embeddings import write_embedding
from vitrail.evaluation.features import FeatureKind, embed
from vitrail.evaluation.probes.protocol import (
    PROBES,
    ProbeData,
    Settings,
    default_vector,
    embed_probe_data,
    label_column,
    measure_retrieval,
    open_embedding_source,
    open_probe_data,
    select_labeled,
)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return vitrail.create("deit_tiny_patch16", 3, 16, patch_size=4, width=16, depth=1, heads=2).eval()


def test_default_splits_of_memory_and_queries(tmp_path):
    make_folder(tmp_path / "one", count=10)
    sides = open_probe_data(str(tmp_path / "one"))
    assert (len(sides.memory), len(sides.queries)) == (27, 3)
    for split, count in (("train", 4), ("val", 2), ("test", 3)):
        make_folder(tmp_path / "three" / split, count=count)
    sides = open_probe_data(str(tmp_path / "three"))
    assert (sides.memory_name, sides.queries_name) == ("train", "test")
    assert (len(sides.memory), len(sides.queries)) == (12, 9)
    sides = open_probe_data(str(tmp_path / "three"), "val", "train", max_images=5)
    assert (sides.memory_name, len(sides.memory), sides.queries_name, len(sides.queries)) == ("validation", 5, "train", 5)
    again = open_probe_data(str(tmp_path / "three"), "val", "train", max_images=5)
    assert np.array_equal(again.memory.indices, sides.memory.indices)
    with pytest.raises(UserError, match="choose two splits"):
        open_probe_data("digits", queries="train")
    with pytest.raises(UserError, match="no validation split"):
        open_probe_data("digits", queries="val")
    with pytest.raises(UserError, match="no split called tset"):
        open_probe_data("digits", queries="tset")


def test_an_unlabeled_test_split_is_not_used_for_queries(tmp_path):
    make_folder(tmp_path / "train", count=3)
    make_folder(tmp_path / "val", count=2)
    make_image(tmp_path / "test" / "a.png")
    assert open_probe_data(str(tmp_path)).queries_name == "validation"


def test_columns_by_name():
    source = LabeledSource(np.array([0, 1, 2]))
    assert label_column(source).names == ["a", "b", "c", "d"]
    assert label_column(source, "coarse_label").names == ["low", "high"]
    with pytest.raises(UserError, match="no labels called color; there are label, coarse_label"):
        label_column(source, "color")


def test_every_probe_on_images_of_colors(model, tmp_path):
    sides = open_probe_data(str(make_folder(tmp_path, count=20)))
    data = select_labeled(sides, *embed_probe_data(model, sides, FeatureKind(), 16, 0))
    for name, probe in PROBES.items():
        result = probe(data, Settings(weight_decays=(1e-2, 1e-3)))
        assert result.score > 0.8, name  # colors are easy, even for a model that has learned nothing
        assert probe(data, Settings(weight_decays=(1e-2, 1e-3))) == result
        assert result.details["queries"] == 6
    assert PROBES["knn"](data, Settings(k=500)).details["k"] == 54
    assert default_vector("fewshot", model) == "penultimate"
    assert default_vector("knn", model) == "pooled"


def test_one_class_or_none_is_rejected():
    vectors = torch.randn(6, 3)
    one = LabeledSource(np.zeros(6, dtype=np.int64))
    sides = ProbeData(one, one, "train", "test")
    with pytest.raises(UserError, match="only one class in label"):
        select_labeled(sides, embedded(vectors, one), embedded(vectors, one))
    none = LabeledSource(np.full(6, -1))
    sides = ProbeData(none, none, "train", "test")
    with pytest.raises(UserError, match=r"No readable image of made up \(train\)"):
        select_labeled(sides, embedded(vectors, none), embedded(vectors, none))
    other = LabeledSource(np.array([0, 1]))
    other.label = Labels(other.label.values, ["b", "a", "c", "d"])
    with pytest.raises(UserError, match="different class names"):
        select_labeled(
            ProbeData(LabeledSource(np.array([0, 1])), other, "train", "test"),
            embedded(vectors[:2], one),
            embedded(vectors[:2], one),
        )


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"kk": 3}, "unknown setting 'kk'"),
        ({"k": "many"}, "not a valid number"),
        ({"k": 2.5}, "not a valid number"),
        ({"k": 0}, "k must be at least 1"),
        ({"temperature": 0}, "temperature must be above 0"),
        ({"temperature": float("nan")}, "temperature must be above 0"),
        ({"weight_decays": [-1]}, "decays must be"),
        ({"weight_decays": []}, "decays must be"),
        ({"weight_decays": ".inf"}, "not a valid number"),
        ({"decays": float("inf")}, "decays must be"),
        ({"held_out": 1}, "between 0 and 1"),
        ({"protocol": "x"}, "no protocol"),
        ({"shots": 0}, "shots must be"),
        ({"penalty": -3}, "penalty must be"),
    ],
)
def test_invalid_settings(values, reason):
    with pytest.raises(UserError, match=reason):
        Settings.from_dict(values, "Task 1")


def test_settings_from_text():
    assert Settings.from_dict({"decays": ["1e-3", 1], "k": "5", "penalty": "2"}, "") == Settings(
        weight_decays=(1e-3, 1.0), k=5, penalty=2.0
    )


def test_rankings_with_coarse_labels(model):
    memory, labels, queries, query_labels = clouds(90, 50)
    sides = ProbeData(LabeledSource(labels.numpy()), LabeledSource(query_labels.numpy()), "train", "test")
    parts = embedded(memory, sides.memory), embedded(queries, sides.queries)
    plain = measure_retrieval(sides, *parts)
    for coarse_by in ("memory", "neighbors"):
        found = measure_retrieval(sides, *parts, coarse="coarse_label", coarse_by=coarse_by)
        assert found["cosine"] == plain["cosine"]
        assert found["cosine"].mean < found["conditional"].mean < found["oracle"].mean
    with pytest.raises(UserError, match="are not the 2 classes of coarse_label"):
        measure_retrieval(sides, *parts, coarse="coarse_label", coarse_by=model)


def test_a_classifier_of_coarse_labels_may_condition(tmp_path):
    make_folder(tmp_path, ["blue", "green", "red"], 10)
    torch.manual_seed(0)
    model = vitrail.create("deit_tiny_patch16", 2, 16, patch_size=4, width=16, depth=1, heads=2).eval()
    sides = open_probe_data(str(tmp_path))
    for side in (sides.memory, sides.queries):
        side.extra = {"coarse_label": Labels((side.label.values == 2).astype(np.int64), ["cold", "warm"])}
    parts = embed_probe_data(model, sides, FeatureKind(), 16, 0)
    logits = embed(model, sides.queries, FeatureKind("logits"), workers=0).vectors
    found = measure_retrieval(sides, *parts, coarse="coarse_label", coarse_by=model, workers=0)
    from vitrail.evaluation.probes.retrieval import CoarseLabels, mean_average_precision

    data = select_labeled(sides, *parts)
    chances = CoarseLabels(parts[0].extra["coarse_label"], logits.softmax(1))
    assert found["conditional"] == mean_average_precision(*data[:4], chances)


def test_sources_to_embed(tmp_path):
    folder = make_folder(tmp_path / "photos", count=2)
    source, problems = open_embedding_source([str(folder)])
    assert source.label is not None
    assert (len(source), problems) == (6, [])
    source, problems = open_embedding_source([str(folder / "red" / "000.png")])
    assert (len(source), source.label, problems) == (1, None, [])
    source, problems = open_embedding_source([str(folder / "red"), str(folder / "green" / "000.png"), str(tmp_path / "gone.png")])
    assert (len(source), source.label, len(problems)) == (3, None, 1)
    flat, _ = open_embedding_source([str(folder / "red")])
    assert (len(flat), flat.label) == (2, None)
    assert len(open_embedding_source(["digits"], "test")[0]) == 360
    with pytest.raises(UserError, match="no splits"):
        open_embedding_source([str(folder / "red" / "000.png")], "train")
    with pytest.raises(UserError, match="does not exist"):
        open_embedding_source([str(tmp_path / "gone")])


def test_features_as_files(model, tmp_path):
    folder = make_folder(tmp_path / "photos", count=2)
    source, _ = open_embedding_source([str(folder)])
    source.extra = {"coarse_label": Labels(np.array([0, 0, 1, -1, 1, 1]), ["x", "y"])}
    found = embed(model, source, FeatureKind(normalize=True), workers=0)
    (path,) = write_embedding(found, source, tmp_path / "f.parquet", FeatureKind(normalize=True), "w")
    table = pyarrow.parquet.read_table(path)
    assert table.column_names == ["image", "index", "label", "coarse_label", "features"]
    assert str(table.schema.field("features").type) == "fixed_size_list<element: float>[16]"
    assert np.array_equal(np.stack(table["features"].to_numpy()), found.vectors.numpy())
    assert table["coarse_label"].to_pylist() == [0, 0, 1, None, 1, 1]
    assert table["image"].to_pylist()[0] == str(folder / "blue" / "000.png")
    metadata = json.loads(table.schema.metadata[b"vitrail"])
    assert metadata["classes"] == {"label": ["blue", "green", "red"], "coarse_label": ["x", "y"]}
    assert (metadata["vector"], metadata["normalize"]) == ("pooled", True)
    array, sidecar = write_embedding(found, source, tmp_path / "f.npy", FeatureKind(normalize=True), "w")
    assert np.array_equal(np.load(array), found.vectors.numpy())
    content = json.loads(sidecar.read_text())
    assert content["labels"] == {"label": [0, 0, 1, 1, 2, 2], "coarse_label": [0, 0, 1, None, 1, 1]}
    assert content["images"] == table["image"].to_pylist()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["f.json", "f.npy", "f.parquet", "photos"]
    with pytest.raises(UserError, match=r"as \.parquet or \.npy"):
        write_embedding(found, source, tmp_path / "f.txt", FeatureKind(), "w")
