"""Parquet files in the Hugging Face convention: a column of encoded images, label columns, class names in the metadata.

Labels are read when the file is opened. For images, a row group is decoded once to find the offsets of its values in the
memory-mapped file; afterwards an image is a slice of that file. Compressed columns cannot be sliced: their decoded row groups are
cached instead.
"""

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from mmap import mmap
from typing import Any

import numpy as np

from vitrail.data.datasets.folder import SourceDict, shards
from vitrail.data.datasets.object_table import ObjectTable
from vitrail.data.datasets.parquet_footer import Chunk, RowGroup, check_expanded, page_sizes, read_footer
from vitrail.data.datasets.parquet_objects import COLUMN, INSTANCES, is_object_column, make_tables, object_names
from vitrail.data.datasets.table import MAIN_LABELS, Column, class_labels, label_columns, main_labels
from vitrail.data.datasets.tar import MappedFiles
from vitrail.data.mask_classes import MaskClasses, find_classes, make_classes
from vitrail.data.objects import Objects
from vitrail.data.source import Labels, Source
from vitrail.errors import UserError

IMAGE_COLUMNS = ("image", "img", "picture", "jpg", "png", "webp")
BATCH_ROWS = 256
LABEL_BATCH_ROWS = 65_536
BATCH_BYTES = 64 * 2**20  # of values that a file stores once and repeats
CACHE_BYTES = 128 * 2**20  # of decoded row groups per process, for compressed columns


@dataclass(frozen=True)
class Columns:
    """The columns of a file: the leaf columns of images and masks, the label columns and their class names."""

    image: str
    mask: str | None
    instances: str | None
    objects: tuple[str, ...] | None  # names of the object classes, which may be none; None: there is no such column
    main: str | None
    extra: tuple[str, ...]
    names: dict[str, list[str]]
    unusable: tuple[tuple[str, str], ...]  # names and types of label columns without one class per image

    @property
    def labels(self) -> list[str]:
        return [*([self.main] if self.main else []), *self.extra]


class ParquetSource(Source):
    """The rows of one or several Parquet files."""

    def __init__(
        self,
        name: str,
        files: list[str],
        footers: list[list[RowGroup]],
        columns: Columns,
        label: Labels | None,
        extra: dict[str, Labels],
        defects: Sequence[str],
        mask_classes: MaskClasses | None,
        table: ObjectTable | None = None,
    ) -> None:
        self.name = name
        self.label = label
        self.label_name = columns.main or "label"
        self.extra = extra
        self.defects = tuple(defects)
        self.has_masks = columns.mask is not None
        self.mask_classes = mask_classes
        self._files = MappedFiles(files)
        self._images = ByteColumn(self._files, columns.image, footers)
        self._masks = ByteColumn(self._files, columns.mask, footers) if columns.mask else None
        self._instances = ByteColumn(self._files, columns.instances, footers) if columns.instances and table else None
        self._table = table
        if table is not None:
            self.object_classes, self.object_notes = table.classes, table.notes
            self.has_instances = self._instances is not None or table.has_shapes
        self._file_starts = np.cumsum([0] + [sum(group.rows for group in footer) for footer in footers]).tolist()

    def __len__(self) -> int:
        return self._images.count

    def encoded(self, index: int) -> bytes:
        value = self._images.read(index)
        if value is None:
            raise ValueError(f"{self.location(index)} has no image")
        return value

    def mask(self, index: int) -> bytes | None:
        return self._masks.read(index) if self._masks else None

    def objects(self, index: int) -> Objects | None:
        if self._table is None:
            return None
        found = self._table.read(index)
        return replace(found, instances=self._instances.read(index)) if self._instances else found

    def location(self, index: int) -> str:
        file = bisect_right(self._file_starts, index) - 1
        return f"row {index - self._file_starts[file]} of {self._files.paths[file]}"


class ByteColumn:
    """Random access to a column of bytes."""

    def __init__(self, files: MappedFiles, leaf: str, footers: list[list[RowGroup]]) -> None:
        self.leaf = leaf
        self._files = files
        self._groups: list[tuple[int, RowGroup]] = []  # file, row group
        self._starts = [0]
        for file, footer in enumerate(footers):
            for group in footer:
                self._groups.append((file, group))
                self._starts.append(self._starts[-1] + group.rows)
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
                self._decoded[group] = values  # most recently used
                return _as_bytes(values[row])
            spans = None if self._chunk(group).compressed else self._locate(group)
            if spans is None:
                values = self._cache_group(group)
                return _as_bytes(values[row])
            self._spans[group] = spans
        start, stop = spans[row].tolist()
        return None if start < 0 else self._files[self._groups[group][0]][start:stop]

    def _batches(self, group: int) -> Iterator[Any]:
        """Yield the values of a row group as Arrow arrays of bytes, `BATCH_ROWS` at a time: a row group may have gigabytes."""
        import pyarrow

        number, metadata = self._groups[group]
        path = self._files.paths[number]
        rows = 0
        try:
            # Opened once per row group: an open reader is neither picklable nor thread-safe.
            for batch in read_batches(path, self._files[number], [self.leaf], [metadata], BATCH_ROWS):
                column = batch.column(0)
                rows += len(column)
                # flatten() instead of field(): a null struct must stay null.
                yield column.flatten()[0] if pyarrow.types.is_struct(column.type) else column
        except (pyarrow.ArrowException, OSError) as error:
            raise OSError(f"{path} cannot be read: {_first_line(error)}") from None
        if rows != metadata.rows:
            raise OSError(f"{path} is damaged: row group {metadata.number} has {rows} rows, not the number in its metadata")

    def _chunk(self, group: int) -> Chunk:
        return self._groups[group][1].chunks[self.leaf]

    def _locate(self, group: int) -> np.ndarray | None:
        """Return the file offsets [rows, (start, stop)] of every value, -1 for null; None if a value is not stored plainly.

        Plain encoding stores each value after its length, page by page; a repeated value may be stored once. So a value starts
        right after the previous one, after a page header, or has occurred before.
        """
        chunk, mapped = self._chunk(group), self._files[self._groups[group][0]]
        spans: list[tuple[int, int]] = []
        seen: dict[bytes, int] = {}
        position = chunk.start
        for value in (value for values in self._batches(group) for value in values.to_pylist()):
            if value is None:
                spans.append((-1, -1))
                continue
            stored = len(value).to_bytes(4, "little") + value
            if mapped[position : position + len(stored)] == stored:
                start = position + 4
            else:
                start = seen.get(_digest(value), 0) or mapped.find(stored, position, chunk.stop) + 4
                if start < 4 or mapped[start - 4 : start + len(value)] != stored:
                    return None
            seen.setdefault(_digest(value), start)
            position = max(position, start + len(value))
            spans.append((start, start + len(value)))
        return np.array(spans, dtype=np.int64)

    def _cache_group(self, group: int) -> Any:
        """Decode and cache a row group; the least recently used ones are dropped above `CACHE_BYTES`."""
        import pyarrow

        values = pyarrow.chunked_array(list(self._batches(group)))
        cached = list(self._decoded.items())
        size = values.nbytes + sum(value.nbytes for _, value in cached)
        for oldest, value in cached:
            if size <= CACHE_BYTES:
                break
            self._decoded.pop(oldest, None)
            size -= value.nbytes
        self._decoded[group] = values
        return values


def _digest(value: bytes) -> bytes:
    # Stored instead of the value, so that the offsets are found without keeping a whole row group in memory.
    return hashlib.blake2b(value, digest_size=16).digest()


def open_parquet(path: str, column: str = "") -> SourceDict:
    """Open the splits of a file or of a folder of shards. `column` is a label whatever its name."""
    try:
        import pyarrow  # noqa: F401 - for a clear error message
    except ImportError:
        raise UserError(f"{path} needs pyarrow: pip install pyarrow.") from None
    split_files = shards(path, ".parquet") if os.path.isdir(path) else {"train": [path]}
    columns: Columns | None = None
    first = ""
    footers: dict[str, list[list[RowGroup]]] = {}
    tables: dict[str, list[Any]] = {}
    for split, files in split_files.items():
        for file in files:
            footer, own, table = _open_file(file, columns, column)
            if columns is not None and own != columns:
                raise UserError(f"{first} and {file} have different columns or class names: put them into separate folders.")
            columns, first = own, first or file
            footers.setdefault(split, []).append(footer)
            tables.setdefault(split, []).append(table)
    if columns is None or not any(footer for group in footers.values() for footer in group):
        raise UserError(f"{path} holds no images: give Parquet files with a column named image.")

    labels: dict[str, dict[str, Labels | None]] = {}
    defects = [
        f"The column {name} of {path} has the type {kind}, not one class per image: use integers or text."
        for name, kind in columns.unusable
    ]
    for name in columns.labels:
        try:
            values = {split: _label_column(group, name, path) for split, group in tables.items()}
        except (ValueError, LookupError):  # text that is not UTF-8, integers above 2^63, two columns of this name
            raise UserError(f"The column {name} of {path} is damaged: write it again as integers or UTF-8 text.") from None
        names, what = columns.names.get(name), f"the column {name} of {path}"
        is_main = name == columns.main
        labels[name] = main_labels(values, names, what, defects) if is_main else class_labels(values, names, what, False)
    mask_classes = None
    if columns.mask is not None:
        names = columns.names.get("mask")
        mask_classes = (
            make_classes(dict(enumerate(names)))
            if names
            else find_classes(path if os.path.isdir(path) else os.path.dirname(path))
        )
    object_tables = make_tables(tables, columns.objects, path) if columns.objects is not None else {}
    return {
        split: ParquetSource(
            path,
            files,
            footers[split],
            columns,
            labels[columns.main][split] if columns.main else None,
            {name: found for name in columns.extra if (found := labels[name][split]) is not None},
            defects,
            mask_classes,
            object_tables.get(split),
        )
        for split, files in split_files.items()
        if any(footers[split])
    }


def open_file(path: str) -> Any:
    """Open a Parquet file, memory-mapped."""
    import pyarrow
    from pyarrow import parquet

    return parquet.ParquetFile(pyarrow.memory_map(os.fsencode(path)))  # bytes: file names need not be valid UTF-8


def read_batches(path: str, mapped: mmap, columns: list[str], groups: list[RowGroup], rows: int) -> Iterator[Any]:
    """Yield columns of some row groups in batches of at most `rows` rows; OSError if they expand out of proportion."""
    import pyarrow
    from pyarrow import types

    # As pyarrow selects columns: "a" is also the columns "a.b".
    chunks = [
        chunk
        for group in groups
        for name, chunk in group.chunks.items()
        if any(f"{name}.".startswith(f"{column}.") for column in columns)
    ]
    sizes = [page_sizes(mapped, chunk) for chunk in chunks]
    check_expanded(sum(total for total, _ in sizes), len(mapped))
    rows = min(rows, max(BATCH_BYTES // max([1, *(largest for _, largest in sizes)]), 1))
    decoded = 0
    with open_file(path) as file:
        for batch in file.iter_batches(rows, row_groups=[group.number for group in groups], columns=columns, use_threads=False):
            # A dictionary would repeat its values in each row only when the rows are converted.
            arrays = [array.dictionary_decode() if types.is_dictionary(array.type) else array for array in batch.columns]
            decoded += sum(array.nbytes for array in arrays)
            check_expanded(decoded, len(mapped))
            yield pyarrow.RecordBatch.from_arrays(arrays, names=batch.schema.names)


def _open_file(path: str, known: Columns | None, column: str) -> tuple[list[RowGroup], Columns, Any]:
    """Return (row groups, columns, table of the label columns) of a file."""
    import pyarrow

    try:
        footer = read_footer(path)
        with open_file(path) as file:
            columns = _find_columns(path, file.schema_arrow, known, column)
            read = [*columns.labels, *([COLUMN] if columns.objects is not None else [])]
            table = _read_labels(path, read, file.schema_arrow, footer) if read else None
        leaves = (columns.image, columns.mask, columns.instances)
        if any(leaf not in group.chunks for group in footer for leaf in leaves if leaf):
            raise OSError("a row group has no images")
        return footer, columns, table
    except PermissionError:
        raise UserError(f"{path} cannot be read: change its permissions.") from None
    except (pyarrow.ArrowException, OSError, ValueError, LookupError) as error:
        raise UserError(f"{path} is damaged or not a Parquet file ({_first_line(error)}): download it again.") from None


def _read_labels(path: str, columns: list[str], schema: Any, footer: list[RowGroup]) -> Any:
    """Return the table of the label columns."""
    import pyarrow
    from pyarrow import types

    rows = sum(group.rows for group in footer)
    check_expanded(8 * rows * len(columns), os.path.getsize(path))
    kinds = [schema.field(name).type for name in columns]
    schema = pyarrow.schema(
        [(name, kind.value_type if types.is_dictionary(kind) else kind) for name, kind in zip(columns, kinds, strict=True)]
    )
    batches = read_batches(path, MappedFiles([path])[0], columns, footer, LABEL_BATCH_ROWS) if footer else ()
    table = pyarrow.Table.from_batches([batch.select(columns) for batch in batches], schema)
    if table.num_rows != rows:
        raise OSError("its label columns do not have the number of rows in its footer")
    return table


def _find_columns(path: str, schema: Any, known: Columns | None, column: str) -> Columns:
    from pyarrow import types

    features = _features(path, schema)
    leaves = {field.name: leaf for field in schema if (leaf := _leaf(field))}
    typed = [name for name in leaves if features.get(name, {}).get("_type") == "Image" and name not in ("mask", INSTANCES)]
    others = ("mask", INSTANCES)
    candidates = [name for name in IMAGE_COLUMNS if name in leaves] + typed + [name for name in leaves if name not in others]
    if not candidates:
        raise UserError(f"{path} has no image column (only {', '.join(schema.names)}): rename a column of bytes to image.")
    classes = {name: feature["names"] for name, feature in features.items() if isinstance(feature.get("names"), list)}
    class_names = {
        name: [str(each).encode("utf-8", "replace").decode() for each in names]
        for name, names in classes.items()
        if name in schema.names
    }
    usable = []
    for field in schema:
        kind = field.type.value_type if types.is_dictionary(field.type) else field.type
        if types.is_integer(kind) or types.is_boolean(kind) or types.is_string(kind) or types.is_large_string(kind):
            usable.append(field.name)
    main, extra = label_columns(usable, [*class_names, column])
    unusable = [(name, str(schema.field(name).type)) for name in MAIN_LABELS if main is None and name in schema.names]
    if known is not None and not class_names and known.names:
        class_names = known.names  # shards that were added later often have no metadata
    has_objects = COLUMN in schema.names and is_object_column(schema.field(COLUMN))
    objects = tuple(object_names(features)) if has_objects else None
    if known is not None and objects == ():
        objects = known.objects
    instances = leaves.get(INSTANCES) if has_objects else None
    return Columns(
        leaves[candidates[0]], leaves.get("mask"), instances, objects, main, tuple(extra), class_names, tuple(unusable)
    )


def _features(path: str, schema: Any) -> dict[str, dict[str, Any]]:
    """Return the feature description that the datasets library writes into the metadata; {} if there is none."""
    text = (schema.metadata or {}).get(b"huggingface")
    if text is None:
        return {}
    try:
        features = json.loads(text)["info"]["features"]
        return {name: feature for name, feature in features.items() if isinstance(feature, dict)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"The huggingface metadata of {path} is damaged: write the file again.") from None


def _as_bytes(value: Any) -> bytes | None:
    """Convert a value of pyarrow."""
    content: bytes | None = value.as_py()
    return content


def _leaf(field: Any) -> str | None:
    """Return the dotted name of the leaf with the bytes of an image column; None for other columns."""
    from pyarrow import types

    if types.is_binary(field.type) or types.is_large_binary(field.type):
        return str(field.name)
    if types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0:
        inner = field.type.field("bytes").type
        return f"{field.name}.bytes" if types.is_binary(inner) or types.is_large_binary(inner) else None
    return None


def _label_column(tables: list[Any], name: str, path: str) -> Column:
    """Concatenate a label column over several files: integers as an array, text as a list."""
    import pyarrow
    from pyarrow import types

    chunks = [table.column(name) for table in tables]
    formats = {chunk.type for chunk in chunks}
    if len({types.is_integer(kind) for kind in formats}) > 1:
        raise UserError(f"The column {name} of {path} is text in some files and integers in others: use one type.")
    if all(types.is_integer(kind) or types.is_boolean(kind) for kind in formats) and not any(
        chunk.null_count for chunk in chunks
    ):
        return np.concatenate([chunk.cast(pyarrow.int64()).to_numpy() for chunk in chunks])
    return [value for chunk in chunks for value in chunk.to_pylist()]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".:")
