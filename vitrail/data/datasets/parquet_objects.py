"""The column `objects` of Parquet files: lists of boxes and categories, as the datasets library stores them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vitrail.data.datasets.coco import read_shape
from vitrail.data.datasets.object_table import ObjectTable
from vitrail.data.objects import CROWD, DIFFICULT, MAX_OBJECTS, UNKNOWN_CLASS, check_class_names
from vitrail.errors import UserError

COLUMN, INSTANCES = "objects", "instances"
BOXES, CATEGORIES = ("bbox", "boxes", "box"), ("category", "category_id", "label", "labels", "class")
FLAGS = {"iscrowd": CROWD, "is_crowd": CROWD, "difficult": DIFFICULT}


def is_object_column(field: Any) -> bool:
    """Whether an Arrow field has boxes and categories: a struct of lists, or a list of structs."""
    from pyarrow import types

    kind = field.type.value_type if types.is_list(field.type) or types.is_large_list(field.type) else field.type
    if not types.is_struct(kind):
        return False
    names = [kind.field(index).name for index in range(kind.num_fields)]
    return any(name in names for name in BOXES) and any(name in names for name in CATEGORIES)


def object_names(features: Mapping[str, Any]) -> list[str]:
    """The class names in the description of the column; [] if there are none."""

    def search(value: Any, depth: int = 0) -> list[str]:
        if isinstance(value, dict) and depth < 8:
            if isinstance(value.get("names"), list):
                return [str(name) for name in value["names"]]
            parts = value.values()
        elif isinstance(value, list) and depth < 8:
            parts = value  # type: ignore[assignment]
        else:
            return []
        return next((found for part in parts if (found := search(part, depth + 1))), [])

    return search(features.get(COLUMN))


def make_tables(tables: Mapping[str, Sequence[Any]], names: Sequence[str], place: str) -> dict[str, ObjectTable]:
    """The objects of each split from the Arrow tables of its files; without names, the categories that occur are the classes."""
    cells = {split: [cell for table in group for cell in table.column(COLUMN).to_pylist()] for split, group in tables.items()}
    named = names or make_table([cell for own in cells.values() for cell in own], (), place).classes
    return {split: make_table(own, named, place) for split, own in cells.items()}


def make_table(column: Sequence[Any], names: Sequence[str], place: str) -> ObjectTable:
    """The table of the values of a column: {bbox: [[x, y, width, height]], category: [number or name]} or a list of such rows."""
    rows = [read_cell(cell) for cell in column]
    categories = {row["class"] for own in rows if not isinstance(own, str) for row in own}
    texts = sorted(each for each in categories if isinstance(each, str))
    numbers = [each for each in categories if isinstance(each, int)]
    if not names:
        if texts and numbers:
            raise UserError(f"{place} has categories that are text and others that are numbers: use one kind.")
        names = texts or [f"class {index}" for index in range(max(numbers, default=0) + 1)]
    classes = check_class_names(names, place)
    index_of: dict[Any, int] = {name: index for index, name in enumerate(classes)} | {
        index: index for index in range(len(classes))
    }
    for own in rows:
        for row in own if not isinstance(own, str) else ():
            row["class"] = index_of.get(row["class"], UNKNOWN_CLASS)
    return ObjectTable(rows, classes)


def read_cell(cell: Any) -> list[dict[str, Any]] | str:
    """The objects of one image, or what is wrong with them."""
    try:
        if cell is None:
            return "it has no list of objects"
        if isinstance(cell, dict):
            lengths = {len(value) for value in cell.values() if isinstance(value, list)}
            if len(lengths) > 1:
                return "its boxes and categories are not equally many"
            count = max(lengths, default=0)
            if count > MAX_OBJECTS:
                return f"{count:,} objects; at most {MAX_OBJECTS:,} are supported"
            cell = [{name: value[row] for name, value in cell.items() if isinstance(value, list)} for row in range(count)]
        return [read_object(each) for each in cell]
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        return f"its objects are damaged: {error}"


def read_object(each: Mapping[str, Any]) -> dict[str, Any]:
    left, top, width, height = (float(value) for value in first_of(each, BOXES))
    row: dict[str, Any] = {"box": (left, top, left + width, top + height), "class": first_of(each, CATEGORIES)}
    row["flag"] = next((flag for name, flag in FLAGS.items() if each.get(name)), 0)
    row["shape"] = read_shape(each.get("segmentation"))
    area = each.get("area")
    row["area"] = float(area) if area is not None else math.nan
    return row


def first_of(each: Mapping[str, Any], names: Sequence[str]) -> Any:
    found = next((each[name] for name in names if each.get(name) is not None), None)
    if found is None:
        raise ValueError(f"an object without {names[0]}")
    return found
