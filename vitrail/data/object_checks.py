"""Checks of boxes and instance masks before a training."""

from vitrail.data.loader import ImageReader, Problem
from vitrail.data.mask_checks import SAMPLED, spread
from vitrail.data.source import Source
from vitrail.errors import UserError


def require_objects(source: Source) -> None:
    if not source.object_classes:
        raise UserError(
            f"{source.name} has no boxes: give COCO, VOC or YOLO annotations beside the images, or Parquet files with an objects "
            "column of bbox and category."
        )


def check_objects(source: Source, samples: int = SAMPLED) -> None:
    """Raise UserError if half of some images spread over the source cannot be used, or if none has an object."""
    require_objects(source)
    reader = ImageReader(source, None, objects=True)
    chosen = spread(source, samples).tolist()
    problems: list[Problem] = []
    found = 0
    for index in chosen:
        image = reader.read_annotated(index)
        if isinstance(image, Problem):
            problems.append(image)
        elif image.objects is not None:
            found += int((image.objects.flags == 0).sum())
    if len(problems) * 2 >= len(chosen):
        location, reason = problems[0]
        others = f" ({len(problems)} of {len(chosen)} images like this)" if len(problems) > 1 else ""
        raise UserError(f"{location} cannot be used: {reason}{others}; `vitrail data inspect` lists all of them.")
    if not found:
        raise UserError(f"No image of {source.name} among {len(chosen)} has an object to learn from: add annotations with boxes.")
