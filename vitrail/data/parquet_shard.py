"""Writes a Parquet file in the Hugging Face convention, one row group at a time."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from vitrail.data.datasets.folder import SourceDict
from vitrail.data.reencoding import Row
from vitrail.data.source import Labels, Source
from vitrail.errors import UserError

ROW_GROUP_BYTES = 32 * 2**20  # of images


def make_schema(parts: SourceDict) -> Any:
    """Return the schema of all splits, with the class names in its metadata. Missing labels are stored as -1."""
    import pyarrow

    columns = {name: list(labels_in(parts, name)) for name in label_names(parts)}
    reserved = next((name for name in ("image", "mask") if name in columns), None)
    if reserved is not None:
        raise UserError(f"A label column has the reserved name {reserved}: rename it first.")
    image = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    fields: list[tuple[str, Any]] = [("image", image), *((name, pyarrow.int64()) for name in columns)]
    features: dict[str, dict[str, Any]] = {"image": {"_type": "Image"}}
    for name, columns_of_splits in columns.items():
        if any(labels.names != columns_of_splits[0].names for labels in columns_of_splits):
            raise UserError(
                f"The splits have different class names in {name}: pack each split with --split into a separate folder."
            )
        features[name] = (
            {"names": columns_of_splits[0].names, "_type": "ClassLabel"}
            if columns_of_splits
            else {"dtype": "int64", "_type": "Value"}
        )
    if any(source.has_masks for source in parts.values()):
        fields.append(("mask", image))
        features["mask"] = {"_type": "Image"}
    return pyarrow.schema(fields, metadata={"huggingface": json.dumps({"info": {"features": features}})})


def label_names(parts: SourceDict) -> list[str]:
    """Return the label columns. `label` is included even if it is empty, or a reader would use an extra label as the main one."""
    extra = list(dict.fromkeys(name for source in parts.values() for name in source.extra))
    return ["label", *extra] if extra or any(source.label for source in parts.values()) else []


def labels_in(parts: SourceDict, name: str) -> Iterator[Labels]:
    for source in parts.values():
        labels = column_of(source, name)
        if labels is not None:
            yield labels


def column_of(source: Source, name: str) -> Labels | None:
    return source.label if name == "label" else source.extra.get(name)


class ShardWriter:
    """Writes rows to a file; a context manager that closes the file on failure."""

    def __init__(self, path: Path, schema: Any) -> None:
        self.path, self.schema = path, schema
        self.rows = self.size = 0
        self._columns: dict[str, list[Any]] = {name: [] for name in schema.names}
        self._buffered = 0

    def __enter__(self) -> "ShardWriter":
        from pyarrow import parquet

        self._file = self.path.open("wb")
        # Images are already compressed, and uncompressed values can be read as slices of the file.
        self._writer = parquet.ParquetWriter(
            self._file, self.schema, compression="none", use_dictionary=False, write_statistics=False
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self._write_row_group()
                self._writer.close()
                self._file.close()  # some network file systems report write errors only here
        finally:
            self._writer.is_open = False  # otherwise its finalizer would try to write the footer
            with suppress(OSError):  # flushing the buffer may fail again
                self._file.close()

    def add(self, row: Row, source: Source, index: int) -> None:
        for name, values in self._columns.items():
            if name == "image":
                values.append({"bytes": row.image, "path": row.path})
            elif name == "mask":
                values.append(None if row.mask is None else {"bytes": row.mask, "path": None})
            else:
                labels = column_of(source, name)
                values.append(int(labels.values[index]) if labels else -1)
        self.rows += 1
        self.size += row.size
        self._buffered += row.size
        if self._buffered >= ROW_GROUP_BYTES:
            self._write_row_group()

    def _write_row_group(self) -> None:
        import pyarrow

        if self._columns["image"]:
            self._writer.write_table(pyarrow.table(self._columns, schema=self.schema), row_group_size=len(self._columns["image"]))
        self._columns = {name: [] for name in self._columns}
        self._buffered = 0
