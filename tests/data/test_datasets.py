"""Every format, opened by its path, returns the images and labels that were written."""

import csv
import gzip
import io
import json
import os
import pickle
import tarfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from vitrail.data.datasets import hub, tar
from vitrail.data.datasets.lookup import check_trainable, open_source, open_splits
from vitrail.data.source import Source
from vitrail.errors import UserError

FEATURES = {
    "image": {"_type": "Image"},
    "label": {"names": ["cat", "dog"], "_type": "ClassLabel"},
    "coarse_label": {"names": ["animal"], "_type": "ClassLabel"},
}


def png(value: int, size: int = 4) -> bytes:
    """An image of one color, different for every value."""
    buffer = io.BytesIO()
    Image.new("RGB", (size, size), (value % 256, value // 256, 7)).save(buffer, "PNG")
    return buffer.getvalue()


def write_folder(root: Path, counts: dict[str, int]) -> str:
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            (root / name / f"{number}.png").write_bytes(png(number))
    return str(root)


def write_parquet(
    path: Path, labels: list, features: dict | None = None, images: list | None = None, masks: bool = False, **options: object
) -> str:
    images = images or [png(number) for number in range(len(labels))]
    columns: dict[str, object] = {
        "image": pa.array(
            [{"bytes": image, "path": None} for image in images], pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        )
    }
    columns["label"] = pa.array(labels)
    if features and "coarse_label" in features:
        columns["coarse_label"] = pa.array([0] * len(labels))
    if masks:
        columns["mask"] = pa.array([png(number, 2) for number in range(len(labels))])
    table = pa.table(columns)
    if features:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    parquet.write_table(table, path, **{"row_group_size": 3, "compression": "none", **options})
    return str(path)


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> str:
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return str(path)


def samples(start: int, count: int) -> list[tuple[str, bytes]]:
    numbers = range(start, start + count)
    return [each for n in numbers for each in ((f"{n:06d}.png", png(n)), (f"{n:06d}.cls", str(n % 3).encode()))]


def write_idx(path: Path, array: np.ndarray) -> None:
    header = bytes((0, 0, 8, array.ndim)) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    opener = gzip.open if path.name.endswith(".gz") else open
    with opener(path, "wb") as file:
        file.write(header + array.astype(np.uint8).tobytes())


class OldPickler(pickle._Pickler):  # type: ignore[name-defined, misc]
    """Writes bytes as Python 2 strings, as in the published batches."""

    def save_string(self, value: bytes) -> None:
        self.write(pickle.BINSTRING + len(value).to_bytes(4, "little") + value)
        self.memoize(value)

    dispatch = {**pickle._Pickler.dispatch, bytes: save_string}  # type: ignore[attr-defined]  # noqa: RUF012


def old_pickle(value: object) -> bytes:
    buffer = io.BytesIO()
    OldPickler(buffer, protocol=2).dump(value)
    return buffer.getvalue()


def write_cifar(folder: Path, hundred: bool, binary: bool, per_file: int = 6) -> dict[str, np.ndarray]:
    """Write batches with random pixels; returns the pixels [N, 3072] of every file."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    written = {}
    for name in ("train", "test") if hundred else ("data_batch_1", "data_batch_2", "test_batch"):
        pixels = rng.integers(0, 256, (per_file, 3072), dtype=np.uint8)
        labels = [number % 3 for number in range(per_file)]
        written[name] = pixels
        if binary:
            columns = [[1] * per_file, labels] if hundred else [labels]
            rows = np.concatenate([np.array(columns, dtype=np.uint8).T, pixels], axis=1)
            (folder / f"{name}.bin").write_bytes(rows.tobytes())
        else:
            keys = {b"fine_labels": labels, b"coarse_labels": [1] * per_file} if hundred else {b"labels": labels}
            write = old_pickle if name != "data_batch_2" else pickle.dumps  # as published, and in the current protocol
            (folder / name).write_bytes(write({b"data": pixels, b"batch_label": b"some", **keys}))
    names, groups = ["apple", "bear", "cup"], ["fruit", "thing"]
    if binary:
        for file, lines in {"fine_label_names.txt": names, "coarse_label_names.txt": groups}.items() if hundred else ():
            (folder / file).write_text("\n".join(lines))
        if not hundred:
            (folder / "batches.meta.txt").write_text("\n".join(names) + "\n\n")
    else:
        meta = {"fine_label_names": names, "coarse_label_names": groups} if hundred else {"label_names": names}
        (folder / ("meta" if hundred else "batches.meta")).write_bytes(pickle.dumps(meta, protocol=2))
    return written


def everything(source: Source) -> list[tuple[bytes, int]]:
    values = source.label.values.tolist() if source.label else [None] * len(source)
    images = [source.encoded(index) for index in range(len(source))]
    return [(each if isinstance(each, bytes) else each.tobytes(), value) for each, value in zip(images, values, strict=True)]


def test_folder_of_classes(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {"b": 2, "a": 11, "Zebra": 1})
    (tmp_path / "a" / "deeper").mkdir()
    (tmp_path / "a" / "deeper" / "x.JPEG").write_bytes(png(99))
    (tmp_path / "a" / ".hidden.png").write_bytes(b"")
    (tmp_path / "a" / "notes.txt").write_bytes(b"")
    (tmp_path / "a" / "deeper" / "loop").symlink_to(tmp_path / "a", target_is_directory=True)
    (tmp_path / "b" / "self.png").symlink_to(tmp_path / "b" / "self.png")
    source = open_source(root)
    assert source.classes == ["Zebra", "a", "b"]
    assert source.label is not None
    assert np.bincount(source.label.values).tolist() == [1, 12, 2]
    places = [os.path.relpath(source.location(index), root) for index in range(len(source))]
    assert places[:4] == ["Zebra/0.png", "a/0.png", "a/1.png", "a/10.png"]  # byte order: 10 before 2
    assert source.encoded(places.index("a/deeper/x.JPEG")) == png(99)
    check_trainable(source)


def test_folder_with_splits(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", {"a": 3, "b": 3, "c": 1})
    write_folder(tmp_path / "valid", {"c": 2})
    write_folder(tmp_path, {"test": 4})
    splits = open_splits(str(tmp_path))
    assert splits.validation.label is not None
    assert splits.validation.label.values.tolist() == [2, 2]  # class indices of the training split
    assert splits.test is not None
    assert len(splits.test) == 4
    assert splits.test.label is None
    assert len(open_source(str(tmp_path), "val")) == 2


def test_a_class_may_be_named_train(tmp_path: Path) -> None:
    assert open_source(write_folder(tmp_path, {"bus": 1, "car": 1, "train": 1})).classes == ["bus", "car", "train"]


def test_flat_folder_has_no_labels(tmp_path: Path) -> None:
    source = open_source(write_folder(tmp_path, {"images": 3}) + "/images")
    assert source.label is None
    assert len(source) == 3


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_dictionary": False},
        {"use_dictionary": False, "data_page_size": 64},
        {"use_dictionary": False, "data_page_version": "2.0"},
        {"compression": "snappy"},
    ],
)
def test_parquet_encodings(tmp_path: Path, options: dict) -> None:
    images = [png(number) for number in (1, 2, 1, 3, 4, 4, 5, 6, 7, 1)]
    path = write_parquet(tmp_path / "all.parquet", [0, 1] * 5, FEATURES, images, masks=True, **options)
    source = open_source(path)
    assert source.classes == ["cat", "dog"]
    assert source.extra["coarse_label"].names == ["animal"]
    assert source.has_masks
    for index in [9, 0, 5, 2, 7, 3, 9, 1]:
        assert source.encoded(index) == images[index]
        assert source.mask(index) == png(index, 2)
    assert source.location(7) == f"row 7 of {path}"
    with pytest.raises(IndexError):
        source.encoded(10)


def test_parquet_limits_the_cached_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.data.datasets.parquet.CACHE_BYTES", 500)
    source = open_source(write_parquet(tmp_path / "all.parquet", [0, 1] * 20, compression="zstd"))
    order = np.random.default_rng(0).permutation(40).tolist()
    assert [source.encoded(index) for index in order] == [png(index) for index in order]


def test_parquet_shards_and_splits(tmp_path: Path) -> None:
    for name, labels in {"train-0": [0, 1], "train-1": [1, 1], "validation-0": [0], "test-0": [-1, -1]}.items():
        write_parquet(tmp_path / f"{name}.parquet", labels, FEATURES)
    (tmp_path / "notes.json").write_text("{}")
    splits = open_splits(str(tmp_path))
    assert [len(splits.train), len(splits.validation)] == [4, 1]
    assert splits.test is not None
    assert splits.test.label is None  # all -1: no labels
    assert splits.train.location(3).endswith("train-1.parquet")


@pytest.mark.parametrize(
    ("labels", "names"),
    [([2, 0, 2], ["0", "1", "2"]), (["dog", "ant", "dog"], ["ant", "dog"]), ([True, False, True], ["0", "1"])],
)
def test_parquet_without_metadata(tmp_path: Path, labels: list, names: list[str]) -> None:
    for number in range(2):
        write_parquet(tmp_path / f"{number}.parquet", labels)
    source = open_source(str(tmp_path))
    assert source.classes == names
    assert source.label is not None
    assert source.label.values.tolist() == [len(names) - 1, 0, len(names) - 1] * 2


def test_tar_shards(tmp_path: Path) -> None:
    for number in range(4):
        write_tar(tmp_path / f"shard-{number:03d}.tar", samples(5 * number, 5))
    whole = open_source(str(tmp_path))
    assert everything(whole) == [(png(number), number % 3) for number in range(20)]
    assert "000007" in whole.location(7)
    part = open_source(str(tmp_path / "shard-{001..002}.tar"))
    assert everything(part) == everything(whole)[5:15]
    assert len(open_source(str(tmp_path / "shard-003.tar"))) == 5


def test_tar_labels_in_text_and_json(tmp_path: Path) -> None:
    described = json.dumps({"class_name": "x", "label": "dog", "width": 4}).encode()
    write_tar(
        tmp_path / "train-0.tar", [("a.png", png(1)), ("a.json", described), ("a.txt", b"a caption"), ("a.mask.png", png(2))]
    )
    write_tar(tmp_path / "val-0.tar", [("d/b.txt", b"cat\n"), ("d/b.png", png(3)), ("lonely.cls", b"1")])
    splits = open_splits(str(tmp_path))
    assert splits.train.classes == ["cat", "dog"]
    assert everything(splits.train) == [(png(1), 1)]
    assert splits.train.mask(0) == png(2)
    assert splits.train.extra["class_name"].names == ["x"]
    assert everything(splits.validation) == [(png(3), 0)]


def test_tar_index_is_reused_and_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "one.tar"
    write_tar(path, samples(0, 3))
    assert len(open_source(str(path))) == 3
    (kept,) = tmp_path.glob(".vitrail-index-*.npz")
    with monkeypatch.context() as patch:
        patch.setattr(tar, "_build_index", None)  # would fail if called
        assert len(open_source(str(path))) == 3
    write_tar(path, samples(0, 9))
    assert len(open_source(str(path))) == 9
    kept.write_bytes(b"damaged")
    assert len(open_source(str(path))) == 9


def test_tar_index_is_cached_if_the_folder_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, cache = tmp_path / "data", tmp_path / "cache"
    data.mkdir()
    monkeypatch.setenv("VITRAIL_CACHE", str(cache))
    refuse = tar.tempfile.NamedTemporaryFile

    def guarded(dir: Path, **options: object) -> object:
        if Path(dir) == data:
            raise PermissionError(13, "Permission denied")
        return refuse(dir=dir, **options)

    monkeypatch.setattr(tar.tempfile, "NamedTemporaryFile", guarded)
    path = write_tar(data / "one.tar", samples(0, 3))
    assert len(open_source(path)) == 3
    assert [file.name for file in data.iterdir()] == ["one.tar"]
    assert len(list(cache.rglob("*.npz"))) == 1
    monkeypatch.setattr(tar, "_build_index", None)
    assert len(open_source(path)) == 3


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("hundred", [False, True])
def test_cifar(tmp_path: Path, hundred: bool, binary: bool) -> None:
    folder = "cifar-100-python" if hundred else "cifar-10-batches-py"
    written = write_cifar(tmp_path / folder, hundred, binary)
    source = open_source(str(tmp_path))
    pixels = np.concatenate([array for name, array in written.items() if "test" not in name])
    assert len(source) == len(pixels)
    assert np.array_equal(source.encoded(4), pixels[4].reshape(3, 32, 32).transpose(1, 2, 0))
    assert source.classes == ["apple", "bear", "cup"]
    assert source.label is not None
    assert source.label.values[:4].tolist() == [0, 1, 2, 0]
    if hundred:
        assert source.extra["coarse_label"].names == ["fruit", "thing"]
    assert len(open_source(str(tmp_path / folder), "test")) == 6


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx(tmp_path: Path, ending: str) -> None:
    pixels = np.arange(4 * 5 * 6).reshape(4, 5, 6)
    for split in ("train", "t10k"):
        write_idx(tmp_path / f"{split}-images-idx3-ubyte{ending}", pixels)
        write_idx(tmp_path / f"{split}-labels-idx1-ubyte{ending}", np.array([3, 0, 1, 1]))
    source = open_source(str(tmp_path), "test")
    image = source.encoded(2)
    assert isinstance(image, np.ndarray)
    assert image.shape == (5, 6, 3)
    assert (image == pixels[2][..., None]).all()
    assert source.classes == ["0", "1", "2", "3"]
    assert len(open_source(str(tmp_path / f"train-images-idx3-ubyte{ending}"))) == 4


@pytest.mark.parametrize(("ending", "separator"), [("csv", ","), ("csv", ";"), ("tsv", "\t")])
def test_table(tmp_path: Path, ending: str, separator: str) -> None:
    write_folder(tmp_path, {"images": 4})
    with open(tmp_path / f"list.{ending}", "w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerow(["File", "label", "split", "class_group", "width"])
        for number, (label, split) in enumerate([("x, y", "train"), ("z", "train"), ("z", "val"), ("z", "test")]):
            path = f"images/{number}.png" if number else str(tmp_path / "images" / "0.png")
            writer.writerow([path, label, split, "g", 4])
    splits = open_splits(str(tmp_path / f"list.{ending}"))
    assert everything(splits.train) == [(png(0), 0), (png(1), 1)]
    assert splits.train.classes == ["x, y", "z"]
    assert everything(splits.validation) == [(png(2), 1)]
    assert list(splits.train.extra) == ["class_group"]


def test_digits() -> None:
    splits = open_splits("digits")
    assert splits.test is not None
    assert len(splits.train) + len(splits.validation) == 1437
    assert len(splits.test) == 360
    image = splits.test.encoded(0)
    assert isinstance(image, np.ndarray)
    assert image.shape == (8, 8, 3)
    assert image.max() == 255
    check_trainable(splits.train)


def test_hub_downloads_only_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[tuple] = []

    def stand_in(repository: str, **options: object) -> str:
        requested.append((repository, options["revision"], options["allow_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", stand_in)
    (tmp_path / "small" / "train").mkdir(parents=True)
    write_parquet(tmp_path / "small" / "train" / "0000.parquet", [0, 1], FEATURES)
    assert len(open_source("hf://owner/name@refs/convert/parquet/small")) == 2
    assert len(open_source("hf://owner/name")) == 2
    assert requested[0] == ("owner/name", "refs/convert/parquet", ["small/*.parquet", "small/*.json"])
    assert requested[1] == ("owner/name", None, ["*.parquet", "*.json"])
    match = hub.ADDRESS.fullmatch("hf://a/b@main/c/d")
    assert match is not None
    assert match.groups() == ("a/b", "main", "c/d")


def test_splits_by_seed_are_reproducible_and_stratified(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {"a": 40, "b": 20, "c": 1})
    first, again, other = open_splits(root, seed=1), open_splits(root, seed=1), open_splits(root, seed=2)
    assert everything(first.validation) == everything(again.validation) != everything(other.validation)
    assert first.validation.label is not None
    assert np.bincount(first.validation.label.values, minlength=3).tolist() == [4, 2, 0]
    places = [part.location(index) for part in (first.train, first.validation) for index in range(len(part))]
    assert len(set(places)) == len(places) == 61
    assert first.test is None


def test_an_empty_path_is_rejected() -> None:
    with pytest.raises(UserError, match="The path to the data is empty: give a folder of class folders"):
        open_source("")


def test_every_format_works_in_a_worker_process(tmp_path: Path) -> None:
    write_folder(tmp_path / "folder", {"a": 3, "b": 3})
    write_parquet(tmp_path / "plain.parquet", [0, 1, 1, 0], FEATURES)
    write_parquet(tmp_path / "packed.parquet", [0, 1, 1, 0], FEATURES, compression="zstd")
    write_tar(tmp_path / "one.tar", samples(0, 4))
    write_cifar(tmp_path / "cifar", hundred=False, binary=False)
    (tmp_path / "list.csv").write_text("path,label\nfolder/a/0.png,u\nfolder/b/1.png,v\n")
    paths = [str(tmp_path / name) for name in ("folder", "plain.parquet", "packed.parquet", "one.tar", "cifar", "list.csv")]
    sources = [open_source(path) for path in [*paths, "digits"]] + [open_splits(paths[0], default_fraction=0.5).validation]
    here = [everything(source) for source in sources]  # read first: open files must not be pickled
    assert len(pickle.dumps(sources[-2])) < 20_000  # labels, not pixels
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert list(pool.map(everything, sources)) == here
