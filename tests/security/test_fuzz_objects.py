"""Changed COCO, VOC and YOLO files: every one is read, refused in one sentence, or has images that cannot be used."""

import copy
import json
import random

import pytest

from tests.shapes import make_coco, make_voc, make_yolo
from vitrail.data.datasets.lookup import open_sources
from vitrail.data.loader import ImageReader
from vitrail.errors import UserError

VALUES = [
    None,
    [],
    {},
    "x",
    -1,
    1e400,
    float("nan"),
    1 << 70,
    True,
    [[]],
    [[1]],
    "\ud800",
    [None] * 4,
    ["a"] * 4,
    [1, 2, 3, 1e308],
]
VALUES += [[[1e308] * 6], [[float("nan")] * 6], [["a"] * 6], 0.5, {"size": [1, 2], "counts": "abc"}, {"size": "ab", "counts": []}]
VALUES += [{"size": [56, 64], "counts": [1, 2, 3.5]}, {"size": [56, 64], "counts": None}]
VALUES += [{"size": [56, 64], "counts": counts} for counts in (3584, 0.5, {}, {"a": 1}, [[3584]], [])]


def places(value, start=()):
    """The paths of all values inside of a value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value[:4]) if isinstance(value, list) else ()
    for key, part in pairs:
        yield (*start, key)
        yield from places(part, (*start, key))


def read_everything(folder):
    try:
        for source in open_sources(folder).values():
            reader = ImageReader(source, None, objects=True)
            for index in range(len(source)):
                reader.read_annotated(index)
    except UserError as refused:
        return str(refused)
    return ""


def test_values_of_coco_files(tmp_path):
    folder = make_coco(tmp_path / "data", 2)
    content, chance = json.loads((folder / "annotations.json").read_text()), random.Random(0)
    everywhere = list(places(content))
    for _ in range(120):
        changed, place = copy.deepcopy(content), chance.choice(everywhere)
        part = changed
        for key in place[:-1]:
            part = part[key]
        if chance.random() < 0.2 and isinstance(part, dict):
            del part[place[-1]]
        else:
            part[place[-1]] = chance.choice(VALUES)
        (folder / "annotations.json").write_text(json.dumps(changed))
        assert len(read_everything(folder)) < 500


@pytest.mark.parametrize(("make", "file"), [(make_yolo, "labels/train/001.txt"), (make_voc, "Annotations/001.xml")])
def test_bytes_of_files_of_boxes(make, file, tmp_path):
    path = make(tmp_path / "data", 2) / file
    content, chance = path.read_bytes(), random.Random(1)
    for _ in range(60):
        changed = bytearray(content)
        for _ in range(chance.randint(1, 4)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        path.write_bytes(bytes(changed))
        assert len(read_everything(tmp_path / "data")) < 500
