"""Boxes, labels and instance masks drawn over images."""

from collections.abc import Sequence
from itertools import islice

import numpy as np
from PIL import Image, ImageDraw

from vitrail.data.contact_sheet import SHOWN, SMALL_SIZE, arrange_tiles, choose_font, draw_text
from vitrail.data.instance_masks import unpack_masks
from vitrail.data.loader import ImageReader, Problem
from vitrail.data.objects import DecodedObjects
from vitrail.data.overlay import STRENGTH, Color, class_colors
from vitrail.data.source import Source
from vitrail.errors import UserError

LINE = 2  # pixels
TEXT_SHARE, SMALLEST_TEXT = 24, 7  # text of 1/24 of the image's side, but readable


def draw_objects(
    pixels: np.ndarray,
    boxes: np.ndarray,
    labels: Sequence[str],
    colors: Sequence[Color],
    masks: np.ndarray | None = None,
) -> np.ndarray:
    """An image [H, W, 3] with boxes [N, 4], their labels, and masks bool [N, H, W], the first on top."""
    out = pixels.astype(np.float32)
    for index in reversed(range(len(boxes) if masks is not None else 0)):
        assert masks is not None
        inside = masks[index]
        out[inside] = out[inside] * (1 - STRENGTH) + np.array(colors[index], dtype=np.float32) * STRENGTH
    image = Image.fromarray(np.rint(out).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    size = min(max(max(image.size) // TEXT_SHARE, SMALLEST_TEXT), SMALL_SIZE)
    for index in reversed(range(len(boxes))):
        left, top, right, bottom = (float(value) for value in boxes[index])
        draw.rectangle((left, top, max(right - 1, left), max(bottom - 1, top)), outline=colors[index], width=LINE)
        width = choose_font(labels[index], size)[0].getlength(labels[index])
        above = max(top - size - 4, 0)
        draw.rectangle((left, above, left + width + 4, above + size + 4), fill=colors[index])
        draw_text(draw, (int(left) + 2, int(above) - 1), labels[index], size, "white", image.width)
    return np.asarray(image)


def draw_annotated(pixels: np.ndarray, objects: DecodedObjects, names: Sequence[str]) -> np.ndarray:
    """An image [H, W, 3] with the objects that its data set lists."""
    colors = class_colors(names)
    masks = None if objects.planes is None else unpack_masks(objects.planes, len(objects.classes))
    kinds = objects.classes.tolist()
    return draw_objects(pixels, objects.boxes, [names[kind] for kind in kinds], [colors[kind] for kind in kinds], masks)


def object_sheet(source: Source, title: str, seed: int = 0) -> Image.Image:
    """Draw random images with their objects."""
    reader = ImageReader(source, None, objects=True)
    order = np.random.default_rng(seed).permutation(len(source)).tolist()
    images = (image for image in map(reader.read_annotated, order) if not isinstance(image, Problem))
    tiles = [
        draw_annotated(image.pixels, image.objects, source.object_classes)
        for image in islice(images, SHOWN)
        if image.objects is not None
    ]
    if not tiles:
        raise UserError(f"None of the objects of {source.name} can be drawn: see the reasons above.")
    return arrange_tiles(tiles, title, f"{len(source):,} images, {len(source.object_classes)} classes, seed {seed}")
