"""Folders of images and masks: the layouts of ADE20K, VOC, Cityscapes and CamVid, class names, and what is wrong with masks."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.images import make_image, make_masked_folder, write_mask
from vitrail.data import inspection
from vitrail.data.datasets.lookup import open_sources, open_splits
from vitrail.data.datasets.mask_folder import match_files
from vitrail.data.inspection_report import findings
from vitrail.data.loader import ImageReader, Problem
from vitrail.data.mask_checks import check_masks, complete_classes, scan_ids
from vitrail.data.mask_classes import IGNORE, make_classes, parse_json, read_class_file, write_json
from vitrail.errors import UserError

MASK = np.arange(16 * 16, dtype=np.uint8).reshape(16, 16) % 5


def pair(root, image, mask, ids=MASK):
    make_image(root / image)
    write_mask(root / mask, ids)


def read(source, index=0):
    return ImageReader(source, None, masks=True).read_image(index)[1]


def test_ade20k(tmp_path):
    for split in ("training", "validation"):
        pair(tmp_path, f"images/{split}/ADE_1.jpg", f"annotations/{split}/ADE_1.png")
    rows = ["Idx\tRatio\tTrain\tVal\tStuff\tName", *(f"{n}\t0.1\t10\t1\t1\tthing {n}, other name" for n in range(1, 5))]
    (tmp_path / "objectInfo150.txt").write_text("\n".join(rows))
    sources = open_sources(tmp_path)
    assert set(sources) == {"train", "validation"}
    assert sources["train"].mask_classes.names == ("thing 1", "thing 2", "thing 3", "thing 4")
    assert np.array_equal(read(sources["train"]), np.where(MASK == 0, IGNORE, MASK.astype(int) - 1))


def test_voc(tmp_path):
    root = tmp_path / "VOCdevkit" / "VOC2012"
    for name in ("a", "b", "c"):
        pair(root, f"JPEGImages/{name}.jpg", f"SegmentationClass/{name}.png")
    make_image(root / "JPEGImages" / "without.jpg")
    (root / "ImageSets" / "Segmentation").mkdir(parents=True)
    (root / "ImageSets" / "Segmentation" / "train.txt").write_text("b\na\n")
    (root / "ImageSets" / "Segmentation" / "val.txt").write_text("c\n")
    sources = open_sources(tmp_path)
    assert {split: len(source) for split, source in sources.items()} == {"train": 2, "validation": 1}
    assert sources["train"].location(0).endswith("b.jpg")
    assert sources["train"].unmasked == 1
    assert sources["train"].mask_classes.names[:2] == ("background", "aeroplane")
    assert len(sources["train"].mask_classes.names) == 21
    assert np.array_equal(read(sources["train"]), MASK)


@pytest.mark.parametrize("training_ids", [False, True])
def test_cityscapes(tmp_path, training_ids):
    ids = MASK + 6  # 7 and 8 are road and sidewalk, 6, 9 and 10 are ignored
    for split in ("train", "val"):
        stem = f"{split}/aachen/aachen_0"
        pair(tmp_path, f"leftImg8bit/{stem}_leftImg8bit.png", f"gtFine/{stem}_gtFine_labelIds.png", ids)
        write_mask(tmp_path / f"gtFine/{stem}_gtFine_instanceIds.png", ids)
        if training_ids:
            write_mask(tmp_path / f"gtFine/{stem}_gtFine_labelTrainIds.png", MASK)
    source = open_sources(tmp_path)["validation"]
    assert source.mask_classes.names[:2] == ("road", "sidewalk")
    assert len(source.mask_classes.names) == 19
    expected = MASK if training_ids else np.select([ids == 7, ids == 8], [0, 1], IGNORE)
    assert np.array_equal(read(source), expected)


def test_camvid(tmp_path):
    for split in ("train", "val", "test"):
        pair(tmp_path, f"{split}/0.png", f"{split}annot/0.png", MASK + 7)
    sources = open_sources(tmp_path)
    assert set(sources) == {"train", "validation", "test"}
    assert sources["test"].mask_classes.names[0] == "Sky"
    assert np.array_equal(read(sources["test"]), np.where(MASK + 7 == 11, IGNORE, MASK + 7))


def test_masks_of_colors(tmp_path):
    colors = np.array([(128, 0, 0), (0, 128, 0), (0, 0, 64)], dtype=np.uint8)
    make_image(tmp_path / "train" / "0.png")
    (tmp_path / "train_labels").mkdir()
    Image.fromarray(colors[MASK % 3]).save(tmp_path / "train_labels" / "0_L.png")
    (tmp_path / "class_dict.csv").write_text("name, r, g, b\nwall, 128, 0, 0\nVoid, 0, 128, 0\nroof, 0, 0, 64\n")
    source = open_sources(tmp_path)["train"]
    assert source.mask_classes.names == ("wall", "roof")
    assert np.array_equal(read(source), np.array([0, IGNORE, 1])[MASK % 3])
    (tmp_path / "class_dict.csv").write_text("name,r,g,b\nwall,128,0,0\n")
    with pytest.raises(UserError, match=r"the mask has the color \(0, 0, 64\), which is not the color of a class"):
        check_masks(open_sources(tmp_path)["train"])


def test_splits_with_images_and_masks(tmp_path):
    for split in ("train", "test"):
        pair(tmp_path, f"{split}/images/a.png", f"{split}/masks/a_mask.png")
    sources = open_sources(tmp_path)
    assert set(sources) == {"train", "test"}
    assert complete_classes(list(sources.values())).names == tuple(f"class {n}" for n in range(5))


def test_a_folder_without_split_is_divided(tmp_path):
    splits = open_splits(make_masked_folder(tmp_path, 10))
    assert (len(splits.train), len(splits.validation)) == (8, 2)
    assert splits.validation.mask_classes.names == ("ground", "red", "blue")
    assert not set(splits.train.indices) & set(splits.validation.indices)


def test_class_folders_are_not_masks(tmp_path):
    for name in ("images", "labels", "cats"):
        (tmp_path / name).mkdir()
    make_image(tmp_path / "cats" / "0.png")
    (tmp_path / "labels" / "0.txt").write_text("0 0.5 0.5 1 1")
    assert not open_sources(tmp_path)["train"].has_masks


def test_files_of_class_names(tmp_path):
    for content, names, ids, ignored in (
        ('["a", "b", "void"]', ("a", "b"), (0, 1), {2, 255}),
        ('{"1": "pet", "3": "border"}', ("pet", "border"), (1, 3), {255}),
        ('{"names": {"1": "pet", "3": "border"}, "ignore": [3, 0]}', ("pet",), (1,), {0, 3, 255}),
    ):
        classes = parse_json(content)
        assert (classes.names, classes.ids, classes.ignored) == (names, ids, ignored)
        assert parse_json(write_json(classes)) == classes
    (tmp_path / "classes.txt").write_text("sky\n\nroad\n", encoding="utf-8-sig")  # as Windows' editors save it
    assert read_class_file(str(tmp_path / "classes.txt")).names == ("sky", "road")
    (tmp_path / "classes.txt").write_text("ciel\nbâtiment\n", encoding="latin-1")
    with pytest.raises(UserError, match=r"classes\.txt is not UTF-8: save it in this encoding\.$"):
        read_class_file(str(tmp_path / "classes.txt"))


@pytest.mark.parametrize("content", ["[]", "{", '{"a": "b"}', '["x", "x"]', "3", '{"names": [1], "ignore": 3}', '{"900": "a"}'])
def test_damaged_files_of_class_names(tmp_path, content):
    (tmp_path / "classes.json").write_text(content)
    with pytest.raises(UserError, match=r"classes\.json"):
        read_class_file(str(tmp_path / "classes.json"))


def spoil(folder, what):
    """Make every mask of a folder wrong in one way."""
    for path in (folder / "masks").iterdir():
        mask = np.array(Image.open(path))
        match what:
            case "size":
                write_mask(path, mask[:, : mask.shape[1] // 2])
            case "ids":
                write_mask(path, mask + 3)
            case "ignored":
                write_mask(path, np.full_like(mask, 255))
            case "color":
                Image.fromarray(np.stack([mask, mask * 7, mask], -1)).save(path)


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("size", "the mask has 12 x 20 pixels, but its image 24 x 20, another aspect ratio"),
        ("ids", "the mask has the ids 3-5, but the classes are 0-2 and ignored are 255"),
        ("color", "png cannot be used: a mask must have a palette or be grayscale, but this file is in color: list its colors"),
        ("ignored", "All pixels of the masks of"),
    ],
)
def test_bad_masks_are_one_sentence(tmp_path, what, sentence):
    spoil(make_masked_folder(tmp_path, 6), what)
    source = open_sources(tmp_path)["train"]
    complete_classes([source])
    with pytest.raises(UserError) as caught:
        check_masks(source)
    assert sentence in str(caught.value)
    assert str(caught.value).count(". ") == 0


def test_missing_masks_are_one_sentence(tmp_path):
    make_masked_folder(tmp_path, 6)
    for path in (tmp_path / "masks").iterdir():
        path.rename(path.with_stem(f"other{path.stem}"))
    sentence = r"^None of the 6 masks in \S+ has the name of an image in \S+: give each the name of its image\.$"
    with pytest.raises(UserError, match=sentence):
        open_sources(tmp_path)
    (tmp_path / "masks" / "other000.png").rename(tmp_path / "masks" / "000.png")
    with pytest.raises(UserError, match=r"holds a single image with a mask \(5 without\): add masks, at least 4\.$"):
        open_splits(tmp_path)
    with pytest.raises(UserError, match=r"^digits has no masks: give a folder with images/ and masks/"):
        complete_classes([open_sources("digits")["train"]])


def test_masks_in_one_folder_of_images_in_class_folders(tmp_path):
    for path in ("photos/cat/a.jpg", "photos/cat/b.jpg", "photos/dog/c.jpg", "some/b.png", "some/c.png"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    matched, unmatched = match_files(str(tmp_path / "photos"), str(tmp_path / "some"))
    names = [tuple(Path(file).relative_to(tmp_path).as_posix() for file in pair) for pair in matched]
    assert names == [("photos/cat/b.jpg", "some/b.png"), ("photos/dog/c.jpg", "some/c.png")]
    assert unmatched == (1, 0)
    (tmp_path / "photos" / "dog" / "b.jpg").touch()  # of which cat or dog is b.png?
    assert match_files(str(tmp_path / "photos"), str(tmp_path / "some")) == ([], (4, 2))


def test_a_few_bad_masks_are_skipped(tmp_path):
    make_masked_folder(tmp_path, 6)
    write_mask(tmp_path / "masks" / "000.png", np.full((20, 24), 77, dtype=np.uint8))
    source = open_sources(tmp_path)["train"]
    check_masks(source)
    problem = ImageReader(source, None, masks=True).read_image(0)
    assert isinstance(problem, Problem)
    assert "id 77" in problem.reason
    assert scan_ids(source) == [0, 1, 2, 77, 255]


def test_inspection_finds_what_is_wrong(tmp_path):
    make_masked_folder(tmp_path, 8)
    write_mask(tmp_path / "masks" / "000.png", np.full((20, 24), 77, dtype=np.uint8))
    write_mask(tmp_path / "masks" / "001.png", np.zeros((40, 48), dtype=np.uint8))
    write_mask(tmp_path / "masks" / "002.png", np.full((20, 24), 255, dtype=np.uint8))
    os.remove(tmp_path / "masks" / "003.png")
    report = inspection.inspect("data", open_sources(tmp_path), workers=0)
    masks = report.splits["train"].mask_report
    assert {row["name"]: row["images"] for row in masks.classes} == {"ground": 5, "red": 4, "blue": 4}
    assert sum(row["share"] for row in masks.classes) == pytest.approx(1)
    messages = "\n".join(findings(report))
    assert "Masks of train have ids that are not classes: 77, first 77 in" in messages
    assert "1 image of train has a mask of another size than the image, first" in messages
    assert "2 images of train have a mask without any class" in messages
    assert "1 image of train without a mask" in messages
    assert json.dumps(report.to_dict())


def test_ids_of_unnamed_classes_are_those_that_occur():
    assert make_classes({3: "a", 7: "b"}).table[[3, 7, 255, 4]].tolist() == [0, 1, IGNORE, 254]
