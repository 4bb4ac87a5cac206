"""Inspection of boxes and instance masks: objects per class, and boxes that are outside, empty or of unknown classes."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vitrail.data.objects import CROWD, DIFFICULT, MIN_SIDE, decode_objects, scale_boxes
from vitrail.data.source import Source
from vitrail.formatting import pluralize

SMALL, LARGE = 32**2, 96**2  # pixels of the areas that divide small, medium and large objects, as in COCO
ROUNDING = 1.0  # pixels by which a box may exceed its image


@dataclass
class ObjectScan:
    """The objects of some images of a split."""

    objects: Counter[int] = field(default_factory=Counter)  # by class
    images: Counter[int] = field(default_factory=Counter)  # images in which a class occurs
    sizes: Counter[str] = field(default_factory=Counter)  # small, medium, large
    flags: Counter[int] = field(default_factory=Counter)
    masks: int = 0
    most: int = 0  # objects of an image
    none: int = 0  # images without objects
    outside: list[str] = field(default_factory=list)  # images with a box that is partly or completely outside
    no_area: list[str] = field(default_factory=list)  # images with a box without area
    unknown: list[str] = field(default_factory=list)  # images with an object of a class that is not listed

    def add(self, source: Source, index: int, pixels: np.ndarray) -> None:
        """Count the objects of an image; ValueError for those that cannot be used."""
        found = source.objects(index)
        if found is None:
            raise ValueError("it has no list of objects")
        height, width = pixels.shape[:2]
        boxes, _ = scale_boxes(found, height, width)
        if (boxes < -ROUNDING).any() or (boxes[:, 2:] > np.array([width, height]) + ROUNDING).any():
            self.outside.append(source.location(index))
        if ((boxes[:, 2:] - boxes[:, :2]) <= MIN_SIDE).any():
            self.no_area.append(source.location(index))
        if (found.classes < 0).any():
            self.unknown.append(source.location(index))
            return
        decoded = decode_objects(found, height, width)
        self.objects.update(found.classes.tolist())
        self.images.update(set(found.classes.tolist()))
        names = np.array(["small", "medium", "large"])
        self.sizes.update(names[(decoded.areas >= SMALL).astype(int) + (decoded.areas > LARGE)].tolist())
        self.flags.update(found.flags.tolist())
        self.masks += len(decoded.classes) if decoded.planes is not None else 0
        self.most, self.none = max(self.most, len(found)), self.none + (not len(found))

    def merge(self, other: "ObjectScan") -> None:
        for name in ("objects", "images", "sizes", "flags"):
            getattr(self, name).update(getattr(other, name))
        self.masks, self.none, self.most = self.masks + other.masks, self.none + other.none, max(self.most, other.most)
        for name in ("outside", "no_area", "unknown"):
            getattr(self, name).extend(getattr(other, name))


@dataclass(frozen=True)
class ObjectReport:
    """The objects of a split."""

    classes: list[dict[str, Any]]  # name, objects, images in which it occurs
    sizes: dict[str, int]  # small, medium, large
    masks: int
    crowds: int
    difficult: int
    most: int  # objects of an image
    none: int  # images without objects
    outside: list[str]
    no_area: list[str]
    unknown: list[str]
    notes: list[str]

    @property
    def total(self) -> int:
        return sum(int(row["objects"]) for row in self.classes)


def describe_objects(source: Source, scan: ObjectScan) -> ObjectReport:
    rows = [
        {"name": name, "objects": scan.objects[index], "images": scan.images[index]}
        for index, name in enumerate(source.object_classes)
    ]
    flags = (scan.masks, scan.flags[CROWD], scan.flags[DIFFICULT], scan.most, scan.none)
    return ObjectReport(rows, dict(scan.sizes), *flags, scan.outside, scan.no_area, scan.unknown, list(source.object_notes))


def object_findings(split: str, report: ObjectReport) -> Iterator[str]:
    """What is wrong with the objects of a split."""
    for found, what in (
        (report.unknown, "an object of a class that is not listed"),
        (report.no_area, "a box without area, which is not used"),
        (report.outside, "a box outside of the image, which is cut, or not used if all of it is outside"),
    ):
        if found:
            have = "has" if len(found) == 1 else "have"
            yield f"{pluralize(len(found), 'image')} of {split} {have} {what}, first {found[0]}."
    for note in report.notes:
        yield f"{note}: they are not used."
    missing = [str(row["name"]) for row in report.classes if not row["objects"]]
    if missing:
        names = ", ".join(missing[:10]) + (f" and {len(missing) - 10} more" if len(missing) > 10 else "")
        yield f"{pluralize(len(missing), 'class')} of {split} without objects: {names}."
