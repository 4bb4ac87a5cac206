"""Mean average precision against a loop over ranks, and relations between Grafit's scores."""

import math

import numpy as np
import pytest
import torch

from tests.evaluation.probes.test_knn import clouds, cosines
from vitrail.errors import UserError
from vitrail.evaluation.probes import retrieval
from vitrail.evaluation.probes.retrieval import CoarseLabels, coarse_probabilities, mean_average_precision, one_hot

PARENT = torch.tensor([0, 0, 1, 1, 1])  # coarse class of each of five fine ones


def by_hand(scores, labels, query_labels):
    """Precision at every rank that is right, averaged; a plain loop."""
    found = []
    for row, answer in zip(np.asarray(scores), query_labels.tolist(), strict=True):
        right, total = 0, 0.0
        for rank, place in enumerate(sorted(range(len(row)), key=lambda number: -row[number]), 1):
            if int(labels[place]) == answer:
                right += 1
                total += right / rank
        if right:
            found.append(total / right)
    return float(np.mean(found))


@pytest.fixture(scope="module")
def data():
    return clouds(120, 30, classes=5)


@pytest.mark.parametrize("elements", [1 << 24, 500, 1])
def test_map_equals_a_loop_for_any_chunk_size(monkeypatch, data, elements):
    monkeypatch.setattr(retrieval, "MAX_SCORES", elements)
    memory, labels, queries, query_labels = data
    found = mean_average_precision(memory, labels, queries, query_labels)
    assert found.mean == pytest.approx(by_hand(cosines(memory, queries), labels, query_labels), rel=1e-6)
    assert (found.queries, found.without_match) == (30, 0)
    assert 0.2 < found.mean < 0.9


def test_known_rankings():
    memory = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.5, 0.5], [0.0, 1.0]])
    query = torch.tensor([[1.0, 0.0]])
    for labels, expected in (([1, 1, 0, 0], 1.0), ([0, 0, 1, 1], (1 / 3 + 2 / 4) / 2), ([1, 0, 1, 0], (1 + 2 / 3) / 2)):
        assert mean_average_precision(memory, torch.tensor(labels), query, torch.tensor([1])).mean == pytest.approx(expected)


def test_conditional_score_against_a_loop(data):
    memory, labels, queries, query_labels = data
    chances = coarse_probabilities(memory, PARENT[labels], queries, 2)
    found = mean_average_precision(memory, labels, queries, query_labels, CoarseLabels(PARENT[labels], chances))
    clamped = chances.double().numpy().clip(1e-6, 1 - 1e-6)
    odds = np.log(clamped / (1 - clamped))
    scores = cosines(memory, queries) + odds[:, PARENT[labels].numpy()]
    assert found.mean == pytest.approx(by_hand(scores, labels, query_labels), rel=1e-6)


def test_the_oracle_sorts_by_coarse_label_then_cosine(data):
    memory, labels, queries, query_labels = data
    oracle = mean_average_precision(
        memory, labels, queries, query_labels, CoarseLabels(PARENT[labels], one_hot(PARENT[query_labels], 2))
    )
    same = (PARENT[labels][None] == PARENT[query_labels][:, None]).numpy()
    assert oracle.mean == pytest.approx(by_hand(cosines(memory, queries) + 10 * same, labels, query_labels), rel=1e-6)
    plain = mean_average_precision(memory, labels, queries, query_labels)
    chances = coarse_probabilities(memory, PARENT[labels], queries, 2)
    conditional = mean_average_precision(memory, labels, queries, query_labels, CoarseLabels(PARENT[labels], chances))
    assert oracle.mean > conditional.mean
    assert oracle.mean > plain.mean


def test_one_coarse_class_changes_nothing(data):
    memory, labels, queries, query_labels = data
    nothing = torch.zeros(len(labels), dtype=torch.int64)
    alike = mean_average_precision(memory, labels, queries, query_labels, CoarseLabels(nothing, torch.ones(len(queries), 1)))
    assert alike == mean_average_precision(memory, labels, queries, query_labels)


@pytest.mark.parametrize("k", [None, 10])
def test_coarse_probabilities_equal_a_loop(monkeypatch, data, k):
    monkeypatch.setattr(retrieval, "MAX_SCORES", 400)
    memory, labels, queries, _ = data
    found = coarse_probabilities(memory, PARENT[labels], queries, 2, 0.05, k)
    for row, similar in zip(found.tolist(), cosines(memory, queries), strict=True):
        near = np.argsort(-similar)[: k or len(similar)]
        weights = [math.exp(similar[place] / 0.05) for place in near]
        second = sum(weight for weight, place in zip(weights, near, strict=True) if PARENT[labels[place]] == 1)
        assert row == pytest.approx([1 - second / sum(weights), second / sum(weights)], abs=1e-4)


def test_excluded_images_are_not_ranked(data):
    memory, labels, *_ = data
    own = torch.arange(len(memory))
    found = mean_average_precision(memory, labels, memory, labels, exclude=own)
    scores = cosines(memory, memory)
    expected = []
    for number in range(len(memory)):
        rest = np.delete(np.arange(len(memory)), number)
        expected.append(by_hand(scores[number : number + 1, rest], labels[rest], labels[number : number + 1]))
    assert found.mean == pytest.approx(np.mean(expected), rel=1e-6)
    assert found.mean < mean_average_precision(memory, labels, memory, labels).mean


def test_queries_without_a_match_are_counted(data):
    memory, labels, queries, query_labels = data
    other = torch.where(torch.arange(30) < 10, 9, query_labels)
    found = mean_average_precision(memory, labels, queries, other)
    assert (found.queries, found.without_match) == (20, 10)
    assert found.mean == pytest.approx(mean_average_precision(memory, labels, queries[10:], query_labels[10:]).mean)
    with pytest.raises(UserError, match="that occurs in the memory"):
        mean_average_precision(memory, labels, queries, torch.full_like(query_labels, 9))
    with pytest.raises(UserError, match="contains no images"):
        mean_average_precision(memory[:0], labels[:0], queries, query_labels)


def test_autocast_does_not_round_the_scores():
    memory, labels, queries, query_labels = clouds(120, 30, classes=5, noise=0.05)

    def measure():
        chances = coarse_probabilities(memory, PARENT[labels], queries, 2)
        data = (memory, labels, queries, query_labels)
        return chances, mean_average_precision(*data), mean_average_precision(*data, CoarseLabels(PARENT[labels], chances))

    expected = measure()
    with torch.autocast("cpu", torch.bfloat16):
        found = measure()
    assert torch.equal(found[0], expected[0])
    assert found[1:] == expected[1:]
