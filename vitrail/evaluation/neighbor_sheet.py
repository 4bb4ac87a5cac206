"""Ranked neighbors as one image: a row per query, with frames whose color says at which level of labels a neighbor is right.

As in Figures 2.6 to 2.9 of Grafit (arXiv 2011.12982): green for the finest level, orange to red for coarser ones, gray for none.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from vitrail.data.contact_sheet import (
    BACKGROUND,
    CAPTION_HEIGHT,
    GAP,
    MARGIN,
    MUTED_COLOR,
    SMALL_SIZE,
    TEXT_COLOR,
    draw_header,
    draw_image,
    draw_text,
    header_height,
)

TILE, FRAME = 112, 5
RIGHT, WRONG, UNKNOWN = "#2e9e44", "#9a9aa0", "#e2e2e6"
COARSER = ("#f0a020", "#e2711d", "#c9442c", "#8e2a2a", "#5c1f33", "#3b1b3f")  # nearest to the finest level first


class Tile(NamedTuple):
    pixels: np.ndarray
    caption: str
    labels: Mapping[str, str]  # column -> class name


def frame_color(query: Mapping[str, str], neighbor: Mapping[str, str], levels: Sequence[str]) -> str:
    """The color of the finest level, the last of `levels`, at which the neighbor has the label of the query."""
    known = [level for level in levels if level in query and level in neighbor]
    if not known:
        return UNKNOWN
    colors = level_colors(levels)
    return next((colors[level] for level in reversed(known) if query[level] == neighbor[level]), WRONG)


def level_colors(levels: Sequence[str]) -> dict[str, str]:
    """Colors of levels, coarsest first."""
    colors = [RIGHT, *(COARSER[min(number, len(COARSER) - 1)] for number in range(len(levels) - 1))]
    return dict(zip(reversed(levels), colors, strict=True))


def neighbor_sheet(rows: Sequence[tuple[Tile, Sequence[Tile]]], levels: Sequence[str], title: str) -> Image.Image:
    """Draw queries, each with its neighbors in order; `levels` are label columns, coarsest first."""
    columns = max(len(neighbors) for _, neighbors in rows)
    step_x, step_y = TILE + 2 * FRAME + GAP, TILE + 2 * FRAME + CAPTION_HEIGHT + GAP
    width = 2 * MARGIN + (columns + 1) * step_x + 2 * GAP
    sheet = Image.new("RGB", (width, MARGIN + header_height() + len(rows) * step_y + MARGIN), BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    draw_header(draw, width, title, "query, then the most similar images")
    for number, (query, neighbors) in enumerate(rows):
        top = MARGIN + header_height() + number * step_y
        for place, tile in enumerate([query, *neighbors]):
            left = MARGIN + place * step_x + (2 * GAP if place else 0)
            color = frame_color(query.labels, tile.labels, levels) if place else BACKGROUND
            draw.rectangle((left, top, left + TILE + 2 * FRAME - 1, top + TILE + 2 * FRAME - 1), fill=color)
            draw_image(sheet, (left + FRAME, top + FRAME), tile.pixels, (TILE, TILE))
            text = TEXT_COLOR if not place else MUTED_COLOR
            draw_text(draw, (left, top + TILE + 2 * FRAME), tile.caption, SMALL_SIZE, text, TILE + 2 * FRAME)
    if any(query.labels for query, _ in rows):
        draw_legend(draw, sheet.height - MARGIN, levels)
    return sheet


def draw_legend(draw: ImageDraw.ImageDraw, top: int, levels: Sequence[str]) -> None:
    left = MARGIN
    for name, color in [*reversed(level_colors(levels).items()), ("none", WRONG)]:
        draw.rectangle((left, top + 6, left + 12, top + 18), fill=color)
        draw_text(draw, (left + 18, top), f"right {name}" if name != "none" else "wrong", SMALL_SIZE, TEXT_COLOR, 200)
        left += 60 + 9 * len(name)
