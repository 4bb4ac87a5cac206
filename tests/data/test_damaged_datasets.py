"""Invalid data raises a one-line error that names the path and what to do."""

import gzip
import io
import os
import pickle
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.data.test_datasets import FEATURES, png, samples, write_cifar, write_folder, write_idx, write_parquet, write_tar
from vitrail.data.datasets.cifar import read_pickle
from vitrail.data.datasets.lookup import check_trainable, check_usable, open_source, open_sources, open_splits
from vitrail.errors import UserError

Damage = Callable[[Path], object]  # makes files in a folder; gives the path to open if it is not that folder
DAMAGES: list[tuple[Damage, str]] = []


def message(pattern: str) -> Callable[[Damage], Damage]:
    def note(damage: Damage) -> Damage:
        DAMAGES.append((damage, pattern))
        return damage

    return note


@message(".*missing does not exist: check the spelling")
def missing_path(root: Path) -> object:
    return root / "missing"


@message("holds no images: give a folder with one folder")
def empty_folder(root: Path) -> object:
    return None


@message("holds no images")
def folder_without_images(root: Path) -> object:
    (root / "a").mkdir()
    (root / "a" / "notes.txt").write_text("x")
    return root


@message("The class folder .*b holds no images: add some or remove it")
def empty_class(root: Path) -> object:
    (root / "b").mkdir()
    return write_folder(root, {"a": 1})


@message("Cats and cats of .* differ only in case")
def classes_that_differ_in_case(root: Path) -> object:
    return write_folder(root, {"Cats": 1, "cats": 1})


@message("same name after Unicode normalization: merge or rename")
def classes_spelled_alike(root: Path) -> object:
    return write_folder(root, {"caf\u00e9": 1, "cafe\u0301": 1})


@message("The class c of .*val is not a class of the training split: add it there")
def unknown_class_in_validation(root: Path) -> object:
    write_folder(root / "train", {"a": 1, "b": 1})
    return write_folder(root / "val", {"c": 1}) and root


@message("two folders for the validation split, val and valid: keep one")
def two_validation_folders(root: Path) -> object:
    for name in ("train", "val", "valid"):
        write_folder(root / name, {"a": 1})
    return root


@message(r"a.zip has an unknown format: give a folder of class folders, Parquet files, .* or digits\.")
def unknown_kind(root: Path) -> object:
    (root / "a.zip").write_bytes(b"PK")
    return root / "a.zip"


@message(r"a.jpg is a single image: give the folder that contains one folder of images per class\.")
def single_image(root: Path) -> object:
    (root / "a.jpg").write_bytes(b"\xff\xd8\xff")
    return root / "a.jpg"


@message("has no image column .only label.: rename a column of bytes to image")
def parquet_without_images(root: Path) -> object:
    parquet.write_table(pa.table({"label": [1, 2]}), root / "a.parquet")
    return root / "a.parquet"


@message("a.parquet is damaged or not a Parquet file")
def parquet_of_noise(root: Path) -> object:
    (root / "a.parquet").write_bytes(bytes(range(256)) * 9)
    return root


@message("a.parquet is damaged or not a Parquet file")
def parquet_cut_off(root: Path) -> object:
    path = Path(write_parquet(root / "a.parquet", [0, 1]))
    path.write_bytes(path.read_bytes()[:-20])
    return path


@message("a.parquet is damaged or not a Parquet file")
def parquet_of_nothing(root: Path) -> object:
    (root / "a.parquet").write_bytes(b"")
    return root


@message("holds no images: give Parquet files")
def parquet_without_rows(root: Path) -> object:
    schema = pa.schema([("image", pa.binary()), ("label", pa.int64())])
    parquet.write_table(schema.empty_table(), root / "a.parquet")
    return root


@message("The huggingface metadata of .* is damaged")
def parquet_with_damaged_description(root: Path) -> object:
    table = pa.table({"image": [b"x"], "label": [0]}).replace_schema_metadata({"huggingface": "{"})
    parquet.write_table(table, root / "a.parquet")
    return root


@message("The label 5 in the column label of .* is out of range: only 2 classes have names")
def label_out_of_range(root: Path) -> object:
    return write_parquet(root / "a.parquet", [0, 5], FEATURES)


@message("Row 1 of the column label of .* has the negative label -3: number the classes from 0")
def label_negative(root: Path) -> object:
    return write_parquet(root / "a.parquet", [0, -3], FEATURES)


@message("1 of 3 labels are missing in the column label of .*, first at row 1")
def label_missing(root: Path) -> object:
    return write_parquet(root / "a.parquet", [0, None, 1], FEATURES)


@message("has the type double, not one class per image: use integers or text")
def label_of_fractions(root: Path) -> object:
    return write_parquet(root / "a.parquet", [0.5, 1.0])


@message("go up to 1000000000, which is not a class index")
def label_that_is_an_identifier(root: Path) -> object:
    return write_parquet(root / "a.parquet", [0, 1_000_000_000])


@message("The class name dog occurs twice in the column label")
def duplicate_class_names(root: Path) -> object:
    return write_parquet(root / "a.parquet", [0, 1], {"label": {"names": ["dog", "dog"], "_type": "ClassLabel"}})


@message("have different columns or class names")
def shards_that_disagree(root: Path) -> object:
    write_parquet(root / "train-0.parquet", [0, 1], FEATURES)
    write_parquet(root / "train-1.parquet", [0, 1], {"label": {"names": ["dog", "cat"], "_type": "ClassLabel"}})
    return root


@message("files with and without a split in their name .other.parquet.")
def shards_with_and_without_split(root: Path) -> object:
    write_parquet(root / "train-0.parquet", [0, 1])
    write_parquet(root / "other.parquet", [0, 1])
    return root


@message(r"member with an unsafe path, '\.\./evil.png'")
def tar_that_escapes(root: Path) -> object:
    return write_tar(root / "a.tar", [*samples(0, 1), ("../evil.png", png(1))])


@message("member with an unsafe path, '/etc/evil.png'")
def tar_with_absolute_name(root: Path) -> object:
    return write_tar(root / "a.tar", [("/etc/evil.png", png(1))])


@message("a.tar is truncated or damaged at 'a.png'")
def tar_cut_off(root: Path) -> object:
    path = Path(write_tar(root / "a.tar", [("a.png", os.urandom(5000))]))
    path.write_bytes(path.read_bytes()[:3000])
    return path


@message("a.tar is truncated or damaged at byte 2048")
def tar_with_a_damaged_member(root: Path) -> object:
    path = Path(write_tar(root / "a.tar", samples(0, 4)))
    data = bytearray(path.read_bytes())
    data[2048:2100] = b"?" * 52
    path.write_bytes(data)
    return path


@message("a.tar is damaged or not an uncompressed tar")
def tar_that_is_compressed_inside(root: Path) -> object:
    (root / "a.tar").write_bytes(gzip.compress(b"x" * 10_000))
    return root


@message("a.tar.gz is a compressed tar, which has no random access: decompress it")
def tar_compressed(root: Path) -> object:
    tarfile.open(root / "a.tar.gz", "w:gz").close()
    return root / "a.tar.gz"


@message("a.tar holds no images")
def tar_without_images(root: Path) -> object:
    return write_tar(root / "a.tar", [("a.cls", b"1")])


@message("labels are missing in label of")
def tar_with_a_missing_label(root: Path) -> object:
    return write_tar(root / "a.tar", [*samples(0, 2), ("b.png", png(1))])


@message("'a.json' in .*a.tar is not valid JSON")
def tar_with_damaged_json(root: Path) -> object:
    return write_tar(root / "a.tar", [("a.png", png(1)), ("a.json", b"{")])


@message("2 of the 3 shards of .* do not exist, first .*a-1.tar")
def tar_pattern_with_missing_shards(root: Path) -> object:
    write_tar(root / "a-0.tar", samples(0, 1))
    return root / "a-{0..2}.tar"


@message("data_batch_1 is damaged or unsafe .it refers to .*system, which is not data.")
def pickle_that_runs_code(root: Path) -> object:
    write_cifar(root / "c", hundred=False, binary=False)
    (root / "c" / "data_batch_1").write_bytes(b"cos\nsystem\n(S'touch " + os.fsencode(root / "ran") + b"'\ntR.")
    return root / "c"


@message("test_batch is damaged or unsafe .*: download it again")
def pickle_cut_off(root: Path) -> object:
    write_cifar(root / "c", hundred=False, binary=False)
    path = root / "c" / "test_batch"
    path.write_bytes(path.read_bytes()[:500])
    return root / "c"


@message("data_batch_1 is not a CIFAR batch: it has no array of 3072 bytes")
def pickle_of_something_else(root: Path) -> object:
    (root / "data_batch_1").write_bytes(pickle.dumps({"data": np.zeros((2, 5)), "labels": [0, 1]}))
    return root


@message("test.bin is truncated: its size of .* bytes is not a multiple of 3074")
def cifar_binary_cut_off(root: Path) -> object:
    write_cifar(root / "c", hundred=True, binary=True)
    path = root / "c" / "test.bin"
    path.write_bytes(path.read_bytes()[:-1])
    return root / "c"


def idx_pair(root: Path, ending: str = "") -> Path:
    write_idx(root / f"train-images-idx3-ubyte{ending}", np.random.default_rng(0).integers(0, 256, (9, 8, 8)))
    write_idx(root / f"train-labels-idx1-ubyte{ending}", np.arange(9))
    return root / f"train-images-idx3-ubyte{ending}"


@message("train-images-idx3-ubyte is truncated or damaged: it is shorter than its header states")
def idx_cut_off(root: Path) -> object:
    path = idx_pair(root)
    path.write_bytes(path.read_bytes()[:-7])
    return root


@message("ubyte.gz is damaged: its compressed data is truncated or invalid")
def idx_compressed_cut_off(root: Path) -> object:
    path = idx_pair(root, ".gz")
    path.write_bytes(path.read_bytes()[:100])
    return root


@message("is not an IDX file of bytes with 3 dimensions")
def idx_of_something_else(root: Path) -> object:
    idx_pair(root).write_bytes(b"<html>not found</html>")
    return root


@message("contains 9 images but .* contains 8 labels")
def idx_with_too_few_labels(root: Path) -> object:
    idx_pair(root)
    write_idx(root / "train-labels-idx1-ubyte", np.arange(8))
    return root


@message("add train-labels-idx1-ubyte to the same folder")
def idx_without_labels(root: Path) -> object:
    idx_pair(root)
    (root / "train-labels-idx1-ubyte").unlink()
    return root


def table(root: Path, text: str | bytes) -> Path:
    write_folder(root, {"p": 2})
    (root / "t.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    return root / "t.csv"


@message("t.csv has no path column: rename one of its columns .name, label. to path, file or image")
def table_without_paths(root: Path) -> object:
    return table(root, "name,label\na,b\n")


@message("2 of the 3 files in .*t.csv do not exist, first gone/1.png")
def table_with_missing_files(root: Path) -> object:
    return table(root, "path,label\np/0.png,a\ngone/1.png,b\ngone/2.png,b\n")


@message("Line 2 of .*t.csv refers to a path outside of its folder")
def table_that_escapes(root: Path) -> object:
    return table(root, "path,label\np/../../x.png,a\n")


@message("Line 3 of .*t.csv has 3 fields but the header has 2")
def table_with_a_long_line(root: Path) -> object:
    return table(root, "path,label\np/0.png,a\np/1.png,b,c\n")


@message("t.csv is not UTF-8 text")
def table_in_another_encoding(root: Path) -> object:
    return table(root, "path,label\np/0.png,é\n".encode("latin1"))


@message("t.csv has two columns named label")
def table_with_a_column_twice(root: Path) -> object:
    return table(root, "path,label,Label\np/0.png,a,b\n")


@message("Line 2 of .*t.csv has an unknown split: write train, validation or test in split")
def table_with_an_unknown_split(root: Path) -> object:
    return table(root, "path,label,split\np/0.png,a,holdout\n")


@message("t.csv is empty: write a header")
def table_of_nothing(root: Path) -> object:
    return table(root, "")


@message("t.csv has no rows")
def table_without_rows(root: Path) -> object:
    return table(root, "path,label\n")


@message("1 of 2 labels are missing in the column label")
def table_with_a_missing_label(root: Path) -> object:
    return table(root, "path,label\np/0.png,a\np/1.png,\n")


@message("hf://only is not a valid hub address: write hf://owner/name")
def hub_address_too_short(root: Path) -> object:
    return "hf://only"


@pytest.mark.parametrize(("damage", "pattern"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_error_messages(tmp_path: Path, damage: Damage, pattern: str) -> None:
    path = str(damage(tmp_path) or tmp_path)
    with pytest.raises(UserError, match=pattern) as caught:
        check_usable(open_sources(path).values())
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")
    assert str(tmp_path) in text or path in text
    assert not (tmp_path / "ran").exists()


def test_many_kinds_of_damage_are_covered() -> None:
    assert len({damage for damage, _ in DAMAGES}) >= 20


def test_a_folder_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("os.scandir", refuse)  # root ignores permissions
    with pytest.raises(UserError, match="cannot be read: change its permissions"):
        open_source(str(tmp_path))


def test_untrainable_data(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {"all": 30})
    with pytest.raises(UserError, match=r"has only one class \(all\)"):
        check_trainable(open_source(root))
    with pytest.raises(UserError, match="has no labels: put the images into one folder per class"):
        check_trainable(open_source(f"{root}/all"))
    splits = open_splits(write_folder(tmp_path / "few", {"x": 1, "y": 9}))
    check_trainable(splits.train)
    with pytest.raises(UserError, match="of its 2 classes only y is in both the training and the validation split"):
        check_trainable(splits.validation)


def test_missing_splits(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "a", {"x": 2, "y": 2})
    with pytest.raises(UserError, match="has no test split, only train"):
        open_source(root, "test")
    with pytest.raises(UserError, match="Unknown split holdout"):
        open_source(root, "holdout")
    with pytest.raises(UserError, match="too few images per class to use 10 % for validation"):
        open_splits(write_folder(tmp_path / "single", {"x": 1, "y": 1}))
    for name in ("val", "test"):
        write_folder(tmp_path / "b" / name, {"x": 1})
    with pytest.raises(UserError, match="has only test and validation splits: add a train split"):
        open_splits(str(tmp_path / "b"))


def test_hub_without_network_or_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("no route\nsecond line")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(UserError, match=r"hf://a/b could not be downloaded \(no route\): check the name and the network\.$"):
        open_source("hf://a/b")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match="needs huggingface_hub"):
        open_source("hf://a/b")


def test_missing_images_raise_when_read(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"image": [png(1), None], "label": [0, 1]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"row 1 of .*a.parquet has no image"):
        open_source(str(tmp_path)).encoded(1)
    source = open_source(write_folder(tmp_path / "f", {"a": 1}))
    os.unlink(source.location(0))
    with pytest.raises(OSError, match="No such file"):
        source.encoded(0)


@pytest.mark.parametrize("value", [print, io.BytesIO, pickle.Unpickler, Path("/")])
def test_the_unpickler_accepts_only_data(tmp_path: Path, value: object) -> None:
    (tmp_path / "p").write_bytes(pickle.dumps({"data": value}))
    with pytest.raises(UserError, match="which is not data"):
        read_pickle(str(tmp_path / "p"))
