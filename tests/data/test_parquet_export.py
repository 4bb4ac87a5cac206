"""`vitrail data pack`: what goes in comes out, however often it is killed on the way."""

import contextlib
import errno
import io
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pyarrow import parquet

from tests.data.test_datasets import png, write_cifar, write_folder, write_parquet, write_tar
from tests.data.test_inspection import scene
from tests.disks import small_disk
from vitrail.atomic_files import aside
from vitrail.cli import data as commands
from vitrail.data import parquet_export
from vitrail.data.datasets.folder import Parts
from vitrail.data.datasets.lookup import open_parts
from vitrail.data.decode import decode, decode_mask
from vitrail.data.parquet_export import pack, parse_bytes
from vitrail.data.parquet_shard import ShardWriter, schema_of
from vitrail.data.reencoding import Recoding
from vitrail.errors import UserError

PLAIN = Recoding()
SHARD = 100_000


def packed(path: str, out: Path, how: Recoding = PLAIN, shard_size: int = SHARD, **options) -> parquet_export.Result:
    return pack(path, open_parts(path), out, how, shard_size, **{"workers": 0, **options})


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def same(first: Parts, second: Parts) -> None:
    assert set(first) == set(second)
    for split, source in first.items():
        other = second[split]
        assert len(source) == len(other)
        assert source.classes == other.classes
        assert (source.label is None) == (other.label is None)
        if source.label:
            assert source.label.values.tolist() == other.label.values.tolist()
        assert {name: (each.names, each.values.tolist()) for name, each in source.extra.items()} == {
            name: (each.names, each.values.tolist()) for name, each in other.extra.items()
        }
        for index in range(len(source)):
            assert (decode(source.encoded(index)) == decode(other.encoded(index))).all()
            assert source.mask(index) == other.mask(index)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Sixty images of noise, so that a task's rows are larger than a pipe: about 1 MB."""
    root = tmp_path_factory.mktemp("photos") / "photos"
    rng = np.random.default_rng(0)
    for number in range(60):
        file = root / ("train" if number % 5 else "val") / f"class {number % 3}" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (75, 75, 3), dtype=np.uint8)).save(file)
    return str(root)


@pytest.fixture(scope="module")
def whole(photos, tmp_path_factory):
    """The pack that no one has interrupted."""
    out = tmp_path_factory.mktemp("whole") / "out"
    packed(photos, out)
    return contents(out)


def mask(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((4, 4), number % 5, dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def folder_without_labels(root: Path) -> str:
    root.mkdir()
    scene(1).save(root / "one.png")
    scene(2).convert("CMYK").save(root / "two.jpg")
    return str(root)


def parquet_with_everything(root: Path) -> str:
    root.mkdir()
    names = {"label": {"names": ["cat", "dog", "eel"]}, "coarse_label": {"names": ["animal"]}}
    write_parquet(root / "train.parquet", [0, 1, 0, 1, 0], names)
    write_parquet(root / "test.parquet", [-1, -1], names)  # a test split whose labels are kept secret
    return str(root)


def tar_with_masks(root: Path) -> str:
    root.mkdir()
    members = [(f"{number}.png", png(number)) for number in range(5)] + [(f"{n}.cls", str(n % 2).encode()) for n in range(5)]
    return write_tar(root / "one.tar", members + [(f"{number}.mask.png", mask(number)) for number in (1, 3)])


def cifar(root: Path) -> str:
    write_cifar(root, hundred=True, binary=True)
    return str(root)


@pytest.mark.parametrize("make", [folder_without_labels, parquet_with_everything, tar_with_masks, cifar])
def test_what_goes_in_comes_out(make, tmp_path):
    path = make(tmp_path / "in")
    before = open_parts(path)
    packed(path, tmp_path / "out", shard_size=200)
    same(before, open_parts(str(tmp_path / "out")))


def test_shards_are_named_sized_and_described_as_hugging_face_does(photos, tmp_path):
    result = packed(photos, tmp_path / "out")
    names = sorted(os.listdir(tmp_path / "out" / "data"))
    count = sum(name.startswith("train") for name in names)
    assert count > 5
    assert names[:2] == ["_pack.json", f"train-00000-of-{count:05d}.parquet"]
    assert set(names) - {"_pack.json"} == set(result.shards)
    assert os.listdir(tmp_path / "out") == ["data"]
    for name in result.shards:
        table = parquet.read_table(tmp_path / "out" / "data" / name)
        assert sum(len(row["bytes"]) for row in table["image"].to_pylist()) <= SHARD
    assert table.schema.names == ["image", "label"]
    assert table["image"][0].as_py()["path"].startswith("class ")
    features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    assert features["label"] == {"names": ["class 0", "class 1", "class 2"], "_type": "ClassLabel"}
    same(open_parts(photos), open_parts(str(tmp_path / "out")))


def test_smaller_images(tmp_path):
    (tmp_path / "in").mkdir()
    large, small = scene(1, 200, 100), scene(2, 40, 30)
    large.convert("L").save(tmp_path / "in" / "0.png")
    large.save(tmp_path / "in" / "1.jpg", quality=95)
    small.save(tmp_path / "in" / "2.png")
    path = str(tmp_path / "in")
    packed(path, tmp_path / "png", Recoding(resize=50, format="png"))
    source = open_parts(str(tmp_path / "png"))["train"]
    assert [decode(source.encoded(index)).shape[:2] for index in range(3)] == [(50, 100), (50, 100), (30, 40)]
    expected = np.asarray(large.convert("L").resize((100, 50), Image.Resampling.BICUBIC))
    assert (decode(source.encoded(0))[:, :, 1] == expected).all()
    assert source.encoded(2) == (tmp_path / "in" / "2.png").read_bytes()
    packed(path, tmp_path / "jpeg", Recoding(resize=50, quality=80))
    source = open_parts(str(tmp_path / "jpeg"))["train"]
    assert source.encoded(0).startswith(b"\xff\xd8")
    paths = [row["path"] for row in parquet.read_table(tmp_path / "jpeg" / "data")["image"].to_pylist()]
    assert paths == ["0.jpg", "1.jpg", "2.png"]


def test_masks_shrink_without_new_ids(tmp_path):
    ids = np.random.default_rng(0).integers(0, 4, (90, 120), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(ids).save(buffer, "PNG")
    image = io.BytesIO()
    scene(1, 120, 90).save(image, "PNG")
    path = write_tar(tmp_path / "one.tar", [("0.png", image.getvalue()), ("0.cls", b"0"), ("0.mask.png", buffer.getvalue())])
    packed(path, tmp_path / "out", Recoding(resize=30))
    found = decode_mask(open_parts(str(tmp_path / "out"))["train"].mask(0) or b"")
    assert found.shape == (30, 40)
    assert set(np.unique(found)) <= {0, 1, 2, 3}


def killed_after(photos: str, out: Path, step: int, workers: int) -> None:
    """Packs, and kills its own process at the given call of `advance` or of anything that changes the folder."""
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == step:
            os.kill(os.getpid(), signal.SIGKILL)

    for name in ("rename", "replace", "unlink", "mkdir"):
        real = getattr(Path, name)
        setattr(Path, name, lambda *args, real=real, **options: (count(), real(*args, **options))[1])
    packed(photos, out, workers=workers, advance=count)


def kill(photos: str, out: Path, step: int, workers: int) -> int | None:
    """The exit code of a run that kills itself; its workers are gone, too, when this returns."""
    watched, held = os.pipe()
    child = multiprocessing.get_context("fork").Process(target=killed_after, args=(photos, out, step, workers))
    child.start()
    os.close(held)  # now only the child and its workers hold that end, and the last of them lets it go
    child.join()
    assert select.select([watched], [], [], 20)[0], "a worker has outlived its run"
    os.close(watched)
    return child.exitcode


@pytest.mark.parametrize(("step", "workers"), [(1, 0), (2, 0), (3, 0), (30, 0), (50, 0), (40, 2), (75, 2)])
def test_killed_and_run_again_is_the_same_to_the_byte(photos, whole, step, workers, tmp_path):
    out = tmp_path / "out"
    assert kill(photos, out, step, workers) == -signal.SIGKILL
    assert not (out / "data").exists()
    packed(photos, out, workers=workers)
    assert contents(out) == whole


def test_killed_again_and_again(photos, whole, tmp_path):
    """At the first step, the second, the third ... each time from where the last one came to, until a run comes through."""
    out = tmp_path / "out"
    codes = [kill(photos, out, 1, 0)]
    while codes[-1] == -signal.SIGKILL:
        assert not (out / "data").exists()
        codes.append(kill(photos, out, len(codes) + 1, 0))
    assert codes[-1] == 0
    assert len(codes) > 20
    assert contents(out) == whole


def test_the_command_killed_from_outside(photos, whole, tmp_path):
    out = tmp_path / "out"
    words = ["data", "pack", photos, str(out), "--shard-size", str(SHARD)]
    process = subprocess.Popen([sys.executable, "-m", "vitrail.cli.main", *words])
    while process.poll() is None and not list(out.glob(".packing/*.parquet")):
        with contextlib.suppress(subprocess.TimeoutExpired):  # looking all the time would take the core that it needs
            process.wait(0.005)
    process.kill()
    process.wait()
    packed(photos, out)
    assert contents(out) == whole


def test_an_interrupt_keeps_what_is_finished(photos, whole, tmp_path):
    done = 0

    def interrupt(count: int) -> None:
        nonlocal done
        done += count
        if done == 25:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packed(photos, tmp_path / "out", workers=2, advance=interrupt)
    assert not multiprocessing.active_children()
    assert not list(tmp_path.rglob("*.part"))
    assert packed(photos, tmp_path / "out").kept > 2
    assert contents(tmp_path / "out") == whole


def interrupted(photos: str, out: Path) -> None:
    def stop(count: int) -> None:
        if len(list(out.glob(".packing/*.parquet"))) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packed(photos, out, advance=stop)


def test_damaged_shards_are_made_again(photos, whole, tmp_path):
    out = tmp_path / "out"
    interrupted(photos, out)
    first, second, *_ = sorted(out.glob(".packing/*.parquet"))
    first.write_bytes(first.read_bytes()[:-1] + b"x")
    second.unlink()
    told: list[str] = []
    other_spelling = os.path.relpath(photos) + "/"
    assert packed(other_spelling, out, warn=told.append).kept == 1
    assert len(told) == 2
    assert "image 0 of train is damaged or gone and is packed again" in told[0]
    assert contents(out) == whole


def test_other_data_or_options_are_refused(photos, tmp_path):
    out = tmp_path / "out"
    interrupted(photos, out)
    before = contents(out)
    with pytest.raises(UserError, match="begun with shard size 100000, not 200000: give the same options"):
        packed(photos, out, shard_size=200_000)
    with pytest.raises(UserError, match="begun with resize none, not 10"):
        packed(photos, out, Recoding(resize=10))
    with pytest.raises(UserError, match="begun with splits train, validation, not train"):
        pack(photos, {"train": open_parts(photos)["train"]}, out, PLAIN, SHARD)
    other = write_folder(tmp_path / "other" / "train", {"a": 2, "b": 2})
    write_folder(tmp_path / "other" / "val", {"a": 2, "b": 2})
    with pytest.raises(UserError, match="begun from other data"):
        packed(os.path.dirname(other), out)
    assert contents(out) == before


def test_a_finished_pack_is_checked_and_left(photos, whole, tmp_path):
    out = tmp_path / "out"
    packed(photos, out)
    stamps = {file: file.stat().st_mtime_ns for file in out.rglob("*")}
    assert packed(photos, out).kept == len(whole) - 1
    assert {file: file.stat().st_mtime_ns for file in out.rglob("*")} == stamps
    next(iter(out.rglob("*.parquet"))).write_bytes(b"")
    with pytest.raises(UserError, match=r"is damaged or gone: remove .* and pack again"):
        packed(photos, out)


def test_foreign_places_are_refused(photos, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="was not made by this command: give a new or empty folder"):
        packed(photos, tmp_path)
    with pytest.raises(UserError, match="is a file: give a folder"):
        packed(photos, tmp_path / "notes.txt")
    with pytest.raises(UserError, match=r"lies inside .* give a folder elsewhere"):
        packed(photos, Path(photos) / "packed")
    with pytest.raises(UserError, match=r"could not be written, Not a directory .* choose another place"):
        packed(photos, tmp_path / "notes.txt" / "out")
    assert sorted(os.listdir(tmp_path)) == ["notes.txt"]


def test_two_runs_at_once_are_refused(photos, whole, tmp_path):
    def second(count: int) -> None:
        # In a process of its own: a process never locks itself out.
        child = multiprocessing.get_context("fork").Process(target=packed_quietly, args=(photos, tmp_path / "out"))
        child.start()
        child.join()
        assert child.exitcode == 7

    once = [second]
    packed(photos, tmp_path / "out", advance=lambda count: once.pop()(count) if once else None)
    assert contents(tmp_path / "out") == whole


def packed_quietly(photos: str, out: Path) -> None:
    try:
        packed(photos, out)
    except UserError as error:
        os._exit(7 if "Another process is packing" in str(error) else 1)


def test_unreadable_images_are_left_out_and_told_or_fatal(typed, tmp_path):
    root = tmp_path / "in"
    path = write_folder(root, {"a": 4, "b": 4})
    (root / "a" / "1.png").write_bytes(b"")
    (root / "b" / "3.png").write_bytes(png(3)[:40])
    out = tmp_path / "out"
    result = typed("data", "pack", path, out, "--shard-size", "150")
    assert result.returncode == 0
    assert "6 images in" in result.stdout
    assert "unreadable: 2 images" in result.stderr
    assert "a/1.png: the file is empty" in result.stderr
    manifest = json.loads((out / "data" / "_pack.json").read_text())
    assert [problem["where"][-7:] for shard in manifest["shards"] for problem in shard["skipped"]] == ["a/1.png", "b/3.png"]
    assert open_parts(str(out))["train"].label.values.tolist() == [0, 0, 0, 1, 1, 1]
    with pytest.raises(UserError, match=r"a/1.png cannot be read: the file is empty"):
        packed(path, out, shard_size=150, fatal=True)
    with pytest.raises(UserError, match=r"a/1.png cannot be read"):
        packed(path, tmp_path / "fatal", fatal=True)
    for file in root.rglob("*.png"):
        file.write_bytes(b"")
    with pytest.raises(UserError, match="None of the images 0 to 7 of train can be read"):
        packed(path, tmp_path / "none")


FULL = r"No space left on device \(.* MiB free\): make room and run the same command again"


def test_a_full_disk_loses_nothing(photos, whole, tmp_path):
    disk = tmp_path / "disk"
    with small_disk(disk, "400k") as resize:
        with pytest.raises(UserError, match=f"{FULL}, the finished shards are kept"):
            packed(photos, disk / "out")
        assert not list(disk.rglob("*.part"))
        finished = len(list(disk.rglob("*.parquet")))
        assert finished > 1
        resize("4m")
        assert packed(photos, disk / "out").kept == finished
        assert contents(disk / "out") == whole


def fill_at(monkeypatch, ending):
    """The disk is full as a file of that ending gets its name."""

    @contextlib.contextmanager
    def full(path):
        with aside(path) as side:
            yield side
            if path.name.endswith(ending):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(parquet_export, "aside", full)


@pytest.mark.parametrize("ending", ["_pack.json", ".parquet"])
def test_a_disk_that_is_full_before_the_first_shard(ending, photos, tmp_path, monkeypatch):
    """Nothing is left, nothing is said to be kept, and the next try may make the images smaller."""
    out = tmp_path / "new" / "out"
    with monkeypatch.context() as patch:
        fill_at(patch, ending)
        with pytest.raises(UserError, match=rf"{FULL}\.$"):
            packed(photos, out)
    assert not list(tmp_path.iterdir())
    assert packed(photos, out, Recoding(resize=10)).rows == 60


def test_a_run_that_was_killed_before_its_first_shard_binds_nobody(photos, whole, tmp_path):
    folder = tmp_path / "out" / ".packing"
    folder.mkdir(parents=True)
    others = {"layout": 1, "source": "other", "options": {"splits": ["train"]}, "shards": []}
    (folder / "_pack.json").write_text(json.dumps(others))
    (folder / "train-000000007.parquet").write_bytes(b"not noted")
    packed(photos, tmp_path / "out")
    assert contents(tmp_path / "out") == whole


def test_a_shard_that_was_not_noted_does_not_come_along(photos, whole, tmp_path):
    out = tmp_path / "out"
    interrupted(photos, out)
    (out / ".packing" / "train-000000047.parquet").write_bytes(b"of images that are in other shards now")
    assert packed(photos, out).kept == 3
    assert contents(out) == whole


def test_a_disk_that_says_late_that_it_is_full(tmp_path):
    """Network disks do as a file is closed."""

    class Late(io.FileIO):
        def close(self):
            if not self.closed:
                super().close()
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    class Place:
        def open(self, mode):
            return io.BufferedWriter(Late(tmp_path / "shard.parquet", mode))

    parts = open_parts("digits")
    with pytest.raises(OSError, match=os.strerror(errno.EDQUOT)), ShardWriter(Place(), schema_of(parts)) as writer:
        writer.add(Recoding().row(parts["train"], 0), parts["train"], 0)


def test_ctrl_c_before_the_first_shard(photos, typed, tmp_path, monkeypatch):
    def stop(*words):
        raise KeyboardInterrupt

    monkeypatch.setattr(ShardWriter, "add", stop)
    done = typed("data", "pack", photos, tmp_path / "out", "--workers", 0)
    assert (done.returncode, done.stderr) == (130, "Stopped; nothing was kept.\n")
    assert not list(tmp_path.iterdir())


def test_sizes_and_options_in_words():
    sizes = {"500MB": 500_000_000, "64MiB": 64 << 20, "1.5 gb": 1_500_000_000, "12": 12, "3k": 3000}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    for text in ("", "much", "-5MB", "0", "5 bananas", "1e5"):
        with pytest.raises(UserError, match="write 500MB"):
            parse_bytes(text)
    for wrong in ({"resize": 0}, {"quality": 0}, {"format": "gif"}):
        with pytest.raises(UserError):
            Recoding(**wrong)
    with pytest.raises(UserError, match="digits has no validation split, only train, test"):
        parquet_export.choose("digits", open_parts("digits"), ["val"])
    assert list(parquet_export.choose("digits", open_parts("digits"), ["testing"])) == ["test"]


def test_bad_input_gets_one_sentence(tmp_path):
    with pytest.raises(UserError, match="choose skip or fatal"):
        commands.pack("digits", tmp_path / "out", bad="maybe")
