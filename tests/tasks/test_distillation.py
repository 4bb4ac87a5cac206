"""Distillation against the equations of DeiT (arXiv 2012.12877), written out in double precision."""

import dataclasses
import math

import pytest
import torch
from torch.autograd import gradcheck

from vitrail.models.vision_transformer import fuse_logits
from vitrail.recipes.schema import DistillationConfig, LossConfig
from vitrail.tasks.distillation import distillation_loss, teacher_targets
from vitrail.tasks.losses import classification_loss

STUDENT = [[0.3, -1.2, 2.0, 0.5], [1.5, 0.0, -0.7, 0.1], [-3.0, 4.0, 0.2, 0.2]]
TEACHER = [[1.0, -0.5, 0.9, 0.0], [-1.0, 2.5, 0.3, 0.8], [0.0, 6.0, -2.0, 1.0]]
LABELS = [2, 0, 1]


def softmax(row, temperature=1.0):
    parts = [math.exp(value / temperature) for value in row]
    return [part / sum(parts) for part in parts]


def cross_entropy(student, target):
    """Mean over the batch of - sum of target times log probability."""
    rows = [
        -sum(t * math.log(p) for t, p in zip(wanted, softmax(row), strict=True))
        for row, wanted in zip(student, target, strict=True)
    ]
    return sum(rows) / len(rows)


def divergence(student, teacher, temperature):
    """KL(teacher, student) of both softmaxes at the temperature, mean over the batch."""
    total = 0.0
    for ours, theirs in zip(student, teacher, strict=True):
        for p, q in zip(softmax(theirs, temperature), softmax(ours, temperature), strict=True):
            total += p * (math.log(p) - math.log(q))
    return total / len(student)


def one_hot(labels, classes=4, smoothing=0.0):
    return [[smoothing / classes + (1 - smoothing) * (place == label) for place in range(classes)] for label in labels]


def first(teacher):
    return [row.index(max(row)) for row in teacher]


def double(rows):
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("per_class", [False, True])
def test_soft(temperature, per_class):
    """Eq. 3.2's second term; the released code divides by batch times classes."""
    how = DistillationConfig("soft", temperature=temperature, per_class=per_class)
    found = distillation_loss(double(STUDENT), teacher_targets(double(TEACHER), how), how)
    expected = temperature**2 * divergence(STUDENT, TEACHER, temperature) / (4 if per_class else 1)
    assert found.item() == pytest.approx(expected, rel=1e-6)


def test_the_released_soft_loss_is_torchs_own_with_log_targets():
    student, teacher, temperature = double(STUDENT), double(TEACHER), 3.0
    how = DistillationConfig("soft", temperature=temperature, per_class=True)
    ours, theirs = ((logits / temperature).log_softmax(1) for logits in (student, teacher))
    expected = torch.nn.functional.kl_div(ours, theirs, reduction="sum", log_target=True) * temperature**2 / student.numel()
    torch.testing.assert_close(distillation_loss(student, teacher_targets(teacher, how), how), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_hard(smoothing):
    """Eq. 3.3's second term: cross-entropy against the teacher's first choice, smoothed if one likes."""
    how = DistillationConfig("hard", label_smoothing=smoothing)
    found = distillation_loss(double(STUDENT), teacher_targets(double(TEACHER), how), how)
    assert found.item() == pytest.approx(cross_entropy(STUDENT, one_hot(first(TEACHER), 4, smoothing)), rel=1e-6)


def test_hard_distillation_of_one_output_is_cross_entropy_with_the_mean_target():
    how = DistillationConfig("hard")
    labels, taught = double(one_hot(LABELS)), teacher_targets(double(TEACHER), how).double()
    objective, student = LossConfig(), double(STUDENT)
    both = classification_loss(student, labels, objective) / 2 + distillation_loss(student, taught, how) / 2
    torch.testing.assert_close(both, classification_loss(student, (labels + taught) / 2, objective))
    mean = [
        [(a + b) / 2 for a, b in zip(*rows, strict=True)] for rows in zip(one_hot(LABELS), one_hot(first(TEACHER)), strict=True)
    ]
    assert both.item() == pytest.approx(cross_entropy(STUDENT, mean), rel=1e-9)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_a_student_that_equals_its_teacher_has_no_loss(temperature):
    how = DistillationConfig("soft", temperature=temperature)
    logits = double(TEACHER).requires_grad_()
    loss = distillation_loss(logits, (logits.detach() / temperature).softmax(1), how)
    (slope,) = torch.autograd.grad(loss, logits)
    assert abs(loss.item()) < 1e-12
    assert slope.abs().max() < 1e-12
    # What the teacher says is rounded to single precision on its way.
    assert abs(distillation_loss(logits, teacher_targets(logits.detach(), how), how).item()) < 1e-6


def test_shifting_all_logits_changes_nothing():
    how = DistillationConfig("soft", temperature=2.0)
    moved = teacher_targets(double(TEACHER) + 11.0, how)
    torch.testing.assert_close(moved, teacher_targets(double(TEACHER), how))
    torch.testing.assert_close(
        distillation_loss(double(STUDENT) - 7.0, moved, how), distillation_loss(double(STUDENT), moved, how)
    )


def test_the_square_keeps_the_gradient_at_high_temperatures():
    """To first order in the logits the gradient is (student - teacher) / C, for centred logits, at every high temperature."""
    student = double(STUDENT).sub(double(STUDENT).mean(1, keepdim=True)).requires_grad_()
    teacher = double(TEACHER).sub(double(TEACHER).mean(1, keepdim=True))
    expected = (student.detach() - teacher) / 4 / len(STUDENT)
    for temperature in (1e3, 1e4):
        how = DistillationConfig("soft", temperature=temperature)
        loss = distillation_loss(student, (teacher / temperature).softmax(1), how)
        (slope,) = torch.autograd.grad(loss, student)
        torch.testing.assert_close(slope, expected, rtol=0, atol=10 / temperature)


@pytest.mark.parametrize(
    "how",
    [DistillationConfig("hard"), DistillationConfig("hard", label_smoothing=0.1), DistillationConfig("soft", temperature=3.0)],
)
@pytest.mark.parametrize("per_class", [False, True])
def test_gradients(how, per_class):
    how = dataclasses.replace(how, per_class=per_class)
    targets = teacher_targets(double(TEACHER), how).double()
    assert gradcheck(lambda logits: distillation_loss(logits, targets, how), double(STUDENT).requires_grad_())


@pytest.mark.parametrize("loss", ["cross_entropy", "binary"])
def test_gradients_of_the_labels_loss(loss):
    targets = double(one_hot(LABELS, 4, 0.1))
    objective = LossConfig(kind=loss, binary_targets="soft")
    assert gradcheck(lambda logits: classification_loss(logits, targets, objective), double(STUDENT).requires_grad_())


def test_classes_that_the_teacher_does_not_predict():
    """Minus infinity: no probability, never the first choice, and neither loss nor gradient is spoilt."""
    teacher = double(TEACHER)
    teacher[:, 3] = -math.inf
    for how in (DistillationConfig("soft", temperature=3.0), DistillationConfig("hard")):
        targets = teacher_targets(teacher, how)
        torch.testing.assert_close(targets.sum(1), torch.ones(3))
        assert not targets[:, 3].any()
        student = double(STUDENT).requires_grad_()
        loss = distillation_loss(student, targets, how)
        (slope,) = torch.autograd.grad(loss, student)
        assert loss.isfinite()
        assert slope.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_logits_are_computed_in_single(dtype):
    student, how = double(STUDENT).to(dtype), DistillationConfig("soft", temperature=3.0)
    targets = teacher_targets(double(TEACHER), how)
    found = distillation_loss(student, targets, how)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), distillation_loss(student.double(), targets.double(), how), rtol=1e-5, atol=1e-7)


def test_huge_logits_stay_finite():
    student, how = torch.tensor([[3e4, -3e4, 0.0]], requires_grad=True), DistillationConfig("soft", temperature=1.0)
    loss = distillation_loss(student, teacher_targets(torch.tensor([[-3e4, 3e4, 0.0]]), how), how)
    loss.backward()
    assert loss.item() == pytest.approx(6e4)
    assert student.grad is not None
    assert student.grad.isfinite().all()


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_nan_of_a_teacher_reaches_the_loss(kind):
    """Also where only its first choice counts, of which there always is one."""
    how, teacher = DistillationConfig(kind), double(TEACHER)
    teacher[1, 2] = math.nan
    targets = teacher_targets(teacher, how)
    assert targets.isnan().all(1).tolist() == [False, True, False]
    assert distillation_loss(double(STUDENT), targets, how).isnan()


def test_fusion_of_two_heads():
    """At test time: the class head, the other one, the mean of both, or the sum of both softmaxes."""
    main, other = double(STUDENT), double(TEACHER)
    assert torch.equal(fuse_logits(main, other, "class"), main)
    assert torch.equal(fuse_logits(main, other, "distillation"), other)
    torch.testing.assert_close(fuse_logits(main, other, "logit_mean"), (main + other) / 2)
    sums = double([[a + b for a, b in zip(softmax(x), softmax(y), strict=True)] for x, y in zip(STUDENT, TEACHER, strict=True)])
    torch.testing.assert_close(fuse_logits(main, other, "softmax_sum").exp() * 2, sums, rtol=1e-6, atol=0)
