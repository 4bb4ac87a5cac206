"""Folders of images with a file of boxes for each: VOC's XML and YOLO's text.

VOC   JPEGImages/*.jpg    Annotations/*.xml              ImageSets/Main/train.txt; masks of objects in SegmentationObject/*.png
YOLO  images/train/*      labels/train/*.txt             data.yaml, classes.txt or classes.json; also train/images, train/labels
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import yaml

from vitrail.data.datasets.folder import SPLITS, FolderSource, Paths, SourceDict, listing
from vitrail.data.datasets.mask_folder import VOC, find_root, list_files, stem_of, subfolders
from vitrail.data.datasets.object_table import ObjectTable
from vitrail.data.mask_classes import find_classes
from vitrail.data.objects import DIFFICULT, MAX_OBJECTS, UNKNOWN_CLASS, check_class_names
from vitrail.errors import UserError

MAX_FILE = 1 << 20  # bytes of a file of boxes
IMAGES = ("images", "JPEGImages", "imgs", "img")
LABELS = ("labels", "Annotations", "annotations")
NAME_FILES = ("classes.txt", "obj.names", "names.txt", "labels.txt")


def open_object_folder(path: str) -> SourceDict | None:
    """The splits of a folder of images with XML or text files of boxes; None if it is none, or if it has masks of classes."""
    path = find_root(path)
    folders = subfolders(path)
    if "JPEGImages" in folders and "Annotations" in folders and "SegmentationClass" not in folders:
        return open_voc(path)
    pairs = list(find_label_folders(path))
    return open_yolo(path, pairs) if pairs else None


# VOC


def open_voc(path: str) -> SourceDict:
    """The splits of ImageSets/Main, or all images."""
    files = {stem_of(file): file for file in list_files(os.path.join(path, "JPEGImages"))}
    splits = read_lists(os.path.join(path, "ImageSets", "Main"), files) or {"train": list(files)}
    sources = {
        split: FolderSource(path, Paths(os.path.relpath(files[stem], path) for stem in stems), None)
        for split, stems in splits.items()
    }
    add_voc_objects(list(sources.values()), path)
    return dict(sources)


def read_lists(folder: str, files: Mapping[str, str]) -> dict[str, list[str]]:
    splits: dict[str, list[str]] = {}
    for name in ("train", "val", "test"):
        file = os.path.join(folder, f"{name}.txt")
        if os.path.isfile(file):
            lines = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
            stems = [line.split()[0] for line in lines if line.strip()]
            own = [stem for stem in stems if stem in files]
            splits |= {SPLITS[name]: own} if own else {}
    return splits


def add_voc_objects(sources: Sequence[FolderSource], path: str) -> None:
    """Give the images of a VOC folder the objects of Annotations/, and the masks of SegmentationObject/ if all have one.

    All splits have the same classes: those of the file of names, VOC's, or the names that occur in any of them.
    """
    tables = [read_annotations(source, path) for source in sources]
    objects = [row for rows, _ in tables for own in rows if not isinstance(own, str) for row in own]
    found = {row["class"] for row in objects}
    known = VOC.split(",")[1:]
    listed = [name for name in find_names(path) if name != "background"]
    damaged = any(isinstance(own, str) for rows, _ in tables for own in rows) and has_files(
        os.path.join(path, "Annotations"), ".xml"
    )
    names: tuple[str, ...] = ()
    if found or listed or damaged:
        names = check_class_names(listed or (known if found <= set(known) else sorted(found)), path)
    for row in objects:
        row["class"] = names.index(row["class"]) if row["class"] in names else UNKNOWN_CLASS
    for source, (rows, sizes) in zip(sources, tables, strict=True):
        masks = [os.path.join("SegmentationObject", f"{stem_of(source.location(index))}.png") for index in range(len(source))]
        complete = all(os.path.isfile(os.path.join(path, mask)) for mask in masks)
        source.add_objects(ObjectTable(rows, names, sizes), Paths(masks) if complete else None)


def read_annotations(source: FolderSource, path: str) -> tuple[list[list[dict[str, Any]] | str], list[tuple[int, int] | None]]:
    """The objects of each image, or what is wrong with its file, and the size of the image that the file names."""
    rows: list[list[dict[str, Any]] | str] = []
    sizes: list[tuple[int, int] | None] = []
    for index in range(len(source)):
        file = os.path.join(path, "Annotations", f"{stem_of(source.location(index))}.xml")
        try:
            own, size = read_xml(read_small(file))
            rows.append(own)
            sizes.append(size)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            rows.append(f"{os.path.basename(file)} cannot be used: {describe(error)}")
            sizes.append(None)
    return rows, sizes


def read_xml(text: str) -> tuple[list[dict[str, Any]], tuple[int, int] | None]:
    """The objects of VOC's XML and the size of the image; documents with a DTD or entities are refused."""
    if "<!" in text.replace("<!--", ""):
        raise ValueError("XML with a DTD, entities or CDATA is not read")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(f"not XML ({error})") from None
    size = root.find("size")
    shape = (number(size, "height"), number(size, "width")) if size is not None else (0, 0)
    rows = []
    for each in root.iter("object"):
        box = each.find("bndbox")
        name = each.findtext("name")
        if box is None or name is None:
            raise ValueError("an object without a name or a box")
        left, top, right, bottom = (number(box, side) for side in ("xmin", "ymin", "xmax", "ymax"))
        # Pixels are counted from 1, and the last one belongs to the box.
        row: dict[str, Any] = {"box": (left - 1, top - 1, right, bottom), "class": name.strip()}
        row["flag"] = DIFFICULT if (each.findtext("difficult") or "0").strip() == "1" else 0
        rows.append(row)
    return rows, (int(shape[0]), int(shape[1])) if min(shape) > 0 else None


def number(parent: ElementTree.Element, name: str) -> float:
    return float(parent.findtext(name) or "nan")


# YOLO


def find_label_folders(path: str) -> Iterator[tuple[str, str, str]]:
    """Split, folder of images and folder of text files."""
    folders = subfolders(path)
    images, labels = (next((folders[name] for name in names if name in folders), None) for names in (IMAGES, LABELS))
    if images and labels:
        inside = subfolders(labels)
        own = [(SPLITS[name.lower()], os.path.join(images, name), inside[name]) for name in inside if name.lower() in SPLITS]
        own = [each for each in own if os.path.isdir(each[1])] or [("train", images, labels)]
        yield from (each for each in own if has_files(each[2], ".txt"))
        return
    for name in (name for name in folders if name.lower() in SPLITS):
        parts = subfolders(folders[name])
        images, labels = (next((parts[each] for each in names if each in parts), None) for names in (IMAGES, LABELS))
        if images and labels and has_files(labels, ".txt"):
            yield SPLITS[name.lower()], images, labels


def has_files(folder: str, ending: str) -> bool:
    return any(entry.name.lower().endswith(ending) and entry.is_file() for entry in listing(folder))


def open_yolo(path: str, pairs: Sequence[tuple[str, str, str]]) -> SourceDict | None:
    """An image without a text file has no objects; None if there are no images."""
    found: dict[str, tuple[list[str], list[list[dict[str, Any]] | str]]] = {}
    for split, images, labels in pairs:
        paths, rows = found.setdefault(split, ([], []))
        for image in list_files(images):
            file = os.path.join(labels, os.path.splitext(os.path.relpath(image, images))[0] + ".txt")
            paths.append(os.path.relpath(image, path))
            rows.append(read_boxes(file) if os.path.isfile(file) else [])
    if not any(paths for paths, _ in found.values()):
        return None
    every = [row["class"] for _, rows in found.values() for own in rows if not isinstance(own, str) for row in own]
    names = find_names(path) or [f"class {index}" for index in range(max(every, default=0) + 1)]
    classes = check_class_names(names, path)
    sources: SourceDict = {}
    for split, (paths, rows) in found.items():
        for own in rows:
            for row in own if not isinstance(own, str) else ():
                row["class"] = row["class"] if row["class"] < len(classes) else UNKNOWN_CLASS
        if paths:
            source = FolderSource(path, Paths(paths), None)
            source.add_objects(ObjectTable(rows, classes, relative=True))
            sources[split] = source
    return sources


def read_boxes(file: str) -> list[dict[str, Any]] | str:
    """The lines "class x y width height" or "class x1 y1 x2 y2 …" of a text file, relative to the image; or what is wrong."""
    rows: list[dict[str, Any]] = []
    try:
        for line in read_small(file).splitlines():
            if line.strip():
                rows.append(read_line(line.split()))
            if len(rows) > MAX_OBJECTS:
                raise ValueError(f"more than {MAX_OBJECTS:,} objects")
    except (OSError, ValueError) as error:
        return f"{os.path.basename(file)} line {len(rows) + 1} cannot be used: {describe(error)}"
    return rows


def describe(error: Exception) -> str:
    """What is wrong with a file of boxes."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return getattr(error, "strerror", None) or str(error)


def read_line(cells: Sequence[str]) -> dict[str, Any]:
    if not (cells[0].isascii() and cells[0].isdecimal() and len(cells[0]) < 7):
        raise ValueError(f"{cells[0][:40]} is not the number of a class")
    kind, values = int(cells[0]), np.array([float(cell) for cell in cells[1:]])
    if len(values) == 4:
        x, y, width, height = values.tolist()
        return {"box": (x - width / 2, y - height / 2, x + width / 2, y + height / 2), "class": kind}
    if len(values) < 6 or len(values) % 2:
        raise ValueError("neither a box (class x y width height) nor a polygon (class and three points or more)")
    points = values.reshape(-1, 2)
    return {"box": (*points.min(0), *points.max(0)), "class": kind, "shape": (points,)}


def find_names(path: str) -> list[str]:
    """The class names of a YAML file of YOLO, a text file or classes.json; [] if there is none."""
    damaged = ""
    for entry in listing(path):
        if entry.name.lower().endswith((".yaml", ".yml")) and entry.is_file():
            try:
                # BaseLoader: all values are text; merge keys, tags and numbers could take gigabytes or minutes.
                names = yaml.load(read_small(entry.path), yaml.BaseLoader).get("names")
            except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
                damaged = entry.path + (" is not UTF-8" if isinstance(error, UnicodeDecodeError) else " is not YAML")
                continue
            except AttributeError:  # YAML, but not a mapping
                continue
            if isinstance(names, list):
                names = {str(number): name for number, name in enumerate(names)}
            if isinstance(names, dict) and names:
                named = [names.get(str(number)) for number in range(len(names))]
                if not all(isinstance(name, str) and name for name in named):
                    raise UserError(f"{entry.path} does not name the classes 0 to {len(names) - 1}: give each number a name.")
                return [str(name) for name in named]
    for name in NAME_FILES:
        file = os.path.join(path, name)
        if os.path.isfile(file):
            try:
                return [line.strip() for line in read_small(file).splitlines() if line.strip()]
            except UnicodeDecodeError:
                raise UserError(f"{file} is not UTF-8: save it in this encoding.") from None
            except (OSError, ValueError):
                raise UserError(f"{file} is not a list of class names: write one name per line.") from None
    classes = find_classes(path) if os.path.isfile(os.path.join(path, "classes.json")) else None
    if classes is None and damaged:
        raise UserError(f"{damaged}: correct it, since no other file has the names of the classes.")
    return list(classes.names) if classes else []


def read_small(file: str) -> str:
    if not os.path.isfile(file):  # opening a named pipe would block
        raise FileNotFoundError(2, "there is no such file")
    with open(file, "rb") as stream:
        content = stream.read(MAX_FILE + 1)
    if len(content) > MAX_FILE:
        raise ValueError("it is larger than 1 MiB")
    return content.decode("utf-8-sig")
