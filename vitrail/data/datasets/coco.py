"""COCO's JSON files of boxes, polygons and run lengths, beside their images.

COCO      annotations/instances_train2017.json     train2017/*.jpg
Roboflow  train/_annotations.coco.json             train/*.jpg
any       annotations.json, or a JSON file         images/*, or beside the file
"""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vitrail.data.datasets.folder import SPLITS, FolderSource, Paths, SourceDict, listing
from vitrail.data.datasets.object_table import ObjectTable
from vitrail.data.decode import PIXEL_LIMIT
from vitrail.data.instance_masks import Rle, Shape, read_polygons
from vitrail.data.objects import CROWD, UNKNOWN_CLASS, check_class_names
from vitrail.errors import UserError
from vitrail.formatting import pluralize

NAMES = re.compile(r"_?(annotations|instances|coco)[\w.-]*\.json", re.IGNORECASE)
MAX_FILE = 1 << 31  # bytes
MAX_SIDE = 1 << 16  # pixels of an image


def find_coco_files(path: str) -> list[str]:
    """The JSON files of a folder that have the names of COCO's."""
    found = [entry.path for entry in listing(path) if entry.is_file() and NAMES.fullmatch(entry.name)]
    for entry in listing(path):
        if entry.is_dir() and (entry.name.lower() == "annotations" or entry.name.lower() in SPLITS):
            found += [each.path for each in listing(entry.path) if each.is_file() and NAMES.fullmatch(each.name)]
    return found


def open_coco(path: str, files: Sequence[str]) -> SourceDict:
    """The splits of COCO files below `path`; a file without the name of a split is the training split."""
    sources: SourceDict = {}
    owners: dict[str, str] = {}
    for file in files:
        split = split_of_file(path, file)
        if split in owners:
            raise UserError(f"{owners[split]} and {file} are both the {split} split: keep one of them.")
        owners[split] = file
        sources[split] = open_coco_file(path, file)
    first = sources.get("train") or next(iter(sources.values()))
    for split, source in sources.items():
        if source.object_classes != first.object_classes:
            raise UserError(f"{owners[split]} lists other categories than the training split: use one list for all splits.")
    return sources


def split_of_file(root: str, file: str) -> str:
    """The split that the name of a file or of its folder contains."""
    for part in (os.path.basename(file), os.path.basename(os.path.dirname(os.path.relpath(file, root)))):
        for word in re.findall(r"[a-z]+", part.lower()):
            if word in SPLITS:
                return SPLITS[word]
    return "train"


def open_coco_file(root: str, file: str) -> FolderSource:
    try:
        if os.path.getsize(file) > MAX_FILE:
            raise UserError(f"{file} has more than 2 GiB: divide it.")
        with open(file, encoding="utf-8-sig") as stream:
            content = json.load(stream)
        images, annotations, categories = (list(content[name]) for name in ("images", "annotations", "categories"))
        names = {int(each["id"]): str(each["name"]) for each in categories}
        paths = [check_relative(each["file_name"], file) for each in images]
        sizes = [read_size(each) for each in images]
        numbers = {each["id"]: index for index, each in enumerate(images)}
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}.") from None
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        raise UserError(
            f"{file} is not a COCO file: it needs images (id, file_name), annotations (image_id, category_id, bbox) and "
            "categories (id, name)."
        ) from None
    if not images:
        raise UserError(f"{file} lists no images: add some.")
    if len(numbers) < len(images):
        raise UserError(f"{file} has two images with the same id: give each its own.")
    if len(names) < len(categories):
        raise UserError(f"{file} has two categories with the same id: give each its own.")
    order = sorted(names)
    classes = check_class_names([names[number] for number in order], file)
    index_of = {number: index for index, number in enumerate(order)}
    rows: list[list[dict[str, Any]] | str] = [[] for _ in images]
    stray = 0
    for annotation in annotations:
        owner = annotation.get("image_id") if isinstance(annotation, dict) else None
        image = numbers.get(owner) if isinstance(owner, int | str) else None
        if image is None:
            stray += 1
            continue
        own = rows[image]
        if not isinstance(own, str):
            try:
                own.append(read_annotation(annotation, index_of))
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                reason = "a value is missing or has another type" if type(error) in (KeyError, TypeError) else error
                rows[image] = f"annotation {str(annotation.get('id'))[:40]} of {os.path.basename(file)} is damaged: {reason}"
    notes = [f"{pluralize(stray, 'annotation')} of {file} without an image in its list"] if stray else []
    folder = find_images(root, file, paths[0])
    for path in (os.path.join(folder, path) for path in paths):
        if os.path.exists(path) and not os.path.isfile(path):  # opening a named pipe would block
            raise UserError(f"{path} is not a regular file: remove it from {file}.")
    source = FolderSource(root, Paths(os.path.relpath(os.path.join(folder, path), root) for path in paths), None)
    source.add_objects(ObjectTable(rows, classes, sizes, notes=notes))
    return source


def check_relative(name: Any, file: str) -> str:
    """The name of an image file; UserError if it leads out of its folder."""
    text = str(name)
    parts = text.replace("\\", "/").split("/")
    if not text or "\0" in text or text.startswith(("/", "~")) or ":" in parts[0] or ".." in parts:
        raise UserError(f"{file} names the image {text[:80]!r}, which is not inside of its folder: use relative paths.")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise UserError(f"{file} names the image {text[:80]!r}, which is not a file name: rename it.") from None
    return text


def read_size(image: Mapping[str, Any]) -> tuple[int, int] | None:
    height, width = image.get("height"), image.get("width")
    if height is None or width is None:
        return None
    size = int(height), int(width)
    if not all(0 < side <= MAX_SIDE for side in size):
        raise ValueError("size")
    return size


def read_annotation(annotation: Mapping[str, Any], index_of: Mapping[int, int]) -> dict[str, Any]:
    shape = read_shape(annotation.get("segmentation"))
    box = annotation.get("bbox")
    if box is None and isinstance(shape, tuple) and not isinstance(shape, Rle) and shape:
        points = np.concatenate(shape)
        box = [*points.min(0), *(points.max(0) - points.min(0))]
    if not isinstance(box, list) or len(box) != 4 or not all(isinstance(value, int | float) for value in box):
        raise ValueError("bbox is not a list of x, y, width and height")
    left, top, width, height = (float(value) for value in box)
    row: dict[str, Any] = {"box": (left, top, left + width, top + height), "shape": shape}
    row["class"] = index_of.get(annotation["category_id"], UNKNOWN_CLASS)
    row["flag"] = CROWD if annotation.get("iscrowd") else 0
    area = annotation.get("area")
    row["area"] = float(area) if isinstance(area, int | float) and math.isfinite(area) and area >= 0 else math.nan
    return row


def read_shape(segmentation: Any) -> Shape:
    """Polygons, or run lengths as numbers or as text."""
    if not segmentation:
        return None
    if isinstance(segmentation, dict):
        height, width = (int(side) for side in segmentation["size"])
        if not (0 < height <= MAX_SIDE and 0 < width <= MAX_SIDE and height * width <= PIXEL_LIMIT):
            raise ValueError("a mask of an impossible size")
        counts = segmentation["counts"]
        if isinstance(counts, str):
            return Rle(counts.encode("utf-8"), (height, width))
        runs = np.asarray(counts, dtype=np.int64)
        if runs.ndim != 1:
            raise ValueError("run lengths that are neither a list of numbers nor text")
        return Rle(runs, (height, width))
    return read_polygons(segmentation)


def find_images(root: str, file: str, first: str) -> str:
    """The folder of the images of a file, in which the first of them is."""
    for folder in image_folders(root, file):
        if os.path.isfile(os.path.join(folder, first)):
            return folder
    raise UserError(f"The image {first} of {file} does not exist: put the images beside the file or into {root}/images.")


def image_folders(root: str, file: str) -> Iterator[str]:
    stem = os.path.splitext(os.path.basename(file))[0]
    name = stem.split("_", 1)[-1]  # train2017 of instances_train2017
    for folder in (os.path.dirname(file), root, os.path.dirname(os.path.dirname(file))):
        for inside in ("", name, "images", os.path.join("images", name)):
            yield os.path.join(folder, inside)
    for folder in (root, os.path.join(root, "images")):
        if os.path.isdir(folder):
            named = [(entry.path, split_of_file(folder, entry.path)) for entry in listing(folder) if entry.is_dir()]
            yield from (inside for inside, split in named if split == split_of_file(root, file))
