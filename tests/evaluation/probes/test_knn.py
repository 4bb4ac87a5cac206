"""Nearest neighbors and their votes, against loops in float64."""

import math

import numpy as np
import pytest
import torch

from vitrail.errors import UserError
from vitrail.evaluation.probes import knn
from vitrail.evaluation.probes.knn import PROTOCOLS, choose_k, get_protocol, knn_accuracy, nearest_neighbors, vote


def clouds(count, queries, classes=4, width=6, seed=0, noise=1.5):
    """Features around one centre per class, float32, with labels; deliberately not of length one."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(classes, width))
    found = []
    for number in (count, queries):
        labels = rng.integers(0, classes, number)
        vectors = (centres[labels] + noise * rng.normal(size=(number, width))) * rng.uniform(0.5, 3, (number, 1))
        found += [torch.from_numpy(vectors).float(), torch.from_numpy(labels)]
    return found


def cosines(memory, queries):
    a, b = memory.double().numpy(), queries.double().numpy()
    return (b / np.linalg.norm(b, axis=1, keepdims=True)) @ (a / np.linalg.norm(a, axis=1, keepdims=True)).T


def by_hand(memory, labels, queries, query_labels, classes, k, temperature):
    """Top-1 and top-5, one query at a time."""
    similar = cosines(memory, queries)
    right = [0, 0]
    for row, answer in zip(similar, query_labels.tolist(), strict=True):
        shares = [0.0] * classes
        for place in np.argsort(-row)[:k]:
            shares[int(labels[place])] += math.exp(row[place] / temperature)
        order = sorted(range(classes), key=lambda number: -shares[number])
        right[0] += order[0] == answer
        right[1] += answer in order[:5] and shares[answer] > 0
    return right[0] / len(query_labels), right[1] / len(query_labels)


@pytest.mark.parametrize(("rows", "elements"), [(1024, 1 << 25), (7, 70), (1, 1)])
def test_nearest_against_a_full_sort(monkeypatch, rows, elements):
    monkeypatch.setattr(knn, "QUERIES", rows)
    monkeypatch.setattr(knn, "MAX_SIMILARITIES", elements)
    memory, _, queries, _ = clouds(101, 23)
    cosine, index = nearest_neighbors(memory, queries, 5)
    similar = cosines(memory, queries)
    assert np.array_equal(index.numpy(), np.argsort(-similar, axis=1)[:, :5])
    assert np.allclose(cosine.numpy(), -np.sort(-similar, axis=1)[:, :5], atol=1e-6)


@pytest.mark.parametrize("elements", [1 << 25, 60])
def test_an_excluded_image_is_not_a_neighbor(monkeypatch, elements):
    monkeypatch.setattr(knn, "MAX_SIMILARITIES", elements)
    memory, *_ = clouds(40, 1)
    own = torch.tensor([3, 39, 0])
    cosine, index = nearest_neighbors(memory, memory[own], 40, exclude=own)
    assert index.shape == (3, 39)
    assert cosine.isfinite().all()
    for row, number in zip(index.tolist(), own.tolist(), strict=True):
        assert sorted([*row, number]) == list(range(40))


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.07), (20, 0.07), (30, 0.05), (500, 0.07)])
def test_classification_against_a_loop(monkeypatch, k, temperature):
    monkeypatch.setattr(knn, "QUERIES", 32)
    memory, labels, queries, query_labels = clouds(200, 100, classes=7)
    found = knn_accuracy(memory, labels, queries, query_labels, 7, [k], temperature)[k]
    assert (found.top1, found.top5) == pytest.approx(by_hand(memory, labels, queries, query_labels, 7, k, temperature))
    assert 0.2 < found.top1 < 0.95  # neither hopeless nor trivial: the comparison says something
    assert found.images == 100


def test_several_k_at_once_are_each_k_alone():
    data = clouds(150, 60)
    together = knn_accuracy(*data, 4, [1, 5, 20], 0.05)
    assert together == {k: knn_accuracy(*data, 4, [k], 0.05)[k] for k in (1, 5, 20)}


def test_votes_are_shares_and_do_not_overflow():
    cosine = torch.tensor([[0.9, 0.8, 0.7]])
    shares = vote(cosine, torch.tensor([[2, 0, 2]]), 4, 0.05)[0]
    weights = [math.exp(value / 0.05) for value in (0.9, 0.8, 0.7)]
    assert shares.tolist() == pytest.approx([weights[1] / sum(weights), 0, (weights[0] + weights[2]) / sum(weights), 0], rel=1e-5)
    cold = vote(cosine, torch.tensor([[2, 0, 2]]), 4, 1e-6)[0]
    assert cold.tolist() == [0, 0, 1, 0]


def test_k_is_chosen_without_the_image_itself():
    memory, labels, _, _ = clouds(120, 1, classes=3, noise=2.0)
    chosen = choose_k(memory, labels, 3, (1, 10, 30), 0.05)
    scores = {}
    for k in (1, 10, 30):
        hits = 0
        for number in range(120):
            rest = [place for place in range(120) if place != number]
            hits += by_hand(memory[rest], labels[rest], memory[[number]], labels[[number]], 3, k, 0.05)[0]
        scores[k] = hits
    assert scores[chosen] == max(scores.values())
    assert scores[1] < scores[chosen]  # with itself in the memory one neighbour would always be right


def test_protocols():
    assert (PROTOCOLS["dino"].k, PROTOCOLS["dino"].temperature) == (20, 0.07)
    assert PROTOCOLS["grafit"] == (0.05, None, (10, 15, 20, 25, 30))
    with pytest.raises(UserError, match="no protocol called 'dinosaur': choose from dino, grafit, snca"):
        get_protocol("dinosaur")


def test_empty_memory_and_empty_queries():
    memory, *_ = clouds(5, 1)
    cosine, index = nearest_neighbors(memory, memory[:0], 3)
    assert cosine.shape == index.shape == (0, 3)
    with pytest.raises(UserError, match="there is no neighbor"):
        nearest_neighbors(memory[:0], memory, 3)


def test_autocast_does_not_round_the_cosines():
    memory, _, queries, _ = clouds(200, 30, noise=0.05)  # cosines of a class differ by less than a step of bfloat16
    expected = nearest_neighbors(memory, queries, 10)
    with torch.autocast("cpu", torch.bfloat16):
        found = nearest_neighbors(memory, queries, 10)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
