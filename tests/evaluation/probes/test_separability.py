"""Separability of random halves of classes."""

import numpy as np
import pytest
import torch

from vitrail.evaluation.probes.linear import fit
from vitrail.evaluation.probes.separability import mean_and_sd, measure_separability, predict_halves, random_halves


def test_halves_are_even_and_random():
    labels = np.repeat([0, 1, 2], [10, 7, 1])
    fine = random_halves(labels, 0)
    assert np.array_equal(fine // 2, labels)
    assert np.bincount(fine).tolist() == [5, 5, 4, 3, 1]
    assert np.array_equal(fine, random_halves(labels, 0))
    assert not np.array_equal(fine, random_halves(labels, 1))


def test_features_of_the_class_alone_give_half():
    labels = torch.arange(4).repeat_interleave(100)
    found = measure_separability(torch.eye(4)[labels], labels, splits=3)
    assert found.plain == pytest.approx([0.5] * 3)
    assert found.conditioned == pytest.approx([0.5] * 3)
    assert (found.images, found.classes) == (400, 4)


def test_as_many_features_as_images_separate_any_halves():
    labels = torch.arange(2).repeat_interleave(20)
    assert measure_separability(torch.randn(40, 60), labels, splits=2).plain == [1.0, 1.0]


def test_richer_features_separate_better():
    rng = np.random.default_rng(0)
    labels = torch.arange(5).repeat_interleave(40)
    centres = np.eye(5)[labels.numpy()] * 6
    scores = []
    for width in (2, 15, 60):
        vectors = torch.from_numpy(np.concatenate([centres, rng.normal(size=(200, width))], 1)).float()
        scores.append(mean_and_sd(measure_separability(vectors, labels, splits=4).plain)[0])
    assert 0.5 < scores[0] < scores[1] < scores[2]


def test_conditioning_multiplies_by_the_class_probability():
    rng = np.random.default_rng(1)
    labels = torch.arange(3).repeat_interleave(30)
    vectors = torch.from_numpy(rng.normal(size=(90, 8)) + 0.8 * np.eye(8)[labels.numpy()]).float()
    query_labels = torch.from_numpy(random_halves(labels.numpy(), 0))
    model, parent = fit(vectors, query_labels, 6, 1e-3), fit(vectors, labels, 3, 1e-3)
    plain, conditioned = predict_halves(model, parent, vectors)
    by_hand = []
    for row in range(90):
        logits, coarse = model.logits(vectors[row : row + 1])[0].double(), parent.logits(vectors[row : row + 1])[0].double()
        chances = [float(coarse.softmax(0)[k // 2] * logits[k // 2 * 2 : k // 2 * 2 + 2].softmax(0)[k % 2]) for k in range(6)]
        by_hand.append(int(np.argmax(chances)))
    assert conditioned.tolist() == by_hand
    assert plain.tolist() != conditioned.tolist()
    assert plain.tolist() == model.logits(vectors).argmax(1).tolist()


def test_labels_with_gaps_and_a_single_class():
    vectors = torch.randn(30, 5)
    gaps = torch.tensor([3, 7, 900]).repeat_interleave(10)
    same = measure_separability(vectors, torch.arange(3).repeat_interleave(10), splits=2)
    assert measure_separability(vectors, gaps, splits=2) == same
    alone = measure_separability(vectors, torch.zeros(30, dtype=torch.int64), splits=2)
    assert alone.plain == alone.conditioned
    assert mean_and_sd([0.5, 0.7]) == pytest.approx((0.6, 0.2 / 2**0.5))
    assert mean_and_sd([0.5]) == (0.5, 0.0)
