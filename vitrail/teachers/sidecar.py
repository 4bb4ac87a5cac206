"""What a person says about a teacher in a small JSON file beside it, for weights that do not say it themselves.

`resnet50.pt` is told by `resnet50.pt.teacher.json` beside it, a folder by `teacher.json` inside it:

    {"kind": "resnet_keras", "classes": "classes.txt", "preprocessing": {"crop_ratio": 1.0}, "size": 224}

Each entry means what the argument of that name means to `open_teacher`, and may be left out; `classes` are names, their number,
or the name of a file with one a line, which is looked for beside the JSON file.
"""

import difflib
import os
from pathlib import Path
from typing import Any

from vitrail.checkpoints.readers import read_json
from vitrail.errors import UserError

ENDING, INSIDE = ".teacher.json", "teacher.json"
ENTRIES = ("kind", "classes", "preprocessing", "size")


def file_beside(teacher: str | Path) -> Path:
    """Where that would be said about a teacher."""
    path = Path(teacher).expanduser()
    return path / INSIDE if path.is_dir() else path.with_name(path.name + ENDING)


def read_beside(teacher: str | Path) -> dict[str, Any]:
    """What is said about a teacher; nothing where there is no such file."""
    file = file_beside(teacher)
    found = (read_json(file) if os.path.isfile(file) else None) or {}  # of a name too long there is no file either
    for key in found:
        if key not in ENTRIES:
            near = difflib.get_close_matches(str(key), ENTRIES, 1, 0.0)
            raise UserError(f"{file} has {key!r}, which says nothing about a teacher; did you mean {near[0]}?")
    said = {key: value for key, value in found.items() if value is not None}
    classes, size = said.get("classes"), said.get("size")
    if isinstance(classes, str):
        if Path(classes).name != classes:  # a file from elsewhere must not make anything else be read
            raise UserError(f"{file}: classes name a file in the same folder, not {classes}.")
        said["classes"] = read_classes(str(file.parent / classes))
    elif classes is not None and type(classes) is not int and not _all_of(classes, str):
        raise UserError(f"{file}: classes are a list of names, their number, or the name of a file with one a line.")
    if size is not None and type(size) is not int and not (_all_of(size, int) and len(size) == 2):
        raise UserError(f"{file}: size is a number of pixels, or [height, width].")
    return said | ({"size": tuple(size)} if isinstance(size, list) else {})


def read_classes(text: str) -> list[str] | int:
    """How many classes, or their names from a file, one a line."""
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        names = [line.strip() for line in Path(text).expanduser().read_text(encoding="utf-8").splitlines() if line.strip()]
    except FileNotFoundError:
        raise UserError(f"There is no file {text}: give a file with one class a line, or their number.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{text} cannot be read: {error}.") from None
    if not names:
        raise UserError(f"{text} names no classes: write one a line.")
    return names


def _all_of(values: Any, kind: type) -> bool:
    return isinstance(values, list) and bool(values) and all(type(value) is kind for value in values)
