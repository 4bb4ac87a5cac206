"""COCO's average precision of boxes and masks: AP, AP50, AP75, and AP of small, medium and large objects.

The rules of COCO's tools: of each image and class at most 100 detections, the highest score first, take the object with the
highest IoU that is still free, at ten IoU thresholds; objects that are crowds, difficult, or of another size are ignored, and so
are detections that match them or that are of another size and match nothing. AP is the mean of the highest precision at 101
recalls, over classes that have objects.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

THRESHOLDS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0, 1, 101)
AREAS = {"all": (0.0, 1e10), "small": (0.0, 32.0**2), "medium": (32.0**2, 96.0**2), "large": (96.0**2, 1e10)}
MAX_DETECTIONS = 100


@dataclass
class Matches:
    """What became of the detections of some images, and how many objects there were."""

    image: list[np.ndarray] = field(default_factory=list)  # int64 [n]
    classes: list[np.ndarray] = field(default_factory=list)  # int64 [n]
    scores: list[np.ndarray] = field(default_factory=list)  # float64 [n]
    correct: list[np.ndarray] = field(default_factory=list)  # bool [n, areas, thresholds]
    ignored: list[np.ndarray] = field(default_factory=list)  # bool [n, areas, thresholds]
    object_image: list[np.ndarray] = field(default_factory=list)  # int64 [m]
    object_classes: list[np.ndarray] = field(default_factory=list)  # int64 [m]
    counted: list[np.ndarray] = field(default_factory=list)  # bool [m, areas]: objects that are not ignored

    def add(
        self,
        image: int,
        scores: np.ndarray,
        classes: np.ndarray,
        areas: np.ndarray,
        object_classes: np.ndarray,
        object_areas: np.ndarray,
        object_ignored: np.ndarray,
        overlaps: np.ndarray,
        crowd: np.ndarray,
    ) -> None:
        """Match the detections of an image (scores, classes, areas [D]) with its objects [G], whose IoU is `overlaps` [D, G].

        Crowds [G] may be matched by several detections; their overlap is the share of the detection.
        """
        order = np.argsort(-scores, kind="mergesort")
        kept = order[rank_in_class(classes[order]) < MAX_DETECTIONS]
        ranges = np.array(list(AREAS.values()))
        outside = (object_areas[:, None] < ranges[:, 0]) | (object_areas[:, None] > ranges[:, 1])
        unwanted = object_ignored[:, None] | outside  # [G, areas]
        found, ignored = match(classes[kept], overlaps[kept], object_classes, unwanted, crowd)
        sizes = areas[kept, None]
        other_size = (sizes < ranges[:, 0]) | (sizes > ranges[:, 1])
        self.image.append(np.full(len(kept), image))
        self.classes.append(classes[kept].astype(np.int64))
        self.scores.append(scores[kept].astype(np.float64))
        self.correct.append(found & ~ignored)
        self.ignored.append(ignored | (~found & other_size[..., None]))
        self.object_image.append(np.full(len(object_classes), image))
        self.object_classes.append(object_classes.astype(np.int64))
        self.counted.append(~unwanted)

    def arrays(self) -> list[np.ndarray]:
        """The columns, for other processes."""
        shapes = [(0,)] * 3 + [(0, len(AREAS), len(THRESHOLDS))] * 2 + [(0,)] * 2 + [(0, len(AREAS))]
        kinds = [np.int64, np.int64, np.float64, bool, bool, np.int64, np.int64, bool]
        parts = [getattr(self, name) for name in self.__dataclass_fields__]
        return [np.concatenate(part or [np.zeros(shape, kind)]) for part, shape, kind in zip(parts, shapes, kinds, strict=True)]

    @classmethod
    def join(cls, several: Sequence[Sequence[np.ndarray]]) -> "Matches":
        """The matches of several processes, in the order of the images, so that their number does not change the result."""
        columns = [np.concatenate(parts) for parts in zip(*several, strict=True)]
        order, objects = (np.argsort(column, kind="mergesort") for column in (columns[0], columns[5]))
        return cls(*([column[order]] for column in columns[:5]), *([column[objects]] for column in columns[5:]))


def rank_in_class(classes: np.ndarray) -> np.ndarray:
    """How many of the detections before each have its class [D]."""
    order = np.argsort(classes, kind="mergesort")
    _, starts, counts = np.unique(classes[order], return_index=True, return_counts=True)
    rank = np.empty(len(classes), dtype=np.int64)
    rank[order] = np.arange(len(classes)) - np.repeat(starts, counts)
    return rank


def match(
    classes: np.ndarray, overlaps: np.ndarray, object_classes: np.ndarray, unwanted: np.ndarray, crowd: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Whether each detection takes an object, and whether that object is ignored, bool [D, areas, thresholds] each."""
    limits = np.minimum(THRESHOLDS, 1 - 1e-10)
    shape = (len(classes), unwanted.shape[1], len(limits))
    found, ignored = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
    places, steps = np.arange(shape[1])[:, None], np.arange(shape[2])
    for kind in np.intersect1d(classes, object_classes):
        own = np.flatnonzero(object_classes == kind)
        avoid = unwanted[own].T[..., None]  # [areas, G, 1]
        taken = np.zeros((shape[1], len(own), shape[2]), dtype=bool)
        # Of equal overlaps the last object is taken; ignored ones come last in their order, and are only taken if no other fits.
        order = np.argsort(unwanted[own].T, axis=1, kind="mergesort")
        position = np.argsort(order, axis=1)[..., None]
        for row in np.flatnonzero(classes == kind):
            overlap = overlaps[row, own][None, :, None]
            free = (overlap >= limits) & (~taken | crowd[own][None, :, None])
            wanted = free & ~avoid
            usable = np.where(wanted.any(1, keepdims=True), wanted, free)
            value = np.where(usable, overlap, -1.0)
            last = np.where(value == value.max(1, keepdims=True), position, -1).argmax(1)  # [areas, thresholds]
            hit = usable.any(1)
            found[row] = hit
            ignored[row] = hit & unwanted[own].T[places, last]
            taken[places, last, steps] |= hit
    return found, ignored


def box_overlaps(boxes: np.ndarray, objects: np.ndarray, crowd: np.ndarray) -> np.ndarray:
    """IoU [D, G] of boxes (left, top, width, height), with a crowd the share of the detection, in float64."""
    boxes, objects = boxes.astype(np.float64), objects.astype(np.float64)
    sides = []
    for axis in (0, 1):
        low = np.maximum(boxes[:, None, axis], objects[None, :, axis])
        high = np.minimum((boxes[:, axis] + boxes[:, axis + 2])[:, None], (objects[:, axis] + objects[:, axis + 2])[None])
        sides.append(np.clip(high - low, 0, None))
    return divide_overlaps(sides[0] * sides[1], boxes[:, 2] * boxes[:, 3], objects[:, 2] * objects[:, 3], crowd)


def divide_overlaps(common: np.ndarray, areas: np.ndarray, object_areas: np.ndarray, crowd: np.ndarray) -> np.ndarray:
    """Areas in common [D, G] by the area of the union, or by that of the detection [D] for a crowd [G]."""
    whole = np.where(crowd[None], areas[:, None], areas[:, None] + object_areas[None] - common)
    out: np.ndarray = np.divide(common, whole, out=np.zeros_like(common), where=whole > 0)
    return out


def summarize_precision(matches: Matches, classes: int) -> dict[str, Any]:
    """AP, AP50, AP75, APs, APm, APl, AR and the AP of each class; None where there are no objects."""
    _, labels, scores, correct, ignored, _, object_labels, counted = matches.arrays()
    areas, steps = len(AREAS), len(THRESHOLDS)
    precision = np.full((classes, areas, steps, len(RECALLS)), np.nan)
    recall = np.full((classes, areas, steps), np.nan)
    for kind in range(classes):
        totals = counted[object_labels == kind].sum(0)
        rows = np.flatnonzero(labels == kind)
        rows = rows[np.argsort(-scores[rows], kind="mergesort")]
        for area in np.flatnonzero(totals):
            curve = precision_at(correct[rows, area], ignored[rows, area], int(totals[area]))
            precision[kind, area], recall[kind, area] = curve

    def mean(values: np.ndarray) -> float | None:
        known = values[~np.isnan(values)]
        return float(known.mean()) if len(known) else None

    found = {
        "ap": mean(precision[:, 0]),
        "ap50": mean(precision[:, 0, 0]),
        "ap75": mean(precision[:, 0, 5]),
        **{f"ap_{name}": mean(precision[:, index]) for index, name in enumerate(AREAS) if index},
        "ar": mean(recall[:, 0]),
    }
    per_class = [{"ap": mean(precision[kind, 0]), "ap50": mean(precision[kind, 0, 0])} for kind in range(classes)]
    counts = [int(counted[object_labels == kind, 0].sum()) for kind in range(classes)]
    return found | {"per_class": [row | {"objects": count} for row, count in zip(per_class, counts, strict=True)]}


def precision_at(correct: np.ndarray, ignored: np.ndarray, total: int) -> tuple[np.ndarray, np.ndarray]:
    """Precision at `RECALLS` [thresholds, 101] and the last recall [thresholds] of detections [n, thresholds], best first."""
    hits = np.cumsum(correct & ~ignored, 0, dtype=np.float64)
    misses = np.cumsum(~correct & ~ignored, 0, dtype=np.float64)
    steps = correct.shape[1]
    precision, last = np.zeros((steps, len(RECALLS))), np.zeros(steps)
    if not len(correct):
        return precision, last
    recall = hits / total
    last = recall[-1]
    envelope = np.maximum.accumulate((hits / (hits + misses + np.spacing(1)))[::-1])[::-1]
    for step in range(steps):
        place = np.searchsorted(recall[:, step], RECALLS, side="left")
        inside = place < len(recall)
        precision[step, inside] = envelope[place[inside], step]
    return precision, last
