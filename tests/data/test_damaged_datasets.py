"""Everything that can be wrong with data ends in one sentence that names the path and says what to do."""

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
from vitrail.data.datasets.lookup import check_trainable, open_source, open_splits
from vitrail.errors import UserError

Damage = Callable[[Path], object]  # makes files in a folder; gives the path to open if it is not that folder
DAMAGES: list[tuple[Damage, str]] = []


def sentence(pattern: str) -> Callable[[Damage], Damage]:
    def note(damage: Damage) -> Damage:
        DAMAGES.append((damage, pattern))
        return damage

    return note


@sentence("There is nothing at .*missing: check the spelling")
def missing_path(root: Path) -> object:
    return root / "missing"


@sentence("holds no images: give a folder with one folder")
def empty_folder(root: Path) -> object:
    return None


@sentence("holds no images")
def folder_without_images(root: Path) -> object:
    (root / "a").mkdir()
    (root / "a" / "notes.txt").write_text("x")
    return root


@sentence("The class folder .*b holds no images: fill it or remove it")
def empty_class(root: Path) -> object:
    (root / "b").mkdir()
    return write_folder(root, {"a": 1})


@sentence("Cats and cats of .* differ only in upper and lower case")
def classes_that_differ_in_case(root: Path) -> object:
    return write_folder(root, {"Cats": 1, "cats": 1})


@sentence("duplicate class names: join or rename")
def classes_spelled_alike(root: Path) -> object:
    return write_folder(root, {"caf\u00e9": 1, "cafe\u0301": 1})


@sentence("The class c of .*val is not among the training classes: add it there")
def unknown_class_in_validation(root: Path) -> object:
    write_folder(root / "train", {"a": 1, "b": 1})
    return write_folder(root / "val", {"c": 1}) and root


@sentence("two folders for the validation split, val and valid: keep one")
def two_validation_folders(root: Path) -> object:
    for name in ("train", "val", "valid"):
        write_folder(root / name, {"a": 1})
    return root


@sentence(r"a.zip is of an unknown kind: give a folder of class folders, Parquet files, .* or digits\.")
def unknown_kind(root: Path) -> object:
    (root / "a.zip").write_bytes(b"PK")
    return root / "a.zip"


@sentence("has no column of images .only label.: name a column of bytes image")
def parquet_without_images(root: Path) -> object:
    parquet.write_table(pa.table({"label": [1, 2]}), root / "a.parquet")
    return root / "a.parquet"


@sentence("a.parquet is damaged or no Parquet file")
def parquet_of_noise(root: Path) -> object:
    (root / "a.parquet").write_bytes(bytes(range(256)) * 9)
    return root


@sentence("a.parquet is damaged or no Parquet file")
def parquet_cut_off(root: Path) -> object:
    path = Path(write_parquet(root / "a.parquet", [0, 1]))
    path.write_bytes(path.read_bytes()[:-20])
    return path


@sentence("a.parquet is damaged or no Parquet file")
def parquet_of_nothing(root: Path) -> object:
    (root / "a.parquet").write_bytes(b"")
    return root


@sentence("holds no images: give Parquet files")
def parquet_without_rows(root: Path) -> object:
    schema = pa.schema([("image", pa.binary()), ("label", pa.int64())])
    parquet.write_table(schema.empty_table(), root / "a.parquet")
    return root


@sentence("The description of the columns in .* is damaged")
def parquet_with_damaged_description(root: Path) -> object:
    table = pa.table({"image": [b"x"], "label": [0]}).replace_schema_metadata({"huggingface": "{"})
    parquet.write_table(table, root / "a.parquet")
    return root


@sentence("The label 5 in the column label of .* is out of range: only 2 classes have names")
def label_out_of_range(root: Path) -> object:
    return write_parquet(root / "a.parquet", [0, 5], FEATURES)


@sentence("Row 1 of the column label of .* has the negative label -3: number the classes from 0")
def label_negative(root: Path) -> object:
    return write_parquet(root / "a.parquet", [0, -3], FEATURES)


@sentence("1 of 3 labels are missing in the column label of .*, first at row 1")
def label_missing(root: Path) -> object:
    return write_parquet(root / "a.parquet", [0, None, 1], FEATURES)


@sentence("holds double and not one class per image: use whole numbers or text")
def label_of_fractions(root: Path) -> object:
    return write_parquet(root / "a.parquet", [0.5, 1.0])


@sentence("go up to 1000000000, which cannot be a class")
def label_that_is_an_identifier(root: Path) -> object:
    return write_parquet(root / "a.parquet", [0, 1_000_000_000])


@sentence("The class name dog occurs twice in the column label")
def duplicate_class_names(root: Path) -> object:
    return write_parquet(root / "a.parquet", [0, 1], {"label": {"names": ["dog", "dog"], "_type": "ClassLabel"}})


@sentence("have other columns or class names")
def shards_that_disagree(root: Path) -> object:
    write_parquet(root / "train-0.parquet", [0, 1], FEATURES)
    write_parquet(root / "train-1.parquet", [0, 1], {"label": {"names": ["dog", "cat"], "_type": "ClassLabel"}})
    return root


@sentence("files with a split in their name and others without .other.parquet.")
def shards_with_and_without_split(root: Path) -> object:
    write_parquet(root / "train-0.parquet", [0, 1])
    write_parquet(root / "other.parquet", [0, 1])
    return root


@sentence(r"member that leads out of it, '\.\./evil.png'")
def tar_that_escapes(root: Path) -> object:
    return write_tar(root / "a.tar", [*samples(0, 1), ("../evil.png", png(1))])


@sentence("member that leads out of it, '/etc/evil.png'")
def tar_with_absolute_name(root: Path) -> object:
    return write_tar(root / "a.tar", [("/etc/evil.png", png(1))])


@sentence("a.tar is truncated or damaged at 'a.png'")
def tar_cut_off(root: Path) -> object:
    path = Path(write_tar(root / "a.tar", [("a.png", os.urandom(5000))]))
    path.write_bytes(path.read_bytes()[:3000])
    return path


@sentence("a.tar is truncated or damaged at byte 2048")
def tar_with_a_damaged_member(root: Path) -> object:
    path = Path(write_tar(root / "a.tar", samples(0, 4)))
    data = bytearray(path.read_bytes())
    data[2048:2100] = b"?" * 52
    path.write_bytes(data)
    return path


@sentence("a.tar is damaged or no uncompressed tar")
def tar_that_is_compressed_inside(root: Path) -> object:
    (root / "a.tar").write_bytes(gzip.compress(b"x" * 10_000))
    return root


@sentence("a.tar.gz is a compressed tar, in which no image can be reached: unpack it")
def tar_compressed(root: Path) -> object:
    tarfile.open(root / "a.tar.gz", "w:gz").close()
    return root / "a.tar.gz"


@sentence("a.tar holds no images")
def tar_without_images(root: Path) -> object:
    return write_tar(root / "a.tar", [("a.cls", b"1")])


@sentence("labels are missing in label of")
def tar_with_a_missing_label(root: Path) -> object:
    return write_tar(root / "a.tar", [*samples(0, 2), ("b.png", png(1))])


@sentence("'a.json' in .*a.tar is not readable JSON")
def tar_with_damaged_json(root: Path) -> object:
    return write_tar(root / "a.tar", [("a.png", png(1)), ("a.json", b"{")])


@sentence("2 of the 3 shards of .* do not exist, first .*a-1.tar")
def tar_pattern_with_missing_shards(root: Path) -> object:
    write_tar(root / "a-0.tar", samples(0, 1))
    return root / "a-{0..2}.tar"


@sentence("data_batch_1 is damaged or unsafe .it asks for .*system, which is not data.")
def pickle_that_runs_code(root: Path) -> object:
    write_cifar(root / "c", hundred=False, binary=False)
    (root / "c" / "data_batch_1").write_bytes(b"cos\nsystem\n(S'touch " + os.fsencode(root / "ran") + b"'\ntR.")
    return root / "c"


@sentence("test_batch is damaged or unsafe .*: download it again")
def pickle_cut_off(root: Path) -> object:
    write_cifar(root / "c", hundred=False, binary=False)
    path = root / "c" / "test_batch"
    path.write_bytes(path.read_bytes()[:500])
    return root / "c"


@sentence("data_batch_1 is no CIFAR batch, it has no data of 3072 bytes")
def pickle_of_something_else(root: Path) -> object:
    (root / "data_batch_1").write_bytes(pickle.dumps({"data": np.zeros((2, 5)), "labels": [0, 1]}))
    return root


@sentence("test.bin is truncated, its .* bytes are not whole records of 3074")
def cifar_binary_cut_off(root: Path) -> object:
    write_cifar(root / "c", hundred=True, binary=True)
    path = root / "c" / "test.bin"
    path.write_bytes(path.read_bytes()[:-1])
    return root / "c"


def idx_pair(root: Path, ending: str = "") -> Path:
    write_idx(root / f"train-images-idx3-ubyte{ending}", np.random.default_rng(0).integers(0, 256, (9, 8, 8)))
    write_idx(root / f"train-labels-idx1-ubyte{ending}", np.arange(9))
    return root / f"train-images-idx3-ubyte{ending}"


@sentence("train-images-idx3-ubyte is truncated or damaged, shorter than its header says")
def idx_cut_off(root: Path) -> object:
    path = idx_pair(root)
    path.write_bytes(path.read_bytes()[:-7])
    return root


@sentence("ubyte.gz is damaged, its compressed data ends or breaks off")
def idx_compressed_cut_off(root: Path) -> object:
    path = idx_pair(root, ".gz")
    path.write_bytes(path.read_bytes()[:100])
    return root


@sentence("is not an IDX file of bytes with 3 dimensions")
def idx_of_something_else(root: Path) -> object:
    idx_pair(root).write_bytes(b"<html>not found</html>")
    return root


@sentence("holds 9 images but .* 8 labels")
def idx_with_too_few_labels(root: Path) -> object:
    idx_pair(root)
    write_idx(root / "train-labels-idx1-ubyte", np.arange(8))
    return root


@sentence("put train-labels-idx1-ubyte beside it")
def idx_without_labels(root: Path) -> object:
    idx_pair(root)
    (root / "train-labels-idx1-ubyte").unlink()
    return root


def table(root: Path, text: str | bytes) -> Path:
    write_folder(root, {"p": 2})
    (root / "t.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    return root / "t.csv"


@sentence("t.csv has no column of paths: name one of its columns .name, label. path, file or image")
def table_without_paths(root: Path) -> object:
    return table(root, "name,label\na,b\n")


@sentence("2 of the 3 files in .*t.csv do not exist, first gone/1.png")
def table_with_missing_files(root: Path) -> object:
    return table(root, "path,label\np/0.png,a\ngone/1.png,b\ngone/2.png,b\n")


@sentence("Line 2 of .*t.csv leads above the table's folder")
def table_that_escapes(root: Path) -> object:
    return table(root, "path,label\np/../../x.png,a\n")


@sentence("Line 3 of .*t.csv has 3 fields where the header has 2")
def table_with_a_long_line(root: Path) -> object:
    return table(root, "path,label\np/0.png,a\np/1.png,b,c\n")


@sentence("t.csv is not UTF-8 text")
def table_in_another_encoding(root: Path) -> object:
    return table(root, "path,label\np/0.png,é\n".encode("latin1"))


@sentence("t.csv has two columns called label")
def table_with_a_column_twice(root: Path) -> object:
    return table(root, "path,label,Label\np/0.png,a,b\n")


@sentence("Line 2 of .*t.csv has an unknown split: write train, validation or test in split")
def table_with_an_unknown_split(root: Path) -> object:
    return table(root, "path,label,split\np/0.png,a,holdout\n")


@sentence("t.csv is empty: write a header")
def table_of_nothing(root: Path) -> object:
    return table(root, "")


@sentence("t.csv has a header and no rows")
def table_without_rows(root: Path) -> object:
    return table(root, "path,label\n")


@sentence("1 of 2 labels are missing in the column label")
def table_with_a_missing_label(root: Path) -> object:
    return table(root, "path,label\np/0.png,a\np/1.png,\n")


@sentence("hf://only is no address of a data set: write hf://owner/name")
def hub_address_too_short(root: Path) -> object:
    return "hf://only"


@pytest.mark.parametrize(("damage", "pattern"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_one_sentence(tmp_path: Path, damage: Damage, pattern: str) -> None:
    path = str(damage(tmp_path) or tmp_path)
    with pytest.raises(UserError, match=pattern) as caught:
        open_source(path)
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")
    assert str(tmp_path) in text or path in text
    assert not (tmp_path / "ran").exists()


def test_there_are_many_kinds_of_damage() -> None:
    assert len({damage for damage, _ in DAMAGES}) >= 20


def test_a_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("os.scandir", refuse)  # the permission itself does not bind every user that runs tests
    with pytest.raises(UserError, match="may not be read: change its permissions"):
        open_source(str(tmp_path))


def test_what_cannot_be_trained_on(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {"all": 30})
    with pytest.raises(UserError, match=r"has only one class \(all\)"):
        check_trainable(open_source(root))
    with pytest.raises(UserError, match="has no labels: put the images into one folder per class"):
        check_trainable(open_source(f"{root}/all"))
    splits = open_splits(write_folder(tmp_path / "few", {"x": 1, "y": 9}))
    check_trainable(splits.train)
    with pytest.raises(UserError, match="of its 2 classes only y is both learned and validated; give every class at least two"):
        check_trainable(splits.validation)


def test_splits_that_are_not_there(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "a", {"x": 2, "y": 2})
    with pytest.raises(UserError, match="has no test split, only train"):
        open_source(root, "test")
    with pytest.raises(UserError, match="There is no split called holdout"):
        open_source(root, "holdout")
    with pytest.raises(UserError, match="too few images per class to set 10 % aside"):
        open_splits(write_folder(tmp_path / "single", {"x": 1, "y": 1}))
    for name in ("val", "test"):
        write_folder(tmp_path / "b" / name, {"x": 1})
    with pytest.raises(UserError, match="has only test and validation splits: add a train split"):
        open_splits(str(tmp_path / "b"))


def test_hub_without_network_or_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("no route\nsecond line")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(UserError, match=r"hf://a/b could not be fetched \(no route\): check the name and the network\.$"):
        open_source("hf://a/b")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match="install huggingface_hub"):
        open_source("hf://a/b")


def test_images_that_are_not_there_are_said_when_read(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"image": [png(1), None], "label": [0, 1]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"row 1 of .*a.parquet has no image"):
        open_source(str(tmp_path)).encoded(1)
    source = open_source(write_folder(tmp_path / "f", {"a": 1}))
    os.unlink(source.where(0))
    with pytest.raises(OSError, match="No such file"):
        source.encoded(0)


@pytest.mark.parametrize("value", [print, io.BytesIO, pickle.Unpickler, Path("/")])
def test_the_unpickler_lets_nothing_but_data_in(tmp_path: Path, value: object) -> None:
    (tmp_path / "p").write_bytes(pickle.dumps({"data": value}))
    with pytest.raises(UserError, match="which is not data"):
        read_pickle(str(tmp_path / "p"))
