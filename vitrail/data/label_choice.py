"""Which labels a training uses: a column, a coarser level from a map, or one class for all images.

The labels that are not chosen stay extra columns of the source, so that other levels can be evaluated.
"""

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence

import numpy as np

from vitrail.data.datasets.folder import sort_classes
from vitrail.data.source import Labels, Source
from vitrail.errors import UserError

ONE_CLASS = "none"  # the choice of one class for all images
COARSE = "coarse_label"  # the column of a map without a header
MAX_BYTES = 64 * 2**20  # of a map
MAX_LEVELS = 32
Levels = dict[str, dict[str, str]]  # column -> class name -> name of the coarser class


def choose_labels(parts: Sequence[Source], label: str = "", label_map: str = "", optional: Source | None = None) -> None:
    """Set the main labels of parts of a data set, in place: a column, "none" for one class, "" for the first level of the map.

    Without either nothing changes. `optional` is a part that may lack the column.
    """
    if label_map:
        levels = add_levels(parts, label_map)
        label = label or levels[0]
    if not label or label in (parts[0].label_name, "label"):
        return
    for part in parts:
        others = {part.label_name: part.label} if part.label is not None else {}
        if label == ONE_CLASS:
            chosen: Labels | None = Labels(np.zeros(len(part), dtype=np.int64), ["image"])
        elif label in part.extra:
            chosen = part.extra[label]
        elif part is optional:
            chosen = None
        else:
            columns = ", ".join([*([part.label_name] if part.label else []), *part.extra]) or "none"
            raise UserError(
                f"{part.name} has no labels called {label!r}; there are {columns}: set data.label to one of them, or to "
                f"{ONE_CLASS!r} for one class of all images."
            )
        part.extra = {name: labels for name, labels in part.extra.items() if name != label} | others
        part.label, part.label_name, part.defects = chosen, label, ()  # the defects were those of the other labels


def add_levels(parts: Sequence[Source], label_map: str) -> list[str]:
    """The names of the levels of a map, which become extra columns of the labeled parts. All must have the same classes."""
    first, levels = parts[0], read_map(label_map, parts[0])
    for part in parts:
        if part.label is not None and part.classes != first.classes:  # levels would have other indices
            reason = f"The classes of {part.name} are not those of {first.name}: the map {label_map} needs the same in both."
            raise UserError(next(iter(part.defects), reason))
        if part.label is not None:
            part.extra = part.extra | {name: coarsen(part.label, level) for name, level in levels.items()}
    return list(levels)


def coarsen(fine: Labels, level: Mapping[str, str]) -> Labels:
    """The labels of a coarser level; images without a label stay without."""
    names = sort_classes(sorted({level[name] for name in fine.names}))
    position = {name: index for index, name in enumerate(names)}
    index = np.array([position[level[name]] for name in fine.names] + [-1])  # the last entry is for unknown labels, -1
    return Labels(index[fine.values], names)


def read_map(path: str, source: Source) -> Levels:
    """The levels of a file that gives every class of the source a coarser one.

    JSON: {"class": "coarser class"}. CSV or TSV: a class and its coarser classes in each row; a header names the columns.
    """
    if source.label is None:
        raise UserError(f"{source.name} has no labels, which the map {path} could make coarser: remove data.map.")
    classes = source.label.names
    text = _read_text(path)
    levels = _parse_json(path, text) if path.lower().endswith(".json") else _parse_table(path, text, classes)
    for name, level in levels.items():
        missing = [each for each in classes if not level.get(each)]
        if missing:
            where = "" if len(levels) == 1 else f" in the column {name}"
            raise UserError(
                f"The map {path} has no coarser class{where} for {len(missing)} of the {len(classes)} classes of {source.name}, "
                f"first {missing[0]!r}: add a line for each."
            )
        if name in (source.label_name, *source.extra):
            raise UserError(f"The map {path} has a column {name}, which {source.name} has too: rename it.")
    return levels


def _read_text(path: str) -> str:
    path = os.path.expanduser(path)
    if not os.path.isfile(path):
        raise UserError(f"There is no map at {path}: give a CSV or JSON file with a class and its coarser class in each line.")
    try:
        if os.path.getsize(path) > MAX_BYTES:
            raise UserError(f"The map {path} is larger than {MAX_BYTES >> 20} MiB: it should have one line for each class.")
        with open(path, encoding="utf-8-sig", newline="") as file:
            return file.read(MAX_BYTES)
    except UnicodeDecodeError:
        raise UserError(f"The map {path} is not UTF-8 text: save it as UTF-8.") from None
    except OSError as error:
        raise UserError(f"The map {path} cannot be read: {error.strerror}.") from None


def _parse_json(path: str, text: str) -> Levels:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"The map {path} is not JSON: save it again.") from None
    if not isinstance(content, dict) or not content or not all(isinstance(value, str | int) for value in content.values()):
        raise UserError(f'The map {path} is not an object of names: write {{"class": "coarser class", …}}.')
    return {COARSE: {name: str(value) for name, value in content.items()}}


def _parse_table(path: str, text: str, classes: Sequence[str]) -> Levels:
    separator = "\t" if path.lower().endswith(".tsv") else max(",;\t", key=text.partition("\n")[0].count)
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text), delimiter=separator) if row]
    except csv.Error as error:
        raise UserError(f"The map {path} is not a readable table ({error}): save it again as CSV.") from None
    width = len(rows[0]) if rows else 0
    if not 2 <= width <= MAX_LEVELS:
        raise UserError(f"The map {path} has rows of {width} fields: write a class and its coarser class, class,coarse, in each.")
    wrong = next((number for number, row in enumerate(rows, 1) if len(row) != width), None)
    if wrong is not None:
        raise UserError(f"Row {wrong} of the map {path} does not have {width} fields as the first row does: correct it.")
    names = [COARSE, *(f"{COARSE}_{number}" for number in range(2, width))]
    if rows[0][0] not in classes:  # a header
        names = rows.pop(0)[1:]
        if len(set(names)) < len(names) or not all(names):
            raise UserError(f"The header of the map {path} has a column without a name or two of one name: rename them.")
    twice = _contradiction(rows)
    if twice is not None:
        raise UserError(f"The map {path} has two different rows for the class {twice!r}: keep one.")
    return {name: {row[0]: row[column] for row in rows} for column, name in enumerate(names, 1)}


def _contradiction(rows: Sequence[Sequence[str]]) -> str | None:
    seen: dict[str, Sequence[str]] = {}
    return next((row[0] for row in rows if seen.setdefault(row[0], row) != row), None)
