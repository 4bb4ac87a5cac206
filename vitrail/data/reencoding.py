"""From a stored image to the one that is packed: as it is, or smaller, checked in either case."""

import io
import os
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from PIL import Image

from vitrail.data.datasets.folder import FolderSource
from vitrail.data.decode import decode, decode_mask, fit_mask
from vitrail.data.source import Source
from vitrail.errors import UserError

FORMATS = ("jpeg", "png")


class Row(NamedTuple):
    """What a shard keeps of an image besides its labels."""

    image: bytes
    path: str | None
    mask: bytes | None

    @property
    def size(self) -> int:
        return len(self.image) + len(self.mask or b"")


@dataclass(frozen=True)
class Recoding:
    """Images whose shorter side is above `resize` are scaled down to it and written in `format`; others keep their bytes.

    Images that are stored as pixels become PNG. `quality` is that of JPEG.
    """

    resize: int | None = None
    format: str = "jpeg"
    quality: int = 92

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UserError(f"The format {self.format} is not known: choose jpeg or png.")
        if not 1 <= self.quality <= 100:
            raise UserError(f"A quality of {self.quality} is out of range: give 1 to 100.")
        if self.resize is not None and self.resize < 1:
            raise UserError(f"A shorter side of {self.resize} pixels is no size: give 1 or more.")

    def row(self, source: Source, index: int) -> Row:
        """The image, decoded once to be sure of it; what cannot be read raises OSError or ValueError."""
        encoded, mask = source.encoded(index), source.mask(index)
        pixels = decode(encoded, self.resize and 2 * self.resize)
        try:
            ids = fit_mask(decode_mask(mask), pixels) if mask is not None else None
        except ValueError as error:
            raise ValueError(f"its mask: {error}") from None
        path = relative_path(source, index)
        height, width = pixels.shape[:2]
        if self.resize is not None and min(height, width) > self.resize:
            scale = self.resize / min(height, width)
            size = (max(round(width * scale), 1), max(round(height * scale), 1))
            pixels = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))
            if ids is not None:
                mask = written(np.asarray(Image.fromarray(ids).resize(size, Image.Resampling.NEAREST)), "png")
            ending = "jpg" if self.format == "jpeg" else "png"
            return Row(written(pixels, self.format, self.quality), path and f"{os.path.splitext(path)[0]}.{ending}", mask)
        return Row(written(pixels, "png") if isinstance(encoded, np.ndarray) else encoded, path, mask)


def written(pixels: np.ndarray, format: str, quality: int = 0) -> bytes:
    """Encoded; grey where all channels agree, which is read as the same image and takes a third of the bytes."""
    if pixels.ndim == 3 and (pixels == pixels[:, :, :1]).all():
        pixels = pixels[:, :, 0].copy()
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format, **({"quality": quality} if format == "jpeg" else {}))
    return buffer.getvalue()


def relative_path(source: Source, index: int) -> str | None:
    """The name of a file below the data's folder; only files have one."""
    if not isinstance(source, FolderSource):
        return None
    return os.fsencode(os.path.relpath(source.where(index), source.name)).decode("utf-8", "replace")
