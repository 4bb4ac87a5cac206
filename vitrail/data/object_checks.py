"""Checks of boxes and instance masks before a training."""

from vitrail.data.loader import ImageReader
from vitrail.data.mask_checks import read_samples
from vitrail.data.source import Source
from vitrail.errors import UserError


def require_objects(source: Source) -> None:
    if not source.object_classes:
        raise UserError(
            f"{source.name} has no boxes: give COCO, VOC or YOLO annotations beside the images, or Parquet files with an objects "
            "column of bbox and category."
        )


def check_objects(source: Source) -> None:
    """Raise UserError if half of some images spread over the source cannot be used, or if none has an object."""
    require_objects(source)
    found = images = 0
    for image in read_samples(ImageReader(source, None, objects=True), "images"):
        images += 1
        found += int((image.objects.flags == 0).sum()) if image.objects is not None else 0
    if not found:
        raise UserError(
            f"No image of {source.name} among {images} has an object to learn from: add annotations with boxes; crowds, "
            "difficult objects, and boxes without area or outside of their image are not used."
        )
