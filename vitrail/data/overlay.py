"""Masks as images: palettes, index PNG files, and overlays on photographs with a legend."""

import colorsys
import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

from vitrail.data.mask_classes import IGNORE

Color = tuple[int, int, int]
STRENGTH = 0.55  # of the color over the image
UNCOLORED = {"background", "other"}


def class_colors(names: Sequence[str]) -> list[Color]:
    """A color for each class: distant hues in turn; black for the background."""
    colors: list[Color] = []
    for index, name in enumerate(names):
        hue, ring = index * 0.381966 % 1.0, index % 3
        red, green, blue = colorsys.hsv_to_rgb(hue, (0.85, 0.6, 1.0)[ring], (0.95, 0.8, 0.65)[ring])
        black = name.lower() in UNCOLORED
        colors.append((0, 0, 0) if black else (round(255 * red), round(255 * green), round(255 * blue)))
    return colors


def encode_mask(indices: np.ndarray, ids: Sequence[int], colors: Sequence[Color]) -> bytes:
    """A PNG with a palette whose values are the file ids of the classes; ignored pixels are 255."""
    table = np.full(256, IGNORE, dtype=np.uint8)
    table[: len(ids)] = ids
    image = Image.fromarray(table[indices], "P")
    palette = np.zeros((256, 3), dtype=np.uint8)
    palette[list(ids)] = colors
    palette[IGNORE] = (224, 224, 192) if IGNORE not in ids else palette[IGNORE]
    image.putpalette(palette.tobytes())
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def draw_overlay(pixels: np.ndarray, indices: np.ndarray, colors: Sequence[Color]) -> np.ndarray:
    """Classes [H, W] drawn over an image [H, W, 3], with white lines between classes; black classes leave it as it is."""
    table = np.zeros((256, 3), dtype=np.float32)
    table[: len(colors)] = colors
    strength = np.zeros(256, dtype=np.float32)
    strength[: len(colors)] = [STRENGTH if any(color) else 0.0 for color in colors]
    share = strength[indices][..., None]
    out = pixels * (1 - share) + table[indices] * share
    border = np.zeros(indices.shape, dtype=bool)
    border[:, 1:] |= indices[:, 1:] != indices[:, :-1]
    border[1:] |= indices[1:] != indices[:-1]
    out[border] = 0.4 * out[border] + 0.6 * 255
    rounded: np.ndarray = np.rint(out).astype(np.uint8)
    return rounded


def draw_classes(indices: np.ndarray, colors: Sequence[Color]) -> np.ndarray:
    """Classes [H, W] as colors [H, W, 3]; ignored pixels are gray."""
    table = np.full((256, 3), 128, dtype=np.uint8)
    table[: len(colors)] = colors
    out: np.ndarray = table[indices]
    return out


def with_legend(pixels: np.ndarray, entries: Sequence[tuple[str, Color]]) -> Image.Image:
    """An image [H, W, 3] with a legend of names and colors below it."""
    from PIL import ImageDraw

    from vitrail.data.contact_sheet import MARGIN, SMALL_SIZE, TEXT_COLOR, choose_font, draw_text

    height, width = pixels.shape[:2]
    line, gap = SMALL_SIZE + 8, 10
    places: list[tuple[int, int]] = []
    x, y = gap, height + gap // 2
    for name, _ in entries:
        length = line + int(choose_font(name, SMALL_SIZE)[0].getlength(name)) + gap
        if x > gap and x + length > width:
            x, y = gap, y + line
        places.append((x, y))
        x += length
    sheet = Image.new("RGB", (max(width, 2 * MARGIN), y + line + gap // 2 if entries else height), "white")
    sheet.paste(Image.fromarray(pixels), (0, 0))
    draw = ImageDraw.Draw(sheet)
    for (name, color), (left, top) in zip(entries, places, strict=True):
        draw.rectangle((left, top + 3, left + SMALL_SIZE, top + 3 + SMALL_SIZE), fill=color, outline="#86868b")
        draw_text(draw, (left + line - 2, top), name, SMALL_SIZE, TEXT_COLOR, sheet.width - left - line)
    return sheet
