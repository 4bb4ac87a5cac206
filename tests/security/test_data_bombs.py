"""Small data sets that would need much memory or time: repeated values, links, patterns, keys and headers."""

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.data.test_datasets import png
from vitrail.data.datasets.lookup import open_source
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
