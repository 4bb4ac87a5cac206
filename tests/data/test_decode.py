"""Decoding of every format and mode against known pixels, and the error messages for damaged files."""

import io
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from vitrail.data import decode as module
from vitrail.data.decode import decode, decode_mask, decoded_size, fit_mask

HEIGHT, WIDTH = 48, 64


def smooth(height=HEIGHT, width=WIDTH):
    """A smooth image that JPEG hardly changes, uint8 [height, width, 3]."""
    row, column = np.mgrid[0:height, 0:width]
    channels = [row * 255 / max(height - 1, 1), column * 255 / max(width - 1, 1), 255 - (row + column) * 255 / (height + width)]
    return np.stack(channels, axis=2).astype(np.uint8)


def encode(pixels, kind="PNG", mode=None, **options):
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    file = io.BytesIO()
    (image.convert(mode) if mode else image).save(file, kind, **options)
    return file.getvalue()


def png(header, rows, *chunks):
    """A PNG for bit depths that Pillow does not write. `header`: width, height, depth, color type."""

    def chunk(name, body):
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    parts = [chunk(b"IHDR", struct.pack(">IIBB", *header) + b"\0\0\0"), *(chunk(*each) for each in chunks)]
    parts += [chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows))), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def tiff(values, bits, sample_format=1, photometric=1):
    """A grayscale TIFF, little-endian, uncompressed."""
    height, width = values.shape
    body = values.tobytes()
    tags = [(256, width), (257, height), (258, bits), (259, 1), (262, photometric), (273, 8), (277, 1), (278, height)]
    tags += [(279, len(body)), (339, sample_format)]
    directory = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\0" + struct.pack("<I", 8 + len(body)) + body + directory + b"\0\0\0\0"


@pytest.fixture(params=["fast", "pillow"])
def each_decoder(request, monkeypatch):
    if request.param == "pillow":
        monkeypatch.setattr(module, "simplejpeg", None)
    elif module.simplejpeg is None:
        pytest.skip("simplejpeg is not installed")


@pytest.mark.parametrize(
    ("kind", "options"),
    [("PNG", {}), ("BMP", {}), ("TIFF", {}), ("TIFF", {"compression": "tiff_lzw"}), ("WEBP", {"lossless": True})],
)
def test_lossless_formats_are_exact(kind, options):
    found = decode(encode(smooth(), kind, **options))
    assert found.dtype == np.uint8
    assert found.flags.c_contiguous
    assert found.flags.writeable
    assert np.array_equal(found, smooth())


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"keep_rgb": True}])
def test_jpeg(each_decoder, options):
    found = decode(encode(smooth(), "JPEG", quality=98, **options))
    assert found.flags.c_contiguous
    assert np.abs(found.astype(int) - smooth()).max() <= 8
    assert np.abs(found.astype(int) - smooth()).mean() < 1.5


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF"])
def test_grayscale(each_decoder, kind):
    gray = smooth()[:, :, 1]
    found = decode(encode(gray, kind, **({"lossless": True} if kind == "WEBP" else {"quality": 98})))
    assert np.array_equal(found[:, :, 0], found[:, :, 2])
    assert np.abs(found[:, :, 0].astype(int) - gray).max() <= (4 if kind == "JPEG" else 0)


def test_one_bit():
    bits = np.tile(np.array([[0, 255], [255, 0]], dtype=np.uint8), (4, 4))
    for kind in ("PNG", "BMP", "TIFF"):
        assert np.array_equal(decode(encode(bits, kind, "1"))[:, :, 1], bits)


def test_first_frame_of_an_animation():
    frames = [Image.new("RGB", (8, 6), color) for color in ("red", "lime", "blue")]
    for kind, options in (("GIF", {}), ("WEBP", {"lossless": True}), ("TIFF", {}), ("PNG", {})):
        found = decode(encode(frames[0], kind, save_all=True, append_images=frames[1:], **options))
        assert (found == (255, 0, 0)).all(), kind


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_alpha_is_composited_over_white(kind):
    alpha = np.tile(np.array([0, 51, 255, 128], dtype=np.uint8), (6, 2))
    colors = np.dstack([np.full((6, 8, 3), (200, 100, 0), dtype=np.uint8), alpha])
    weight = alpha[:, :, None] / 255
    expected = colors[:, :, :3] * weight + 255 * (1 - weight)
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    assert np.abs(decode(encode(colors, kind, **options)) - expected).max() <= 1


def test_grayscale_with_alpha():
    pixels = np.dstack([np.full((4, 4), 100, dtype=np.uint8), np.tile(np.array([0, 255], dtype=np.uint8), (4, 2))])
    found = decode(encode(Image.fromarray(pixels, "LA")))
    assert (found[:, 0] == 255).all()
    assert (found[:, 1] == 100).all()


def test_palettes_and_transparent_colors():
    image = Image.new("P", (4, 2))
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.paste(1, (2, 0, 4, 2))
    for kind in ("PNG", "GIF", "BMP", "TIFF"):
        assert np.array_equal(decode(encode(image, kind))[0, [0, 3]], [[10, 20, 30], [200, 100, 50]]), kind
    for kind in ("PNG", "GIF"):
        assert np.array_equal(decode(encode(image, kind, transparency=1))[0, [0, 3]], [[10, 20, 30], [255, 255, 255]]), kind
    half = decode(encode(image, "PNG", transparency=bytes([255, 128])))
    assert np.abs(half[0, 3].astype(int) - (227, 177, 152)).max() <= 1
    color = Image.new("RGB", (2, 2), (1, 2, 3))
    assert (decode(encode(color, "PNG", transparency=(1, 2, 3))) == 255).all()


def test_cmyk_and_its_inversions(each_decoder):
    """Adobe's programs and Pillow write inverted CMYK with Adobe's marker."""
    ink = np.zeros((32, 32, 4), dtype=np.uint8)
    ink[:16] = (255, 0, 0, 0)  # cyan
    ink[16:] = (0, 0, 255, 128)  # dark yellow
    image = Image.fromarray(ink, "CMYK")
    for kind in ("JPEG", "TIFF"):
        found = decode(encode(image, kind, quality=95)).astype(int)
        assert np.abs(found[4, 4] - (0, 255, 255)).max() <= 6, kind
        assert np.abs(found[28, 28] - (127, 127, 0)).max() <= 6, kind


def test_ycck_is_converted(each_decoder):
    """The same file with Adobe's marker set to YCCK: the first three channels are Y, Cb, Cr of the inverted color."""
    stored = np.zeros((16, 16, 4), dtype=np.uint8)
    stored[:] = (76, 85, 255, 255)  # Y, Cb, Cr of (255, 0, 0): cyan without black
    encoded = encode(Image.fromarray(255 - stored, "CMYK"), "JPEG", quality=100, subsampling=0)
    place = encoded.index(b"Adobe") + 11
    assert encoded[place] == 0
    found = decode(encoded[:place] + b"\x02" + encoded[place + 1 :])
    assert np.abs(found.astype(int) - (0, 255, 255)).max() <= 6


def test_sixteen_bits_are_scaled_not_clipped():
    ramp = np.linspace(0, 65535, 256).round().astype(np.uint16).reshape(16, 16)
    expected = np.arange(256).reshape(16, 16)
    for encoded in (encode(ramp), encode(ramp, "TIFF"), tiff(ramp, 16)):
        assert np.array_equal(decode(encoded)[:, :, 0], expected)
    assert np.array_equal(decode(tiff(ramp, 16, photometric=0))[:, :, 0], 255 - expected)
    color = np.stack([ramp, ramp[::-1], np.full_like(ramp, 32768)], axis=2)
    found = decode(png((16, 16, 16, 2), [row.astype(">u2").tobytes() for row in color]))
    assert np.array_equal(found[:, :, 0], expected)
    assert np.array_equal(found[:, :, 1], expected[::-1])
    assert (found[:, :, 2] == 128).all()
    transparent = np.dstack([ramp, np.full_like(ramp, 65535)])
    found = decode(png((16, 16, 16, 4), [row.astype(">u2").tobytes() for row in transparent]))
    assert np.array_equal(found[:, :, 0], expected)


def test_thirty_two_bits_and_floating_point():
    expected = np.arange(256).reshape(16, 16)
    ramp = np.linspace(0, 2**32 - 1, 256).round().astype(np.uint32).reshape(16, 16)
    assert np.array_equal(decode(tiff(ramp, 32))[:, :, 0], expected)
    assert np.array_equal(decode(tiff(expected.astype(np.uint32), 32))[:, :, 0], expected)
    assert np.array_equal(decode(tiff((expected * 257).astype(np.uint32), 32))[:, :, 0], expected)
    assert np.array_equal(decode(tiff((ramp // 2).astype(np.int32), 32, sample_format=2))[:, :, 0], expected)
    assert np.array_equal(decode(tiff((expected * 128).astype(np.int16), 16, sample_format=2))[:, :, 0], expected)
    for scale in (1 / 255, 1):
        assert np.array_equal(decode(encode((expected * scale).astype(np.float32), "TIFF"))[:, :, 0], expected)
    for bad in (expected * 100.0, expected - 1.0, expected * np.nan):
        with pytest.raises(ValueError, match="gray values"):
            decode(encode(bad.astype(np.float32), "TIFF"))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_orientation(each_decoder, orientation, kind):
    upright = smooth()
    # The inverse of each orientation transform.
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.swapaxes(0, 1),
        6: np.rot90(upright, 1),
        7: np.rot90(upright, 2).swapaxes(0, 1),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[module.ORIENTATION] = orientation
    options = {"lossless": True} if kind == "WEBP" else {"quality": 98}
    encoded = encode(np.ascontiguousarray(stored), kind, exif=exif, **options)
    found = decode(encoded)
    assert found.flags.c_contiguous
    assert found.shape == upright.shape
    assert np.abs(found.astype(int) - upright).max() <= (8 if kind == "JPEG" else 0)
    assert decoded_size(encoded) == upright.shape[:2]
    if kind == "PNG":
        assert np.array_equal(decode_mask(encode(np.ascontiguousarray(stored[:, :, 0]), exif=exif)), upright[:, :, 0])


def test_broken_metadata_does_not_lose_the_image():
    encoded = encode(smooth(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff nonsense")
    assert decode(encoded).shape == smooth().shape


@pytest.mark.parametrize(
    ("size", "min_side", "expected"),
    [
        ((400, 300), None, (400, 300)),
        ((400, 300), 151, (400, 300)),
        ((400, 300), 150, (200, 150)),
        ((300, 400), 75, (75, 100)),
        ((401, 301), 75, (101, 76)),
        ((1001, 801), 20, (126, 101)),  # 1/8 is the smallest scale
        ((16, 9), 4, (8, 5)),
        ((5, 3), 1, (3, 2)),
    ],
)
def test_scaled_decoding(each_decoder, size, min_side, expected):
    image = smooth(*size)
    encoded = encode(image, "JPEG", quality=95)
    found = decode(encoded, min_side)
    assert found.shape[:2] == expected
    assert decoded_size(encoded, min_side) == expected
    assert min_side is None or min(found.shape[:2]) >= min(min_side, *size)
    reference = np.asarray(Image.fromarray(image).resize(expected[::-1], Image.Resampling.BOX))
    if min(size) > 16:  # below, edge pixels include much padding
        assert np.abs(found.astype(int) - reference).mean() < 3
    assert decode(encode(image), min_side).shape == image.shape


def test_both_decoders_agree(monkeypatch):
    if module.simplejpeg is None:
        pytest.skip("simplejpeg is not installed")
    noise = np.random.default_rng(0).integers(0, 256, (75, 101, 3), dtype=np.uint8)
    for options in ({}, {"progressive": True}, {"subsampling": 1}, {"subsampling": 0}, {"optimize": True}):
        encoded = encode(noise, "JPEG", quality=80, **options)
        for min_side in (None, 30, 10):
            with monkeypatch.context() as patch:
                fast = decode(encoded, min_side)
                patch.setattr(module, "simplejpeg", None)
                assert np.array_equal(decode(encoded, min_side), fast)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF"])
def test_truncated_and_empty(each_decoder, kind):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    encoded = encode(noise, kind)
    for share in (0.9, 0.5):
        with pytest.raises(ValueError, match=r"truncated|header is damaged"):
            decode(encoded[: int(len(encoded) * share)])
    for broken in (encoded[:12], encoded[:2], b"no image at all"):
        with pytest.raises(ValueError, match=r"header is damaged|truncated"):
            decode(broken)
    with pytest.raises(ValueError, match="empty"):
        decode(b"")
    with pytest.raises(ValueError, match=r"^damaged or truncated PNG$"):  # Pillow's error has no text
        decode(png((8, 8, 8, 3), [bytes(8)] * 8))  # colors of a palette that does not exist


def test_damaged_files_raise_only_value_error():
    rng = np.random.default_rng(1)
    for kind in ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF"):
        encoded = bytearray(encode(smooth(), kind))
        for _ in range(30):
            broken = bytearray(encoded)
            for place in rng.integers(0, len(broken), 8):
                broken[place] = rng.integers(256)
            try:
                found = decode(bytes(broken))
            except ValueError:
                continue
            assert found.dtype == np.uint8
            assert found.shape[2] == 3


def test_decompression_bombs(monkeypatch):
    bomb = png((60_000, 60_000, 8, 2), [b"\0" * 10])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for read in (decode, decode_mask, decoded_size):
            with pytest.raises(ValueError, match="decompression bomb"):
                read(bomb)
        monkeypatch.setattr(module, "PIXEL_LIMIT", HEIGHT * WIDTH - 1)
        with pytest.raises(ValueError, match=r"3,071 pixels"):
            decode(encode(smooth()))
        monkeypatch.setattr(module, "PIXEL_LIMIT", HEIGHT * WIDTH)
        decode(encode(smooth()))


def test_pixel_arrays():
    assert np.array_equal(decode(smooth()[::-1]), smooth()[::-1])
    assert decode(smooth()[::-1]).flags.c_contiguous
    for wrong in (smooth()[:, :, 0], smooth().astype(np.float32), smooth()[:, :, :2]):
        with pytest.raises(ValueError, match="pixels are"):
            decode(wrong)


def test_masks_keep_their_ids():
    ids = np.arange(48, dtype=np.uint8).reshape(6, 8)
    palette = Image.fromarray(ids, "P")
    palette.putpalette(list(np.random.default_rng(0).integers(0, 256, 768)))
    three = np.repeat(ids[:, :, None], 3, axis=2)
    for encoded in (encode(ids), encode(palette), encode(ids.astype(np.uint16)), encode(three), encode(palette, "GIF")):
        assert np.array_equal(decode_mask(encoded), ids)
    assert np.array_equal(decode_mask(encode(ids % 2 * 255, mode="1")), ids % 2)
    for depth in (2, 4):
        small = ids % (1 << depth)
        shifts = np.arange(8 - depth, -1, -depth)
        packed = (small.reshape(6, depth, 8 // depth) << shifts).sum(axis=2).astype(np.uint8)
        assert np.array_equal(decode_mask(png((8, 6, depth, 0), [row.tobytes() for row in packed])), small)
    with pytest.raises(ValueError, match="in color"):
        decode_mask(encode(smooth()))
    with pytest.raises(ValueError, match="class ids up to 300"):
        decode_mask(encode(np.full((4, 4), 300, dtype=np.uint16)))


def test_masks_are_scaled_with_their_images():
    mask = np.zeros((40, 60), dtype=np.uint8)
    mask[20:] = 7
    fitted = fit_mask(mask, np.zeros((20, 30, 3), dtype=np.uint8))
    assert (fitted[:10] == 0).all()
    assert (fitted[10:] == 7).all()
    with pytest.raises(ValueError, match="aspect ratio"):
        fit_mask(mask, np.zeros((30, 20, 3), dtype=np.uint8))
