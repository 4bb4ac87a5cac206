"""Metrics of segmentation from a confusion matrix of pixels: mIoU, accuracy, per class and near boundaries."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.mask_classes import IGNORE

RADII = (1, 2, 4, 8)  # pixels around a boundary between classes


def count_pixels(labels: Tensor, predictions: Tensor, classes: int, where: Tensor | None = None) -> Tensor:
    """The confusion matrix of pixels, int64 [classes, classes] with a row per label; labels of `IGNORE` are not counted.

    `where` (bool, the shape of the labels) selects pixels.
    """
    valid = labels < classes
    if where is not None:
        valid = valid & where
    pairs = labels.long() * classes + predictions.long()
    counts = torch.bincount(torch.where(valid, pairs, classes**2).flatten(), minlength=classes**2 + 1)
    return counts[:-1].view(classes, classes)


def class_ious(matrix: Tensor) -> Tensor:
    """The intersection over union of each class, float64 [classes]; NaN for a class that is neither labeled nor predicted."""
    hits = matrix.diagonal().double()
    return hits / (matrix.sum(0) + matrix.sum(1) - matrix.diagonal())


def summarize_pixels(matrix: Tensor) -> dict[str, float]:
    """mIoU over the classes that occur, pixel accuracy and the mean recall of the labeled classes."""
    ious, total = class_ious(matrix), int(matrix.sum())
    recall = matrix.diagonal().double() / matrix.sum(1)
    return {
        "miou": finite_mean(ious),
        "pixel_accuracy": float(matrix.diagonal().sum()) / total if total else 0.0,
        "mean_accuracy": finite_mean(recall),
    }


def finite_mean(values: Tensor) -> float:
    finite = values[values.isfinite()]
    return float(finite.mean()) if len(finite) else 0.0


def describe_class_pixels(matrix: Tensor, names: Sequence[str]) -> list[dict[str, Any]]:
    """IoU, precision, recall and labeled pixels of each class; None where a class has none."""
    hits = matrix.diagonal().double()
    columns = {"iou": class_ious(matrix), "precision": hits / matrix.sum(0), "recall": hits / matrix.sum(1)}
    values = {name: [None if each != each else each for each in column.tolist()] for name, column in columns.items()}
    pixels = matrix.sum(1).tolist()
    return [
        {"name": name, "pixels": pixels[row]} | {column: each[row] for column, each in values.items()}
        for row, name in enumerate(names)
    ]


def boundary_distance(labels: Tensor, radii: Sequence[int] = RADII) -> Tensor:
    """The first of the radii within which a pixel has another class, as its index, int64 [B, H, W]; len(radii): none.

    Ignored pixels are not a class: the border between an object and its void margin is no boundary.
    """
    values, ignored = labels.float()[:, None], (labels == IGNORE)[:, None]
    found = torch.full_like(labels, len(radii), dtype=torch.int64)
    for index in reversed(range(len(radii))):
        side, reach = 2 * radii[index] + 1, radii[index]
        highest = F.max_pool2d(values.masked_fill(ignored, -1.0), side, 1, reach)
        lowest = -F.max_pool2d((-values).masked_fill(ignored, -float(IGNORE)), side, 1, reach)
        found = torch.where((highest != lowest)[:, 0] & ~ignored[:, 0], index, found)
    return found


class PixelCounts:
    """Confusion matrices of many images: of all pixels and, with `boundaries`, by distance to the next boundary."""

    def __init__(self, classes: int, boundaries: bool = False, device: torch.device | str = "cpu") -> None:
        self.classes, self.boundaries = classes, boundaries
        self.by_distance = torch.zeros(len(RADII) + 1 if boundaries else 1, classes, classes, dtype=torch.int64, device=device)

    def add(self, labels: Tensor, predictions: Tensor) -> None:
        """Labels and predicted class indices [B, H, W]."""
        if not self.boundaries:
            self.by_distance[0] += count_pixels(labels, predictions, self.classes)
            return
        distance = boundary_distance(labels)
        for index in range(len(self.by_distance)):
            self.by_distance[index] += count_pixels(labels, predictions, self.classes, distance == index)

    @property
    def matrix(self) -> Tensor:
        return self.by_distance.sum(0)

    def describe_boundaries(self) -> list[dict[str, Any]]:
        """mIoU and accuracy of the pixels at most 1, 2, 4 and 8 pixels from a boundary, and of the others."""
        near = self.by_distance[:-1].cumsum(0)
        rows = [{"pixels": f"within {radius} of a boundary"} for radius in RADII] + [{"pixels": f"more than {RADII[-1]} away"}]
        total = max(int(self.matrix.sum()), 1)
        matrices = [*near, self.by_distance[-1]]
        return [
            row | {"share": int(matrix.sum()) / total} | summarize_pixels(matrix)
            for row, matrix in zip(rows, matrices, strict=True)
        ]
