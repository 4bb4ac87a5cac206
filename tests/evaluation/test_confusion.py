"""Confusion matrix, per-class accuracy and mistakes."""

import numpy as np
import pytest

from tests.evaluation.test_accuracy import PREPROCESSING, Means, open_loader
from tests.images import make_folder, write_invalid_image
from vitrail.aliases import upgrade_run
from vitrail.data.datasets.lookup import open_source
from vitrail.data.source import Labels, Subset
from vitrail.evaluation.confusion import (
    MAX_PAIRS,
    Predictions,
    average_metrics,
    class_metrics,
    collect_predictions,
    confusion,
    worst_mistakes,
)
from vitrail.runs.report import confused_pairs


def make_predictions(labels, predicted, confidence=None):
    labels, predicted = np.array(labels), np.array(predicted)
    return Predictions(np.arange(len(labels)), labels, predicted, np.array(confidence if confidence else [0.5] * len(labels)))


def test_predictions_of_every_image(tmp_path):
    make_folder(tmp_path, ("a red", "b green", "c blue"), 5, (8, 8))
    write_invalid_image(tmp_path / "a red" / "bad.png")
    source = open_source(str(tmp_path))
    found = collect_predictions(Means(), open_loader(source), PREPROCESSING, 4)
    readable = [index for index in range(len(source)) if "bad" not in source.location(index)]
    assert found.image.tolist() == readable
    assert (found.prediction == found.label).all()
    assert ((found.confidence > 1 / 7) & (found.confidence < 1)).all()
    some = Subset(source, np.array(readable))
    some.label = Labels(np.full(15, -1), source.label.names)
    assert len(collect_predictions(Means(), open_loader(some), PREPROCESSING, 4).label) == 0
    only_bad = Subset(source, np.setdiff1d(np.arange(len(source)), readable))
    assert len(collect_predictions(Means(), open_loader(only_bad), PREPROCESSING, 4).label) == 0


def test_few_classes_as_a_matrix():
    found = confusion(make_predictions([0, 0, 1, 2, 2], [0, 1, 1, 1, 1]), ["a", "b", "c"])
    assert found == {"names": ["a", "b", "c"], "matrix": [[1, 1, 0], [0, 1, 0], [0, 2, 0]]}


def test_many_classes_as_pairs_are_those_of_the_matrix():
    rng = np.random.default_rng(0)
    names = [f"class {index}" for index in range(50)]
    answers = make_predictions(rng.integers(0, 50, 2000), rng.integers(0, 50, 2000) // 9)
    matrix = np.zeros((50, 50), dtype=int)
    np.add.at(matrix, (answers.label, answers.prediction), 1)
    assert confusion(answers, names) == {"pairs": confused_pairs(matrix, names, MAX_PAIRS)}
    assert confusion(make_predictions([3], [3]), names) == {"pairs": []}


def test_classes_without_images_have_no_metrics():
    found = class_metrics(make_predictions([0, 0, 0, 2, 2], [0, 0, 1, 2, 0]), ["a", "b", "c"])
    two_thirds = pytest.approx(2 / 3)
    assert found == [
        {"name": "a", "top1": two_thirds, "images": 3, "precision": two_thirds, "recall": two_thirds, "f1": two_thirds},
        {"name": "c", "top1": 0.5, "images": 2, "precision": 1.0, "recall": 0.5, "f1": two_thirds},
    ]
    averages = average_metrics(found)
    assert averages["macro"] == pytest.approx({"precision": 5 / 6, "recall": 7 / 12, "f1": 2 / 3})
    assert averages["weighted"] == pytest.approx({"precision": (2 + 2) / 5, "recall": 3 / 5, "f1": 2 / 3})


def test_a_class_that_is_never_predicted_has_precision_0():
    (row,) = class_metrics(make_predictions([1, 1], [0, 0]), ["a", "b"])
    assert (row["precision"], row["recall"], row["f1"]) == (0.0, 0.0, 0.0)


def test_the_most_confident_mistakes_come_first():
    answers = make_predictions([0, 1, 2, 3], [0, 2, 1, 1], [0.99, 0.2, 0.9, 0.4])
    worst = worst_mistakes(answers, 2)
    assert worst.image.tolist() == [2, 3]
    assert worst.confidence.tolist() == [0.9, 0.4]
    assert len(worst_mistakes(make_predictions([1, 1], [1, 1])).label) == 0


def test_keys_of_older_run_files_are_upgraded():
    old = {"truth": "a", "guess": "b"}
    run = {"mistakes": [old | {"where": "a.png"}], "confusion": {"pairs": [old | {"count": 1}]}}
    new = {"label": "a", "prediction": "b"}
    assert upgrade_run(run) == {"mistakes": [new | {"location": "a.png"}], "confusion": {"pairs": [new | {"count": 1}]}}
