"""Checks images and reduces their size for `vitrail data pack`."""

import io
import os
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from PIL import Image

from vitrail.data.datasets.folder import FolderSource
from vitrail.data.decode import decode, decode_mask, fit_mask
from vitrail.data.source import Source, Subset
from vitrail.errors import UserError

FORMATS = {"jpeg": "jpg", "png": "png", "webp": "webp"}  # with the suffixes of their files


class Row(NamedTuple):
    """The columns of an image in a shard, without its labels."""

    image: bytes
    path: str | None
    mask: bytes | None

    @property
    def size(self) -> int:
        return len(self.image) + len(self.mask or b"")


@dataclass(frozen=True)
class Reencoding:
    """Reduces images whose shorter side exceeds `resize` and encodes them as `format`; other files are kept unchanged.

    Pixel arrays are encoded as PNG. `quality` is that of JPEG and WebP.
    """

    resize: int | None = None
    format: str = "jpeg"
    quality: int = 92

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UserError(f"Unknown format {self.format}: choose jpeg, png or webp.")
        if not 1 <= self.quality <= 100:
            raise UserError(f"The quality {self.quality} is out of range: give 1 to 100.")
        if self.resize is not None and self.resize < 1:
            raise UserError(f"The size {self.resize} is out of range: give 1 or more.")

    def encode(self, source: Source, index: int) -> Row:
        """Decode an image to check it, and reduce it if needed. An unreadable image raises OSError or ValueError."""
        encoded, mask = source.encoded(index), source.mask(index)
        pixels = decode(encoded, self.resize and 2 * self.resize)
        try:
            ids = fit_mask(decode_mask(mask), pixels) if mask is not None else None
        except ValueError as error:
            raise ValueError(f"mask: {error}") from None
        path = relative_path(source, index)
        height, width = pixels.shape[:2]
        if self.resize is not None and min(height, width) > self.resize:
            scale = self.resize / min(height, width)
            size = (max(round(width * scale), 1), max(round(height * scale), 1))
            pixels = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))
            if ids is not None:
                mask = encode_image(np.asarray(Image.fromarray(ids).resize(size, Image.Resampling.NEAREST)), "png")
            path = path and f"{os.path.splitext(path)[0]}.{FORMATS[self.format]}"
            return Row(encode_image(pixels, self.format, self.quality), path, mask)
        return Row(encode_image(pixels, "png") if isinstance(encoded, np.ndarray) else encoded, path, mask)


def encode_image(pixels: np.ndarray, format: str, quality: int = 0) -> bytes:
    """Encode pixels; as grayscale if all channels are equal, which decodes to the same image and is smaller."""
    if pixels.ndim == 3 and (pixels == pixels[:, :, :1]).all():
        pixels = pixels[:, :, 0].copy()
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format, **({} if format == "png" else {"quality": quality}))
    return buffer.getvalue()


def relative_path(source: Source, index: int) -> str | None:
    """Return the path of an image relative to its data set; None if it is not a file."""
    if not isinstance(source.source if isinstance(source, Subset) else source, FolderSource):
        return None
    return os.fsencode(os.path.relpath(source.location(index), source.name)).decode("utf-8", "replace")
