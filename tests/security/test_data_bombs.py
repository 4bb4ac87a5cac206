"""Small data sets that would need much memory or time: repeated values, links, patterns, keys and headers."""

import io
import struct
import zlib

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from tests.data.test_datasets import png
from vitrail.data import decode as decode_module
from vitrail.data.datasets.lookup import open_source
from vitrail.data.decode import decode
from vitrail.errors import UserError

EXPANDS = "it would expand to more than 100 times its size"


def repeated(value: str | bytes, rows: int = 2000) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(np.zeros(rows, np.int32), pa.array([value]))


@pytest.mark.parametrize("stored_type", [True, False])
def test_a_long_label_in_every_row_of_a_parquet_file(stored_type, tmp_path):
    """A dictionary page stores it once: 100 KB become 200 MB."""
    table = pa.table({"image": [b"x"] * 2000, "label": repeated("x" * 100_000)})
    parquet.write_table(table, tmp_path / "a.parquet", compression="none", write_statistics=False, store_schema=stored_type)
    with pytest.raises(UserError, match=EXPANDS):
        open_source(tmp_path / "a.parquet")


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_large_image_in_every_row_of_a_parquet_file(compression, tmp_path):
    table = pa.table({"image": repeated(b"x" * 100_000), "label": np.random.default_rng(0).integers(0, 999, 2000)})
    parquet.write_table(table, tmp_path / "a.parquet", compression=compression, write_statistics=False, store_schema=False)
    with pytest.raises(OSError, match=EXPANDS):
        open_source(tmp_path / "a.parquet").encoded(0)


def test_prefixes_shared_by_the_rows_of_a_parquet_file(tmp_path):
    table = pa.table({"image": [b"x"] * 2000, "label": ["x" * 100_000] * 2000})
    encodings = {"label": "DELTA_BYTE_ARRAY"}
    options = {"use_dictionary": False, "column_encoding": encodings, "compression": "none", "write_statistics": False}
    parquet.write_table(table, tmp_path / "a.parquet", **options)
    with pytest.raises(UserError, match=EXPANDS):
        open_source(tmp_path / "a.parquet")


def test_a_parquet_footer_with_other_sizes_than_the_pages(tmp_path):
    """Arrow decompresses pages of the size in the page headers, so the size in the footer is no bound."""
    path, length = tmp_path / "a.parquet", 120_000_000
    parquet.write_table(
        pa.table({"image": [bytes(length)]}), path, compression="zstd", use_dictionary=False, write_statistics=False
    )
    total = parquet.read_metadata(path).row_group(0).column(0).total_uncompressed_size
    written, smaller = varint(total), varint(70_000)
    smaller = smaller[:-1] + bytes([smaller[-1] | 128]) + b"\x80" * (len(written) - len(smaller) - 1) + b"\0"
    path.write_bytes(path.read_bytes().replace(written, smaller))
    with pytest.raises(OSError, match=EXPANDS):
        open_source(path).encoded(0)


def varint(value: int) -> bytes:
    """A signed integer of Thrift's compact protocol."""
    value, content = value << 1, b""
    while value > 127:
        content, value = content + bytes([value & 127 | 128]), value >> 7
    return content + bytes([value])


def test_ordinary_parquet_files_repeat_values(tmp_path):
    table = pa.table({"image": [png(1), png(2)] * 500, "label": ["the first class", "the second class"] * 500})
    parquet.write_table(table, tmp_path / "a.parquet")
    source = open_source(tmp_path / "a.parquet")
    assert source.classes == ["the first class", "the second class"]
    assert source.encoded(999) == png(2)


def jpeg_of_scans(scans: int, trailer: bytes = b"") -> bytes:
    """A progressive JPEG of one block that repeats a scan."""

    def segment(marker: int, data: bytes) -> bytes:
        return struct.pack(">BBH", 255, marker, len(data) + 2) + data

    tables = segment(0xC4, b"\0" + bytes([1] + [0] * 15) + b"\0") + segment(0xC4, b"\x10" + bytes([1] + [0] * 15) + b"\0")
    start = b"\xff\xd8" + segment(0xDB, b"\0" + b"\1" * 64) + segment(0xC2, struct.pack(">BHHB", 8, 8, 8, 1) + b"\1\x11\0")
    first = segment(0xDA, b"\1\1\0\0\0\0") + b"\x7f"
    return start + tables + first + (segment(0xDA, b"\1\1\0\1\x3f\0") + b"\x7f") * (scans - 1) + b"\xff\xd9" + trailer


def test_a_jpeg_of_many_scans():
    """Each scan of a few bytes is decoded for all pixels."""
    assert decode(jpeg_of_scans(10)).shape == (8, 8, 3)
    assert decode(jpeg_of_scans(10, trailer=b"\xff\xda" * 1000)).shape == (8, 8, 3)  # a video follows in photos of some phones
    with pytest.raises(ValueError, match="more than 100 scans"):
        decode(jpeg_of_scans(101))


def tiff(*tile_sides: int) -> bytes:
    """A TIFF of 64 x 64 pixels in one tile; more than two tile sides are repeated tags."""
    data = zlib.compress(bytes(64 * 64))
    tags = [(256, 64), (257, 64), (258, 8), (259, 8), (262, 1), (277, 1)]
    tags += [(322 + number % 2, side) for number, side in enumerate(tile_sides)] + [(324, 500), (325, len(data))]
    directory = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return (b"II*\0\x08\0\0\0" + directory).ljust(500, b"\0") + data


def test_a_tiff_with_a_tile_larger_than_the_image():
    assert decode(tiff(64, 64)).shape == (64, 64, 3)
    with pytest.raises(ValueError, match="decompression bomb"):
        decode(tiff(40_000, 40_000))
    with pytest.raises(ValueError, match="repeated tags"):  # the decoder uses the first and Pillow the last
        decode(tiff(40_000, 40_000, 64, 64))


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L", "CMYK"])
def test_large_images_are_converted_in_strips(mode, monkeypatch):
    content = io.BytesIO()
    image = Image.effect_noise((37, 50), 90).convert(mode)
    if mode == "P":
        image.info["transparency"] = 100
    image.save(content, "TIFF" if mode == "CMYK" else "PNG")
    whole = decode(content.getvalue())
    monkeypatch.setattr(decode_module, "STRIP_PIXELS", 37 * 8)
    assert np.array_equal(decode(content.getvalue()), whole)
