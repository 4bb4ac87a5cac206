"""The footer of a Parquet file (rows and column chunks), and the sizes of the pages.

Arrow checks a footer when it reads columns, but ends the process if a damaged one is inspected through `ParquetFile.metadata`.
"""

import os
from mmap import mmap
from typing import Any, NamedTuple

MAX_RATIO = 100  # of the decoded columns to the file
DATA_PAGE, DATA_PAGE_V2 = 0, 3  # types of pages
UNREPEATED = (0, 2, 6, 8)  # encodings of pages that store each value once, or indices of a dictionary page
# Types of Thrift's compact protocol.
BOOLEANS, BYTE, INTEGER, INTEGERS, DOUBLE, BINARY, LISTS, STRUCT = (1, 2), 3, 6, (4, 5, 6), 7, 8, (9, 10), 12


class Chunk(NamedTuple):
    """The values of a column in a row group: byte range in the file, and whether they are compressed."""

    start: int
    stop: int
    compressed: bool


class RowGroup(NamedTuple):
    number: int
    rows: int
    chunks: dict[str, Chunk]  # by dotted column name


def read_footer(path: str) -> list[RowGroup]:
    """Return the row groups of a file. OSError or ValueError if the footer is damaged or its sizes are out of proportion."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        file.seek(max(size - 8, 0))
        tail = file.read(8)
        length = int.from_bytes(tail[:4], "little")
        if tail[4:] != b"PAR1" or length > size - 12:
            raise OSError("its last bytes are not those of a Parquet file")
        file.seek(size - 8 - length)
        try:
            content = read_struct(file.read(length), 0)[0]
            groups = [parse_group(number, group) for number, group in enumerate(content[4])]
            rows, expanded = int(content[3]), sum(expanded for _, expanded in groups)
        except (LookupError, TypeError, AttributeError, RecursionError):
            raise OSError("its footer is damaged") from None
    if not sum(group.rows for group, _ in groups) == rows <= size or any(group.rows < 0 for group, _ in groups):
        raise OSError("the numbers of rows in its footer are invalid")
    if any(not 0 < chunk.start <= chunk.stop <= size for group, _ in groups for chunk in group.chunks.values()):
        raise OSError("a column has an invalid position in its footer")
    check_expanded(expanded, size)
    return [group for group, _ in groups if group.rows]


def check_expanded(expanded: int, size: int) -> None:
    """Raise OSError if so many decoded bytes are out of proportion to the size of the file."""
    if expanded > MAX_RATIO * size + 2**26:
        raise OSError(f"it would expand to more than {MAX_RATIO} times its size")


def page_sizes(data: mmap, chunk: Chunk) -> tuple[int, int]:
    """Return the decompressed size of the pages of a column, and that of the largest page whose values can be repeated.

    Arrow reserves memory for the sizes in the page headers, whatever the footer says. A value of a dictionary page, or a prefix
    of the encoding DELTA_BYTE_ARRAY, is stored once and can be part of any number of rows.
    """
    position, total, largest = chunk.start, 0, 0
    try:
        while position < chunk.stop:
            header, position = read_struct(data, position)
            kind, expanded, stored = header[1], header[2], header[3]
            if not (0 <= expanded < 2**31 and 0 <= stored < 2**31):
                raise LookupError(expanded)
            encoding = header[5][2] if kind == DATA_PAGE else header[8][4] if kind == DATA_PAGE_V2 else None
            total += expanded
            if encoding not in UNREPEATED:
                largest = max(largest, expanded)
            position += stored
    except (LookupError, TypeError, AttributeError, RecursionError):
        raise OSError("the header of a page is damaged") from None
    return total, largest


def parse_group(number: int, group: dict[int, Any]) -> tuple[RowGroup, int]:
    """Return a row group and the size of its decoded columns; the numbers are the field ids of Parquet's Thrift definition."""
    chunks, expanded = {}, 0
    for column in group[1] if group[3] else ():
        if column.get(1):
            raise LookupError("a column in another file")
        content = column[3]
        start = min(offset for offset in (content[9], content.get(11, 0)) if offset)
        name = b".".join(content[3]).decode("utf-8", "replace")
        if name in chunks:
            raise LookupError("two columns of the same name")
        chunks[name] = Chunk(start, start + content[7], content[4] != 0)
        expanded += max(content[6], 0)
    return RowGroup(number, group[3], chunks), expanded


# Thrift's compact protocol. Each function takes the data and a position, and returns a value and the position after it;
# IndexError or LookupError if the data is damaged.


def read_struct(data: bytes | mmap, position: int) -> tuple[dict[int, Any], int]:
    """Return the fields of a struct by their ids. Of a field that occurs twice, other readers may use either one."""
    fields: dict[int, Any] = {}
    number = 0
    while header := data[position]:
        position += 1
        if header >> 4:
            number += header >> 4
        else:
            number, position = read_value(data, position, INTEGER)
        kind = header & 15
        if number in fields:
            raise LookupError(number)
        if kind in BOOLEANS:
            fields[number] = kind == 1
        else:
            fields[number], position = read_value(data, position, kind)
    return fields, position + 1


def read_value(data: bytes | mmap, position: int, kind: int) -> tuple[Any, int]:
    if kind == STRUCT:
        return read_struct(data, position)
    if kind in LISTS:
        count, kind = data[position] >> 4, data[position] & 15
        position += 1
        if count == 15:
            count, position = read_varint(data, position)
        if count > len(data) - position:
            raise LookupError(count)
        values = []
        for _ in range(count):
            value, position = read_value(data, position, kind)
            values.append(value)
        return values, position
    if kind in BOOLEANS or kind == BYTE:
        return data[position], position + 1
    if kind == DOUBLE:
        return data[position : position + 8], position + 8
    value, position = read_varint(data, position)
    if kind in INTEGERS:
        return (value >> 1) ^ -(value & 1), position
    if kind != BINARY or position + value > len(data):
        raise LookupError(kind)  # maps do not occur in a footer
    return data[position : position + value], position + value


def read_varint(data: bytes | mmap, position: int) -> tuple[int, int]:
    value = data[position]
    position += 1
    shift = 7
    while value >> shift:  # the last byte read has its highest bit set
        value += (data[position] - 1) << shift
        position += 1
        shift += 7
        if shift > 70:
            raise LookupError(shift)
    return value, position
