"""The classes of segmentation masks: which id, or color, of a mask file is which class, and which pixels are ignored."""

import csv
import io
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from vitrail.data.decode import apply_orientation, decode_mask, open_and_convert
from vitrail.errors import UserError
from vitrail.formatting import format_ranges, pluralize

IGNORE = 255  # class index of pixels that are not trained or evaluated, also outside of the image
MAX_CLASSES = 255
UNKNOWN = 254  # class index of an id that is neither a class nor ignored
NAME_IDS = 'name the other ids in classes.json, as {"0": "background", "255": "object"}.'  # where only one is a class
MAX_FILE = 1 << 20  # bytes of a file of class names
IGNORED_NAMES = {"void", "ignore", "ignored", "unlabeled", "unlabelled", "unknown"}
# Files of class names beside the data, in the order in which they are looked for.
FILES = ("classes.json", "classes.txt", "class_dict.csv", "label_colors.txt", "objectInfo150.txt")
Color = tuple[int, int, int]


@dataclass(frozen=True)
class MaskClasses:
    """Names and file ids of the classes; the class index is the position in `names`."""

    names: tuple[str, ...]
    ids: tuple[int, ...]
    ignored: frozenset[int] = frozenset({IGNORE})
    colors: tuple[tuple[Color, int], ...] = ()  # color and id, of masks that are stored as RGB

    @property
    def table(self) -> np.ndarray:
        """The class index of every id, uint8 [256]; `IGNORE` and `UNKNOWN` for the others."""
        table = np.full(256, UNKNOWN, dtype=np.uint8)
        table[list(self.ignored)] = IGNORE
        table[list(self.ids)] = np.arange(len(self.ids))
        return table

    def read(self, encoded: bytes) -> np.ndarray:
        """Decode a mask to class indices, uint8 [height, width]; ValueError for ids that are not classes."""
        ids = self.read_ids(encoded)
        indices: np.ndarray = self.table[ids]
        if (indices == UNKNOWN).any():
            raise ValueError(self.describe_unknown(np.unique(ids[indices == UNKNOWN]).tolist()))
        return indices

    def read_ids(self, encoded: bytes) -> np.ndarray:
        """Decode a mask to the ids of the file."""
        return read_colors(encoded, self.colors) if self.colors else decode_mask(encoded)

    def describe_unknown(self, unknown: Sequence[int]) -> str:
        ids = f"id{'s' if len(unknown) > 1 else ''} {format_ranges(unknown)}"
        known = format_ranges(sorted(self.ids))
        return f"the mask has the {ids}, but the classes are {known} and ignored are {format_ranges(sorted(self.ignored))}"


def read_colors(encoded: bytes, colors: Sequence[tuple[Color, int]]) -> np.ndarray:
    """Decode a mask whose classes are colors to ids, uint8 [height, width]."""

    def convert(image: Image.Image) -> np.ndarray:
        image.load()
        rgb = np.asarray(image.convert("RGB")).astype(np.int32)
        return apply_orientation(rgb[:, :, 0] << 16 | rgb[:, :, 1] << 8 | rgb[:, :, 2], image)

    packed = open_and_convert(encoded, convert)
    found, inverse = np.unique(packed, return_inverse=True)
    known = {red << 16 | green << 8 | blue: number for (red, green, blue), number in colors}
    missing = [value for value in found.tolist() if value not in known]
    if missing:
        color = missing[0] >> 16, missing[0] >> 8 & 255, missing[0] & 255
        raise ValueError(f"the mask has the color {color}, which is not the color of a class")
    ids: np.ndarray = np.array([known[value] for value in found.tolist()], dtype=np.uint8)[inverse.reshape(packed.shape)]
    return ids


def make_classes(names: Mapping[int, str], ignored: Sequence[int] = (), colors: Mapping[int, Color] | None = None) -> MaskClasses:
    """Classes from names by id; ids whose name is "void" or similar are ignored, as is 255 unless it is a class."""
    skipped = {number for number, name in names.items() if name.strip().lower() in IGNORED_NAMES} | set(ignored)
    kept = {number: name for number, name in sorted(names.items()) if number not in skipped}
    if not kept:
        raise UserError("The masks have no class: name at least one id that is not ignored.")
    if not all(0 <= number <= 255 for number in (*kept, *skipped)) or len(kept) > MAX_CLASSES - 1:
        raise UserError(f"Masks have ids from 0 to 255 and at most {MAX_CLASSES - 1} classes.")
    if len(set(kept.values())) < len(kept):
        twice = next(name for name in kept.values() if list(kept.values()).count(name) > 1)
        raise UserError(f"Two classes of the masks are called {twice!r}: give each its own name.")
    skipped |= {IGNORE} - set(kept)
    pairs = tuple((color, number) for number, color in (colors or {}).items())
    return MaskClasses(tuple(kept.values()), tuple(kept), frozenset(skipped), pairs)


def find_classes(*folders: str) -> MaskClasses | None:
    """The classes in the first file of class names in one of the folders."""
    for folder in folders:
        for name in FILES:
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                return read_class_file(path)
    return None


def read_class_file(path: str) -> MaskClasses:
    """The classes of a file of names: JSON, text with a name per line, or a table of names and colors."""
    name = os.path.basename(path)
    parse: Callable[[str], MaskClasses] = parse_json if name.lower().endswith(".json") else parse_lines
    if name.lower().endswith(".csv"):
        parse = parse_color_table
    elif name == "label_colors.txt":
        parse = parse_camvid_colors
    elif name == "objectInfo150.txt":
        parse = parse_ade
    try:
        if os.path.getsize(path) > MAX_FILE:
            raise UserError(f"{path} is too large for a list of class names.")
        with open(path, encoding="utf-8-sig") as file:
            return parse(file.read())
    except UserError as error:
        raise UserError(f"{path} cannot be used: {error}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8: save it in this encoding.") from None
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        raise UserError(f"{path} is not a list of class names: write a JSON list, or one name per line.") from None


def parse_json(text: str) -> MaskClasses:
    """A list of names, an object of names by id, or {"names": …, "ignore": [ids], "colors": {id: [r, g, b]}}."""
    content: Any = json.loads(text)
    ignored: list[int] = []
    colors: dict[int, Color] = {}
    if isinstance(content, dict) and "names" in content:
        ignored = [int(number) for number in content.get("ignore") or []]
        colors = {int(number): (int(r), int(g), int(b)) for number, (r, g, b) in (content.get("colors") or {}).items()}
        content = content["names"]
    pairs = content.items() if isinstance(content, dict) else enumerate(content)
    return make_classes({int(number): str(name) for number, name in pairs}, ignored, colors)


def write_json(classes: MaskClasses) -> str:
    """The content of a classes.json that `parse_json` reads."""
    content: dict[str, Any] = {"names": dict(zip(classes.ids, classes.names, strict=True)), "ignore": sorted(classes.ignored)}
    if classes.colors:
        content["colors"] = {number: color for color, number in classes.colors}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def parse_lines(text: str) -> MaskClasses:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return make_classes(dict(enumerate(lines)))


def parse_color_table(text: str) -> MaskClasses:
    """CSV with the columns name, r, g, b; the ids are the row numbers."""
    rows = list(csv.DictReader(io.StringIO(text), skipinitialspace=True))
    names, colors = {}, {}
    for number, row in enumerate(rows):
        names[number] = row["name"]
        colors[number] = (int(row["r"]), int(row["g"]), int(row["b"]))
    return make_classes(names, colors=colors)


def parse_camvid_colors(text: str) -> MaskClasses:
    """Lines of "red green blue name"."""
    rows = [line.split(maxsplit=3) for line in text.splitlines() if line.strip()]
    colors = {number: (int(row[0]), int(row[1]), int(row[2])) for number, row in enumerate(rows)}
    return make_classes({number: row[3].strip() for number, row in enumerate(rows)}, colors=colors)


def parse_ade(text: str) -> MaskClasses:
    """The table of ADE20K: id, three columns of numbers, names; 0 is ignored."""
    rows = [re.split(r"\t+|\s{2,}", line.strip()) for line in text.splitlines()[1:] if line.strip()]
    return make_classes({int(row[0]): row[-1].split(",")[0].strip() for row in rows}, [0])


def numbered_classes(ids: Sequence[int]) -> MaskClasses:
    """Classes without names: those of the ids that were found, without 255."""
    found = sorted(set(ids) - {IGNORE})
    if not found:
        raise UserError("the masks contain no class: all pixels are 255, which is ignored.")
    return make_classes({number: f"class {number}" for number in found})


def describe_classes(classes: MaskClasses) -> str:
    """ "11 classes, ids 0-10, ignored 11 and 255"."""
    ignored = format_ranges(sorted(classes.ignored))
    return f"{pluralize(len(classes.names), 'class')}, ids {format_ranges(sorted(classes.ids))}, ignored {ignored}"
