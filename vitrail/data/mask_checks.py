"""Checks of segmentation masks before a training: which ids they have, and whether they fit their images."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from vitrail.data.loader import AnnotatedImage, ImageReader, Problem
from vitrail.data.mask_classes import IGNORE, NAME_IDS, MaskClasses, make_classes, numbered_classes
from vitrail.data.source import Source
from vitrail.data.workers import Workers, default_workers
from vitrail.errors import UserError
from vitrail.formatting import format_ranges

SCANNED, SAMPLED = 2000, 48  # images
CHUNK = 32


@dataclasses.dataclass(frozen=True)
class IdScanner:
    """Collects the ids of masks; sent to worker processes."""

    source: Source

    def __call__(self, indices: np.ndarray) -> set[int]:
        from vitrail.data.decode import decode_mask

        found: set[int] = set()
        for index in indices.tolist():
            try:
                encoded = self.source.mask(index)
                found |= set(np.unique(decode_mask(encoded)).tolist()) if encoded is not None else set()
            except (OSError, ValueError):
                continue  # reported when it is read
        return found


def scan_ids(source: Source) -> list[int]:
    """The ids that occur in the masks of a source, or in some of them."""
    indices = source.spread(SCANNED)
    chunks = np.split(indices, range(CHUNK, len(indices), CHUNK))
    pool = Workers(IdScanner(source), default_workers() if len(chunks) > 2 else 0)
    try:
        return sorted(set().union(*pool.run(chunks)))
    finally:
        pool.close()


def complete_classes(sources: Sequence[Source], ignored: Sequence[int] = ()) -> MaskClasses:
    """Give all sources the classes of the first: those of its file, else one for each id in its masks; `ignored` are left out."""
    first = sources[0]
    if not first.has_masks and first.has_instances:
        use_object_masks(sources)
    require_masks(first)
    classes = first.mask_classes
    if classes is None:
        try:
            classes = numbered_classes(scan_ids(first))
        except UserError as error:
            check_masks(first)  # a better reason, if none can be read
            raise UserError(f"{first.name} has no masks to learn from: {error}") from None
    if ignored:
        names = dict(zip(classes.ids, classes.names, strict=True))
        colors = {number: color for color, number in classes.colors}
        classes = make_classes(names, [*classes.ignored - {IGNORE}, *ignored], colors)
    for source in sources:
        source.mask_classes = classes
    return classes


def use_object_masks(sources: Sequence[Source]) -> None:
    """Make the masks of objects, such as COCO's, the segmentation masks, with a background as the first class."""
    names = dict(enumerate(("background", *(name for name in sources[0].object_classes if name != "background"))))
    if len(names) != len(sources[0].object_classes) + 1:
        raise UserError(f"{sources[0].name} has objects of the class background, which is that of all other pixels: rename it.")
    classes = make_classes(names)
    if len(classes.names) != len(names):
        raise UserError(f"{sources[0].name} has objects of a class that is called void or ignored: rename it.")
    for source in sources:
        source.has_masks, source.mask_classes, source.draws_masks = True, classes, True


def require_masks(source: Source) -> None:
    if not source.has_masks:
        raise UserError(
            f"{source.name} has no masks: give a folder with images/ and masks/ (PNG files of the same names), one of the "
            "layouts of ADE20K, VOC, Cityscapes or CamVid, COCO or YOLO polygons, or Parquet files with a mask column."
        )


def require_classes(source: Source) -> None:
    """Raise UserError if the masks have a single class, which every prediction would match."""
    classes = source.mask_classes
    if classes is not None and len(classes.ids) == 1:
        ids = f"id {classes.ids[0]}; ignored {format_ranges(sorted(classes.ignored))}"
        raise UserError(f"The masks of {source.name} have one class only ({ids}): {NAME_IDS}")


def read_samples(reader: ImageReader, what: str) -> Iterator[AnnotatedImage]:
    """Yield some images spread over the source; at the end UserError if half cannot be used. A few are skipped in training."""
    chosen = reader.source.spread(SAMPLED).tolist()
    problems: list[Problem] = []
    for index in chosen:
        image = reader.read_annotated(index)
        if isinstance(image, Problem):
            problems.append(image)
        else:
            yield image
    if problems and len(problems) * 2 >= len(chosen):
        location, reason = problems[0]
        others = f" ({len(problems)} of {len(chosen)} {what} like this)" if len(problems) > 1 else ""
        raise UserError(f"{location} cannot be used: {reason}{others}; `vitrail data inspect` lists all of them.")


def check_masks(source: Source) -> None:
    """Raise UserError if half of some masks spread over the source cannot be used, or if they have fewer than two classes."""
    require_masks(source)
    reader = ImageReader(source, None, masks=True)
    if not sum(image.mask is not None and bool((image.mask != IGNORE).any()) for image in read_samples(reader, "masks")):
        raise UserError(f"All pixels of the masks of {source.name} are ignored: name the classes of their ids in classes.json.")
    require_classes(source)
