"""mIoU and its parts, compared with torchmetrics; accuracy near boundaries."""

import pytest
import torch
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassJaccardIndex

from vitrail.data.mask_classes import IGNORE
from vitrail.evaluation.mean_iou import (
    PixelCounts,
    boundary_distance,
    class_ious,
    count_pixels,
    describe_class_pixels,
    summarize_pixels,
)


def random_masks(classes, missing=()):
    generator = torch.Generator().manual_seed(classes)
    labels = torch.randint(0, classes, (3, 40, 50), generator=generator)
    predictions = torch.where(torch.rand(labels.shape, generator=generator) < 0.6, labels, labels.flip(1))
    for label in missing:
        labels[labels == label], predictions[predictions == label] = 0, 0
    labels[torch.rand(labels.shape, generator=generator) < 0.1] = IGNORE
    return labels.to(torch.uint8), predictions.to(torch.uint8)


@pytest.mark.parametrize(("classes", "missing"), [(2, ()), (11, ()), (21, (3, 7))])
def test_it_equals_torchmetrics(classes, missing):
    labels, predictions = random_masks(classes, missing)
    matrix = count_pixels(labels, predictions, classes)
    arguments = (predictions.long(), labels.long())
    ignored = {"num_classes": classes, "ignore_index": IGNORE}
    assert torch.equal(matrix, MulticlassConfusionMatrix(**ignored)(*arguments))
    ious = MulticlassJaccardIndex(**ignored, average="none")(*arguments)
    present = class_ious(matrix).isfinite()
    assert present.sum() == classes - len(missing)
    torch.testing.assert_close(class_ious(matrix)[present].float(), ious[present])
    summary = summarize_pixels(matrix)
    assert summary["miou"] == pytest.approx(float(MulticlassJaccardIndex(**ignored)(*arguments)), rel=1e-5)
    assert summary["pixel_accuracy"] == pytest.approx(float(MulticlassAccuracy(**ignored, average="micro")(*arguments)), rel=1e-5)
    assert summary["mean_accuracy"] == pytest.approx(float(MulticlassAccuracy(**ignored)(*arguments)), rel=1e-5)


def test_rows_of_classes():
    labels, predictions = torch.tensor([[[0, 0, 1, IGNORE]]]), torch.tensor([[[0, 1, 1, 2]]])
    first, second, third = describe_class_pixels(count_pixels(labels, predictions, 3), ["a", "b", "c"])
    assert first == {"name": "a", "pixels": 2, "iou": 0.5, "precision": 1.0, "recall": 0.5}
    assert second == {"name": "b", "pixels": 1, "iou": 0.5, "precision": 0.5, "recall": 1.0}
    assert third == {"name": "c", "pixels": 0, "iou": None, "precision": None, "recall": None}  # predicted where it is ignored


def test_nothing_labeled_is_zero():
    assert summarize_pixels(torch.zeros(3, 3, dtype=torch.int64)) == {"miou": 0.0, "pixel_accuracy": 0.0, "mean_accuracy": 0.0}


def test_distances_to_boundaries():
    labels = torch.zeros(1, 9, 20, dtype=torch.uint8)
    labels[:, :, 10:] = 1
    labels[:, 0] = IGNORE  # the margin of an object is no boundary
    distance = boundary_distance(labels, (1, 3))[0]
    assert distance[5].tolist() == [2] * 7 + [1] * 2 + [0] * 2 + [1] * 2 + [2] * 7
    assert (distance[0] == 2).all()


def test_errors_at_the_boundary_count_near_it():
    labels = torch.zeros(1, 40, 40, dtype=torch.uint8)
    labels[:, :, 20:] = 1
    predictions = labels.clone()
    predictions[:, :, 20] = 0  # one column too far
    counts = PixelCounts(2, boundaries=True)
    counts.add(labels, predictions)
    rows = counts.describe_boundaries()
    assert [row["pixel_accuracy"] for row in rows] == [0.5, 0.75, 0.875, 0.9375, 1.0]
    assert rows[0]["share"] == pytest.approx(2 / 40)
    assert torch.equal(counts.matrix, count_pixels(labels, predictions, 2))
