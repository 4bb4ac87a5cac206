"""One Parquet file in the Hugging Face convention, written a row group at a time."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from vitrail.data.datasets.folder import Parts
from vitrail.data.reencoding import Row
from vitrail.data.source import Labels, Source
from vitrail.errors import UserError

ROW_GROUP = 32 * 2**20  # bytes of images that are held before they are written


def schema_of(parts: Parts) -> Any:
    """One schema for all splits, class names in its metadata; a split without a column's labels holds -1."""
    import pyarrow

    columns = {name: list(labels_in(parts, name)) for name in label_names(parts)}
    taken = next((name for name in ("image", "mask") if name in columns), None)
    if taken is not None:
        raise UserError(f"A column of labels is called {taken}, as the images or masks are: rename it first.")
    image = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    fields: list[tuple[str, Any]] = [("image", image), *((name, pyarrow.int64()) for name in columns)]
    features: dict[str, dict[str, Any]] = {"image": {"_type": "Image"}}
    for name, found in columns.items():
        if any(labels.names != found[0].names for labels in found):
            raise UserError(
                f"The splits name the classes of {name} differently: pack each with --split into a folder of its own."
            )
        features[name] = {"names": found[0].names, "_type": "ClassLabel"} if found else {"dtype": "int64", "_type": "Value"}
    if any(source.has_masks for source in parts.values()):
        fields.append(("mask", image))
        features["mask"] = {"_type": "Image"}
    return pyarrow.schema(fields, metadata={"huggingface": json.dumps({"info": {"features": features}})})


def label_names(parts: Parts) -> list[str]:
    """The columns of labels: `label`, which stands even where it is empty beside others, or one of them would take its place."""
    further = list(dict.fromkeys(name for source in parts.values() for name in source.extra))
    return ["label", *further] if further or any(source.label for source in parts.values()) else []


def labels_in(parts: Parts, name: str) -> Iterator[Labels]:
    for source in parts.values():
        labels = column_of(source, name)
        if labels is not None:
            yield labels


def column_of(source: Source, name: str) -> Labels | None:
    return source.label if name == "label" else source.extra.get(name)


class ShardWriter:
    """Rows into a file; a context, so that a failure leaves no writer behind."""

    def __init__(self, path: Path, schema: Any) -> None:
        self.path, self.schema = path, schema
        self.rows = self.size = 0
        self._columns: dict[str, list[Any]] = {name: [] for name in schema.names}
        self._held = 0

    def __enter__(self) -> "ShardWriter":
        from pyarrow import parquet

        self._file = self.path.open("wb")
        # Images are compressed already, and plain values can be read where they lie in the file.
        self._writer = parquet.ParquetWriter(
            self._file, self.schema, compression="none", use_dictionary=False, write_statistics=False
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self._write()
                self._writer.close()
                self._file.close()  # which on some network disks is when a write is known to have failed
        finally:
            self._writer.is_open = False  # or it would try again to write its end when it is collected
            with suppress(OSError):  # after a failure, what is still in the buffer may not fit either
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
        self._held += row.size
        if self._held >= ROW_GROUP:
            self._write()

    def _write(self) -> None:
        import pyarrow

        if self._columns["image"]:
            self._writer.write_table(pyarrow.table(self._columns, schema=self.schema), row_group_size=len(self._columns["image"]))
        self._columns = {name: [] for name in self._columns}
        self._held = 0
