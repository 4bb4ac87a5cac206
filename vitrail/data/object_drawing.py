"""Boxes, labels and instance masks drawn over images."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from vitrail.data.contact_sheet import SMALL_SIZE, choose_font, draw_text
from vitrail.data.overlay import STRENGTH, Color

LINE = 2  # pixels


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
    for index in reversed(range(len(boxes))):
        left, top, right, bottom = (float(value) for value in boxes[index])
        draw.rectangle((left, top, max(right - 1, left), max(bottom - 1, top)), outline=colors[index], width=LINE)
        width = choose_font(labels[index], SMALL_SIZE)[0].getlength(labels[index])
        above = max(top - SMALL_SIZE - 4, 0)
        draw.rectangle((left, above, left + width + 4, above + SMALL_SIZE + 4), fill=colors[index])
        draw_text(draw, (int(left) + 2, int(above)), labels[index], SMALL_SIZE, "white", image.width)
    return np.asarray(image)
