"""Disagreement of models, against manual counts and published definitions."""

import numpy as np
import pytest

from tests.images import make_folder
from vitrail.data.datasets.lookup import open_source
from vitrail.errors import UserError
from vitrail.evaluation.disagreement import compare, draw_sheet, kappa, order_by_disagreement


def reference_kappa(one, other):
    """From the confusion matrix in float64, as textbooks and scikit-learn's cohen_kappa_score have it."""
    kinds = sorted({*one.tolist(), *other.tolist()})
    matrix = np.array([[np.sum((one == a) & (other == b)) for b in kinds] for a in kinds], dtype=np.float64)
    expected = np.outer(matrix.sum(1), matrix.sum(0)) / matrix.sum()
    weights = 1 - np.eye(len(kinds))
    return 1 - (weights * matrix).sum() / (weights * expected).sum()


@pytest.mark.parametrize("seed", range(5))
def test_kappa(seed):
    rng = np.random.default_rng(seed)
    one = rng.integers(0, 6, 500)
    other = np.where(rng.random(500) < 0.6, one, rng.integers(2, 9, 500))
    assert kappa(one, other) == pytest.approx(reference_kappa(one, other), abs=1e-12)
    assert kappa(one > 2, other > 2) == pytest.approx(reference_kappa(one > 2, other > 2), abs=1e-12)


def test_kappa_of_known_cases():
    # The example of Cohen's kappa in every textbook: 20 yes-yes, 5 yes-no, 10 no-yes, 15 no-no.
    one, other = np.repeat([1, 1, 0, 0], [20, 5, 10, 15]), np.repeat([1, 0, 1, 0], [20, 5, 10, 15])
    assert kappa(one, other) == pytest.approx(0.4)
    assert kappa(one, one) == 1.0
    assert kappa(np.array([0, 1]), np.array([1, 0])) == -1.0
    assert np.isnan(kappa(np.zeros(4), np.zeros(4)))


LABELS = np.array([0, 0, 1, 1, 2, 2])
PREDICTIONS = np.array([[0, 0, 1, 1, 2, 2], [0, 1, 1, 0, 2, 1], [1, 1, 1, 0, 0, 1]])


def test_the_matrix_has_the_labels_first():
    found = compare(["a", "b", "c"], PREDICTIONS, LABELS, ["x", "y", "z"])
    assert found.differ[0].tolist() == pytest.approx([0, 0, 3 / 6, 5 / 6])  # the first row is one minus the accuracies
    assert found.differ[2, 3] == pytest.approx(2 / 6)
    assert (found.differ == found.differ.T).all()
    assert found.pairs[2] == {
        "models": ["b", "c"],
        "both_correct": 1,
        "only_first_correct": 2,
        "only_second_correct": 0,
        "same_error": 3,
        "different_errors": 0,
    }
    assert found.correct == {"all": 1, "some": 5, "none": 0}
    assert found.classes[0] == {"name": "x", "images": 2, "top1": {"a": 1.0, "b": 0.5, "c": 0.0}}
    assert found.to_dict()["error_consistency"][0] == [None, 0.0, 0.0]  # one that is never wrong is consistent by chance alone


def test_error_consistency_is_that_of_geirhos():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 2000)
    predictions = np.stack([np.where(rng.random(2000) < share, labels, rng.integers(0, 4, 2000)) for share in (0.8, 0.5)])
    found = compare(["a", "b"], predictions, labels, list("wxyz"))
    correct = predictions == labels
    shares = correct.mean(1)
    observed, chance = (correct[0] == correct[1]).mean(), shares[0] * shares[1] + (1 - shares[0]) * (1 - shares[1])
    assert found.error_consistency[0, 1] == pytest.approx((observed - chance) / (1 - chance), abs=1e-12)
    assert abs(found.error_consistency[0, 1]) < 0.1  # they err independently


def test_images_that_differ_most_and_from_all_classes_come_first():
    chosen = order_by_disagreement(PREDICTIONS, LABELS)
    assert sorted(chosen.tolist()) == [0, 1, 3, 4, 5]
    assert sorted(LABELS[chosen[:3]].tolist()) == [0, 1, 2]
    assert len(order_by_disagreement(PREDICTIONS[:1].repeat(2, 0), LABELS)) == 0


def test_sheet_of_differing_images(tmp_path):
    source = open_source(str(make_folder(tmp_path, ("x", "y", "z"), 2)))
    arguments = (
        source,
        np.arange(6),
        PREDICTIONS,
        LABELS,
        ["one model", "two", "three"],
        ["x", "a very long name " * 5, "z"],
        "title",
    )
    sheet = draw_sheet(*arguments)
    again = draw_sheet(*arguments)
    assert sheet is not None
    assert again is not None
    assert sheet.tobytes() == again.tobytes()
    colors = {color for _, color in sheet.getcolors(1 << 24)}
    assert {(26, 127, 90), (198, 47, 57)} <= colors  # right and wrong answers
    alike = (source, np.arange(6), PREDICTIONS[:1].repeat(2, 0), LABELS, ["a", "b"], ["x", "y", "z"], "title")
    assert draw_sheet(*alike) is None


def test_nothing_to_compare():
    with pytest.raises(UserError, match="no image"):
        compare(["a", "b"], np.zeros((2, 0), dtype=int), np.zeros(0, dtype=int), ["x"])
