"""What is taken for what."""

import numpy as np
import pytest

from tests.evaluation.test_accuracy import VIEW, Means, feed_of
from tests.images import make_folder, spoil
from vitrail.data.datasets.lookup import open_source
from vitrail.data.source import Labels, Subset
from vitrail.evaluation.confusion import PAIRS, Answers, class_accuracies, collect_answers, confusion, worst_mistakes
from vitrail.runs.report import confused_pairs


def answers_of(truth, guess, confidence=None):
    truth, guess = np.array(truth), np.array(guess)
    return Answers(np.arange(len(truth)), truth, guess, np.array(confidence if confidence else [0.5] * len(truth)))


def test_answers_to_every_image(tmp_path):
    make_folder(tmp_path, ("a red", "b green", "c blue"), 5, (8, 8))
    spoil(tmp_path / "a red" / "bad.png")
    source = open_source(str(tmp_path))
    found = collect_answers(Means(), feed_of(source), VIEW, 4)
    readable = [index for index in range(len(source)) if "bad" not in source.where(index)]
    assert found.image.tolist() == readable
    assert (found.guess == found.truth).all()
    assert ((found.confidence > 1 / 7) & (found.confidence < 1)).all()
    some = Subset(source, np.array(readable))
    some.label = Labels(np.full(15, -1), source.label.names)
    assert len(collect_answers(Means(), feed_of(some), VIEW, 4).truth) == 0
    only_bad = Subset(source, np.setdiff1d(np.arange(len(source)), readable))
    assert len(collect_answers(Means(), feed_of(only_bad), VIEW, 4).truth) == 0


def test_few_classes_as_a_matrix():
    found = confusion(answers_of([0, 0, 1, 2, 2], [0, 1, 1, 1, 1]), ["a", "b", "c"])
    assert found == {"names": ["a", "b", "c"], "matrix": [[1, 1, 0], [0, 1, 0], [0, 2, 0]]}


def test_many_classes_as_pairs_are_those_of_the_matrix():
    rng = np.random.default_rng(0)
    names = [f"class {index}" for index in range(50)]
    answers = answers_of(rng.integers(0, 50, 2000), rng.integers(0, 50, 2000) // 9)
    matrix = np.zeros((50, 50), dtype=int)
    np.add.at(matrix, (answers.truth, answers.guess), 1)
    assert confusion(answers, names) == {"pairs": confused_pairs(matrix, names, PAIRS)}
    assert confusion(answers_of([3], [3]), names) == {"pairs": []}


def test_classes_without_images_have_no_accuracy():
    found = class_accuracies(answers_of([0, 0, 0, 2], [0, 0, 1, 2]), ["a", "b", "c"])
    assert found == [{"name": "a", "top1": pytest.approx(2 / 3), "images": 3}, {"name": "c", "top1": 1.0, "images": 1}]


def test_the_surest_mistakes_come_first():
    answers = answers_of([0, 1, 2, 3], [0, 2, 1, 1], [0.99, 0.2, 0.9, 0.4])
    worst = worst_mistakes(answers, 2)
    assert worst.image.tolist() == [2, 3]
    assert worst.confidence.tolist() == [0.9, 0.4]
    assert len(worst_mistakes(answers_of([1, 1], [1, 1])).truth) == 0
