"""Sidecar files: a JSON file with settings for a teacher whose weights do not contain them.

The sidecar of `resnet50.pt` is `resnet50.pt.teacher.json`, that of a folder is `teacher.json` inside it:

    {"kind": "resnet_keras", "classes": "classes.txt", "preprocessing": {"crop_ratio": 1.0}, "size": 224}

Entries are the arguments of `open_teacher` of the same names; all are optional. `classes` is a list of names, their number, or
the name of a text file in the same folder with one name per line.
"""

import difflib
import os
from pathlib import Path
from typing import Any

from vitrail.checkpoints.readers import check_regular_file, read_json_object
from vitrail.errors import UserError

SUFFIX, FOLDER_FILE = ".teacher.json", "teacher.json"
ENTRIES = ("kind", "classes", "preprocessing", "size")


def sidecar_path(teacher: str | Path) -> Path:
    path = Path(teacher).expanduser()
    return path / FOLDER_FILE if path.is_dir() else path.with_name(path.name + SUFFIX)


def read_sidecar(teacher: str | Path) -> dict[str, Any]:
    """The entries of a teacher's sidecar file; empty without one."""
    file = sidecar_path(teacher)
    content = (read_json_object(file) if os.path.isfile(file) else None) or {}  # isfile: False for a name that is too long
    for key in content:
        if key not in ENTRIES:
            near = difflib.get_close_matches(str(key), ENTRIES, 1, 0.0)
            raise UserError(f"{file} has the unknown entry {key!r}; did you mean {near[0]}?")
    settings = {key: value for key, value in content.items() if value is not None}
    classes, size = settings.get("classes"), settings.get("size")
    if isinstance(classes, str):
        if Path(classes).name != classes:  # a downloaded sidecar must not read files elsewhere
            raise UserError(f"{file}: classes must be a file in the same folder, not {classes}.")
        settings["classes"] = read_classes(str(file.parent / classes))
    elif classes is not None and type(classes) is not int and not _is_list_of(classes, str):
        raise UserError(f"{file}: classes must be a list of names, their number, or the name of a file with one name per line.")
    if size is not None and type(size) is not int and not (_is_list_of(size, int) and len(size) == 2):
        raise UserError(f"{file}: size must be a number of pixels, or [height, width].")
    return settings | ({"size": tuple(size)} if isinstance(size, list) else {})


def read_classes(text: str) -> list[str] | int:
    """The number of classes, or their names from a file with one name per line."""
    if text.isascii() and text.isdigit() and len(text) < 10:
        return int(text)
    path = Path(text).expanduser()
    try:
        check_regular_file(path)
        names = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except FileNotFoundError:
        raise UserError(f"There is no file {text}: give a file with one class name per line, or the number of classes.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{text} cannot be read: {error}.") from None
    if not names:
        raise UserError(f"{text} contains no class names: write one per line.")
    return names


def _is_list_of(values: Any, kind: type) -> bool:
    return isinstance(values, list) and bool(values) and all(type(value) is kind for value in values)
