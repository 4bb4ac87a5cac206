"""Tables of images (CSV or TSV with a header, one row per file), and the conversion of label columns to classes."""

import csv
import os
from collections import Counter
from collections.abc import Sequence

import numpy as np

from vitrail.data.datasets.folder import FolderSource, Paths, SourceDict, sort_classes, split_of
from vitrail.data.source import Labels
from vitrail.errors import UserError

MAX_COLUMNS = 1000
PATH_COLUMNS = ("path", "file", "image", "filename", "file_name", "filepath", "image_path")
MAIN_LABELS = ("label", "labels", "fine_label", "class")
RANKS, MIN_RANKS = ("kingdom", "phylum", "class", "order", "family", "genus", "species"), 3  # so many columns are a hierarchy
SPLIT_COLUMNS = ("split", "subset", "set", "partition")
MAX_CLASSES = 100_000  # a larger label that also exceeds the number of images is not a class index

Column = Sequence[str | int | None] | np.ndarray


def open_table(path: str, column: str = "") -> SourceDict:
    """Open the splits of a table. Paths are relative to the folder of the table. `column` is a label whatever its name."""
    header, rows = _read(path)
    if len(header) > MAX_COLUMNS:
        raise UserError(f"{path} has {len(header):,} columns: keep the path, the split and the labels, at most {MAX_COLUMNS:,}.")
    path_column = next((name for name in PATH_COLUMNS if name in header), None)
    if path_column is None:
        raise UserError(f"{path} has no path column: rename one of its columns ({', '.join(header)}) to path, file or image.")
    if not rows:
        raise UserError(f"{path} has no rows: add one row per image.")
    files = [row[header.index(path_column)] for _, row in rows]
    _check_files(path, files, [line for line, _ in rows])

    split_column = next((name for name in SPLIT_COLUMNS if name in header), None)
    members: dict[str, list[int]] = {}
    for index, (line, row) in enumerate(rows):
        split = split_of(row[header.index(split_column)].strip()) if split_column else "train"
        if split is None:
            raise UserError(f"Line {line} of {path} has an unknown split: write train, validation or test in {split_column}.")
        members.setdefault(split, []).append(index)

    main, extra = label_columns(header, [column.lower()])
    labels: dict[str, dict[str, Labels | None]] = {}
    defects: list[str] = []
    for name in ([main] if main else []) + extra:
        place = header.index(name)
        texts = {split: [rows[index][1][place].strip() for index in indices] for split, indices in members.items()}
        values, what = integers_if_all(texts), f"the column {name} of {path}"
        labels[name] = main_labels(values, None, what, defects) if name == main else class_labels(values, None, what, False)
    root = os.path.dirname(path) or "."
    sources: SourceDict = {}
    for split, indices in members.items():
        own = {name: found for name in extra if (found := labels[name][split]) is not None}
        main_label = labels[main][split] if main else None
        sources[split] = FolderSource(root, Paths(files[index] for index in indices), main_label, own, defects=defects)
        sources[split].label_name = main or "label"
    return sources


def _read(path: str) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Return the column names in lower case and the rows with their line numbers."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            separator = "\t" if path.lower().endswith(".tsv") else max(",;\t", key=first.count)
            reader = csv.reader(file, delimiter=separator, strict=True)
            header = [name.strip().lower() for name in next(reader, [])]
            rows = [(reader.line_num, row) for row in reader if row]
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text: save the table as UTF-8.") from None
    except csv.Error as error:
        raise UserError(f"{path} is not a readable table ({error}): save it again as CSV or TSV.") from None
    except PermissionError:
        raise UserError(f"{path} cannot be read: change its permissions.") from None
    if not header:
        raise UserError(f"{path} is empty: write a header such as path,label and one row per image.")
    duplicate = next((name for name in header if header.count(name) > 1), None)
    if duplicate is not None:
        raise UserError(f"{path} has two columns named {duplicate}: rename one of them.")
    for line, row in rows:
        if len(row) != len(header):
            raise UserError(f"Line {line} of {path} has {len(row)} fields but the header has {len(header)}: correct that line.")
    return header, rows


def _check_files(path: str, files: list[str], lines: list[int]) -> None:
    root = os.path.dirname(path) or "."
    for file, line in zip(files, lines, strict=True):
        if not file:
            raise UserError(f"Line {line} of {path} has no path: fill it in or remove the line.")
        if "\0" in file or (not os.path.isabs(file) and os.path.normpath(file).split(os.sep)[0] == os.pardir):
            raise UserError(
                f"Line {line} of {path} refers to a path outside of its folder ({file!r}): move the images into that folder."
            )
    missing = [file for file in files if not os.path.isfile(os.path.join(root, file))]
    if missing:
        raise UserError(
            f"{len(missing)} of the {len(files)} files in {path} do not exist, first {missing[0]}: correct the paths."
        )


def label_columns(names: Sequence[str], known: Sequence[str] = ()) -> tuple[str | None, list[str]]:
    """Return (main label, extra labels) among column names. Columns in `known` are labels regardless of their name."""
    ranks = sorted((name for name in names if name.lower() in RANKS), key=lambda name: RANKS.index(name.lower()))
    ranks = ranks if len(ranks) >= MIN_RANKS else []
    parts = ("label", "class", "category")
    labels = [name for name in names if name in known or name in ranks or any(part in name.lower() for part in parts)]
    preferred = (*MAIN_LABELS[:-1], *reversed(ranks), MAIN_LABELS[-1])  # the finest rank, not the one called class
    main = next((name for name in preferred if name in labels), None)
    if main is None and len(labels) == 1:
        main = labels[0]
    return main, [name for name in labels if name != main]


def integers_if_all(columns: dict[str, list[str]]) -> dict[str, Column]:
    """Convert text to integers if all splits contain only integers; empty text becomes None."""
    numeric = all(is_integer(text) for texts in columns.values() for text in texts if text)
    return {split: [(int(text) if numeric else text) if text else None for text in texts] for split, texts in columns.items()}


def is_integer(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and len(text) < 18


def main_labels(columns: dict[str, Column], names: list[str] | None, what: str, defects: list[str]) -> dict[str, Labels | None]:
    """As `class_labels`; a column without one class per image is appended to `defects` and gives no labels."""
    try:
        return class_labels(columns, names, what)
    except UserError as error:
        defects.append(str(error))
        return dict.fromkeys(columns)


def class_labels(
    columns: dict[str, Column], names: list[str] | None, what: str, required: bool = True
) -> dict[str, Labels | None]:
    """Convert a label column to class indices over one list of classes; a split without labels (all missing or -1) has None.

    Integers are class indices from 0, which are also the class names if `names` is None. Text is a class name. Missing labels are
    -1 unless `required`.
    """
    _check_names(names, what)
    present: dict[str, Column] = {split: values for split, values in columns.items() if not _all_missing(values)}
    if not present:
        return dict.fromkeys(columns)
    text = any(isinstance(value, str) for values in present.values() if not isinstance(values, np.ndarray) for value in values)
    if text and names is None:
        names = sort_classes(sorted({str(value) for values in present.values() for value in values if value is not None}))
    numbers: dict[str, np.ndarray] = {}
    for split, values in present.items():
        if text:
            index_of = {name: index for index, name in enumerate(names or [])}
            unknown = next((value for value in values if value is not None and str(value) not in index_of), None)
            if unknown is not None:
                raise UserError(f"The label {unknown} in {what} is not one of its class names: correct the label or the names.")
            values = [None if value is None else index_of[str(value)] for value in values]
        numbers[split] = _indices(values, what, required)
    highest = max(int(values.max()) for values in numbers.values())
    if names is None:
        if highest >= max(MAX_CLASSES, sum(len(values) for values in numbers.values())):
            raise UserError(f"The labels in {what} go up to {highest}, which is not a class index: number the classes from 0.")
        names = [str(number) for number in range(highest + 1)]
    elif highest >= len(names):
        raise UserError(f"The label {highest} in {what} is out of range: only {len(names)} classes have names.")
    return {split: Labels(numbers[split], names) if split in numbers else None for split in columns}


def _check_names(names: list[str] | None, what: str) -> None:
    if names and len(set(names)) < len(names):
        duplicate = Counter(names).most_common(1)[0][0]
        raise UserError(f"The class name {duplicate} occurs twice in {what}: rename one of the two classes.")


def _all_missing(values: Column) -> bool:
    if isinstance(values, np.ndarray):
        return bool((values == -1).all())
    return all(value is None or value == -1 for value in values)


def _indices(values: Column, what: str, required: bool) -> np.ndarray:
    if not isinstance(values, np.ndarray):
        missing = [index for index, value in enumerate(values) if value is None]
        if missing and required:
            raise UserError(
                f"{len(missing)} of {len(values)} labels are missing in {what}, first at row {missing[0]}: fill them in."
            )
        values = np.array([-1 if value is None else value for value in values], dtype=np.int64)
    values = values.astype(np.int64, copy=False)
    negative = np.flatnonzero(values < (0 if required else -1))
    if len(negative):
        raise UserError(f"Row {negative[0]} of {what} has the negative label {values[negative[0]]}: number the classes from 0.")
    return values
