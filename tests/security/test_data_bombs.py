"""Small data sets that would need much memory or time: repeated values, links, patterns, keys and headers."""

import io
import pickle
import struct
import tarfile
import zlib

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from tests.data.test_datasets import png
from vitrail.data import decode as decode_module
from vitrail.data.datasets.cifar import read_pickle
from vitrail.data.datasets.folder import shards
from vitrail.data.datasets.lookup import open_source
from vitrail.data.datasets.tar import expand
from vitrail.data.decode import decode
from vitrail.errors import UserError
from vitrail.evaluation.predict import find_images, open_images

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


def link_twice(root, depth=24):
    """Two links in each of many folders are 2^24 paths; returns the first folder."""
    folders = [root / "links" / str(number) for number in range(depth)]
    for folder, following in zip(folders, [*folders[1:], None], strict=True):
        folder.mkdir(parents=True)
        if following is not None:
            (folder / "a").symlink_to(following)
            (folder / "b").symlink_to(following)
    return folders[0]


def test_links_that_multiply(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "class").symlink_to(link_twice(tmp_path))
    for read in (open_source, lambda path: open_images([path])):
        with pytest.raises(UserError, match="More than 16 links lead to"):
            read(tmp_path / "data")


def test_links_to_folders_of_shards(tmp_path):
    for folder in ("data", "data/a", "b"):
        (tmp_path / folder).mkdir()
        for number in range(17):
            (tmp_path / folder / str(number)).symlink_to(tmp_path / "b")
    with pytest.raises(UserError, match="More than 16 links lead to"):
        shards(str(tmp_path / "data"), ".tar")


def test_a_folder_of_images_that_is_too_deep(tmp_path):
    (tmp_path / "/".join("x" * 70)).mkdir(parents=True)
    assert find_images(str(tmp_path), problems := []) == []
    assert problems[0].reason == "more than 64 folders deep"


def test_links_to_folders(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "1.png").write_bytes(png(1))
    for name in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(16):
            (tmp_path / "data" / name / str(number)).symlink_to(tmp_path / "photos")
    assert len(open_source(tmp_path / "data")) == 32


@pytest.mark.parametrize(
    "pattern",
    ["a{0..99999}{0..99999}.tar", "{a,b}" * 30 + ".tar", "{0..100000}.tar", "{3..1}.tar", "{0..999999999999999999}.tar"],
)
def test_patterns_of_too_many_shards(pattern):
    with pytest.raises(UserError, match=r"expands to .* shards or more, not 1 to 100,000"):
        open_source(pattern)


def test_patterns():
    assert expand("{a,b}-{08..10}.tar") == [f"{letter}-{number}.tar" for letter in "ab" for number in ("08", "09", "10")]
    assert expand("{a,{b,c}}") == ["a", "b", "a", "c"]
    assert expand("{0..1}{,x}") == ["0", "0x", "1", "1x"]
    with pytest.raises(UserError, match=r"do not exist|does not exist"):
        open_source("a{0.." + "9" * 5000 + "}.tar")


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_extended_headers_one_after_the_other(kind, tmp_path):
    """tarfile reads the header after an extended one recursively."""
    header = tarfile.TarInfo("header")
    header.type, header.size = kind, 12
    block = header.tobuf(tarfile.USTAR_FORMAT) + b"12 path=abc\n".ljust(512, b"\0")
    (tmp_path / "a.tar").write_bytes(block * 400 + bytes(1024))
    with pytest.raises(UserError, match="damaged or not an uncompressed tar"):
        open_source(tmp_path / "a.tar")


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_keys_of_cifar_are_text(protocol, tmp_path):
    """The hash of a tuple that contains another one twice takes twice the time."""
    key: tuple = ("a",)
    for _ in range(20):
        key = (key, key)
    for content in ({key: 1}, {key: 1, "b": 2}, {"a": {5: 1}}, {"a": {key}}, {"a": frozenset([key])}):
        (tmp_path / "meta").write_bytes(pickle.dumps(content, protocol))
        with pytest.raises(UserError, match="is damaged or unsafe"):
            read_pickle(str(tmp_path / "meta"))
    (tmp_path / "meta").write_bytes(pickle.dumps({b"a": {"b": [1]}}, protocol))
    assert read_pickle(str(tmp_path / "meta")) == {"a": {"b": [1]}}
