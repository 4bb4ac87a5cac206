"""The linear classifier is the minimum of its loss, and its decay the best on what was held out."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from tests.evaluation.probes.test_knn import clouds
from vitrail.evaluation.probes import linear
from vitrail.evaluation.probes.linear import accuracy, choose, fit, hold_out


def reference(vectors, labels, classes, decay):
    """The minimum by scipy, from standardized features: (loss, weight, bias)."""
    x = vectors.double().numpy()
    x = (x - x.mean(0)) / (x.std(0) + 1e-5)
    y = np.eye(classes)[labels.numpy()]

    def loss(flat):
        weight, bias = flat[:-classes].reshape(-1, classes), flat[-classes:]
        logits = x @ weight + bias
        top = logits.max(1, keepdims=True)
        total = np.exp(logits - top).sum(1, keepdims=True)
        chances = np.exp(logits - top) / total
        value = (np.log(total) + top - (logits * y).sum(1, keepdims=True)).mean() + decay / 2 * (weight**2).sum()
        slope = (chances - y) / len(x)
        return value, np.concatenate([(x.T @ slope + decay * weight).ravel(), slope.sum(0)])

    start = np.zeros((x.shape[1] + 1) * classes)
    found = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 5000, "ftol": 1e-15, "gtol": 1e-10})
    return loss, found.fun, found.x


@pytest.mark.parametrize("decay", [1.0, 1e-2, 1e-3])
@pytest.mark.parametrize("rows", [1 << 16, 33])
def test_the_minimum_of_the_loss(monkeypatch, decay, rows):
    monkeypatch.setattr(linear, "ROWS", rows)
    vectors, labels, queries, _ = clouds(150, 50)
    loss, least, flat = reference(vectors, labels, 4, decay)
    found = fit(vectors.double(), labels, 4, decay)
    value, slope = loss(np.concatenate([found.weight.numpy().ravel(), found.bias.numpy()]))
    assert value == pytest.approx(least, rel=1e-6)
    assert np.abs(slope).max() < 1e-5
    assert np.allclose(found.weight.numpy().ravel(), flat[:-4], atol=2e-3)
    single = fit(vectors, labels, 4, decay)
    assert torch.allclose(single.logits(queries).softmax(1).double(), found.logits(queries.double()).softmax(1), atol=2e-3)


def test_a_start_changes_the_way_and_not_the_end():
    vectors, labels, *_ = clouds(100, 1)
    near = fit(vectors.double(), labels, 4, 1e-2, fit(vectors.double(), labels, 4, 1.0))
    assert torch.allclose(near.weight, fit(vectors.double(), labels, 4, 1e-2).weight, atol=1e-3)


def test_the_decay_is_the_best_on_what_was_held_out():
    vectors, labels, queries, truth = clouds(60, 200, width=40, noise=2.5)  # few images, many features: decay matters
    found = choose(vectors, labels, 4, (1e-5, 1e-1, 1.0), share=0.3)
    assert found.held_out[found.decay] == max(found.held_out.values())
    assert len(set(found.held_out.values())) > 1
    held = hold_out(labels.numpy(), 0.3, 0)
    for decay, score in found.held_out.items():
        alone = fit(vectors[~held], labels[~held], 4, decay)
        assert accuracy(alone, vectors[held], labels[held]).top1 == pytest.approx(score, abs=1.01 / held.sum())
    assert torch.allclose(found.model.weight, fit(vectors, labels, 4, found.decay).weight)  # of all images
    again = choose(vectors, labels, 4, (1e-5, 1e-1, 1.0), share=0.3)
    assert torch.equal(again.model.weight, found.model.weight)
    assert accuracy(found.model, queries, truth).top1 > 0.4


def test_what_is_held_out():
    labels = np.repeat([0, 1, 2, 3], [20, 10, 2, 1])
    held = hold_out(labels, 0.1, 0)
    assert np.bincount(labels[held], minlength=4).tolist() == [2, 1, 1, 0]
    assert np.array_equal(held, hold_out(labels, 0.1, 0))
    assert not np.array_equal(held, hold_out(labels, 0.1, 1))


def test_features_that_do_not_vary_do_no_harm():
    vectors, labels, queries, truth = clouds(100, 50)
    padded = [torch.cat([part, torch.full((len(part), 2), 7.0)], 1) for part in (vectors, queries)]
    plain = accuracy(fit(vectors, labels, 4, 1e-2), queries, truth)
    assert accuracy(fit(padded[0], labels, 4, 1e-2), padded[1], truth) == plain


def test_one_decay_needs_no_choice_and_the_edge_is_known():
    vectors, labels, *_ = clouds(60, 1)
    alone = choose(vectors, labels, 4, [1e-2])
    assert (alone.decay, alone.held_out, alone.at_edge) == (1e-2, {}, False)
    assert choose(vectors, labels, 4, [1e4, 1e3]).at_edge
