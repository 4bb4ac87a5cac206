"""COCO, VOC, YOLO and Parquet: the same objects from each, and annotations that are wrong, in one sentence each."""

import json
import os
import re
import shutil
import time
from dataclasses import replace

import numpy as np
import pytest
from faster_coco_eval import mask as coco_masks

from tests.shapes import CLASSES, draw_shapes, make_coco, make_parquet, make_voc, make_yolo
from vitrail.data.datasets.lookup import open_sources, open_splits
from vitrail.data.image_loader import ImageLoader
from vitrail.data.instance_masks import Rle, unpack_masks
from vitrail.data.loader import ImageReader, Problem
from vitrail.data.mask_checks import check_masks, complete_classes
from vitrail.data.object_checks import check_objects
from vitrail.data.objects import CROWD, DIFFICULT, decode_objects, make_objects
from vitrail.data.sampler import EpochSampler
from vitrail.data.source import Subset
from vitrail.errors import UserError

MAKERS = {"coco": make_coco, "voc": make_voc, "yolo": make_yolo}


def read(source, index):
    return ImageReader(source, None, objects=True).read_annotated(index)


def change_json(folder, change):
    path = folder / "annotations.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("kind", [*MAKERS, "parquet"])
def test_every_format_has_the_same_objects(kind, tmp_path):
    path = make_parquet(tmp_path / "train.parquet") if kind == "parquet" else MAKERS[kind](tmp_path / "data", 4)
    source = open_sources(path)["train"]
    assert source.has_instances
    assert set(source.object_classes) >= set(CLASSES)
    for index in range(4):
        _, wanted = draw_shapes(index)
        found = read(source, index).objects
        assert [source.object_classes[number] for number in found.classes] == [CLASSES[each["class"]] for each in wanted]
        boxes = np.array([(x, y, x + w, y + h) for x, y, w, h in (each["box"] for each in wanted)])
        assert np.abs(found.boxes - boxes).max() < 1e-4
        masks = unpack_masks(found.planes, len(wanted))
        if kind in ("coco", "yolo"):  # the others have one object per pixel, drawn by Pillow
            polygons = [coco_masks.frPyObjects([each["polygon"]], 56, 64) for each in wanted]
            assert np.array_equal(masks, np.stack([coco_masks.decode(part)[:, :, 0] for part in polygons]))
        assert masks.any((1, 2)).all()


def test_layouts_of_coco(tmp_path):
    made = make_coco(tmp_path / "made", 4)
    for name, inside in {"coco": "train2017", "any": "images/train2017"}.items():
        folder = tmp_path / name
        (folder / "annotations").mkdir(parents=True)
        shutil.copytree(made / "images", folder / inside)
        shutil.copy(made / "annotations.json", folder / "annotations" / "instances_train2017.json")
        assert len(open_sources(folder)["train"]) == 4
        assert not isinstance(read(open_sources(folder)["train"], 0), Problem)
    folder = tmp_path / "exported"
    for split in ("train", "valid"):
        shutil.copytree(made / "images", folder / split)
        shutil.copy(made / "annotations.json", folder / split / "_annotations.coco.json")
    assert sorted(open_sources(folder)) == ["train", "validation"]
    assert len(open_sources(made / "annotations.json")["train"]) == 4


def test_crowds_run_lengths_and_other_fields(tmp_path):
    def change(content):
        first, second = content["annotations"][:2]
        first |= {"iscrowd": 1, "segmentation": {"size": [56, 64], "counts": [64 * 56 - 10, 10]}}
        mask = np.zeros((56, 64), dtype=np.uint8, order="F")
        mask[5:9, 10:20] = 1
        counts = coco_masks.encode(mask)["counts"]
        second |= {"segmentation": {"size": [56, 64], "counts": counts if isinstance(counts, str) else counts.decode()}}
        del second["area"]
        content["annotations"].append({"image_id": 99, "category_id": 7, "bbox": [0, 0, 1, 1]})

    folder = make_coco(tmp_path / "data", 3, most=3)
    source = open_sources(change_json(folder, change))["train"]
    image = json.loads((folder / "annotations.json").read_text())["annotations"][1]["image_id"]
    every = [read(source, index).objects for index in range(3)]
    assert sum((each.flags == CROWD).sum() for each in every) == 1
    assert every[0].areas[0] == 56 * 64 or every[0].areas[0] > 100  # of the file
    own = every[image]
    row = 1 if image == 0 else 0
    assert own.areas[row] == 40  # of the mask
    assert unpack_masks(own.planes, len(own.classes))[row].sum() == 40
    assert source.object_notes == (f"1 annotation of {folder / 'annotations.json'} without an image in its list",)


def test_voc_with_class_masks_has_boxes_too(tmp_path):
    folder = make_voc(tmp_path / "VOC2012", 4)
    xml = folder / "Annotations" / "000.xml"
    xml.write_text(
        xml.read_text().replace("<difficult>0<", "<difficult>1<").replace("box<", "aeroplane<").replace("triangle<", "bird<")
    )
    for number in range(1, 4):
        path = folder / "Annotations" / f"{number:03}.xml"
        path.write_text(path.read_text().replace("box<", "aeroplane<").replace("triangle<", "bird<"))
    (folder / "SegmentationClass").mkdir()
    for path in (folder / "SegmentationObject").iterdir():
        shutil.copy(path, folder / "SegmentationClass")
    source = open_sources(tmp_path)["train"]
    assert source.has_masks
    assert source.has_instances
    assert len(source.object_classes) == 20
    assert set(read(source, 0).objects.flags.tolist()) == {DIFFICULT}


def test_loaders_give_the_same_batches(tmp_path):
    source = open_splits(make_coco(tmp_path / "data", 10, most=4)).train
    sampler = EpochSampler(len(source), 4, 0)
    cached = ImageLoader(source, "cpu", 0, objects=True)
    assert cached.cache is not None
    batches = [list(cached.train_loader(sampler, (0,), 1).iterate_steps(0, 3))]
    cached.cache = None
    batches.append(list(cached.train_loader(sampler, (0,), 1).iterate_steps(0, 3)))
    for first, second in zip(*batches, strict=True):
        for row in range(4):
            count = int((first.objects.classes[row] >= 0).sum())
            for one, other in zip(first.objects[:4], second.objects[:4], strict=True):
                assert (one[row, :count] == other[row, :count]).all()
            planes = second.objects.planes.shape[1]
            assert (first.objects.planes[row, :planes] == second.objects.planes[row]).all()
    assert sum(len(batch.index) for batch in cached.iterate(3)) == len(source)


def first_annotation(content, **changes):
    content["annotations"][0] |= changes


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda content: content.pop("categories"), "is not a COCO file"),
        (lambda content: content["images"].clear(), "lists no images"),
        (lambda content: content["images"][0].update(file_name="../../etc/passwd"), "not inside of its folder"),
        (lambda content: content["images"][0].update(file_name="/etc/passwd"), "not inside of its folder"),
        (lambda content: content["images"][0].update(file_name="gone.png"), "gone.png of .* does not exist"),
        (lambda content: content["images"][0].update(height=1 << 40), "is not a COCO file"),
        (lambda content: content["images"][1].update(id=0), "two images with the same id"),
        (lambda content: content["categories"][1].update(name="box"), "names the class 'box' twice"),
        (lambda content: content["categories"][1].update(id=content["categories"][0]["id"]), "two categories with the same id"),
        (lambda content: content["categories"].clear(), "names 0 classes"),
        (lambda content: content["categories"][1].update(name="x" * 2000), "more than 1,000 characters"),
    ],
)
def test_files_that_cannot_be_opened(change, sentence, tmp_path):
    with pytest.raises(UserError, match=sentence):
        open_sources(change_json(make_coco(tmp_path / "data", 3), change))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"bbox": [1, 2, float("nan"), 4]}, "not a box"),
        ({"bbox": [1, 2, -3, 4]}, "not a box"),
        ({"bbox": [1, 2, 3]}, "annotation 1 of annotations.json is damaged: bbox is not a list of x, y, width and height"),
        ({"category_id": [1]}, "annotation 1 of annotations.json is damaged: a value is missing or has another type"),
        ({"bbox": "large"}, "annotation 1 of annotations.json is damaged"),
        ({"category_id": 1234}, "a category that is not listed"),
        ({"segmentation": [[1, 2, 3]]}, "annotation 1 of annotations.json is damaged: a polygon is a list"),
        ({"segmentation": {"size": [10, 10], "counts": [100]}}, "10 x 10 pixels, but its image 64 x 56"),
        ({"segmentation": {"size": [56, 64], "counts": [7]}}, "run lengths of 7 pixels"),
        ({"segmentation": {"size": [56, 64], "counts": "P" * 9}}, "not COCO's text"),
        ({"segmentation": {"size": [56, 64], "counts": "é" * 9}}, "not COCO's text"),
        ({"segmentation": {"size": [1 << 50, 64], "counts": [7]}}, "impossible size"),
        ({"segmentation": {"counts": [7]}}, "annotation 1 of annotations.json is damaged"),
    ],
)
def test_objects_that_cannot_be_used(changes, sentence, tmp_path):
    folder = make_coco(tmp_path / "data", 3)
    source = open_sources(change_json(folder, lambda content: first_annotation(content, **changes)))["train"]
    problem = read(source, 0)
    assert isinstance(problem, Problem)
    assert sentence in problem.reason
    assert not isinstance(read(source, 1), Problem)


def test_masks_of_images_without_a_listed_size(tmp_path):
    """Run lengths of a few bytes cannot claim gigabytes."""

    def change(content):
        for each in content["images"]:
            del each["width"], each["height"]
        first_annotation(content, segmentation={"size": [11000, 11000], "counts": [11000 * 11000]})

    problem = read(open_sources(change_json(make_coco(tmp_path / "data", 3), change))["train"], 0)
    assert "11000 x 11000 pixels, but its image 64 x 56" in problem.reason


def test_pipes_are_not_opened(tmp_path):
    folder = make_voc(tmp_path / "voc", 3)
    (folder / "Annotations" / "001.xml").unlink()
    os.mkfifo(folder / "Annotations" / "001.xml")
    assert "there is no such file" in read(open_sources(folder)["train"], 1).reason
    folder = make_coco(tmp_path / "coco", 3)
    (folder / "images" / "001.png").unlink()
    os.mkfifo(folder / "images" / "001.png")
    with pytest.raises(UserError, match="not a regular file"):
        open_sources(folder)


def test_annotations_of_strange_types(tmp_path):
    def change(content):
        content["annotations"] += [
            7,
            {"image_id": [0]},
            {"image_id": 0, "id": "x" * 1000, "category_id": {}, "bbox": [1, 2, 3, 4]},
        ]

    source = open_sources(change_json(make_coco(tmp_path / "data", 3), change))["train"]
    assert source.object_notes[0].startswith("2 annotations")
    assert len(read(source, 0).reason) < 200
    assert not isinstance(read(source, 1), Problem)


def test_empty_boxes_are_left_out(tmp_path):
    def change(content):
        for each in content["annotations"]:
            if each["image_id"] == 0:
                each |= {"bbox": [5, 5, 0, 9]} if each["id"] == 1 else {"bbox": [500, 500, 9, 9]}

    source = open_sources(change_json(make_coco(tmp_path / "data", 3), change))["train"]
    assert len(read(source, 0).objects.classes) == 0
    assert ImageReader(source, None, objects=True).read_images(np.arange(3)).objects.classes[0].max() == -1


def test_too_many_objects(tmp_path):
    def change(content):
        content["annotations"] += [content["annotations"][0] | {"image_id": 0}] * 1001

    problem = read(open_sources(change_json(make_coco(tmp_path / "data", 3), change))["train"], 0)
    assert "at most 1,000 are supported" in problem.reason


def test_masks_that_are_too_large_together():
    """Run lengths of some bytes for each object: 7 GB of masks in a file of 55 KB."""
    shape = Rle(np.array([0, 4000 * 4000]), (4000, 4000))
    rows = [{"box": (0, 0, 4000, 4000), "class": 0, "shape": shape if number == 0 else None} for number in range(400)]
    with pytest.raises(ValueError, match="masks of 400 objects of 4000 x 4000 pixels are too large: make the image smaller"):
        decode_objects(make_objects(rows), 4000, 4000)
    with pytest.raises(ValueError, match="masks of 400 objects"):
        decode_objects(replace(make_objects(rows), shapes=(), instances=b""), 4000, 4000)


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ({"size": [56, 64], "counts": 4096}, "neither a list of numbers nor text"),
        ({"size": [56, 64], "counts": [[3584]]}, "neither a list of numbers nor text"),
        ({"size": [1 << 16, 1 << 16], "counts": [0, 1 << 32]}, "a mask of an impossible size"),
    ],
)
def test_run_lengths_that_cannot_be_used(shape, sentence, tmp_path):
    def change(content):
        content["annotations"][0]["segmentation"] = shape

    source = open_sources(change_json(make_coco(tmp_path / "data", 2), change))["train"]
    assert sentence in read(source, 0).reason


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("<annotation><object><name>a</name></object></annotation>", "an object without a name or a box"),
        ("<annotation>", "not XML"),
        ('<!DOCTYPE a [<!ENTITY x "y">]><annotation>&x;</annotation>', "a DTD, entities or CDATA"),
        ("", "not XML"),
        ("x" * (1 << 21), "larger than 1 MiB"),
    ],
)
def test_xml_that_cannot_be_used(text, sentence, tmp_path):
    folder = make_voc(tmp_path / "data", 3)
    (folder / "Annotations" / "001.xml").write_text(text)
    source = open_sources(folder)["train"]
    assert sentence in read(source, 1).reason
    assert not isinstance(read(source, 0), Problem)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("0 0.5 0.5", "neither a box"),
        ("car 0.5 0.5 0.1 0.1", "car is not the number of a class"),
        ("-1 0.5 0.5 0.1 0.1", "-1 is not the number of a class"),
        ("5 0.5 0.5 0.1 0.1", "a category that is not listed"),
        ("0 nan 0.5 0.1 0.1", "not a box"),
        ("0 0.5 0.5 0.1 0.1\n" * 1002, "more than 1,000 objects"),
    ],
)
def test_text_that_cannot_be_used(line, sentence, tmp_path):
    folder = make_yolo(tmp_path / "data", 3, polygons=False)
    (folder / "labels" / "train" / "001.txt").write_text(line)
    source = open_sources(folder)["train"]
    assert not source.has_instances
    assert sentence in read(source, 1).reason


def test_yaml_does_not_expand(tmp_path):
    folder = make_yolo(tmp_path / "data", 2)
    lines = ["a: &a [x, x, x, x, x, x, x, x]"]
    lines += [
        f"{after}: &{after} [*{before}, *{before}, *{before}, *{before}, *{before}, *{before}]"
        for before, after in zip("abcdefgh", "bcdefghi", strict=True)
    ]
    (folder / "data.yaml").write_text("\n".join([*lines, "names: [*i, *i]"]))
    start = time.monotonic()
    with pytest.raises(UserError, match="does not name the classes 0 to 1"):
        open_sources(folder)
    assert time.monotonic() - start < 5


MERGES = ["a0: &a0 {k: 1, l: 2}", *(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 6))]


@pytest.mark.parametrize("line", ["\n".join(MERGES), "x: 1" + ":59" * 50_000, "x: 2026-99-99", "x: !!python/name:os.system 1"])
def test_values_of_yaml_are_only_text(line, tmp_path):
    """Merge keys take memory without limit, numbers of base 60 minutes."""
    folder = make_yolo(tmp_path / "data", 2)
    (folder / "data.yaml").write_text(f"{line}\nnames: {{0: 0x{'f' * 500}, 1: yes}}\n")
    start = time.monotonic()
    assert open_sources(folder)["train"].object_classes == (f"0x{'f' * 500}", "yes")
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("data.yaml", "names: [é, b]".encode("latin-1"), "data.yaml is not UTF-8"),
        ("data.yaml", b"names: [a, b", "data.yaml is not YAML"),
        ("classes.txt", "é\nb\n".encode("latin-1"), "classes.txt is not UTF-8"),
        ("classes.txt", b"\xef\xbb\xbfa\nb\n", ""),
    ],
)
def test_encodings_of_class_names(name, content, sentence, tmp_path):
    folder = make_yolo(tmp_path / "data", 2)
    (folder / "data.yaml").unlink()
    (folder / name).write_bytes(content)
    if sentence:
        with pytest.raises(UserError, match=sentence):
            open_sources(folder)
    else:
        assert open_sources(folder)["train"].object_classes == ("a", "b")


def test_splits_of_voc_have_the_same_classes(tmp_path):
    folder = make_voc(tmp_path / "data", 4)
    (folder / "ImageSets" / "Main").mkdir(parents=True, exist_ok=True)
    for split, stems in {"train": ("000", "001"), "val": ("002", "003")}.items():
        (folder / "ImageSets" / "Main" / f"{split}.txt").write_text("\n".join(stems))
        for stem in stems:
            path = folder / "Annotations" / f"{stem}.xml"
            path.write_text(re.sub("<name>.*?</name>", f"<name>only in {split}</name>", path.read_text()))
    assert {source.object_classes for source in open_sources(folder).values()} == {("only in train", "only in val")}


def test_voc_with_damaged_files_only(tmp_path):
    folder = make_voc(tmp_path / "data", 3)
    for path in (folder / "Annotations").iterdir():
        path.write_text("boxes")
    with pytest.raises(UserError, match=r"000\.xml cannot be used: not XML"):
        check_objects(open_sources(folder)["train"])


@pytest.mark.parametrize("names", ["{0: a, 2: b}", "['', b]", "{x: a}", "[[a], b]"])
def test_yaml_without_a_name_for_each_class(names, tmp_path):
    folder = make_yolo(tmp_path / "data", 2)
    (folder / "data.yaml").write_text(f"names: {names}\n")
    with pytest.raises(UserError, match="does not name the classes 0 to"):
        open_sources(folder)


def test_a_long_name_that_yaml_repeats(tmp_path):
    folder = make_yolo(tmp_path / "data", 2)
    (folder / "data.yaml").write_text(f"x: &x {'n' * 500_000}\nnames: [{'*x, ' * 9000}]\n")
    with pytest.raises(UserError, match="a class name of more than 1,000 characters"):
        open_sources(folder)


def test_data_that_cannot_be_trained_on(tmp_path):
    with pytest.raises(UserError, match="has no boxes"):
        check_objects(open_splits("digits").train)
    none = change_json(make_coco(tmp_path / "none", 4), lambda content: content["annotations"].clear())
    with pytest.raises(UserError, match="has an object to learn from"):
        check_objects(open_sources(none)["train"])
    bad = change_json(
        make_coco(tmp_path / "bad", 4), lambda content: [each.update(category_id=1) for each in content["annotations"]]
    )
    with pytest.raises(UserError, match=r"a category that is not listed \(4 of 4 images like this\)"):
        check_objects(open_sources(bad)["train"])
    missing = make_coco(tmp_path / "missing", 4)
    for number in (1, 2, 3):
        (missing / "images" / f"{number:03}.png").unlink()
    with pytest.raises(UserError, match="cannot be used: No such file or directory"):
        check_objects(open_sources(missing)["train"])


def test_masks_of_objects_are_classes_of_pixels(tmp_path):
    """COCO's polygons can be segmented, too: smaller objects are on top, crowds are ignored."""
    folder = make_coco(tmp_path / "data", 6, most=3)
    change_json(folder, lambda content: first_annotation(content, iscrowd=1))
    source = open_splits(folder).train
    classes = complete_classes([source])
    assert classes.names == ("background", *CLASSES)
    check_masks(source)
    reader = ImageReader(source, None, masks=True, objects=True)
    for index in range(len(source)):
        pixels, mask, objects = reader.read_annotated(index)
        masks = unpack_masks(objects.planes, len(objects.classes))
        assert ((mask > 0) == masks.any(0)).all()
        smallest = int(np.argmin(objects.areas))
        assert set(mask[masks[smallest]].tolist()) == {255 if objects.flags[smallest] else int(objects.classes[smallest]) + 1}
        assert mask.shape == pixels.shape[:2]
    part = ImageReader(Subset(source, np.array([2, 0])), None, masks=True)
    assert (part.read_image(0)[1] == reader.read_annotated(2).mask).all()
    assert not open_sources(folder)["train"].has_masks  # as opened
