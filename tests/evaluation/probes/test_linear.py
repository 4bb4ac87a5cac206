"""Linear probe: the minimum of the loss, and the selection of the weight decay on held-out images."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from tests.evaluation.probes.test_knn import clouds
from vitrail.evaluation.probes import linear
from vitrail.evaluation.probes.linear import accuracy, fit, hold_out, select_classifier


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


def test_initialization_does_not_change_the_minimum():
    vectors, labels, *_ = clouds(100, 1)
    near = fit(vectors.double(), labels, 4, 1e-2, fit(vectors.double(), labels, 4, 1.0))
    assert torch.allclose(near.weight, fit(vectors.double(), labels, 4, 1e-2).weight, atol=1e-3)


def test_the_selected_weight_decay_is_the_best_on_held_out_images():
    vectors, labels, queries, query_labels = clouds(60, 200, width=40, noise=2.5)  # few images, many features: decay matters
    found = select_classifier(vectors, labels, 4, (1e-5, 1e-1, 1.0), fraction=0.3)
    assert found.held_out[found.weight_decay] == max(found.held_out.values())
    assert len(set(found.held_out.values())) > 1
    held = hold_out(labels.numpy(), 0.3, 0)
    for decay, score in found.held_out.items():
        alone = fit(vectors[~held], labels[~held], 4, decay)
        assert accuracy(alone, vectors[held], labels[held]).top1 == pytest.approx(score, abs=1.01 / held.sum())
    assert torch.allclose(found.classifier.weight, fit(vectors, labels, 4, found.weight_decay).weight)  # of all images
    again = select_classifier(vectors, labels, 4, (1e-5, 1e-1, 1.0), fraction=0.3)
    assert torch.equal(again.classifier.weight, found.classifier.weight)
    assert accuracy(found.classifier, queries, query_labels).top1 > 0.4


def test_held_out_images():
    labels = np.repeat([0, 1, 2, 3], [20, 10, 2, 1])
    held = hold_out(labels, 0.1, 0)
    assert np.bincount(labels[held], minlength=4).tolist() == [2, 1, 1, 0]
    assert np.array_equal(held, hold_out(labels, 0.1, 0))
    assert not np.array_equal(held, hold_out(labels, 0.1, 1))


def test_constant_features():
    vectors, labels, queries, query_labels = clouds(100, 50)
    padded = [torch.cat([part, torch.full((len(part), 2), 7.0)], 1) for part in (vectors, queries)]
    plain = accuracy(fit(vectors, labels, 4, 1e-2), queries, query_labels)
    assert accuracy(fit(padded[0], labels, 4, 1e-2), padded[1], query_labels) == plain


def test_a_single_weight_decay_and_the_edge_of_the_range():
    vectors, labels, *_ = clouds(60, 1)
    alone = select_classifier(vectors, labels, 4, [1e-2])
    assert (alone.weight_decay, alone.held_out, alone.at_edge) == (1e-2, {}, False)
    assert select_classifier(vectors, labels, 4, [1e4, 1e3]).at_edge
