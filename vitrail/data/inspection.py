"""Inspection of a data set: classes, sizes, formats, unreadable images, duplicates and leaks between splits."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from vitrail.atomic_files import describe_error
from vitrail.data.datasets.folder import SourceDict
from vitrail.data.decode import check_pixels, decode_mask, fit_mask, open_and_convert, to_pixels
from vitrail.data.duplicates import THUMBNAIL, exact_groups, fingerprint, near_groups
from vitrail.data.loader import Problem
from vitrail.data.mask_classes import IGNORE
from vitrail.data.object_inspection import ObjectReport, ObjectScan, describe_objects
from vitrail.data.source import Source
from vitrail.data.workers import Workers, default_workers

DEFAULT_SIZE = 224  # default input size of most networks; smaller images are enlarged
CHUNK = 32  # images per task: a compromise between a steady progress bar and communication
IMAGE_RECORD = np.dtype(
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
    """The scan of some images of one split."""

    records: np.ndarray  # IMAGE_RECORD [N]
    formats: Counter[str] = field(default_factory=Counter)  # "JPEG RGB" -> images
    mask_pixels: Counter[int] = field(default_factory=Counter)  # by id
    mask_images: Counter[int] = field(default_factory=Counter)  # images in which an id occurs
    other_sizes: list[str] = field(default_factory=list)  # locations of images whose mask has another size
    ignored: list[str] = field(default_factory=list)  # locations of images whose mask has no class
    unknown: dict[int, str] = field(default_factory=dict)  # ids that are not classes, and where they were found first
    problems: list[Problem] = field(default_factory=list)
    objects: ObjectScan = field(default_factory=ObjectScan)


@dataclass(frozen=True)
class Scanner:
    """Decodes images and records their properties; sent to the worker processes."""

    sources: SourceDict

    def __call__(self, task: tuple[str, int, int]) -> Scan:
        split, start, stop = task
        source = self.sources[split]
        scan = Scan(np.zeros(stop - start, IMAGE_RECORD))
        for row, index in enumerate(range(start, stop)):
            try:
                self._scan_image(source, index, scan, scan.records[row])
            except (OSError, ValueError) as error:
                scan.problems.append(Problem(source.location(index), describe_error(error)))
                scan.records[row]["height"] = 0
        return scan

    def _scan_image(self, source: Source, index: int, scan: Scan, record: Any) -> None:
        encoded = source.encoded(index)
        if isinstance(encoded, np.ndarray):
            format, pixels = "pixels RGB", check_pixels(encoded)
            record["bytes"] = encoded.nbytes
        else:
            format = ""

            def convert(image: Any) -> np.ndarray:
                nonlocal format
                format = f"{image.format} {image.mode}"
                return to_pixels(image, encoded, None)

            record["bytes"] = len(encoded)
            pixels = open_and_convert(encoded, convert)
        mask = source.mask(index)
        if mask is not None:
            try:
                self._scan_mask(source, index, mask, pixels, scan)
            except ValueError as error:
                raise ValueError(f"mask: {error}") from None
            record["bytes"] += len(mask)
            record["mask"] = True
        if source.object_classes:
            scan.objects.add(source, index, pixels)
        scan.formats[format] += 1
        record["height"], record["width"] = pixels.shape[:2]
        record["digest"], record["hash"], record["thumbnail"] = fingerprint(pixels)

    def _scan_mask(self, source: Source, index: int, encoded: bytes, pixels: np.ndarray, scan: Scan) -> None:
        classes = source.mask_classes
        ids = decode_mask(encoded) if classes is None else classes.read_ids(encoded)
        fit_mask(ids, pixels)  # raises if it has another aspect ratio
        if ids.shape != pixels.shape[:2]:
            scan.other_sizes.append(source.location(index))
        found, counts = np.unique(ids, return_counts=True)
        scan.mask_pixels.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))
        scan.mask_images.update(found.tolist())
        if classes is None:
            return
        if not np.isin(found, classes.ids).any():
            scan.ignored.append(source.location(index))
        for number in found.tolist():
            if number not in classes.ids and number not in classes.ignored:
                scan.unknown.setdefault(number, source.location(index))


@dataclass(frozen=True)
class MaskReport:
    """The masks of a split."""

    classes: list[dict[str, Any]]  # name, id, share of the labeled pixels, images in which it occurs
    ignored_share: float  # of all pixels
    other_sizes: list[str]  # images whose mask has another size with the same aspect ratio
    ignored: list[str]  # images whose mask has no class
    unknown: dict[int, str]  # ids that are not classes, and where they were found first
    unmasked: int  # images without a mask


@dataclass(frozen=True)
class SplitReport:
    images: int
    bytes: int
    formats: dict[str, int]
    classes: dict[str, int] | None  # images per class; None: no labels
    extra_labels: dict[str, int]  # number of classes per column
    masks: int
    mask_ids: list[int]
    mask_report: MaskReport | None
    object_report: ObjectReport | None
    resolution: dict[str, list[float]]  # minimum, quartiles, maximum
    below_default_size: int
    unreadable: list[Problem]
    skipped: list[str]  # files that are not images or cannot be read
    defects: list[str]  # reasons why no model can be trained on it

    @property
    def readable(self) -> int:
        return self.images - len(self.unreadable)


@dataclass(frozen=True)
class DuplicateImage:
    split: str
    index: int
    location: str
    label: str | None


@dataclass(frozen=True)
class DuplicateGroup:
    """Images with equal pixels (`exact`) or nearly equal ones."""

    exact: bool
    members: list[DuplicateImage]

    @property
    def splits(self) -> set[str]:
        return {member.split for member in self.members}

    @property
    def labels_differ(self) -> bool:
        return len({member.label for member in self.members if member.label is not None}) > 1


@dataclass(frozen=True)
class DuplicateCounts:
    """Numbers of exact and near duplicates."""

    exact: int
    near: int

    @property
    def total(self) -> int:
        return self.exact + self.near


@dataclass(frozen=True)
class Report:
    source: str
    splits: dict[str, SplitReport]
    repeats: dict[str, DuplicateCounts]  # images that duplicate an earlier image of the same split
    leaks: dict[tuple[str, str], DuplicateCounts]  # images of the second split that duplicate an image of the first
    groups: list[DuplicateGroup]  # of duplicates

    def to_dict(self) -> dict[str, Any]:
        """Return the complete report as plain values for JSON."""
        splits = {
            split: asdict(each) | {"unreadable": [problem._asdict() for problem in each.unreadable]}
            for split, each in self.splits.items()
        }
        leaks = [{"from": first, "to": second, **asdict(counts)} for (first, second), counts in self.leaks.items()]
        groups = [
            {
                "exact": group.exact,
                "across_splits": len(group.splits) > 1,
                "labels_differ": group.labels_differ,
                "images": [asdict(member) for member in group.members],
            }
            for group in self.groups
        ]
        repeats = {split: asdict(counts) for split, counts in self.repeats.items()}
        return {"source": self.source, "splits": splits, "leaks": leaks, "repeats": repeats, "duplicates": groups}


def inspect(
    name: str, sources: SourceDict, workers: int | None = None, advance: Callable[[int], Any] = lambda count: None
) -> Report:
    """Decode every image of every split once and report on them. `advance` is called with the number of images just scanned."""
    sources = {split: sources[split] for split in ("train", "validation", "test") if split in sources}
    pool = Workers(Scanner(sources), default_workers() if workers is None else workers)
    scans: dict[str, list[Scan]] = {split: [] for split in sources}
    try:
        for (split, start, stop), scan in zip(_tasks(sources), pool.run(_tasks(sources)), strict=True):
            scans[split].append(scan)
            advance(stop - start)
    finally:
        pool.close()
    merged = {split: _merge(parts) for split, parts in scans.items()}
    splits = {split: _describe_split(sources[split], scan) for split, scan in merged.items()}
    return Report(name, splits, *_compare(sources, merged))


def _tasks(sources: SourceDict) -> Iterator[tuple[str, int, int]]:
    for split, source in sources.items():
        for start in range(0, len(source), CHUNK):
            yield split, start, min(start + CHUNK, len(source))


def _merge(scans: list[Scan]) -> Scan:
    merged = Scan(np.concatenate([scan.records for scan in scans]))
    for scan in scans:
        merged.formats += scan.formats
        merged.mask_pixels += scan.mask_pixels
        merged.mask_images += scan.mask_images
        merged.other_sizes += scan.other_sizes
        merged.ignored += scan.ignored
        merged.unknown = scan.unknown | merged.unknown
        merged.problems += scan.problems
        merged.objects.merge(scan.objects)
    return merged


def _describe_split(source: Source, scan: Scan) -> SplitReport:
    records = scan.records[scan.records["height"] > 0]
    height, width = records["height"].astype(np.float64), records["width"].astype(np.float64)
    measures = {"width": width, "height": height, "aspect": width / height, "megapixels": width * height / 1e6}
    label = source.label
    counts = np.bincount(label.values[label.values >= 0], minlength=len(label.names)).tolist() if label else []
    return SplitReport(
        images=len(source),
        bytes=int(scan.records["bytes"].sum()),
        formats=dict(scan.formats.most_common()),
        classes=dict(zip(label.names, counts, strict=True)) if label else None,
        extra_labels={name: len(labels.names) for name, labels in source.extra.items()},
        masks=int(records["mask"].sum()),
        mask_ids=sorted(scan.mask_pixels),
        mask_report=_describe_masks(source, scan, records["mask"]) if records["mask"].any() else None,
        object_report=describe_objects(source, scan.objects) if source.object_classes else None,
        resolution={name: np.quantile(values, (0, 0.25, 0.5, 0.75, 1)).tolist() for name, values in measures.items()}
        if len(records)
        else {},
        below_default_size=int((np.minimum(height, width) < DEFAULT_SIZE).sum()),
        unreadable=scan.problems,
        skipped=list(source.skipped),
        defects=list(source.defects),
    )


def _describe_masks(source: Source, scan: Scan, masked: np.ndarray) -> MaskReport:
    classes, unnamed = source.mask_classes, {number: f"class {number}" for number in sorted(scan.mask_pixels) if number != IGNORE}
    names = dict(zip(classes.ids, classes.names, strict=True)) if classes else unnamed
    labeled, total = sum(scan.mask_pixels[number] for number in names), sum(scan.mask_pixels.values())
    rows = [
        {
            "name": name,
            "id": number,
            "share": scan.mask_pixels[number] / max(labeled, 1),
            "images": scan.mask_images[number],
        }
        for number, name in names.items()
    ]
    problems = (scan.other_sizes, scan.ignored, scan.unknown)
    return MaskReport(rows, 1 - labeled / max(total, 1), *problems, int((~masked).sum()) + source.unmasked)


def _compare(
    sources: SourceDict, scans: dict[str, Scan]
) -> tuple[dict[str, DuplicateCounts], dict[tuple[str, str], DuplicateCounts], list[DuplicateGroup]]:
    """Find the repeats, leaks and groups of duplicates among the readable images of all splits."""
    rows = {split: np.flatnonzero(scan.records["height"] > 0) for split, scan in scans.items()}
    records = np.concatenate([scans[split].records[chosen] for split, chosen in rows.items()])
    owner = np.repeat(np.arange(len(rows)), [len(chosen) for chosen in rows.values()])
    index = np.concatenate(list(rows.values()))
    exact = exact_groups(records["digest"])
    near = near_groups(exact, records["hash"], records["thumbnail"])

    names = list(sources)
    own = {split: (exact[owner == number], near[owner == number]) for number, split in enumerate(names)}
    repeats, leaks = {}, {}
    for number, split in enumerate(names):
        same, similar = own[split]
        repeats[split] = DuplicateCounts(len(same) - len(np.unique(same)), len(np.unique(same)) - len(np.unique(similar)))
        for first in names[:number]:
            is_exact, is_near = np.isin(same, own[first][0]), np.isin(similar, own[first][1])
            leaks[first, split] = DuplicateCounts(int(is_exact.sum()), int((is_near & ~is_exact).sum()))

    def duplicate(position: int) -> DuplicateImage:
        split = names[owner[position]]
        source, row = sources[split], int(index[position])
        value = int(source.label.values[row]) if source.label else -1
        return DuplicateImage(split, row, source.location(row), source.classes[value] if value >= 0 else None)

    order = np.argsort(near, kind="stable")
    starts = np.flatnonzero(np.diff(near[order], prepend=-1))
    groups = [
        DuplicateGroup(bool((exact[members] == exact[members[0]]).all()), [duplicate(int(position)) for position in members])
        for members in np.split(order, starts[1:])
        if len(members) > 1
    ]
    return repeats, leaks, groups
