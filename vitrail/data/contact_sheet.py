"""Images of data: a contact sheet of the classes, and what a network sees of an image in training."""

import unicodedata
from bisect import bisect_right
from collections.abc import Iterator
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

PAPER, INK, QUIET, MOUNT, EDGE = "#ffffff", "#1d1d1f", "#86868b", "#f2f2f4", "#e2e2e6"
MARGIN, GAP, ALLEY = 40, 4, 28  # round the sheet, between images, between classes
TITLE, TEXT, SMALL = 30, 16, 14  # sizes of letters
LINE = 28  # of a caption
TILE = 128  # a whole multiple of the small sizes that data sets like
MOST_CLASSES = 60
LEAST_SIDE = 128  # of a view that is drawn; smaller ones are enlarged by whole factors
WIDE_FONTS = ("DejaVuSans.ttf", "NotoSans-Regular.ttf", "Arial.ttf", "NotoSansCJK-Regular.ttc", "PingFang.ttc", "msyh.ttc")


class Arrangement(NamedTuple):
    """How many classes stand side by side, and the tiles of each."""

    blocks: int
    rows: int
    columns: int


def arrange(classes: int) -> Arrangement:
    """Few classes get many images each, many classes few: the sheet stays about as large as a screen."""
    for most, arrangement in (
        (1, Arrangement(1, 8, 12)),
        (3, Arrangement(1, 3, 12)),
        (6, Arrangement(1, 2, 12)),
        (12, Arrangement(1, 1, 12)),
        (24, Arrangement(2, 1, 6)),
        (36, Arrangement(3, 1, 4)),
    ):
        if classes <= most:
            return arrangement
    return Arrangement(4, 1, 3)


def contact_sheet(source: Source, title: str, seed: int = 0) -> Image.Image:
    """Some images of every class, or of the `MOST_CLASSES` that the seed picks."""
    rng = np.random.default_rng(seed)
    values = source.label.values if source.label else np.zeros(len(source), dtype=np.int64)
    classes = np.unique(values[values >= 0])
    shown = np.sort(rng.permutation(classes)[:MOST_CLASSES])
    blocks, most_rows, columns = arrange(len(shown))
    members = [np.flatnonzero(values == value) for value in shown]
    caption = LINE if source.label else 0
    block_width = columns * TILE + (columns - 1) * GAP
    tops, bottom = [], MARGIN + header_height()
    for line in range(0, len(shown), blocks):
        rows = min(-(-max(len(each) for each in members[line : line + blocks]) // columns), most_rows)
        tops.append(bottom)
        bottom += caption + rows * (TILE + GAP) - GAP + ALLEY
    width = 2 * MARGIN + blocks * block_width + (blocks - 1) * ALLEY
    sheet = Image.new("RGB", (width, bottom - ALLEY + MARGIN), PAPER)
    draw = ImageDraw.Draw(sheet)

    facts = [f"{len(source):,} images"]
    if source.label:
        facts.append(f"{len(shown):,} of {len(classes):,} classes" if len(shown) < len(classes) else f"{len(classes):,} classes")
    write_header(draw, width, title, ", ".join([*facts, f"chosen with seed {seed}"]))
    for block, own in enumerate(members):
        left, top = MARGIN + block % blocks * (block_width + ALLEY), tops[block // blocks]
        if source.label:
            count = f"{len(own):,}"
            room = block_width - letters(count, SMALL)[0].getlength(count) - 12
            write(draw, (left, top), class_name(source, own[0]), TEXT, INK, room)
            write(draw, (left + block_width, top), count, SMALL, QUIET, block_width, right=True)
        for number, (_, pixels) in enumerate(islice(readable(source, rng.permutation(own)), most_rows * columns)):
            row, column = divmod(number, columns)
            mount(sheet, (left + column * (TILE + GAP), top + caption + row * (TILE + GAP)), pixels, (TILE, TILE))
    return sheet


def augmented_views(
    source: Source,
    how: Augmentation,
    title: str,
    seed: int = 0,
    mixup: float = 0.0,
    cutmix: float = 0.0,
    switch: float = 0.5,
    count: int = 6,
    views: int = 6,
) -> Image.Image:
    """Rows of images: each as it is stored, then as the network sees it in the first epochs, mixed as the alphas say.

    A column is a batch of its own: with mixing, an image takes its share from the one in the mirrored row.
    """
    chosen = spread(source, count, seed)
    names = [class_name(source, number) for number, _ in chosen]
    factor = max(-(-LEAST_SIDE // min(how.image_size)), 1)
    height, width = (side * factor for side in how.image_size)
    caption = LINE if any(names) or mixup > 0 or cutmix > 0 else 0
    step_x, step_y = width + GAP * 2, height + caption + GAP * 2
    header = header_height() + LINE
    total = (2 * MARGIN + (views + 1) * step_x - GAP * 2 + ALLEY, 2 * MARGIN + header + len(chosen) * step_y - GAP * 2)
    sheet = Image.new("RGB", total, PAPER)
    draw = ImageDraw.Draw(sheet)
    write_header(draw, total[0], title, f"the network sees {how.image_size[0]} x {how.image_size[1]}, seed {seed}")

    above = MARGIN + header - LINE
    write(draw, (MARGIN, above), "as stored", SMALL, QUIET, width)
    for row, (_, pixels) in enumerate(chosen):
        corner = (MARGIN, MARGIN + header + row * step_y)
        mount(sheet, corner, pixels, (width, height))
        write(draw, (corner[0], corner[1] + height), names[row], SMALL, INK, width + ALLEY - GAP)
    for epoch in range(views):
        images = torch.cat([view(pixels, number, how, seed, epoch) for number, pixels in chosen])
        mix = draw_mix(seed, epoch, 0, 0, how.image_size, mixup, cutmix, switch)
        left = MARGIN + ALLEY + (epoch + 1) * step_x
        write(draw, (left, above), f"epoch {epoch}" + kind_of(mix), SMALL, QUIET, width)
        for row, pixels in enumerate(stored(mix_images(images, mix), how)):
            top = MARGIN + header + row * step_y
            place(sheet, (left, top), Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST))
            write(draw, (left, top + height), admixture(names[-1 - row], mix), SMALL, INK, width)
    return sheet


def view(pixels: np.ndarray, number: int, how: Augmentation, seed: int, epoch: int) -> Tensor:
    """[1, 3, height, width], normalized; one image at a time, so that large ones of all sizes need no common canvas."""
    image = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    key = sample_key(seed, epoch, torch.tensor([number]), torch.zeros(1, dtype=torch.int64))
    return augment(image, torch.tensor([pixels.shape[:2]]), key, how).images


def stored(images: Tensor, how: Augmentation) -> np.ndarray:
    """Normalized [B, 3, height, width] back to uint8 [B, height, width, 3]."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (how.mean, how.std))
    return ((images * std + mean) * 255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()


def kind_of(mix: Mix) -> str:
    if mix.share == 1.0:
        return ""
    return ", mixup" if mix.box is None else ", CutMix"


def admixture(other: str, mix: Mix) -> str:
    """What a view holds besides its own class."""
    return "" if mix.share == 1.0 else f"+ {percent(1 - mix.share)} {other or 'another'}"


def spread(source: Source, count: int, seed: int) -> list[tuple[int, np.ndarray]]:
    """Readable images (number, pixels), from as many classes as there are."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(source))
    if source.label:
        # The first image of every class comes before the second of any.
        values = source.label.values[order]
        by_class = np.argsort(values, kind="stable")
        starts = np.flatnonzero(np.diff(values[by_class], prepend=-2))
        turn = np.empty(len(order), dtype=np.int64)
        turn[by_class] = np.arange(len(order)) - np.repeat(starts, np.diff(starts, append=len(order)))
        order = order[np.argsort(turn, kind="stable")]
    found = list(islice(readable(source, order, whole=True), count))
    if not found:
        raise UserError(f"None of the images of {source.name} that were tried can be read.")
    return found


def readable(source: Source, order: np.ndarray, whole: bool = False) -> Iterator[tuple[int, np.ndarray]]:
    """(number, pixels) of the images that can be read, in that order; `whole`: large JPEGs at their full size too."""
    for index in order.tolist():
        try:
            yield index, decode(source.encoded(index), None if whole else 2 * TILE)
        except (OSError, ValueError):
            continue  # the report names it


def class_name(source: Source, index: int) -> str:
    value = int(source.label.values[index]) if source.label else -1
    return source.classes[value] if value >= 0 else ""


def mount(sheet: Image.Image, corner: tuple[int, int], pixels: np.ndarray, box: tuple[int, int]) -> None:
    """The whole image in the middle of its box; tiny ones are enlarged by a whole factor so that pixels stay pixels."""
    image = Image.fromarray(pixels)
    scale = min(box[0] / image.width, box[1] / image.height)
    tiny = scale >= 3
    scale = int(scale) if tiny else scale
    size = (max(round(image.width * scale), 1), max(round(image.height * scale), 1))
    image = image.resize(size, Image.Resampling.NEAREST if tiny else Image.Resampling.LANCZOS)
    ground = Image.new("RGB", box, MOUNT)
    ground.paste(image, ((box[0] - size[0]) // 2, (box[1] - size[1]) // 2))
    place(sheet, corner, ground)


def place(sheet: Image.Image, corner: tuple[int, int], image: Image.Image) -> None:
    """With a hairline round it, so that white images do not run into the paper."""
    left, top = corner
    ImageDraw.Draw(sheet).rectangle((left - 1, top - 1, left + image.width, top + image.height), outline=EDGE)
    sheet.paste(image, corner)


def header_height() -> int:
    return TITLE + TEXT + 36


def write_header(draw: ImageDraw.ImageDraw, width: int, title: str, subtitle: str) -> None:
    write(draw, (MARGIN, MARGIN - 6), title, TITLE, INK, width - 2 * MARGIN)
    write(draw, (MARGIN, MARGIN + TITLE + 4), subtitle, TEXT, QUIET, width - 2 * MARGIN)


def write(
    draw: ImageDraw.ImageDraw, start: tuple[float, float], text: str, size: int, color: str, room: float, right: bool = False
) -> None:
    """One line, its baseline the same for every text of a size; what is too long for the room ends in dots."""
    font, text = letters(text, size)
    if font.getlength(text) > room:
        fitting = bisect_right(range(len(text)), room, key=lambda length: font.getlength(text[:length] + "..."))
        text = text[: max(fitting - 1, 0)].rstrip() + "..."
    draw.text((start[0], start[1] + size + 3), text, fill=color, font=font, anchor="rs" if right else "ls")


@cache
def letters(text: str, size: int) -> tuple[ImageFont.FreeTypeFont, str]:
    """A font that has the letters, and the text: in plain letters where this machine has no such font."""
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    plain = ImageFont.load_default(size)
    assert isinstance(plain, ImageFont.FreeTypeFont)
    if text.isascii():
        return plain, text
    for font in wide_fonts(size):
        absent = bytes(font.getmask("\uffff"))
        if all(bytes(font.getmask(letter)) != absent for letter in set(text) - {" "}):
            return font, text
    return plain, unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().strip() or "?"


@cache
def wide_fonts(size: int) -> list[ImageFont.FreeTypeFont]:
    """Those of this machine with letters beyond the plain ones."""
    found = []
    for name in WIDE_FONTS:
        with suppress(OSError):
            found.append(ImageFont.truetype(name, size))
    return found


def base_name(path: str) -> str:
    """What a sheet calls a data set: the last part of its path."""
    return Path(path.rstrip("/")).name or path
