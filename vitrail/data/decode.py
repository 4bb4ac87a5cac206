"""Image decoding: every common format and mode to uint8 RGB. Unreadable images raise ValueError with the reason.

Pillow reads the headers (format, size, mode, orientation) and decodes. If `simplejpeg` is installed, it decodes ordinary JPEGs,
with bit-identical results in less time; see docs/decoding.md.
"""

import io
import re
import struct
import warnings
from collections.abc import Callable

import numpy as np
from PIL import Image, UnidentifiedImageError

from vitrail.data.image_formats import missing_extra, readable_formats

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

# Images with more pixels are rejected before they are decoded: a file of a few kilobytes can expand to gigabytes. For larger
# images, increase the limit before worker processes start.
PIXEL_LIMIT = 2**27
LARGE, PIXELS_PER_BYTE = 2**25, 2000  # images above this number of pixels must not be compressed more than this
STRIP_PIXELS = 2**24  # larger images are converted in strips of this size
MAX_SCANS = 100  # of a JPEG; a scan of a few bytes can cover all pixels, and encoders write about ten
ARITHMETIC = b"\xff\xc9"  # start of a frame
SCAN, END_OF_IMAGE, MARKER = 0xDA, 0xD9, re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]", re.DOTALL)

JPEGS = ("JPEG", "MPO")  # MPO: written by some cameras, a JPEG followed by more images
ORIENTATION, BITS_PER_SAMPLE, PHOTOMETRIC, SAMPLE_FORMAT = 274, 258, 262, 339  # TIFF and EXIF tags
TILE_SIDES = (322, 323)
SIGNED = 2  # value of SAMPLE_FORMAT
WHITE_IS_ZERO = 0  # value of PHOTOMETRIC

ORIENTATION_TRANSFORMS: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: pixels[::-1, ::-1].swapaxes(0, 1),
    8: lambda pixels: np.rot90(pixels, 1),
}


class NoClassIds(ValueError):
    """A mask that can be decoded, but whose pixels are no ids."""


class UnsupportedFormat(ValueError):
    """Not an image, or one of a format that is not read."""


class TooManyPixels(ValueError):
    """More pixels than the limit."""


def decode(encoded: bytes | np.ndarray, min_side: int | None = None) -> np.ndarray:
    """Decode an image to contiguous uint8 RGB [height, width, 3]. Raises ValueError with the reason on failure.

    The EXIF orientation is applied, and transparent images are composited over white. With `min_side`, a JPEG is decoded at 1/2,
    1/4 or 1/8 of its size, the smallest scale at which the shorter side is at least `min_side`. Other formats are decoded at full
    size.
    """
    if isinstance(encoded, np.ndarray):
        return check_pixels(encoded)
    return open_and_convert(encoded, lambda image: to_pixels(image, encoded, min_side))


def decode_mask(encoded: bytes) -> np.ndarray:
    """Decode a segmentation mask to class ids, uint8 [height, width]: the palette indices or gray values of the file.

    The orientation of the mask file is applied, not that of its image. A color file is accepted if its three channels are equal.
    Ids above 255 raise ValueError.
    """
    return open_and_convert(encoded, class_ids)


def fit_mask(mask: np.ndarray, pixels: np.ndarray) -> np.ndarray:
    """Resize a mask to the size of its decoded image by nearest-neighbor interpolation."""
    height, width = pixels.shape[:2]
    # Scaled JPEG decoding rounds each side up by less than one pixel of the smaller image.
    if abs(mask.shape[0] * width - mask.shape[1] * height) > max(mask.shape):
        raise ValueError(
            f"the mask has {mask.shape[1]} x {mask.shape[0]} pixels, but its image {width} x {height}, another aspect ratio"
        )
    return resize_mask(mask, height, width)


def resize_mask(mask: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize [h, w] by nearest-neighbor interpolation; a mask of this size is returned as it is."""
    if mask.shape == (height, width):
        return mask
    rows, columns = ((np.arange(new) * 2 + 1) * old // (2 * new) for new, old in zip((height, width), mask.shape, strict=True))
    resized: np.ndarray = mask[rows[:, None], columns]
    return resized


def decoded_size(encoded: bytes | np.ndarray, min_side: int | None = None) -> tuple[int, int]:
    """Return (height, width) of the result of `decode`; decodes a PNG, whose orientation may follow the pixels."""
    if isinstance(encoded, np.ndarray):
        return encoded.shape[0], encoded.shape[1]

    def size(image: Image.Image) -> np.ndarray:
        height, width = scaled_size(image, min_side)
        return np.array((width, height) if orientation(image) >= 5 else (height, width))

    height, width = open_and_convert(encoded, size).tolist()
    return height, width


def scaled_size(image: Image.Image, min_side: int | None) -> tuple[int, int]:
    factor = jpeg_factor(image, min_side)
    return -(-image.height // factor), -(-image.width // factor)


def check_pixels(pixels: np.ndarray) -> np.ndarray:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise ValueError(f"pixels are {pixels.dtype} {list(pixels.shape)} instead of uint8 [height, width, 3]")
    return np.ascontiguousarray(pixels)


def open_and_convert(encoded: bytes, convert: Callable[[Image.Image], np.ndarray]) -> np.ndarray:
    """Open the image and apply `convert`; every failure is raised as ValueError with a reason."""
    if not encoded:
        raise ValueError("the file is empty")
    kind, limit = "image", min(PIXEL_LIMIT, max(LARGE, PIXELS_PER_BYTE * len(encoded)))
    try:
        with warnings.catch_warnings():
            # Pillow warns about images above its own pixel limit and about metadata that does not affect the pixels.
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(encoded), formats=readable_formats()) as image:
                kind = image.format or kind
                if max(image.width * image.height, tile_pixels(image, encoded)) > limit:
                    raise Image.DecompressionBombError
                check_scans(image, encoded)
                return np.ascontiguousarray(convert(image))
    except UnidentifiedImageError:
        extra = missing_extra(encoded)
        if extra is not None:
            raise UnsupportedFormat(f"a {extra.upper()} image, which needs another package: install 'vitrail[{extra}]'") from None
        raise UnsupportedFormat("not a JPEG, PNG, WebP, BMP, GIF or TIFF image, or its header is damaged") from None
    except Image.DecompressionBombError:
        raise TooManyPixels(f"more than {limit:,} pixels; rejected as a decompression bomb") from None
    except (MemoryError, NoClassIds):
        raise
    except Exception as error:  # damaged files raise OSError, SyntaxError, struct.error, IndexError, ...
        reason = f": {error}" if str(error) else ""
        raise ValueError(f"damaged or truncated {kind}{reason}") from error


def tile_pixels(image: Image.Image, encoded: bytes) -> int:
    """Return the size of a tile of a TIFF, which is decoded as a whole even if the image is smaller; 0 if there are none."""
    if image.format != "TIFF":
        return 0
    order, big = "<" if encoded[:2] == b"II" else ">", 43 in encoded[2:4]
    (start,) = struct.unpack_from(order + ("8xQ" if big else "4xI"), encoded)
    count, entry = struct.unpack_from(order + ("Q" if big else "H"), encoded, start)[0], 20 if big else 12
    first_tag = start + (8 if big else 2)
    tags = [encoded[at : at + 2] for at in range(first_tag, min(first_tag + count * entry, len(encoded)), entry)]
    if len(set(tags)) < len(tags):
        raise ValueError("repeated tags")  # Pillow uses the last, its decoder the first
    width, height = (first(image.tag_v2.get(tag)) or 0 for tag in TILE_SIDES)  # type: ignore[attr-defined]
    return width * height


def check_scans(image: Image.Image, encoded: bytes) -> None:
    """Raise ValueError if a progressive or arithmetic-coded JPEG has more than `MAX_SCANS` scans; others need bits per pixel."""
    if image.format not in JPEGS:
        return
    header = encoded[: image.fp.tell()]  # type: ignore[attr-defined] # Pillow has read up to the first scan
    if not (image.info.get("progressive") or ARITHMETIC in header):
        return
    if encoded.count(b"\xff\xda") <= MAX_SCANS:  # metadata and a video after the image may contain these bytes, too
        return
    scans, position = 0, 2
    while marker := MARKER.search(encoded, position):
        position = marker.end()
        kind = encoded[position - 1]
        if kind == END_OF_IMAGE:
            return
        scans += kind == SCAN
        if scans > MAX_SCANS:
            raise ValueError(f"more than {MAX_SCANS} scans")
        position += int.from_bytes(encoded[position : position + 2], "big")


def to_pixels(image: Image.Image, encoded: bytes, min_side: int | None) -> np.ndarray:
    pixels = decode_jpeg(image, encoded, jpeg_factor(image, min_side)) if image.format in JPEGS else to_rgb(image)
    return apply_orientation(pixels, image)


def jpeg_factor(image: Image.Image, min_side: int | None) -> int:
    """Return the largest factor (1, 2, 4 or 8) by which a JPEG can be shrunk while its shorter side is at least `min_side`."""
    factor = 1
    if min_side is not None and image.format in JPEGS:
        while factor < 8 and min(image.size) >= 2 * factor * max(min_side, 1):
            factor *= 2
    return factor


def decode_jpeg(image: Image.Image, encoded: bytes, factor: int) -> np.ndarray:
    width, height = image.size
    # Below 8 pixels several scales of libjpeg have the same size, and simplejpeg would use the coarsest one.
    if simplejpeg is not None and image.mode in ("RGB", "L") and min(width, height) >= 8:
        try:
            pixels: np.ndarray = simplejpeg.decode_jpeg(
                encoded, "RGB", min_height=-(-height // factor), min_width=-(-width // factor)
            )
            return pixels
        except ValueError:
            pass  # simplejpeg is stricter than Pillow; fall back so that both accept the same images
    if factor > 1:
        image.draft(image.mode, (width // factor, height // factor))
    return to_rgb(image)


def to_rgb(image: Image.Image) -> np.ndarray:
    """Convert an image of any Pillow mode to uint8 [height, width, 3]."""
    image.load()
    if image.mode.startswith(("I", "F")):
        return np.repeat(gray_to_uint8(image)[:, :, None], 3, axis=2)
    rows = max(STRIP_PIXELS // image.width, 1)
    if image.height <= rows:
        return color_to_uint8(image)
    # Conversions of the whole image would need many times its memory.
    pixels = np.empty((image.height, image.width, 3), dtype=np.uint8)
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height)))
        pixels[top : top + rows] = color_to_uint8(strip)
    return pixels


def color_to_uint8(image: Image.Image) -> np.ndarray:
    if image.has_transparency_data:
        colors = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), colors)
    if image.mode != "RGB":
        # CMYK is converted without its color profile. Pillow has already undone Adobe's inversion and YCCK.
        image = image.convert("RGB")
    return np.array(image)


def gray_to_uint8(image: Image.Image) -> np.ndarray:
    """Convert grayscale of 12, 16 or 32 bits or floating point to uint8 [height, width].

    Integers keep their highest 8 bits, as Pillow does for 16-bit color. 32-bit files rarely use their full range: they are scaled
    from the smallest of 8, 16 and 32 bits that contains their largest value. Floating point is scaled from 0 ... 1, or from
    0 ... 255 if a value exceeds 1.
    """
    values = np.asarray(image)
    tags = getattr(image, "tag_v2", {})
    signed = first(tags.get(SAMPLE_FORMAT)) == SIGNED
    if image.mode == "I" and not signed:
        values = values.view(np.uint32)  # Pillow has no unsigned 32-bit mode
    lowest, highest = values.min(), values.max()
    if not (np.isfinite(lowest) and np.isfinite(highest)) or lowest < 0:
        raise ValueError("negative or infinite gray values")
    if image.mode == "F":
        if highest > 255:
            raise ValueError(f"floating-point gray values up to {highest:g}; only 0 ... 1 and 0 ... 255 are supported")
        gray: np.ndarray = np.rint(values * 255 if highest <= 1 else values).astype(np.uint8)
    else:
        bits = first(tags.get(BITS_PER_SAMPLE)) or 16
        if bits == 32:
            bits = next(size for size in (8, 16, 32) if int(highest) < 2**size)
            signed = signed and bits == 32
        gray = (values >> (bits - 8 - signed)).astype(np.uint8)
    if tags.get(PHOTOMETRIC) == WHITE_IS_ZERO:
        gray = 255 - gray
    return gray


def first(tag: int | tuple[int, ...] | None) -> int | None:
    return tag[0] if isinstance(tag, tuple) else tag


def apply_orientation(pixels: np.ndarray, image: Image.Image) -> np.ndarray:
    """Rotate and flip the pixels upright. Call it after loading: in a PNG the orientation may follow the pixels."""
    transform = ORIENTATION_TRANSFORMS.get(orientation(image))
    return transform(pixels) if transform else pixels


def orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 ... 8; 1 if it is missing or invalid, so that broken metadata does not lose an image."""
    if image.format == "TIFF":
        return 1  # Pillow applies it while loading and reports the upright size
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # damaged tags raise many kinds of exceptions
        return 1


def class_ids(image: Image.Image) -> np.ndarray:
    scale = GRAY_SCALE.get(raw_mode(image), 1)
    image.load()
    if image.mode not in ("1", "L", "P") and not image.mode.startswith("I"):
        if image.mode not in ("LA", "PA", "RGB", "RGBA", "RGBX"):
            raise NoClassIds(f"a mask must have a palette or be grayscale, but this file has the mode {image.mode}")
        channels = np.asarray(image)[:, :, : 1 if image.mode in ("LA", "PA") else 3]
        if (channels != channels[:, :, :1]).any():
            raise NoClassIds(
                "a mask must have a palette or be grayscale, but this file is in color: list its colors in class_dict.csv "
                "(columns name, r, g, b)"
            )
        values = channels[:, :, 0]
    else:
        values = np.asarray(image)
    if values.dtype not in (np.bool_, np.uint8) and (values.min() < 0 or values.max() > 255):
        raise NoClassIds(f"class ids up to {values.max()}; only 0 ... 255 are supported")
    return apply_orientation(values.astype(np.uint8) // np.uint8(scale), image)


# Pillow scales 2-bit and 4-bit grayscale to 8 bits, which must be undone for class ids.
GRAY_SCALE = {"L;2": 85, "L;4": 17}


def raw_mode(image: Image.Image) -> str:
    """Return Pillow's name of the sample layout in the file, or "" if the format has none."""
    tile = getattr(image, "tile", None)
    arguments = tile[0][3] if tile else ""
    name = arguments[0] if isinstance(arguments, tuple) and arguments else arguments
    return name if isinstance(name, str) else ""
