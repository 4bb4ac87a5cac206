"""Few-shot probe: closed-form least squares against normal equations and an iterative solution."""

import numpy as np
import pytest
import torch

from tests.evaluation.probes.test_knn import clouds
from vitrail.evaluation.probes.fewshot import draw_shots, fewshot_accuracy, fewshot_scores, least_squares


@pytest.mark.parametrize(("count", "width"), [(50, 6), (6, 50), (8, 8)])
@pytest.mark.parametrize("penalty", [1e-3, 1.0, 1024.0])
def test_both_systems_minimize_the_penalized_squares(count, width, penalty):
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(count, width)), rng.integers(0, 3, count)
    y = np.where(np.eye(3)[labels] > 0, 1.0, -1.0)
    # Rows sqrt(penalty) * I with targets of nought are the penalty: numpy's own least squares, by another way.
    augmented = np.concatenate([x, np.sqrt(penalty) * np.eye(width)])
    expected = np.linalg.lstsq(augmented, np.concatenate([y, np.zeros((width, 3))]), rcond=None)[0]
    found = least_squares(torch.from_numpy(x), torch.from_numpy(labels), 3, penalty)
    assert found.dtype == torch.float64
    assert np.allclose(found.numpy(), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("width", [5, 40])
def test_scores_are_those_of_the_published_procedure(width):
    few, labels, queries, _ = clouds(20, 30, width=width)
    x = few.double().numpy()
    mean, scale = x.mean(0), x.std(0) + 1e-5
    x, z = (np.c_[(part - mean) / scale, np.full(len(part), 100.0)] for part in (x, queries.double().numpy()))
    y = 2 * np.eye(4)[labels.numpy()] - 1
    weight = np.linalg.inv(x.T @ x + 1024 * np.eye(width + 1)) @ x.T @ y
    assert np.allclose(fewshot_scores(few, labels, queries, 4).numpy(), z @ weight, rtol=1e-6, atol=1e-8)


def test_shots_are_of_each_class_and_nested():
    labels = np.repeat([2, 0, 1], [9, 4, 30])
    five, ten = (draw_shots(labels, 4, shots, 7) for shots in (5, 10))
    assert np.bincount(labels[five], minlength=4).tolist() == [4, 5, 5, 0]
    assert set(five) <= set(ten)
    assert len(set(ten)) == len(ten)
    assert np.array_equal(five, draw_shots(labels, 4, 5, 7))
    assert not np.array_equal(five, draw_shots(labels, 4, 5, 8))


def test_accuracy_over_the_draws():
    memory, labels, queries, query_labels = clouds(400, 300, noise=0.8)
    found = fewshot_accuracy(memory, labels, queries, query_labels, 4, shots=5, seeds=4)
    by_hand = []
    for seed in range(4):
        rows = torch.from_numpy(draw_shots(labels.numpy(), 4, 5, seed))
        by_hand.append(float((fewshot_scores(memory[rows], labels[rows], queries, 4).argmax(1) == query_labels).double().mean()))
    assert found.top1 == pytest.approx(by_hand)
    assert found.mean == pytest.approx(np.mean(by_hand))
    assert found.sd == pytest.approx(np.std(by_hand, ddof=1))
    assert found.sd > 0
    many = fewshot_accuracy(memory, labels, queries, query_labels, 4, shots=50, seeds=1)
    assert many.mean > found.mean
    assert many.sd == 0
    every = fewshot_accuracy(memory, labels, queries, query_labels, 4, shots=1000, seeds=1)
    assert every.shots == int(labels.bincount().max())  # no class has more to give
