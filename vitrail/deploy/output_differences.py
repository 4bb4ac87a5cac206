"""Differences between the outputs of an exported program and those of its model, added up over images."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vitrail.deploy.exported_outputs import ExportedNetwork

# The largest difference of float outputs, relative to the largest output: more is an error of the export and not rounding.
TOLERANCE = {"fp32": 1e-3, "fp16": 5e-2}
# The share of objects and of pixels that must be the same: rounding decides between nearly equal scores.
AGREEMENT = {"fp32": 0.98, "fp16": 0.8}


class Differences:
    """Of a float output [B, C, ...]; equal top-1 classes are counted along C."""

    objects: int | None = None

    def __init__(self) -> None:
        self.largest_difference, self.largest, self.same, self.total = 0.0, 0.0, 0, 0

    def add(self, actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
        """The outputs for the same images."""
        self.measure(actual[0], expected[0])
        self.count(actual[0].argmax(1), expected[0].argmax(1))

    def measure(self, own: Tensor, wanted: Tensor) -> None:
        self.largest_difference = max(self.largest_difference, float((own - wanted).abs().max().nan_to_num(torch.inf)))
        self.largest = max(self.largest, float(wanted.abs().max()))

    def count(self, own: Tensor, wanted: Tensor) -> None:
        self.same, self.total = self.same + int((own == wanted).sum()), self.total + wanted.numel()

    @property
    def agreement(self) -> float | None:
        return self.same / self.total if self.total else None

    def problem(self, precision: str) -> str:
        """What is wrong if the difference is more than rounding, else nothing."""
        if self.largest_difference <= TOLERANCE.get(precision, float("inf")) * self.largest:
            return ""
        return (
            f"The outputs of the exported program differ from the model's by up to {self.largest_difference:.2g}, of "
            f"{self.largest:.2g}"
        )

    def disagreement(self, precision: str, what: str) -> str:
        """What is wrong if too few of what was counted are the same, else nothing."""
        if self.agreement is None or self.agreement >= AGREEMENT.get(precision, 0.0):
            return ""
        return f"Of the {what} of the exported program and the model, only {self.agreement:.1%} are the same"


class PixelDifferences(Differences):
    """Of a segmentation: logits are compared, and classes [B, height, width] are counted."""

    def add(self, actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
        self.measure(actual[1], expected[1])
        self.count(actual[0], expected[0])

    def problem(self, precision: str) -> str:
        return super().problem(precision) or self.disagreement(precision, "classes of pixels")


class ObjectDifferences(Differences):
    """Of a detection of one image: objects that the other side found too.

    Two objects are the same if they have the same class, each coordinate differs by at most the tolerance times the largest
    coordinate of the image's objects, and the score, and the mask on average, by at most the tolerance.
    """

    def __init__(self, precision: str) -> None:
        super().__init__()
        self.objects, self.tolerance = 0, TOLERANCE.get(precision, TOLERANCE["fp16"])

    def add(self, actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
        boxes, scores, classes, count, *masks = actual
        own = [each[0, : int(count[0])] for each in (boxes, scores, classes, *masks)]
        self.objects = (self.objects or 0) + len(expected[0])
        self.total += len(own[0]) + len(expected[0])
        if not len(own[0]) or not len(expected[0]):
            return
        largest = float(expected[0].abs().max())
        apart = (own[0][:, None] - expected[0]).abs().amax(2)  # [own, expected]
        close = (apart <= self.tolerance * largest) & (own[2][:, None] == expected[2])
        close &= (own[1][:, None] - expected[1]).abs() <= self.tolerance
        for mask, wanted in zip(own[3:], expected[3:], strict=True):
            close &= torch.cdist(mask.flatten(1), wanted.flatten(1), p=1) <= self.tolerance * wanted[0].numel()
        self.same += int(close.any(1).sum()) + int(close.any(0).sum())
        self.largest = max(self.largest, largest)
        nearest = torch.where(close, apart, torch.inf).amin(0)
        self.largest_difference = max(self.largest_difference, float(nearest[close.any(0)].max()) if close.any() else 0.0)

    def problem(self, precision: str) -> str:
        return self.disagreement(precision, "objects")


def make_differences(network: ExportedNetwork, precision: str) -> Differences:
    if network.task == "detection":
        return ObjectDifferences(precision)
    return PixelDifferences() if network.task == "segmentation" and network.takes_pixels else Differences()
