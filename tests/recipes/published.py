"""Reads `published.txt`: what papers and released code print about each training."""

from pathlib import Path
from typing import Any, NamedTuple

# Short column names, with the key they stand for.
SHORT = {
    "batch": "batch_size",
    "opt": "optimizer.kind",
    "wd": "optimizer.weight_decay",
    "drop": "architecture.drop_path",
}
DURATIONS = {
    "epochs": ("schedule.length", "epochs"),
    "steps": ("schedule.length", "steps"),
    "warmup": ("schedule.warmup", "epochs"),
    "warmup_steps": ("schedule.warmup", "steps"),
}


class Cell(NamedTuple):
    title: str
    recipe: str
    leaf: str
    value: Any


def parse(text: str) -> Any:
    """A printed cell as a plain value: a number, a bool, several numbers, or text."""
    if text in ("yes", "no"):
        return text == "yes"
    parts = text.split(",")
    try:
        numbers = tuple(float(part) for part in parts)
    except ValueError:
        return text
    return numbers if len(numbers) > 1 else numbers[0]


def cell(title: str, recipe: str, column: str, text: str) -> Cell:
    if column in DURATIONS:
        leaf, unit = DURATIONS[column]
        return Cell(title, recipe, leaf, f"{text} {unit}")
    if column == "size":
        return Cell(title, recipe, "augmentation.image_size", (float(text), float(text)))
    return Cell(title, recipe, SHORT.get(column, column), text if column in ("top1", "also", "hardware") else parse(text))


def read() -> list[Cell]:
    cells: list[Cell] = []
    title, common, columns = "", {}, []
    for line in (Path(__file__).parent / "published.txt").read_text().splitlines():
        if line.startswith("#") or not line.strip():
            continue
        if line.startswith("== "):
            title, common, columns = line.removeprefix("== "), {}, []
        elif line.startswith("recipe "):
            columns = line.split()[1:]
        elif not columns:
            leaf, value = line.split(maxsplit=1)
            common[leaf] = value
        else:
            recipe, *values = line.split()
            row = common | {key: value for key, value in zip(columns, values, strict=True) if value != "-"}
            cells += [cell(title, recipe, column, value) for column, value in row.items()]
    return cells
