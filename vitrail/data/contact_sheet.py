"""Contact sheets of a data set: images of every class, and the augmented images that a network is trained on."""

import unicodedata
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from vitrail.data.decode import decode
from vitrail.data.rng import sample_key
from vitrail.data.source import Source
from vitrail.data.transforms.mixup import Mix, draw_mix, mix_images
from vitrail.data.transforms.pipeline import Augmentation, augment
from vitrail.errors import UserError
from vitrail.formatting import percent

BACKGROUND, TEXT_COLOR, MUTED_COLOR, TILE_COLOR, BORDER_COLOR = "#ffffff", "#1d1d1f", "#86868b", "#f2f2f4", "#e2e2e6"
MARGIN, GAP, CLASS_GAP = 40, 4, 28  # around the sheet, between images, between classes
TITLE_SIZE, TEXT_SIZE, SMALL_SIZE = 30, 16, 14  # font sizes
CAPTION_HEIGHT = 28
TILE = 128  # a multiple of 32 and 64, the usual sizes of small images
MAX_CLASSES = 60
SHOWN, COLUMNS = 24, 6  # annotated images
MIN_VIEW_SIDE = 128  # smaller views are enlarged by integer factors
UNICODE_FONTS = ("DejaVuSans.ttf", "NotoSans-Regular.ttf", "Arial.ttf", "NotoSansCJK-Regular.ttc", "PingFang.ttc", "msyh.ttc")


class Layout(NamedTuple):
    """The number of classes side by side, and the rows and columns of tiles of each class."""

    blocks: int
    rows: int
    columns: int


def choose_layout(classes: int) -> Layout:
    """Choose a layout of about the size of a screen: the more classes, the fewer images of each."""
    for max_classes, layout in (
        (1, Layout(1, 8, 12)),
        (3, Layout(1, 3, 12)),
        (6, Layout(1, 2, 12)),
        (12, Layout(1, 1, 12)),
        (24, Layout(2, 1, 6)),
        (36, Layout(3, 1, 4)),
    ):
        if classes <= max_classes:
            return layout
    return Layout(4, 1, 3)


def contact_sheet(source: Source, title: str, seed: int = 0) -> Image.Image:
    """Draw random images of every class, or of `MAX_CLASSES` random classes."""
    rng = np.random.default_rng(seed)
    values = source.label.values if source.label else np.zeros(len(source), dtype=np.int64)
    classes = np.unique(values[values >= 0])
    shown = np.sort(rng.permutation(classes)[:MAX_CLASSES])
    blocks, max_rows, columns = choose_layout(len(shown))
    members = [np.flatnonzero(values == value) for value in shown]
    caption = CAPTION_HEIGHT if source.label else 0
    block_width = columns * TILE + (columns - 1) * GAP
    tops, bottom = [], MARGIN + header_height()
    for line in range(0, len(shown), blocks):
        rows = min(-(-max(len(images) for images in members[line : line + blocks]) // columns), max_rows)
        tops.append(bottom)
        bottom += caption + rows * (TILE + GAP) - GAP + CLASS_GAP
    width = 2 * MARGIN + blocks * block_width + (blocks - 1) * CLASS_GAP
    sheet = Image.new("RGB", (width, bottom - CLASS_GAP + MARGIN), BACKGROUND)
    draw = ImageDraw.Draw(sheet)

    counts = [f"{len(source):,} images"]
    if source.label:
        counts.append(f"{len(shown):,} of {len(classes):,} classes" if len(shown) < len(classes) else f"{len(classes):,} classes")
    draw_header(draw, width, title, ", ".join([*counts, f"seed {seed}"]))
    for block, own in enumerate(members):
        left, top = MARGIN + block % blocks * (block_width + CLASS_GAP), tops[block // blocks]
        if source.label:
            count = f"{len(own):,}"
            max_width = block_width - choose_font(count, SMALL_SIZE)[0].getlength(count) - 12
            draw_text(draw, (left, top), class_name(source, own[0]), TEXT_SIZE, TEXT_COLOR, max_width)
            draw_text(draw, (left + block_width, top), count, SMALL_SIZE, MUTED_COLOR, block_width, right=True)
        for number, (_, pixels) in enumerate(islice(readable_images(source, rng.permutation(own)), max_rows * columns)):
            row, column = divmod(number, columns)
            draw_image(sheet, (left + column * (TILE + GAP), top + caption + row * (TILE + GAP)), pixels, (TILE, TILE))
    return sheet


def overlay_sheet(source: Source, title: str, seed: int = 0) -> Image.Image:
    """Draw random images with their masks over them, and a legend of the classes."""
    from vitrail.data.loader import ImageReader, Problem
    from vitrail.data.mask_checks import complete_classes
    from vitrail.data.overlay import class_colors, draw_overlay, with_legend

    classes = complete_classes([source])
    colors, reader = class_colors(classes.names), ImageReader(source, None, masks=True)
    order = np.random.default_rng(seed).permutation(len(source)).tolist()
    images = (image for image in map(reader.read_image, order) if not isinstance(image, Problem))
    tiles = [draw_overlay(pixels, mask, colors) for pixels, mask in islice(images, SHOWN) if mask is not None]
    if not tiles:
        raise UserError(f"None of the masks of {source.name} can be drawn: see the reasons above.")
    legend = list(zip(classes.names, colors, strict=True))
    sheet = arrange_tiles(tiles, title, f"{len(source):,} images, {len(classes.names)} classes, seed {seed}")
    return with_legend(np.asarray(sheet), legend)


def arrange_tiles(tiles: Sequence[np.ndarray], title: str, subtitle: str) -> Image.Image:
    """Draw images in rows under a title."""
    side = 2 * TILE
    rows = -(-len(tiles) // COLUMNS)
    size = (2 * MARGIN + COLUMNS * (side + GAP) - GAP, MARGIN + header_height() + rows * (side + GAP) + MARGIN // 2)
    sheet = Image.new("RGB", size, BACKGROUND)
    draw_header(ImageDraw.Draw(sheet), size[0], title, subtitle)
    for number, tile in enumerate(tiles):
        row, column = divmod(number, COLUMNS)
        draw_image(sheet, (MARGIN + column * (side + GAP), MARGIN + header_height() + row * (side + GAP)), tile, (side, side))
    return sheet


def augmented_views(
    source: Source,
    augmentation: Augmentation,
    title: str,
    seed: int = 0,
    mixup: float = 0.0,
    cutmix: float = 0.0,
    switch_prob: float = 0.5,
    count: int = 6,
    views: int = 6,
) -> Image.Image:
    """Draw one row per image: the stored image, then its augmented and mixed versions in the first epochs.

    Each column is one batch: mixup and CutMix mix an image with the one in the opposite row.
    """
    chosen = sample_images(source, count, seed)
    names = [class_name(source, number) for number, _ in chosen]
    factor = max(-(-MIN_VIEW_SIDE // min(augmentation.image_size)), 1)
    height, width = (side * factor for side in augmentation.image_size)
    caption = CAPTION_HEIGHT if any(names) or mixup > 0 or cutmix > 0 else 0
    step_x, step_y = width + GAP * 2, height + caption + GAP * 2
    header = header_height() + CAPTION_HEIGHT
    total = (2 * MARGIN + (views + 1) * step_x - GAP * 2 + CLASS_GAP, 2 * MARGIN + header + len(chosen) * step_y - GAP * 2)
    sheet = Image.new("RGB", total, BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    draw_header(draw, total[0], title, "image size {} x {}, seed {}".format(*augmentation.image_size, seed))

    above = MARGIN + header - CAPTION_HEIGHT
    draw_text(draw, (MARGIN, above), "original", SMALL_SIZE, MUTED_COLOR, width)
    for row, (_, pixels) in enumerate(chosen):
        corner = (MARGIN, MARGIN + header + row * step_y)
        draw_image(sheet, corner, pixels, (width, height))
        draw_text(draw, (corner[0], corner[1] + height), names[row], SMALL_SIZE, TEXT_COLOR, width + CLASS_GAP - GAP)
    for epoch in range(views):
        images = torch.cat([augmented_image(pixels, number, augmentation, seed, epoch) for number, pixels in chosen])
        mix = draw_mix(seed, epoch, 0, 0, augmentation.image_size, mixup, cutmix, switch_prob)
        left = MARGIN + CLASS_GAP + (epoch + 1) * step_x
        draw_text(draw, (left, above), f"epoch {epoch}" + mix_name(mix), SMALL_SIZE, MUTED_COLOR, width)
        for row, pixels in enumerate(denormalize(mix_images(images, [mix]), augmentation)):
            top = MARGIN + header + row * step_y
            paste(sheet, (left, top), Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST))
            draw_text(draw, (left, top + height), mix_caption(names[-1 - row], mix), SMALL_SIZE, TEXT_COLOR, width)
    return sheet


def augmented_image(pixels: np.ndarray, number: int, augmentation: Augmentation, seed: int, epoch: int) -> Tensor:
    """Augment one image, float [1, 3, height, width]; one at a time, so that images of any size need no padding."""
    image = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    key = sample_key(seed, epoch, torch.tensor([number]), torch.zeros(1, dtype=torch.int64))
    return augment(image, torch.tensor([pixels.shape[:2]]), key, augmentation).images


def denormalize(images: Tensor, augmentation: Augmentation) -> np.ndarray:
    """Convert normalized images [B, 3, height, width] to uint8 [B, height, width, 3]."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (augmentation.mean, augmentation.std))
    return ((images * std + mean) * 255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()


def mix_name(mix: Mix) -> str:
    if mix.lam == 1.0:
        return ""
    return ", mixup" if mix.box is None else ", CutMix"


def mix_caption(other: str, mix: Mix) -> str:
    """Describe the other image of a mixed one."""
    return "" if mix.lam == 1.0 else f"+ {percent(1 - mix.lam)} {other or 'another'}"


def sample_images(source: Source, count: int, seed: int) -> list[tuple[int, np.ndarray]]:
    """Choose random readable images (index, pixels) of as many classes as possible."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(source))
    if source.label:
        # The first image of every class comes before the second image of any class.
        values = source.label.values[order]
        by_class = np.argsort(values, kind="stable")
        starts = np.flatnonzero(np.diff(values[by_class], prepend=-2))
        turn = np.empty(len(order), dtype=np.int64)
        turn[by_class] = np.arange(len(order)) - np.repeat(starts, np.diff(starts, append=len(order)))
        order = order[np.argsort(turn, kind="stable")]
    images = list(islice(readable_images(source, order, full_size=True), count))
    if not images:
        raise UserError(f"None of the images of {source.name} can be read.")
    return images


def readable_images(source: Source, order: np.ndarray, full_size: bool = False) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (index, pixels) of the readable images. Large JPEGs are decoded at reduced size unless `full_size`."""
    for index in order.tolist():
        try:
            yield index, decode(source.encoded(index), None if full_size else 2 * TILE)
        except (OSError, ValueError):
            continue  # the report lists it


def class_name(source: Source, index: int) -> str:
    value = int(source.label.values[index]) if source.label else -1
    return source.classes[value] if value >= 0 else ""


def draw_image(sheet: Image.Image, corner: tuple[int, int], pixels: np.ndarray, box: tuple[int, int]) -> None:
    """Draw the whole image centered in its box. Small images are enlarged by an integer factor without interpolation."""
    image = Image.fromarray(pixels)
    scale = min(box[0] / image.width, box[1] / image.height)
    enlarge = scale >= 3
    scale = int(scale) if enlarge else scale
    size = (max(round(image.width * scale), 1), max(round(image.height * scale), 1))
    image = image.resize(size, Image.Resampling.NEAREST if enlarge else Image.Resampling.LANCZOS)
    background = Image.new("RGB", box, TILE_COLOR)
    background.paste(image, ((box[0] - size[0]) // 2, (box[1] - size[1]) // 2))
    paste(sheet, corner, background)


def paste(sheet: Image.Image, corner: tuple[int, int], image: Image.Image) -> None:
    """Paste an image with a thin border, so that white images are separated from the background."""
    left, top = corner
    ImageDraw.Draw(sheet).rectangle((left - 1, top - 1, left + image.width, top + image.height), outline=BORDER_COLOR)
    sheet.paste(image, corner)


def header_height() -> int:
    return TITLE_SIZE + TEXT_SIZE + 36


def draw_header(draw: ImageDraw.ImageDraw, width: int, title: str, subtitle: str) -> None:
    draw_text(draw, (MARGIN, MARGIN - 6), title, TITLE_SIZE, TEXT_COLOR, width - 2 * MARGIN)
    draw_text(draw, (MARGIN, MARGIN + TITLE_SIZE + 4), subtitle, TEXT_SIZE, MUTED_COLOR, width - 2 * MARGIN)


def draw_text(
    draw: ImageDraw.ImageDraw, start: tuple[float, float], text: str, size: int, color: str, max_width: float, right: bool = False
) -> None:
    """Draw one line of text; text wider than `max_width` is truncated with an ellipsis."""
    font, text = choose_font(text, size)
    if font.getlength(text) > max_width:
        fitting = bisect_right(range(len(text)), max_width, key=lambda length: font.getlength(text[:length] + "..."))
        text = text[: max(fitting - 1, 0)].rstrip() + "..."
    draw.text((start[0], start[1] + size + 3), text, fill=color, font=font, anchor="rs" if right else "ls")


@cache
def choose_font(text: str, size: int) -> tuple[ImageFont.FreeTypeFont, str]:
    """Return a font that contains all characters, and the text, reduced to ASCII if no installed font contains them."""
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    default = ImageFont.load_default(size)
    assert isinstance(default, ImageFont.FreeTypeFont)
    if text.isascii():
        return default, text
    for font in unicode_fonts(size):
        missing = bytes(font.getmask("\uffff"))
        if all(bytes(font.getmask(letter)) != missing for letter in set(text) - {" "}):
            return font, text
    return default, unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().strip() or "?"


@cache
def unicode_fonts(size: int) -> list[ImageFont.FreeTypeFont]:
    """Return the installed fonts with characters beyond ASCII."""
    fonts = []
    for name in UNICODE_FONTS:
        with suppress(OSError):
            fonts.append(ImageFont.truetype(name, size))
    return fonts


def base_name(path: str) -> str:
    """Return the name of a data set: the last part of its path."""
    return Path(path.rstrip("/")).name or path
