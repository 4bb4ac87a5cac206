"""Data without labels, or with labels that cannot be trained on, opens and is split in every format."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.data.test_datasets import png, write_folder, write_parquet, write_tar
from tests.images import make_folder, make_image, write_invalid_image
from vitrail.data.datasets.lookup import check_trainable, check_usable, open_source, open_sources, open_splits, require_labels
from vitrail.data.image_loader import ImageLoader
from vitrail.data.sampler import EpochSampler
from vitrail.data.source import Splits
from vitrail.errors import UserError
from vitrail.recipes import lookup
from vitrail.tasks.classification import Classification
from vitrail.training.task import Task

COUNTS = {"train": 8, "val": 3}


def write_flat(root: Path, count: int) -> Path:
    root.mkdir(parents=True)
    for number in range(count):
        (root / f"{number}.png").write_bytes(png(number))
    return root


def flat_folder(root: Path) -> Path:
    return write_flat(root / "photos", COUNTS["train"])


def flat_splits(root: Path) -> Path:
    for name, count in COUNTS.items():
        write_flat(root / "photos" / name, count)
    return root / "photos"


def flat_tar(root: Path) -> Path:
    return Path(write_tar(root / "a.tar", [(f"{number}.png", png(number)) for number in range(COUNTS["train"])]))


def tar_splits(root: Path) -> Path:
    for name, count in COUNTS.items():
        write_tar(root / f"{name}-0.tar", [(f"{number}.png", png(number)) for number in range(count)])
    return root


def flat_parquet(root: Path) -> Path:
    parquet.write_table(pa.table({"image": [png(number) for number in range(COUNTS["train"])]}), root / "a.parquet")
    return root / "a.parquet"


def parquet_splits(root: Path) -> Path:
    for name, count in COUNTS.items():
        parquet.write_table(pa.table({"image": [png(number) for number in range(count)]}), root / f"{name}-0.parquet")
    return root


def flat_csv(root: Path) -> Path:
    write_flat(root / "p", COUNTS["train"])
    (root / "t.csv").write_text("path\n" + "".join(f"p/{number}.png\n" for number in range(COUNTS["train"])))
    return root / "t.csv"


def tsv_splits(root: Path) -> Path:
    write_flat(root / "p", sum(COUNTS.values()))
    splits = [name for name, count in COUNTS.items() for _ in range(count)]
    (root / "t.tsv").write_text("path\tsplit\n" + "".join(f"p/{number}.png\t{name}\n" for number, name in enumerate(splits)))
    return root / "t.tsv"


def images(parts: Splits) -> list[bytes]:
    return [bytes(part.encoded(index)) for part in parts[:2] for index in range(len(part))]


@pytest.mark.parametrize("write", [flat_folder, flat_tar, flat_parquet, flat_csv])
def test_every_format_is_split(tmp_path, write):
    path = write(tmp_path)
    splits = open_splits(path)
    assert [len(part) for part in splits[:2]] == [6, 2]
    assert splits.train.label is splits.validation.label is None
    assert splits.train.classes == []
    assert sorted(images(splits)) == sorted(png(number) for number in range(8))
    assert images(open_splits(path)) == images(splits)
    assert images(open_splits(path, seed=1)) != images(splits)
    folds = [open_splits(path, fold=(number, 4)).validation for number in range(4)]
    assert sorted(bytes(part.encoded(index)) for part in folds for index in range(2)) == sorted(images(splits))


@pytest.mark.parametrize("write", [flat_splits, tar_splits, parquet_splits, tsv_splits])
def test_every_format_has_its_own_validation_split(tmp_path, write):
    splits = open_splits(write(tmp_path))
    assert [len(part) for part in splits[:2]] == [8, 3]
    assert splits.train.label is splits.validation.label is splits.test is None


@pytest.mark.parametrize("expected", [[1, 1], [2, 1], [2, 2], [7, 2], [12, 2], [36, 4]])
def test_a_split_of_few_images(tmp_path, expected):
    splits = open_splits(write_flat(tmp_path / "p", sum(expected)))
    assert [len(part) for part in splits[:2]] == expected
    if min(expected) >= 2:
        Task.check_data(lookup("laptop"), splits)
        return
    message = f"p has too few images: {expected[0]} images? for training and 1 for validation; add images until"
    with pytest.raises(UserError, match=message):
        Task.check_data(lookup("laptop"), splits)


def test_a_large_fraction_leaves_training_images(tmp_path):
    splits = open_splits(write_flat(tmp_path / "p", 4), validation_fraction=0.9)
    assert [len(part) for part in splits[:2]] == [1, 3]


def test_no_image_and_one_image(tmp_path):
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "notes.txt").write_text("x")
    with pytest.raises(UserError, match=r"none holds no images \(1 file skipped: 1 \.txt\): give a folder .* no labels\.$"):
        open_splits(tmp_path / "none")
    with pytest.raises(UserError, match=r"one holds a single image: add images, at least 4\.$"):
        open_splits(write_flat(tmp_path / "one", 1))
    write_flat(tmp_path / "both" / "train", 5)
    write_flat(tmp_path / "both" / "val", 1)
    with pytest.raises(UserError, match="5 images for training and 1 for validation"):
        Task.check_data(lookup("laptop"), open_splits(tmp_path / "both"))


def test_one_class(tmp_path):
    splits = open_splits(make_folder(tmp_path, ["all"], 8))
    assert [len(part) for part in splits[:2]] == [6, 2]
    assert splits.train.classes == ["all"]
    Task.check_data(lookup("laptop"), splits)
    with pytest.raises(
        UserError, match=r"only one class \(all\): .*, or train without labels with --recipe dino_small or grafit_small\.$"
    ):
        Classification.check_data(lookup("laptop"), splits)


def test_classification_names_both_ways_out(tmp_path):
    with pytest.raises(UserError, match=r"no labels: put the images into one folder per class .* --recipe dino_small\.$"):
        Classification.check_data(lookup("laptop"), open_splits(write_flat(tmp_path / "p", 8)))


def test_classes_of_single_images(tmp_path):
    splits = open_splits(write_folder(tmp_path, dict.fromkeys("abcdef", 1)))
    assert [len(part) for part in splits[:2]] == [4, 2]
    Task.check_data(lookup("laptop"), splits)
    with pytest.raises(UserError, match="too few images per class to use 10 % for validation: add images or a val folder"):
        Classification.check_data(lookup("laptop"), splits)


def test_hidden_files_and_other_files(tmp_path):
    root = write_flat(tmp_path / "p", 4)
    for name in (".hidden.png", "._0.png", "notes.txt"):
        (root / name).write_bytes(b"x")
    (root / "__MACOSX").mkdir()
    (root / "empty").mkdir()
    source = open_source(root)
    assert (len(source), source.skipped, source.label) == (4, ("notes.txt",), None)


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_have_no_labels_and_unreadable_images_are_counted(tmp_path, workers):
    root = tmp_path / "p"
    for number in range(7):
        make_image(root / f"{number}.png", size=(8, 8))
    write_invalid_image(root / "bad.jpg")
    messages: list[str] = []
    loader = ImageLoader(open_source(root), "cpu", workers, log=messages.append)
    try:
        for batch in loader.train_loader(EpochSampler(8, 8, 0), range(1), 1).iterate_steps(0, 1):
            assert batch.to("cpu").labels is None
            assert batch.pixels.shape == (8, 3, 8, 8)
        shown = [index for batch in loader.iterate(4) for index in batch.index.tolist()]
    finally:
        loader.close()
    assert len(shown) == 7
    assert any("1 unreadable image" in message and "bad.jpg" in message for message in messages)


def empty_class(root: Path) -> object:
    (root / "empty").mkdir()
    return write_folder(root, {"a": 4, "b": 4})


def class_of_validation_only(root: Path) -> object:
    write_folder(root / "train", {"a": 4, "b": 4})
    write_folder(root / "val", {"a": 2, "c": 2})
    return root


def classes_that_differ_in_case(root: Path) -> object:
    return write_folder(root, {"Cats": 4, "cats": 4})


def classes_spelled_alike(root: Path) -> object:
    return write_folder(root, {"caf\u00e9": 4, "cafe\u0301": 4})


def parquet_with_a_missing_label(root: Path) -> object:
    return write_parquet(root / "a.parquet", [0, 1, None, 1, 0, 1, 0, 1])


def parquet_with_several_labels(root: Path) -> object:
    return write_parquet(root / "a.parquet", [[0, 1]] * 8)


def parquet_with_identifiers(root: Path) -> object:
    return write_parquet(root / "a.parquet", [10**9 + number for number in range(8)])


def tar_with_a_missing_label(root: Path) -> object:
    return write_tar(root / "a.tar", [("0.cls", b"1"), *((f"{number}.png", png(number)) for number in range(8))])


def table_with_a_missing_label(root: Path) -> object:
    write_flat(root / "p", 8)
    (root / "t.csv").write_text("path,label\n" + "".join(f"p/{number}.png,{'a' * (number % 3)}\n" for number in range(8)))
    return root / "t.csv"


CLASS_DEFECTS = {
    empty_class: "The class folder .*empty holds no images: add some or remove it",
    class_of_validation_only: "The class c of .*val is not a class of the training split",
    classes_that_differ_in_case: "Cats and cats of .* differ only in case",
    classes_spelled_alike: "same name after Unicode normalization",
}
COLUMN_DEFECTS = {
    parquet_with_a_missing_label: "1 of 8 labels are missing in the column label of .*, first at row 2",
    parquet_with_several_labels: "has the type list<.*, not one class per image",
    parquet_with_identifiers: "go up to 1000000007, which is not a class index",
    tar_with_a_missing_label: "7 of 8 labels are missing in label of",
    table_with_a_missing_label: "3 of 8 labels are missing in the column label of",
}


@pytest.mark.parametrize("write", CLASS_DEFECTS | COLUMN_DEFECTS)
def test_defects_of_labels_are_refused_by_classification_only(tmp_path, write):
    splits = open_splits(str(write(tmp_path)))
    Task.check_data(lookup("laptop"), splits)
    assert len(splits.train) + len(splits.validation) >= 8
    with pytest.raises(UserError, match=(CLASS_DEFECTS | COLUMN_DEFECTS)[write]):
        Classification.check_data(lookup("laptop"), splits)


@pytest.mark.parametrize("write", COLUMN_DEFECTS)
def test_an_unusable_label_column_gives_no_labels(tmp_path, write):
    source = open_source(str(write(tmp_path)))
    assert source.label is None
    with pytest.raises(UserError, match=COLUMN_DEFECTS[write]):
        require_labels(source)


def test_folders_with_the_same_name_are_one_class(tmp_path):
    label = require_labels(open_source(classes_spelled_alike(tmp_path)))
    assert (label.names, label.values.tolist()) == (["caf\u00e9"], [0] * 8)


def test_usable_labels_have_no_defects(tmp_path):
    sources = open_sources(make_folder(tmp_path, count=4))
    check_usable(sources.values())
    check_trainable(sources["train"])
    assert np.bincount(require_labels(sources["train"]).values).tolist() == [4, 4, 4]


def test_a_label_column_is_not_lost_when_packed(tmp_path, cli_error):
    path = parquet_with_a_missing_label(tmp_path)
    assert "1 of 8 labels are missing" in cli_error("data", "pack", path, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()
