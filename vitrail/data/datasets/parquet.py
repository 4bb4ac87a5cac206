"""Parquet files in the Hugging Face convention: a column of encoded images, columns of labels, names in the metadata.

Labels are read at once. Images are read where they lie: a row group is decoded once to learn where its values stand in the
mapped file, and from then on an image is a slice of that file. Compressed columns cannot be sliced; their decoded row groups
are kept for a while instead.
"""

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitrail.data.datasets.folder import Parts, shards
from vitrail.data.datasets.table import Column, class_labels, label_columns
from vitrail.data.datasets.tar import MappedFiles
from vitrail.data.source import Labels, Source
from vitrail.errors import UserError

IMAGE_COLUMNS = ("image", "img", "image", "jpg", "png", "webp")
BATCH_ROWS = 256
KEPT_BYTES = 128 * 2**20  # of decoded row groups, per process; only for compressed columns


@dataclass(frozen=True)
class Shape:
    """What a file's schema says: the leaf columns of images and masks, and the columns of labels with their names."""

    image: str
    mask: str | None
    main: str | None
    further: tuple[str, ...]
    names: dict[str, list[str]]


@dataclass(frozen=True)
class RowGroup:
    """One row group's column: which file, which group, and the span of the column's bytes in the file."""

    file: int
    number: int
    start: int
    stop: int
    compressed: bool


class ParquetSource(Source):
    """Rows of some Parquet files, numbered through."""

    def __init__(
        self, name: str, files: list[str], metadata: list[Any], shape: Shape, label: Labels | None, extra: dict[str, Labels]
    ) -> None:
        self.name = name
        self.label = label
        self.extra = extra
        self.has_masks = shape.mask is not None
        self._files = MappedFiles(files)
        self._images = ByteColumn(self._files, shape.image, metadata)
        self._masks = ByteColumn(self._files, shape.mask, metadata) if shape.mask else None
        self._file_starts = np.cumsum([0] + [each.num_rows for each in metadata]).tolist()

    def __len__(self) -> int:
        return self._images.count

    def encoded(self, index: int) -> bytes:
        value = self._images.read(index)
        if value is None:
            raise ValueError(f"{self.where(index)} has no image")
        return value

    def mask(self, index: int) -> bytes | None:
        return self._masks.read(index) if self._masks else None

    def where(self, index: int) -> str:
        file = bisect_right(self._file_starts, index) - 1
        return f"row {index - self._file_starts[file]} of {self._files.paths[file]}"


class ByteColumn:
    """Random access to one column of bytes."""

    def __init__(self, files: MappedFiles, leaf: str, metadata: list[Any]) -> None:
        self.leaf = leaf
        self._files = files
        self._groups: list[RowGroup] = []
        self._starts = [0]
        for file, each in enumerate(metadata):
            column = next(index for index in range(each.num_columns) if each.schema.column(index).path == leaf)
            for number in range(each.num_row_groups):
                group = each.row_group(number)
                chunk = group.column(column)
                start = min(offset for offset in (chunk.dictionary_page_offset, chunk.data_page_offset) if offset)
                stop = start + chunk.total_compressed_size
                self._groups.append(RowGroup(file, number, start, stop, chunk.compression != "UNCOMPRESSED"))
                self._starts.append(self._starts[-1] + group.num_rows)
        self.count = self._starts[-1]
        self._spans: dict[int, np.ndarray] = {}
        self._decoded: dict[int, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_spans": {}, "_decoded": {}}

    def read(self, index: int) -> bytes | None:
        if not 0 <= index < self.count:
            raise IndexError(index)
        group = bisect_right(self._starts, index) - 1
        row = index - self._starts[group]
        spans = self._spans.get(group)
        if spans is None:
            values = self._decoded.pop(group, None)
            if values is not None:
                self._decoded[group] = values  # last in the queue again
                return values[row].as_py()
            spans = None if self._groups[group].compressed else self._locate(group)
            if spans is None:
                values = self._remember(group)
                return values[row].as_py()
            self._spans[group] = spans
        start, stop = spans[row].tolist()
        return None if start < 0 else self._files[self._groups[group].file][start:stop]

    def _batches(self, group: int) -> Iterator[Any]:
        """The values of a row group as Arrow arrays of bytes, some rows at a time: a row group may be gigabytes."""
        import pyarrow
        from pyarrow import parquet

        place = self._groups[group]
        path = self._files.paths[place.file]
        rows = 0
        try:
            # Opened anew each time: it happens once per row group, and an open reader is neither picklable nor for threads.
            with parquet.ParquetFile(path, memory_map=True) as file:
                for batch in file.iter_batches(BATCH_ROWS, row_groups=[place.number], columns=[self.leaf], use_threads=False):
                    column = batch.column(0)
                    rows += len(column)
                    # flatten() and not field(): an image that is null as a whole must stay null.
                    yield column.flatten()[0] if pyarrow.types.is_struct(column.type) else column
        except (pyarrow.ArrowException, OSError) as error:
            raise OSError(f"{path} cannot be read: {_first_line(error)}") from None
        if rows != self._starts[group + 1] - self._starts[group]:
            raise OSError(f"{path} is damaged: row group {place.number} has {rows} rows, not as many as it says")

    def _locate(self, group: int) -> np.ndarray | None:
        """[rows, (start, stop)] of every value in the file, -1 for null; None if a value is not found as it is.

        Parquet writes bytes plainly, each after its length, page after page; a value that occurs again may be written once.
        So the next value begins right after the last, or a page header later, or has been seen.
        """
        place = self._groups[group]
        mapped = self._files[place.file]
        spans: list[tuple[int, int]] = []
        seen: dict[bytes, int] = {}
        position = place.start
        for value in (value for values in self._batches(group) for value in values.to_pylist()):
            if value is None:
                spans.append((-1, -1))
                continue
            written = len(value).to_bytes(4, "little") + value
            if mapped[position : position + len(written)] == written:
                start = position + 4
            else:
                start = seen.get(_digest(value), 0) or mapped.find(written, position, place.stop) + 4
                if start < 4 or mapped[start - 4 : start + len(value)] != written:
                    return None
            seen.setdefault(_digest(value), start)
            position = max(position, start + len(value))
            spans.append((start, start + len(value)))
        return np.array(spans, dtype=np.int64)

    def _remember(self, group: int) -> Any:
        """Decodes a row group and keeps it; lets the oldest go when there are too many bytes."""
        import pyarrow

        values = pyarrow.chunked_array(list(self._batches(group)))
        kept = list(self._decoded.items())
        size = values.nbytes + sum(value.nbytes for _, value in kept)
        for oldest, value in kept:
            if size <= KEPT_BYTES:
                break
            self._decoded.pop(oldest, None)
            size -= value.nbytes
        self._decoded[group] = values
        return values


def _digest(value: bytes) -> bytes:
    # Remembered instead of the value, so that finding the places does not hold a whole row group.
    return hashlib.blake2b(value, digest_size=16).digest()


def open_parquet(path: str) -> Parts:
    """The splits of a file or of a folder of shards."""
    try:
        import pyarrow  # noqa: F401 - only to say early, and in words, that it is missing
    except ImportError:
        raise UserError(f"To read {path}, install pyarrow: pip install pyarrow.") from None
    found = shards(path, ".parquet") if os.path.isdir(path) else {"train": [path]}
    shape: Shape | None = None
    first = ""
    metadata: dict[str, list[Any]] = {}
    tables: dict[str, list[Any]] = {}
    for split, files in found.items():
        for file in files:
            each, own, table = _open_file(file, shape)
            if shape is not None and own != shape:
                raise UserError(f"{first} and {file} have other columns or class names: put them into folders of their own.")
            shape, first = own, first or file
            metadata.setdefault(split, []).append(each)
            tables.setdefault(split, []).append(table)
    if shape is None or not any(each.num_rows for group in metadata.values() for each in group):
        raise UserError(f"{path} holds no images: give Parquet files with a column called image.")

    labels: dict[str, dict[str, Labels | None]] = {}
    for name in ([shape.main] if shape.main else []) + list(shape.further):
        columns = {split: _column(group, name, path) for split, group in tables.items()}
        labels[name] = class_labels(columns, shape.names.get(name), f"the column {name} of {path}", required=name == shape.main)
    return {
        split: ParquetSource(
            path,
            files,
            metadata[split],
            shape,
            labels[shape.main][split] if shape.main else None,
            {name: column for name in shape.further if (column := labels[name][split]) is not None},
        )
        for split, files in found.items()
        if any(each.num_rows for each in metadata[split])
    }


def _open_file(path: str, known: Shape | None) -> tuple[Any, Shape, Any]:
    """(metadata, shape, table of the label columns) of one file."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path, memory_map=True) as file:
            shape = _shape(path, file.schema_arrow, known)
            columns = ([shape.main] if shape.main else []) + list(shape.further)
            return file.metadata, shape, file.read(columns=columns) if columns else None
    except PermissionError:
        raise UserError(f"{path} may not be read: change its permissions.") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} is damaged or no Parquet file ({_first_line(error)}): download it again.") from None


def _shape(path: str, schema: Any, known: Shape | None) -> Shape:
    from pyarrow import types

    features = _features(path, schema)
    leaves = {field.name: leaf for field in schema if (leaf := _leaf(field))}
    marked = [name for name in leaves if features.get(name, {}).get("_type") == "Image" and name != "mask"]
    candidates = [name for name in IMAGE_COLUMNS if name in leaves] + marked + [name for name in leaves if name != "mask"]
    if not candidates:
        raise UserError(f"{path} has no column of images (only {', '.join(schema.names)}): name a column of bytes image.")
    classes = {name: feature["names"] for name, feature in features.items() if isinstance(feature.get("names"), list)}
    named = {name: [str(each) for each in names] for name, names in classes.items() if name in schema.names}
    usable = []
    for field in schema:
        kind = field.type.value_type if types.is_dictionary(field.type) else field.type
        if types.is_integer(kind) or types.is_boolean(kind) or types.is_string(kind) or types.is_large_string(kind):
            usable.append(field.name)
    main, further = label_columns(usable, list(named))
    wrong = next((name for name in ("label", "labels", "fine_label", "class") if name in schema.names), None)
    if main is None and wrong is not None:
        kind = schema.field(wrong).type
        raise UserError(f"The column {wrong} of {path} holds {kind} and not one class per image: use whole numbers or text.")
    if known is not None and not named and known.names:
        named = known.names  # shards that were added later often come without the metadata
    return Shape(leaves[candidates[0]], leaves.get("mask"), main, tuple(further), named)


def _features(path: str, schema: Any) -> dict[str, dict[str, Any]]:
    """The description of the columns that Hugging Face's library leaves in a file; {} if there is none."""
    text = (schema.metadata or {}).get(b"huggingface")
    if text is None:
        return {}
    try:
        features = json.loads(text)["info"]["features"]
        return {name: feature for name, feature in features.items() if isinstance(feature, dict)}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"The description of the columns in {path} is damaged: write its huggingface metadata again.") from None


def _leaf(field: Any) -> str | None:
    """The dotted name of the bytes in a column of images, None for other columns."""
    from pyarrow import types

    if types.is_binary(field.type) or types.is_large_binary(field.type):
        return field.name
    if types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0:
        inner = field.type.field("bytes").type
        return f"{field.name}.bytes" if types.is_binary(inner) or types.is_large_binary(inner) else None
    return None


def _column(tables: list[Any], name: str, path: str) -> Column:
    """One column of labels over several files: numbers as an array, text as a list."""
    import pyarrow
    from pyarrow import types

    chunks = [table.column(name) for table in tables]
    kinds = {chunk.type for chunk in chunks}
    if len({types.is_integer(kind) for kind in kinds}) > 1:
        raise UserError(f"The column {name} of {path} is text in some files and numbers in others: write them alike.")
    if all(types.is_integer(kind) or types.is_boolean(kind) for kind in kinds) and not any(chunk.null_count for chunk in chunks):
        return np.concatenate([chunk.cast(pyarrow.int64()).to_numpy() for chunk in chunks])
    return [value for chunk in chunks for value in chunk.to_pylist()]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".:")
