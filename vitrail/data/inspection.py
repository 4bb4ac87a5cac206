"""A look at a whole data set: what is in it, what is broken, what occurs twice and where."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from vitrail.atomic_files import reason
from vitrail.data.datasets.folder import Parts
from vitrail.data.decode import decode_mask, fit_mask, read, stored_pixels, to_pixels
from vitrail.data.duplicates import THUMBNAIL, exact_groups, fingerprint, near_groups
from vitrail.data.loader import Problem
from vitrail.data.source import Source
from vitrail.data.workers import Workers, usual_workers

USUAL_SIDE = 224  # what most networks look at; smaller images have to be enlarged
CHUNK = 32  # images per task: few enough for a steady progress bar, many enough for the pipe
FACTS = np.dtype(
    [
        ("height", np.int32),  # 0: unreadable
        ("width", np.int32),
        ("bytes", np.int64),
        ("mask", np.bool_),
        ("digest", np.void, 16),
        ("hash", np.uint64),
        ("thumbnail", np.uint8, (THUMBNAIL, THUMBNAIL, 3)),
    ]
)


@dataclass
class Scan:
    """What was seen of some images of one split."""

    facts: np.ndarray  # FACTS [N]
    kinds: Counter[str] = field(default_factory=Counter)  # "JPEG RGB" -> images
    mask_ids: set[int] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)


@dataclass(frozen=True)
class Scanner:
    """Decodes images and notes what they are; all that a worker process needs to know about the data."""

    parts: Parts

    def __call__(self, task: tuple[str, int, int]) -> Scan:
        split, start, stop = task
        source = self.parts[split]
        scan = Scan(np.zeros(stop - start, FACTS))
        for row, index in enumerate(range(start, stop)):
            try:
                self._look(source, index, scan, scan.facts[row])
            except (OSError, ValueError) as error:
                scan.problems.append(Problem(source.where(index), reason(error)))
                scan.facts[row]["height"] = 0
        return scan

    def _look(self, source: Source, index: int, scan: Scan, fact: Any) -> None:
        encoded = source.encoded(index)
        if isinstance(encoded, np.ndarray):
            kind, pixels = "pixels RGB", stored_pixels(encoded)
            fact["bytes"] = encoded.nbytes
        else:
            kind = ""

            def decoded(image: Any) -> np.ndarray:
                nonlocal kind
                kind = f"{image.format} {image.mode}"
                return to_pixels(image, encoded, None)

            fact["bytes"] = len(encoded)
            pixels = read(encoded, decoded)
        mask = source.mask(index)
        if mask is not None:
            try:
                ids = fit_mask(decode_mask(mask), pixels)
            except ValueError as error:
                raise ValueError(f"its mask: {error}") from None
            scan.mask_ids.update(np.unique(ids).tolist())
            fact["bytes"] += len(mask)
            fact["mask"] = True
        scan.kinds[kind] += 1
        fact["height"], fact["width"] = pixels.shape[:2]
        fact["digest"], fact["hash"], fact["thumbnail"] = fingerprint(pixels)


@dataclass(frozen=True)
class SplitReport:
    images: int
    bytes: int
    kinds: dict[str, int]
    classes: dict[str, int] | None  # images of every class that has a name; None: no labels
    further_labels: dict[str, int]  # columns, and how many classes each has
    masks: int
    mask_ids: list[int]
    resolution: dict[str, list[float]]  # smallest, quartiles, largest
    below_usual_side: int
    broken: list[Problem]

    @property
    def readable(self) -> int:
        return self.images - len(self.broken)


@dataclass(frozen=True)
class Member:
    split: str
    index: int
    where: str
    label: str | None


@dataclass(frozen=True)
class Group:
    """Images that are the same (`exact`: pixel for pixel) or nearly."""

    exact: bool
    members: list[Member]

    @property
    def splits(self) -> set[str]:
        return {member.split for member in self.members}

    @property
    def contradicts(self) -> bool:
        return len({member.label for member in self.members if member.label is not None}) > 1


@dataclass(frozen=True)
class Twins:
    """How many images, and how many of them pixel for pixel."""

    exact: int
    near: int

    @property
    def total(self) -> int:
        return self.exact + self.near


@dataclass(frozen=True)
class Report:
    source: str
    splits: dict[str, SplitReport]
    repeats: dict[str, Twins]  # images of a split that an earlier one of the same split has shown
    leaks: dict[tuple[str, str], Twins]  # images of the second split that the first holds too
    groups: list[Group]  # all images that occur more than once

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; nothing is left out."""
        splits = {
            split: asdict(each) | {"broken": [problem._asdict() for problem in each.broken]}
            for split, each in self.splits.items()
        }
        leaks = [{"from": first, "to": second, **asdict(twins)} for (first, second), twins in self.leaks.items()]
        groups = [
            {
                "exact": group.exact,
                "across_splits": len(group.splits) > 1,
                "labels_differ": group.contradicts,
                "images": [asdict(member) for member in group.members],
            }
            for group in self.groups
        ]
        repeats = {split: asdict(twins) for split, twins in self.repeats.items()}
        return {"source": self.source, "splits": splits, "leaks": leaks, "repeats": repeats, "duplicates": groups}


def inspect(name: str, parts: Parts, workers: int | None = None, advance: Callable[[int], Any] = lambda count: None) -> Report:
    """Decodes every image of every split once; `advance` is told how many more are done."""
    parts = {split: parts[split] for split in ("train", "validation", "test") if split in parts}
    pool = Workers(Scanner(parts), usual_workers() if workers is None else workers)
    scans: dict[str, list[Scan]] = {split: [] for split in parts}
    try:
        for (split, start, stop), scan in zip(_tasks(parts), pool.run(_tasks(parts)), strict=True):
            scans[split].append(scan)
            advance(stop - start)
    finally:
        pool.close()
    whole = {split: _gather(found) for split, found in scans.items()}
    return Report(name, {split: _describe(parts[split], scan) for split, scan in whole.items()}, *_compare(parts, whole))


def _tasks(parts: Parts) -> Iterator[tuple[str, int, int]]:
    for split, source in parts.items():
        for start in range(0, len(source), CHUNK):
            yield split, start, min(start + CHUNK, len(source))


def _gather(scans: list[Scan]) -> Scan:
    whole = Scan(np.concatenate([scan.facts for scan in scans]))
    for scan in scans:
        whole.kinds += scan.kinds
        whole.mask_ids |= scan.mask_ids
        whole.problems += scan.problems
    return whole


def _describe(source: Source, scan: Scan) -> SplitReport:
    facts = scan.facts[scan.facts["height"] > 0]
    height, width = facts["height"].astype(np.float64), facts["width"].astype(np.float64)
    measures = {"width": width, "height": height, "aspect": width / height, "megapixels": width * height / 1e6}
    label = source.label
    counts = np.bincount(label.values[label.values >= 0], minlength=len(label.names)).tolist() if label else []
    return SplitReport(
        images=len(source),
        bytes=int(scan.facts["bytes"].sum()),
        kinds=dict(scan.kinds.most_common()),
        classes=dict(zip(label.names, counts, strict=True)) if label else None,
        further_labels={name: len(labels.names) for name, labels in source.extra.items()},
        masks=int(facts["mask"].sum()),
        mask_ids=sorted(scan.mask_ids),
        resolution={name: np.quantile(values, (0, 0.25, 0.5, 0.75, 1)).tolist() for name, values in measures.items()}
        if len(facts)
        else {},
        below_usual_side=int((np.minimum(height, width) < USUAL_SIDE).sum()),
        broken=scan.problems,
    )


def _compare(parts: Parts, scans: dict[str, Scan]) -> tuple[dict[str, Twins], dict[tuple[str, str], Twins], list[Group]]:
    """Repeats, leaks and groups over the readable images of all splits."""
    rows = {split: np.flatnonzero(scan.facts["height"] > 0) for split, scan in scans.items()}
    facts = np.concatenate([scans[split].facts[chosen] for split, chosen in rows.items()])
    owner = np.repeat(np.arange(len(rows)), [len(chosen) for chosen in rows.values()])
    index = np.concatenate(list(rows.values()))
    exact = exact_groups(facts["digest"])
    near = near_groups(exact, facts["hash"], facts["thumbnail"])

    names = list(parts)
    own = {split: (exact[owner == number], near[owner == number]) for number, split in enumerate(names)}
    repeats, leaks = {}, {}
    for number, split in enumerate(names):
        same, alike = own[split]
        repeats[split] = Twins(len(same) - len(np.unique(same)), len(np.unique(same)) - len(np.unique(alike)))
        for first in names[:number]:
            known, resembling = np.isin(same, own[first][0]), np.isin(alike, own[first][1])
            leaks[first, split] = Twins(int(known.sum()), int((resembling & ~known).sum()))

    def member(place: int) -> Member:
        split = names[owner[place]]
        source, row = parts[split], int(index[place])
        value = int(source.label.values[row]) if source.label else -1
        return Member(split, row, source.where(row), source.classes[value] if value >= 0 else None)

    order = np.argsort(near, kind="stable")
    starts = np.flatnonzero(np.diff(near[order], prepend=-1))
    groups = [
        Group(bool((exact[places] == exact[places[0]]).all()), [member(int(place)) for place in places])
        for places in np.split(order, starts[1:])
        if len(places) > 1
    ]
    return repeats, leaks, groups
