"""Targets and losses against their definitions in double precision."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from tests.tasks.labels import make_targets
from vitrail.data.transforms.mixup import Mix, draw_mix
from vitrail.recipes.schema import LossConfig
from vitrail.tasks.losses import classification_loss

WHOLE = Mix(1.0, None)


def defined_targets(labels, classes, share, smoothing, over):
    rows = []
    for label in labels:
        off = smoothing / (classes - 1) if over == "others" else smoothing / classes
        row = [off] * classes
        row[label] = 1 - smoothing if over == "others" else 1 - smoothing + smoothing / classes
        rows.append(row)
    mixed = [[share * a + (1 - share) * b for a, b in zip(row, rows[-1 - i], strict=True)] for i, row in enumerate(rows)]
    return torch.tensor(mixed, dtype=torch.float64)


@settings(deadline=None, derandomize=True)
@given(
    some.integers(2, 20).flatmap(
        lambda classes: some.tuples(some.just(classes), some.lists(some.integers(0, classes - 1), min_size=1, max_size=9))
    ),
    some.floats(0, 1),
    some.floats(0, 0.99),
    some.sampled_from(["all", "others"]),
)
def test_targets_are_distributions(case, share, smoothing, over):
    classes, labels = case
    targets = make_targets(
        torch.tensor(labels), classes, Mix(share, None), LossConfig(label_smoothing=smoothing, smoothing_over=over)
    )
    assert targets.shape == (len(labels), classes)
    assert targets.dtype == torch.float32
    assert targets.min() >= 0
    torch.testing.assert_close(targets.sum(1), torch.ones(len(labels)), rtol=0, atol=2e-6)
    expected = defined_targets(labels, classes, share, smoothing, over)
    torch.testing.assert_close(targets.double(), expected, rtol=1e-5, atol=1e-7)


def test_values_of_the_released_code():
    """Smoothing 0.1 over 1000 classes, mixed with the last image of the batch by 0.7."""
    targets = make_targets(torch.tensor([3, 5, 7, 9]), 1000, Mix(0.7, None), LossConfig(label_smoothing=0.1))
    assert targets[0, 3].item() == pytest.approx(0.7 * 0.9001 + 0.3 * 0.0001)
    assert targets[0, 9].item() == pytest.approx(0.3 * 0.9001 + 0.7 * 0.0001)
    assert targets[1, 7].item() == pytest.approx(0.3 * 0.9001 + 0.7 * 0.0001)
    assert targets[1, 3].item() == pytest.approx(0.0001)
    text = make_targets(torch.tensor([3]), 11, WHOLE, LossConfig(label_smoothing=0.1, smoothing_over="others"))
    assert text[0, 3].item() == pytest.approx(0.9)
    assert text[0, 0].item() == pytest.approx(0.01)


def test_a_single_class_is_not_smoothed():
    for over in ("all", "others"):
        assert make_targets(torch.tensor([0]), 1, WHOLE, LossConfig(label_smoothing=0.1, smoothing_over=over)).item() == 1.0


def test_a_draw_of_cutmix_fits():
    """The share that a box leaves is the target's, and labels of any integer kind will do."""
    mix = draw_mix(1, 2, 3, 0, (32, 32), 0.0, 1.0)
    assert mix.box is not None
    targets = make_targets(torch.tensor([0, 1], dtype=torch.int32), 3, mix, LossConfig())
    assert targets[0].tolist() == pytest.approx([mix.lam, 1 - mix.lam, 0.0])


def defined_loss(logits, targets, objective):
    """The formulas, number by number."""
    total = []
    for row, wanted in zip(logits.tolist(), targets.tolist(), strict=True):
        if objective.kind == "cross_entropy":
            highest = max(row)
            log_sum = highest + math.log(sum(math.exp(value - highest) for value in row))
            total.append(sum(part * (log_sum - value) for value, part in zip(row, wanted, strict=True)))
            continue
        part = [float(part > 0) if objective.binary_targets == "present" else part for part in wanted]
        losses = [p * np.logaddexp(0, -value) + (1 - p) * np.logaddexp(0, value) for value, p in zip(row, part, strict=True)]
        total.append(sum(losses) if objective.binary_sum else sum(losses) / len(losses))
    return sum(total) / len(total)


OBJECTIVES = [
    LossConfig(),
    LossConfig(label_smoothing=0.1),
    LossConfig(label_smoothing=0.2, smoothing_over="others"),
    LossConfig("binary"),
    LossConfig("binary", binary_sum=True),
    LossConfig("binary", binary_targets="soft", label_smoothing=0.1),
    LossConfig("binary", binary_targets="soft", binary_sum=True),
]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_losses(objective):
    labels = torch.randint(0, 13, (6,))
    targets = make_targets(labels, 13, Mix(0.3, None), objective)
    logits = 4 * torch.randn(6, 13)
    expected = defined_loss(logits.double(), targets.double(), objective)
    assert classification_loss(logits, targets, objective).item() == pytest.approx(expected, rel=1e-6)
    exact = classification_loss(logits.double(), targets.double(), objective)
    assert exact.item() == pytest.approx(expected, rel=1e-12)
    wide = logits[:4].double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: classification_loss(x, targets[:4], objective), wide)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_half_precision_logits_are_computed_in_single(objective):
    targets = make_targets(torch.tensor([0, 2, 1, 4]), 5, Mix(0.6, None), objective)
    logits = torch.randn(4, 5).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = classification_loss(logits, targets, objective)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, classification_loss(logits.float(), targets, objective))
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_torch_agrees():
    logits, labels = torch.randn(8, 10), torch.randint(0, 10, (8,))
    targets = make_targets(labels, 10, WHOLE, LossConfig(label_smoothing=0.1))
    theirs = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
    torch.testing.assert_close(classification_loss(logits, targets, LossConfig(label_smoothing=0.1)), theirs)


def test_the_binary_loss_of_zero_logits_is_log_two():
    targets = make_targets(torch.tensor([0, 1]), 1000, Mix(0.5, None), LossConfig("binary"))
    logits = torch.zeros(2, 1000)
    assert classification_loss(logits, targets, LossConfig("binary")).item() == pytest.approx(math.log(2))
    whole = classification_loss(logits, targets, LossConfig("binary", binary_sum=True))
    assert whole.item() == pytest.approx(1000 * math.log(2))


def test_dense_logits():
    """Token logits [B, N, C] count as more images."""
    logits, targets = torch.randn(2, 3, 5), torch.randn(2, 3, 5).softmax(-1)
    for objective in OBJECTIVES:
        flat = classification_loss(logits.flatten(0, 1), targets.flatten(0, 1), objective)
        torch.testing.assert_close(classification_loss(logits, targets, objective), flat)
