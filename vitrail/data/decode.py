"""Encoded images into pixels: every common format and mode becomes uint8 RGB, and what cannot be read says why.

Pillow reads the header of everything (format, size, mode, orientation) and decodes everything; where `simplejpeg` is installed it
takes over the pixels of ordinary JPEGs, which it gives bit for bit as Pillow does, sooner. docs/decoding.md has the numbers.
"""

import io
import warnings
from collections.abc import Callable

import numpy as np
from PIL import Image, UnidentifiedImageError

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

# Above this many pixels a file is refused before it is decoded: a few kilobytes can ask for gigabytes. Set it higher for data
# that really is larger, before workers start.
PIXEL_LIMIT = 2**27

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
JPEGS = ("JPEG", "MPO")  # MPO: what some cameras write, a JPEG with further images behind it
ORIENTATION, BITS_PER_SAMPLE, PHOTOMETRIC, SAMPLE_FORMAT = 274, 258, 262, 339  # numbers of TIFF and EXIF tags
SIGNED = 2  # a SAMPLE_FORMAT
WHITE_IS_ZERO = 0  # a PHOTOMETRIC

UPRIGHT: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: pixels[::-1, ::-1].swapaxes(0, 1),
    8: lambda pixels: np.rot90(pixels, 1),
}


def decode(encoded: bytes | np.ndarray, at_least: int | None = None) -> np.ndarray:
    """uint8 [height, width, 3] RGB, upright, contiguous; what cannot be decoded raises ValueError with the reason.

    Transparent parts are laid over white. With `at_least`, a JPEG whose shorter side is at least twice that is decoded at 1/2,
    1/4 or 1/8 of its size, the smallest whose shorter side stays at or above `at_least`; other formats come at full size.
    """
    if isinstance(encoded, np.ndarray):
        return stored_pixels(encoded)
    return read(encoded, lambda image: to_pixels(image, encoded, at_least))


def decode_mask(encoded: bytes) -> np.ndarray:
    """uint8 [height, width] class ids: palette indices or grey values as they stand in the file, never interpolated.

    The orientation is the mask file's own; nothing is taken over from its image. A color image is a mask only if its three
    channels agree. Ids above 255 raise ValueError.
    """
    return read(encoded, class_ids)


def fit_mask(mask: np.ndarray, pixels: np.ndarray) -> np.ndarray:
    """The mask at the size its image was decoded at, by nearest neighbour."""
    height, width = pixels.shape[:2]
    if mask.shape == (height, width):
        return mask
    # Scaled decoding rounds each side up by less than one pixel of the smaller image.
    if abs(mask.shape[0] * width - mask.shape[1] * height) > max(mask.shape):
        raise ValueError(f"the mask is {mask.shape[0]} x {mask.shape[1]}, its image has the proportions of {height} x {width}")
    rows, columns = ((np.arange(new) * 2 + 1) * old // (2 * new) for new, old in zip((height, width), mask.shape, strict=True))
    return mask[rows[:, None], columns]


def decoded_size(encoded: bytes | np.ndarray, at_least: int | None = None) -> tuple[int, int]:
    """(height, width) that `decode` will give, from the header alone."""
    if isinstance(encoded, np.ndarray):
        return encoded.shape[0], encoded.shape[1]

    def size(image: Image.Image) -> np.ndarray:
        factor = shrink(image, at_least)
        height, width = -(-image.height // factor), -(-image.width // factor)
        return np.array((width, height) if orientation(image) >= 5 else (height, width))

    height, width = read(encoded, size).tolist()
    return height, width


def stored_pixels(pixels: np.ndarray) -> np.ndarray:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ValueError(f"stored pixels are {pixels.dtype} {list(pixels.shape)}, not uint8 [height, width, 3]")
    return np.ascontiguousarray(pixels)


def read(encoded: bytes, convert: Callable[[Image.Image], np.ndarray]) -> np.ndarray:
    """`convert` applied to the opened file; whatever goes wrong inside becomes a ValueError with a reason."""
    if not encoded:
        raise ValueError("the file is empty")
    kind = "image"
    try:
        with warnings.catch_warnings():
            # Pillow warns at a limit of its own, and about metadata that does not concern the pixels.
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
                kind = image.format or kind
                if image.width * image.height > PIXEL_LIMIT:
                    raise Image.DecompressionBombError
                return np.ascontiguousarray(convert(image))
    except UnidentifiedImageError:
        raise ValueError("not a JPEG, PNG, WebP, BMP, GIF or TIFF image, or its header is damaged") from None
    except Image.DecompressionBombError:
        raise ValueError(f"more than {PIXEL_LIMIT:,} pixels; refused as a decompression bomb") from None
    except MemoryError:
        raise
    except Exception as error:  # damaged files bring out every kind: OSError, SyntaxError, struct.error, IndexError, ...
        raise ValueError(f"damaged or truncated {kind}: {error}") from error


def to_pixels(image: Image.Image, encoded: bytes, at_least: int | None) -> np.ndarray:
    return upright(jpeg(image, encoded, shrink(image, at_least)) if image.format in JPEGS else rgb(image), image)


def shrink(image: Image.Image, at_least: int | None) -> int:
    factor = 1
    if at_least is not None and image.format in JPEGS:
        while factor < 8 and min(image.size) >= 2 * factor * max(at_least, 1):
            factor *= 2
    return factor


def jpeg(image: Image.Image, encoded: bytes, factor: int) -> np.ndarray:
    width, height = image.size
    # Below 8 pixels several of libjpeg's scales give the same size, and simplejpeg would take the coarsest.
    if simplejpeg is not None and image.mode in ("RGB", "L") and min(width, height) >= 8:
        try:
            return simplejpeg.decode_jpeg(encoded, "RGB", min_height=-(-height // factor), min_width=-(-width // factor))
        except ValueError:
            pass  # it stops at the least oddity; Pillow has the last word, so that both give the same images
    if factor > 1:
        image.draft(image.mode, (width // factor, height // factor))
    return rgb(image)


def rgb(image: Image.Image) -> np.ndarray:
    """Any mode of Pillow's -> uint8 [height, width, 3]."""
    image.load()
    if image.mode.startswith(("I", "F")):
        return np.repeat(eight_bits(image)[:, :, None], 3, axis=2)
    if image.has_transparency_data:
        colors = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), colors)
    if image.mode != "RGB":
        # CMYK comes without its color profile: the plain formula. Pillow has undone Adobe's inversion and YCCK already.
        image = image.convert("RGB")
    return np.array(image)


def eight_bits(image: Image.Image) -> np.ndarray:
    """Grey of 12, 16 or 32 bits or floating point -> uint8 [height, width], scaled by what the type can hold.

    Integers keep their highest 8 bits, as Pillow does with 16-bit color. 32-bit files rarely use their range: their scale is the
    smallest of 8, 16 and 32 bits that holds the file's largest value.
    Floating point is 0 ... 1, or 0 ... 255 where it goes beyond 1.
    """
    values = np.asarray(image)
    tags = getattr(image, "tag_v2", {})
    signed = first(tags.get(SAMPLE_FORMAT)) == SIGNED
    if image.mode == "I" and not signed:
        values = values.view(np.uint32)  # Pillow has no unsigned 32-bit mode
    lowest, highest = values.min(), values.max()
    if not (np.isfinite(lowest) and np.isfinite(highest)) or lowest < 0:
        raise ValueError("negative or infinite grey values")
    if image.mode == "F":
        if highest > 255:
            raise ValueError(f"floating-point grey values reach {highest:g}; 0 ... 1 or 0 ... 255 can be read")
        grey = np.rint(values * 255 if highest <= 1 else values).astype(np.uint8)
    else:
        bits = first(tags.get(BITS_PER_SAMPLE)) or 16
        if bits == 32:
            bits = next(size for size in (8, 16, 32) if int(highest) < 2**size)
            signed = signed and bits == 32
        grey = (values >> (bits - 8 - signed)).astype(np.uint8)
    return 255 - grey if tags.get(PHOTOMETRIC) == WHITE_IS_ZERO else grey


def first(tag: int | tuple[int, ...] | None) -> int | None:
    return tag[0] if isinstance(tag, tuple) else tag


def upright(pixels: np.ndarray, image: Image.Image) -> np.ndarray:
    """Only after loading: a PNG may tell its orientation behind its pixels."""
    turn = UPRIGHT.get(orientation(image))
    return turn(pixels) if turn else pixels


def orientation(image: Image.Image) -> int:
    """1 ... 8 as in EXIF; 1 where the file says nothing or nonsense, for broken metadata is no reason to lose an image."""
    if image.format == "TIFF":
        return 1  # Pillow turns these by itself while loading, and gives the upright size before
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # as many kinds as there are ways to break a directory of tags
        return 1


def class_ids(image: Image.Image) -> np.ndarray:
    spread = GREY_SPREAD.get(raw_mode(image), 1)
    image.load()
    if image.mode not in ("1", "L", "P") and not image.mode.startswith("I"):
        if image.mode not in ("LA", "PA", "RGB", "RGBA", "RGBX"):
            raise ValueError(f"a mask holds class ids as palette or grey, this one is {image.mode}")
        channels = np.asarray(image)[:, :, : 1 if image.mode in ("LA", "PA") else 3]
        if (channels != channels[:, :, :1]).any():
            raise ValueError("a mask holds class ids as palette or grey, this one is in color")
        values = channels[:, :, 0]
    else:
        values = np.asarray(image)
    if values.dtype not in (np.bool_, np.uint8) and (values.min() < 0 or values.max() > 255):
        raise ValueError(f"class ids reach {values.max()}; 0 ... 255 can be read")
    return upright(values.astype(np.uint8) // np.uint8(spread), image)


# Pillow widens grey of 2 and 4 bits to the range of 8: right for an image, wrong for ids.
GREY_SPREAD = {"L;2": 85, "L;4": 17}


def raw_mode(image: Image.Image) -> str:
    """How the samples lie in the file, in Pillow's words; "" where the format has no such thing."""
    tile = getattr(image, "tile", None)
    arguments = tile[0][3] if tile else ""
    name = arguments[0] if isinstance(arguments, tuple) and arguments else arguments
    return name if isinstance(name, str) else ""
