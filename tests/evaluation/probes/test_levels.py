"""Label hierarchies: levels, their order and consistency; every cell of the grid equals a single probe."""

import json

import numpy as np
import pytest
import torch

import vitrail
from tests.evaluation.probes.test_knn import clouds
from tests.images import make_image
from vitrail.data.datasets.lookup import open_source
from vitrail.data.source import Labels
from vitrail.errors import UserError
from vitrail.evaluation.features import Embedding
from vitrail.evaluation.probes.knn import knn_accuracy
from vitrail.evaluation.probes.levels import (
    NO_LEVEL,
    EmbeddedModel,
    Grid,
    find_levels,
    inconsistent_classes,
    measure_grid,
    training_level,
)
from vitrail.evaluation.probes.protocol import ProbeData, Settings
from vitrail.evaluation.probes.retrieval import mean_average_precision

PARENT = np.array([0, 0, 1, 1])


class LabeledSource:
    """A source of labels alone; its images have been embedded already."""

    def __init__(self, fine):
        self.name = "made up"
        self.label = Labels(fine, ["a", "b", "c", "d"])
        self.extra = {"coarse_label": Labels(np.where(fine < 0, -1, PARENT[fine]), ["low", "high"])}


def embedded(vectors, source):
    columns = {name: torch.from_numpy(labels.values) for name, labels in source.extra.items()}
    return Embedding(vectors, torch.arange(len(vectors)), torch.from_numpy(source.label.values), columns, [])


@pytest.fixture(scope="module")
def made():
    memory, labels, queries, query_labels = clouds(90, 50)
    sides = ProbeData(LabeledSource(labels.numpy()), LabeledSource(query_labels.numpy()), "train", "test")
    return sides, embedded(memory, sides.memory), embedded(queries, sides.queries)


def test_levels_of_a_table_coarsest_first(tmp_path):
    rows = ["path,label,coarse_label,empty_label"]
    for place, name in enumerate(("tabby", "siamese", "poodle")):
        make_image(tmp_path / f"{name}.png", place)
        rows += [f"{name}.png,{name},{'dog' if name == 'poodle' else 'cat'},"] * 2
    (tmp_path / "all.csv").write_text("\n".join(rows))
    levels = find_levels(open_source(str(tmp_path / "all.csv")))
    assert [(level.name, level.classes) for level in levels] == [("coarse_label", 2), ("label", 3)]
    assert inconsistent_classes(levels[1].labels, levels[0].labels) == []
    assert inconsistent_classes(levels[0].labels, levels[1].labels) == ["cat"]


def test_a_single_class_is_no_level():
    source = LabeledSource(np.zeros(5, dtype=np.int64))
    with pytest.raises(UserError, match="no label column with two classes"):
        find_levels(source)


def test_the_level_a_model_was_trained_at(made):
    levels = find_levels(made[0].memory)
    model = vitrail.create("deit_tiny_patch16", 4, 16, patch_size=4, width=16, depth=1, heads=2)
    assert training_level(model, levels) == "label"
    model.class_names = ["a", "b", "c", "d"]
    assert training_level(model, levels) == "label"
    model.class_names = ["some", "thing", "quite", "other"]
    assert training_level(model, levels) is None
    assert training_level(vitrail.create("deit_tiny_patch16", 2, 16, patch_size=4, depth=1), levels) == "coarse_label"
    assert training_level(vitrail.create("deit_tiny_patch16", 7, 16, patch_size=4, depth=1), levels) is None
    assert training_level(vitrail.create("deit_tiny_patch16", 0, 16, patch_size=4, depth=1), levels) == NO_LEVEL


def test_every_cell_equals_a_single_probe(made):
    sides, memory, queries = made
    other = memory._replace(vectors=memory.vectors[:, :3]), queries._replace(vectors=queries.vectors[:, :3])
    models = [EmbeddedModel("fine", "label", memory, queries), EmbeddedModel("coarse", "coarse_label", *other)]
    settings = Settings(protocol="snca", k=7)
    cells = []
    grid = measure_grid(sides, find_levels(sides.memory), models, ("knn", "map"), settings, cells.append)
    assert (grid.models, grid.train, grid.test) == (["coarse", "fine"], ["coarse_label", "label"], ["coarse_label", "label"])
    assert sum(cells) == 8
    for number, (left, right) in enumerate((other, (memory, queries))):
        for row, (labels, query_labels, classes) in enumerate(
            ((left.extra["coarse_label"], right.extra["coarse_label"], 2), (left.labels, right.labels, 4))
        ):
            data = (left.vectors, labels, right.vectors, query_labels)
            assert grid.scores["knn"][row][number] == knn_accuracy(*data, classes, [7], 0.05)[7].top1
            assert grid.scores["map"][row][number] == mean_average_precision(*data).mean
    assert grid.means("knn") == pytest.approx(
        {
            "same level": (grid.scores["knn"][0][0] + grid.scores["knn"][1][1]) / 2,
            "coarse to fine": grid.scores["knn"][1][0],
            "fine to coarse": grid.scores["knn"][0][1],
        }
    )


def test_means_of_a_grid_with_models_of_no_level():
    grid = Grid(["n", "x", "c"], [NO_LEVEL, "unknown", "c"], ["c", "f"], {"knn": [[0.1, 0.9, 0.4], [0.2, 0.9, 0.3]]})
    assert grid.means("knn") == pytest.approx({"same level": 0.4, "coarse to fine": (0.1 + 0.2 + 0.3) / 3})
    assert grid.to_dict()["means"] == {"knn": grid.means("knn")}


def test_images_without_a_label_are_not_counted(made):
    sides, memory, queries = made
    gaps = np.where(np.arange(50) < 10, -1, sides.queries.label.values)
    holey = sides._replace(queries=LabeledSource(gaps))
    models = [EmbeddedModel("m", "label", memory, embedded(queries.vectors, holey.queries))]
    rest = sides._replace(queries=LabeledSource(sides.queries.label.values[10:]))
    only = [EmbeddedModel("m", "label", memory, embedded(queries.vectors[10:], rest.queries))]
    levels = find_levels(sides.memory)
    assert measure_grid(holey, levels, models).scores == measure_grid(rest, levels, only).scores


def test_unknown_scores(made):
    sides, memory, queries = made
    with pytest.raises(UserError, match="no score called 'auc': choose from knn, map, linear"):
        measure_grid(sides, find_levels(sides.memory), [EmbeddedModel("m", "label", memory, queries)], ["auc"])


def test_seeds_of_one_method_are_one_column():
    scores = {"knn": [[0.5, 0.7, 0.9], [0.1, 0.3, 0.2]]}
    grid = Grid(["seeds", "seeds", "other"], ["label", "label", "label"], ["coarse_label", "label"], scores).average()
    assert grid.models == ["seeds", "other"]
    assert grid.scores["knn"] == [[pytest.approx(0.6), 0.9], [pytest.approx(0.2), 0.2]]
    assert grid.sds["knn"] == [[pytest.approx(0.1 * 2**0.5), None], [pytest.approx(0.1 * 2**0.5), None]]
    assert grid.to_dict()["sds"] == grid.sds


def test_a_linear_classifier_is_evaluated_on_the_trunk(made):
    data, memory, queries = made
    useless = memory._replace(vectors=torch.ones_like(memory.vectors)), queries._replace(vectors=torch.ones_like(queries.vectors))
    levels = find_levels(data.memory)
    both = measure_grid(data, levels, [EmbeddedModel("m", "label", *useless, trunk=(memory, queries))], ["knn", "linear"])
    assert both.scores["linear"][-1][0] > 0.6 > both.scores["knn"][-1][0]


def test_the_level_of_a_model_without_classifier_is_in_its_recipe(made):
    levels = find_levels(made[0].memory)
    model = vitrail.create("vitrail_mini", 0, 16, width=16, depth=1)
    for label, expected in (("coarse_label", "coarse_label"), ("none", NO_LEVEL), ("", "label"), ("other", None)):
        model.notes["recipe"] = json.dumps({"task": "grafit", "data": {"label": label}})
        assert training_level(model, levels) == expected
        assert training_level(model, levels, main="other") == ("label" if label == "other" else expected)
    model.notes["recipe"] = "damaged"
    assert training_level(model, levels) == NO_LEVEL
