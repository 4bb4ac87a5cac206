"""The losses of Grafit against loops in float64 that follow the formulas of its paper."""

import math

import pytest
import torch
from torch.nn import functional as F

from vitrail.errors import UserError
from vitrail.tasks import neighbor_losses
from vitrail.tasks.clusters import kmeans
from vitrail.tasks.neighbor_losses import instance_loss, neighbor_loss, triplet_loss


def drawn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cosine(a, b):
    return float(a @ b / (a.norm() * b.norm()))


def by_formula(g, memory, labels, index, sigma, margin=0.0):
    """Equations 2.2 and 2.3: one image after the other."""
    losses = []
    for row, i in enumerate(index.tolist()):
        weights = {j: math.exp(cosine(g[row], memory[j]) / sigma) for j in range(len(memory)) if j != i}
        same = {j: w / math.exp(margin) for j, w in weights.items() if labels[j] == labels[i] and labels[i] >= 0}
        total = sum(same.values()) + sum(w for j, w in weights.items() if j not in same)
        losses.append(-math.log(sum(same.values()) / total) if same else 0.0)
    return torch.tensor(losses, dtype=torch.float64)


LABELS = torch.tensor([0, 1, 0, 2, 1, 0, -1, 1, 2, 0, 3, 1])  # 3 has a single image, -1 is not labeled
INDEX = torch.tensor([0, 4, 10, 3, 6])


@pytest.mark.parametrize("parts", [1, 5])
@pytest.mark.parametrize("margin", [0.0, 0.7])
def test_the_neighbor_loss_is_that_of_the_paper(monkeypatch, parts, margin):
    monkeypatch.setattr(neighbor_losses, "MAX_LOGITS", len(LABELS) * len(INDEX) // parts)
    g, memory = drawn(5, 6), drawn(12, 6, seed=1)
    g.requires_grad_()
    found = neighbor_loss(g, memory, LABELS, INDEX, 0.05, margin)
    torch.testing.assert_close(found.detach(), by_formula(g.detach(), memory, LABELS, INDEX, 0.05, margin))
    assert torch.equal(found[2:5:2].detach(), torch.zeros(2, dtype=torch.float64))  # no other one of its class, no label
    assert torch.autograd.gradcheck(lambda x: neighbor_loss(x, memory, LABELS, INDEX, 0.3, margin), g)


def test_the_own_row_has_no_effect_and_the_memory_no_gradient():
    g, memory = drawn(5, 6), drawn(12, 6, seed=1).requires_grad_()
    other = memory.detach().clone()
    other[INDEX[0]] = -7 * other[INDEX[0]]
    first = neighbor_loss(g[:1], memory, LABELS, INDEX[:1], 0.05)
    assert torch.equal(first, neighbor_loss(g[:1], other, LABELS, INDEX[:1], 0.05))
    first.sum().backward()
    assert memory.grad is None


def test_one_class_gives_zero_and_class_probabilities_sum_to_one():
    g, memory, ones = drawn(5, 6), drawn(12, 6, seed=1), torch.zeros(12, dtype=torch.int64)
    assert neighbor_loss(g, memory, ones, INDEX, 0.05).abs().max() < 1e-12
    labels, chances = torch.arange(12) % 3, []
    for label in range(3):  # the probability that a neighbor has this class
        own = labels.index_fill(0, INDEX[:1], label)
        chances.append(neighbor_loss(g[:1], memory, own, INDEX[:1], 0.05).neg().exp())
    assert sum(chances).item() == pytest.approx(1.0)


def test_half_precision_is_computed_in_float32():
    g, memory = drawn(5, 6).bfloat16().requires_grad_(), drawn(12, 6, seed=1).float()
    found = neighbor_loss(g, memory, LABELS, INDEX, 0.05)
    assert found.dtype == torch.float32
    torch.testing.assert_close(
        found.double().detach(), by_formula(g.double().detach(), memory.double(), LABELS, INDEX, 0.05), rtol=1e-4, atol=1e-4
    )
    found.sum().backward()
    assert g.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("views", [2, 4])
def test_the_instance_loss_is_that_of_the_paper(views):
    """Equation 2.1: all ordered pairs of different views."""
    predictions, targets = drawn(views, 3, 5), drawn(views, 3, 5, seed=1)
    expected = [
        -sum(cosine(predictions[i, x], targets[j, x]) for i in range(views) for j in range(views) if i != j)
        / (views * (views - 1))
        for x in range(3)
    ]
    found = instance_loss(predictions, targets)
    assert found.item() == pytest.approx(sum(expected) / 3, abs=1e-12)
    order = torch.randperm(views)
    torch.testing.assert_close(instance_loss(predictions[order], targets[order]), found)
    assert instance_loss(
        predictions[:1].expand(views, -1, -1), 3 * predictions[:1].expand(views, -1, -1)
    ).item() == pytest.approx(-1)
    if views == 2:  # BYOL: the sum of 2 - 2 cos over both directions
        byol = sum((2 - 2 * F.cosine_similarity(predictions[i], targets[1 - i])).mean() for i in range(2))
        torch.testing.assert_close(byol, 4 + 4 * found)


@pytest.mark.parametrize(("group", "size"), [(2, 2), (4, 3), (5, 3), (6, 6), (64, 6)])
def test_the_triplet_loss_is_the_mean_over_all_triplets(group, size):
    first, second = F.normalize(drawn(6, 4), dim=1), F.normalize(drawn(6, 4, seed=1), dim=1)
    terms = []
    for a, p in ((first, second), (second, first)):
        for i in range(6):
            others = [j for j in range(6) if j != i and j // size == i // size]
            terms += [max(0.0, float((a[i] - p[i]).square().sum() - (a[i] - p[j]).square().sum()) + 0.2) for j in others]
    assert triplet_loss(3 * first, second, 0.2, group).item() == pytest.approx(sum(terms) / len(terms), abs=1e-12)


def test_kmeans_finds_separate_groups_and_leaves_none_empty():
    centers = F.normalize(drawn(4, 8), dim=1)
    vectors = centers.repeat_interleave(25, 0).float() + 0.05 * drawn(100, 8, seed=1).float()
    found = kmeans(vectors, 4, seed=3)
    assert all(len(found[start : start + 25].unique()) == 1 for start in range(0, 100, 25))
    assert len(found.unique()) == 4
    assert torch.equal(found, kmeans(vectors, 4, seed=3))
    same = torch.ones(10, 3)
    assert sorted(kmeans(same, 5).unique().tolist()) == [0, 1, 2, 3, 4]  # all vectors are equal
    with pytest.raises(UserError, match="at most as many as there are images"):
        kmeans(same, 11)
