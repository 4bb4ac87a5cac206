"""`vitrail data pack` preserves the data, also if it is killed and resumed."""

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
from vitrail.atomic_files import atomic_replace
from vitrail.cli import data as commands
from vitrail.data import parquet_export
from vitrail.data.datasets.folder import SourceDict
from vitrail.data.datasets.lookup import open_sources
from vitrail.data.decode import decode, decode_mask
from vitrail.data.parquet_export import pack, parse_bytes
from vitrail.data.parquet_shard import ShardWriter, make_schema
from vitrail.data.reencoding import Reencoding
from vitrail.errors import UserError

PLAIN = Reencoding()
SHARD = 100_000


def packed(path: str, out: Path, reencoding: Reencoding = PLAIN, shard_size: int = SHARD, **options) -> parquet_export.Result:
    return pack(path, open_sources(path), out, reencoding, shard_size, **{"workers": 0, **options})


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def same(first: SourceDict, second: SourceDict) -> None:
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
    """Sixty images of noise, about 1 MB, so that the rows of a task exceed the buffer of a pipe."""
    root = tmp_path_factory.mktemp("photos") / "photos"
    rng = np.random.default_rng(0)
    for number in range(60):
        file = root / ("train" if number % 5 else "val") / f"class {number % 3}" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (75, 75, 3), dtype=np.uint8)).save(file)
    return str(root)


@pytest.fixture(scope="module")
def expected_files(photos, tmp_path_factory):
    """The files of an uninterrupted run."""
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
    write_parquet(root / "test.parquet", [-1, -1], names)  # a test split without labels
    return str(root)


def tar_with_masks(root: Path) -> str:
    root.mkdir()
    members = [(f"{number}.png", png(number)) for number in range(5)] + [(f"{n}.cls", str(n % 2).encode()) for n in range(5)]
    return write_tar(root / "one.tar", members + [(f"{number}.mask.png", mask(number)) for number in (1, 3)])


def cifar(root: Path) -> str:
    write_cifar(root, hundred=True, binary=True)
    return str(root)


@pytest.mark.parametrize("make", [folder_without_labels, parquet_with_everything, tar_with_masks, cifar])
def test_images_labels_and_masks_are_preserved(make, tmp_path):
    path = make(tmp_path / "in")
    before = open_sources(path)
    packed(path, tmp_path / "out", shard_size=200)
    same(before, open_sources(str(tmp_path / "out")))


def test_shards_follow_the_hugging_face_convention(photos, tmp_path):
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
    same(open_sources(photos), open_sources(str(tmp_path / "out")))


def test_resize(tmp_path):
    (tmp_path / "in").mkdir()
    large, small = scene(1, 200, 100), scene(2, 40, 30)
    large.convert("L").save(tmp_path / "in" / "0.png")
    large.save(tmp_path / "in" / "1.jpg", quality=95)
    small.save(tmp_path / "in" / "2.png")
    path = str(tmp_path / "in")
    packed(path, tmp_path / "png", Reencoding(resize=50, format="png"))
    source = open_sources(str(tmp_path / "png"))["train"]
    assert [decode(source.encoded(index)).shape[:2] for index in range(3)] == [(50, 100), (50, 100), (30, 40)]
    expected = np.asarray(large.convert("L").resize((100, 50), Image.Resampling.BICUBIC))
    assert (decode(source.encoded(0))[:, :, 1] == expected).all()
    assert source.encoded(2) == (tmp_path / "in" / "2.png").read_bytes()
    packed(path, tmp_path / "jpeg", Reencoding(resize=50, quality=80))
    source = open_sources(str(tmp_path / "jpeg"))["train"]
    assert source.encoded(0).startswith(b"\xff\xd8")
    paths = [row["path"] for row in parquet.read_table(tmp_path / "jpeg" / "data")["image"].to_pylist()]
    assert paths == ["0.jpg", "1.jpg", "2.png"]
    packed(path, tmp_path / "webp", Reencoding(resize=50, format="webp", quality=80))
    rows = parquet.read_table(tmp_path / "webp" / "data")["image"].to_pylist()
    assert [row["path"] for row in rows] == ["0.webp", "1.webp", "2.png"]
    assert [Image.open(io.BytesIO(row["bytes"])).format for row in rows] == ["WEBP", "WEBP", "PNG"]
    assert len(rows[1]["bytes"]) < len(source.encoded(1))


def test_resized_masks_have_no_new_ids(tmp_path):
    ids = np.random.default_rng(0).integers(0, 4, (90, 120), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(ids).save(buffer, "PNG")
    image = io.BytesIO()
    scene(1, 120, 90).save(image, "PNG")
    path = write_tar(tmp_path / "one.tar", [("0.png", image.getvalue()), ("0.cls", b"0"), ("0.mask.png", buffer.getvalue())])
    packed(path, tmp_path / "out", Reencoding(resize=30))
    found = decode_mask(open_sources(str(tmp_path / "out"))["train"].mask(0) or b"")
    assert found.shape == (30, 40)
    assert set(np.unique(found)) <= {0, 1, 2, 3}


def killed_after(photos: str, out: Path, step: int, workers: int) -> None:
    """Pack, and kill the own process at the given call of `advance` or of a function that changes the folder."""
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
    """Return the exit code of a run that kills itself, after its workers have exited."""
    watched, held = os.pipe()
    child = multiprocessing.get_context("fork").Process(target=killed_after, args=(photos, out, step, workers))
    child.start()
    os.close(held)  # now only the child and its workers hold that end
    child.join()
    assert select.select([watched], [], [], 20)[0], "a worker is still running"
    os.close(watched)
    return child.exitcode


@pytest.mark.parametrize(("step", "workers"), [(1, 0), (2, 0), (3, 0), (30, 0), (50, 0), (40, 2), (75, 2)])
def test_a_killed_and_resumed_run_is_byte_identical(photos, expected_files, step, workers, tmp_path):
    out = tmp_path / "out"
    assert kill(photos, out, step, workers) == -signal.SIGKILL
    assert not (out / "data").exists()
    packed(photos, out, workers=workers)
    assert contents(out) == expected_files


def test_killed_many_times(photos, expected_files, tmp_path):
    """Killed at the first step, then at the second, and so on, resuming each time, until a run completes."""
    out = tmp_path / "out"
    codes = [kill(photos, out, 1, 0)]
    while codes[-1] == -signal.SIGKILL:
        assert not (out / "data").exists()
        codes.append(kill(photos, out, len(codes) + 1, 0))
    assert codes[-1] == 0
    assert len(codes) > 20
    assert contents(out) == expected_files


def test_the_command_can_be_killed(photos, expected_files, tmp_path):
    out = tmp_path / "out"
    args = ["data", "pack", photos, str(out), "--shard-size", str(SHARD)]
    process = subprocess.Popen([sys.executable, "-m", "vitrail.cli.main", *args])
    while process.poll() is None and not list(out.glob(".packing/*.parquet")):
        with contextlib.suppress(subprocess.TimeoutExpired):  # do not busy-wait
            process.wait(0.005)
    process.kill()
    process.wait()
    packed(photos, out)
    assert contents(out) == expected_files


def test_an_interrupt_keeps_finished_shards(photos, expected_files, tmp_path):
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
    assert contents(tmp_path / "out") == expected_files


def interrupted(photos: str, out: Path) -> None:
    def stop(count: int) -> None:
        if len(list(out.glob(".packing/*.parquet"))) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packed(photos, out, advance=stop)


def test_damaged_shards_are_written_again(photos, expected_files, tmp_path):
    out = tmp_path / "out"
    interrupted(photos, out)
    first, second, *_ = sorted(out.glob(".packing/*.parquet"))
    first.write_bytes(first.read_bytes()[:-1] + b"x")
    second.unlink()
    messages: list[str] = []
    other_spelling = os.path.relpath(photos) + "/"
    assert packed(other_spelling, out, log=messages.append).kept == 1
    assert len(messages) == 2
    assert "The train shard from image 0 on is damaged or missing and is written again" in messages[0]
    assert contents(out) == expected_files


def test_other_data_or_options_are_rejected(photos, tmp_path):
    out = tmp_path / "out"
    interrupted(photos, out)
    before = contents(out)
    with pytest.raises(UserError, match="started with shard size 100000, not 200000: give the same options"):
        packed(photos, out, shard_size=200_000)
    with pytest.raises(UserError, match="started with resize none, not 10"):
        packed(photos, out, Reencoding(resize=10))
    with pytest.raises(UserError, match="started with splits train, validation, not train"):
        pack(photos, {"train": open_sources(photos)["train"]}, out, PLAIN, SHARD)
    other = write_folder(tmp_path / "other" / "train", {"a": 2, "b": 2})
    write_folder(tmp_path / "other" / "val", {"a": 2, "b": 2})
    with pytest.raises(UserError, match="started from other data"):
        packed(os.path.dirname(other), out)
    assert contents(out) == before


def test_a_finished_pack_is_verified_and_unchanged(photos, expected_files, tmp_path):
    out = tmp_path / "out"
    packed(photos, out)
    stamps = {file: file.stat().st_mtime_ns for file in out.rglob("*")}
    assert packed(photos, out).kept == len(expected_files) - 1
    assert {file: file.stat().st_mtime_ns for file in out.rglob("*")} == stamps
    next(iter(out.rglob("*.parquet"))).write_bytes(b"")
    with pytest.raises(UserError, match=r"is damaged or missing: remove .* and pack again"):
        packed(photos, out)


def test_folders_with_other_files_are_rejected(photos, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="was not written by this command: give a new or empty folder"):
        packed(photos, tmp_path)
    with pytest.raises(UserError, match="is a file: give a folder"):
        packed(photos, tmp_path / "notes.txt")
    with pytest.raises(UserError, match=r"is inside of .* give another folder"):
        packed(photos, Path(photos) / "packed")
    with pytest.raises(UserError, match=r"could not be written, Not a directory .* choose another path"):
        packed(photos, tmp_path / "notes.txt" / "out")
    assert sorted(os.listdir(tmp_path)) == ["notes.txt"]


def test_concurrent_runs_are_rejected(photos, expected_files, tmp_path):
    def second(count: int) -> None:
        # In another process: record locks do not exclude the same process.
        child = multiprocessing.get_context("fork").Process(target=packed_quietly, args=(photos, tmp_path / "out"))
        child.start()
        child.join()
        assert child.exitcode == 7

    once = [second]
    packed(photos, tmp_path / "out", advance=lambda count: once.pop()(count) if once else None)
    assert contents(tmp_path / "out") == expected_files


def packed_quietly(photos: str, out: Path) -> None:
    try:
        packed(photos, out)
    except UserError as error:
        os._exit(7 if "Another process is packing" in str(error) else 1)


def test_a_sample_is_packed(photos, run_cli, tmp_path):
    result = run_cli("data", "pack", photos, tmp_path / "out", "--images", 7)
    assert result.returncode == 0, result.stderr
    whole, sample = open_sources(photos), open_sources(str(tmp_path / "out"))
    assert [len(sample[split]) for split in ("train", "validation")] == [7, min(7, len(whole["validation"]))]
    assert sample["train"].label.names == whole["train"].label.names
    paths = [row["path"] for row in parquet.read_table(next((tmp_path / "out" / "data").glob("train-*")))["image"].to_pylist()]
    assert all(path.startswith("class ") for path in paths)


def test_unreadable_images_are_skipped_and_reported_or_fatal(run_cli, tmp_path):
    root = tmp_path / "in"
    path = write_folder(root, {"a": 4, "b": 4})
    (root / "a" / "1.png").write_bytes(b"")
    (root / "b" / "3.png").write_bytes(png(3)[:40])
    out = tmp_path / "out"
    result = run_cli("data", "pack", path, out, "--shard-size", "150")
    assert result.returncode == 0
    assert "6 images in" in result.stdout
    assert "Skipped 2 unreadable images." in result.stderr
    assert "a/1.png: the file is empty" in result.stderr
    manifest = json.loads((out / "data" / "_pack.json").read_text())
    assert [problem["location"][-7:] for shard in manifest["shards"] for problem in shard["skipped"]] == ["a/1.png", "b/3.png"]
    assert open_sources(str(out))["train"].label.values.tolist() == [0, 0, 0, 1, 1, 1]
    with pytest.raises(UserError, match=r"a/1.png cannot be read: the file is empty"):
        packed(path, out, shard_size=150, fatal=True)
    with pytest.raises(UserError, match=r"a/1.png cannot be read"):
        packed(path, tmp_path / "fatal", fatal=True)
    for file in root.rglob("*.png"):
        file.write_bytes(b"")
    with pytest.raises(UserError, match="None of the images 0 to 7 of train can be read"):
        packed(path, tmp_path / "none")


FULL = r"No space left on device \(.*B free\): free disk space and run the same command again"


def test_a_full_disk_keeps_finished_shards(photos, expected_files, tmp_path):
    disk = tmp_path / "disk"
    with small_disk(disk, "400k") as resize:
        with pytest.raises(UserError, match=f"{FULL}, the finished shards are kept"):
            packed(photos, disk / "out")
        assert not list(disk.rglob("*.part"))
        finished = len(list(disk.rglob("*.parquet")))
        assert finished > 1
        resize("4m")
        assert packed(photos, disk / "out").kept == finished
        assert contents(disk / "out") == expected_files


def fill_at(monkeypatch, ending):
    """Simulate a full disk when a file with that ending is renamed."""

    @contextlib.contextmanager
    def full(path):
        with atomic_replace(path) as temporary:
            yield temporary
            if path.name.endswith(ending):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(parquet_export, "atomic_replace", full)


@pytest.mark.parametrize("ending", ["_pack.json", ".parquet"])
def test_a_full_disk_before_the_first_shard(ending, photos, tmp_path, monkeypatch):
    """Nothing is left, and the next run may use other options."""
    out = tmp_path / "new" / "out"
    with monkeypatch.context() as patch:
        fill_at(patch, ending)
        with pytest.raises(UserError, match=rf"{FULL}\.$"):
            packed(photos, out)
    assert not list(tmp_path.iterdir())
    assert packed(photos, out, Reencoding(resize=10)).rows == 60


def test_a_run_killed_before_its_first_shard_is_ignored(photos, expected_files, tmp_path):
    folder = tmp_path / "out" / ".packing"
    folder.mkdir(parents=True)
    manifest = {"layout": 1, "source": "other", "options": {"splits": ["train"]}, "shards": []}
    (folder / "_pack.json").write_text(json.dumps(manifest))
    (folder / "train-000000007.parquet").write_bytes(b"not recorded")
    packed(photos, tmp_path / "out")
    assert contents(tmp_path / "out") == expected_files


def test_an_unrecorded_shard_is_removed(photos, expected_files, tmp_path):
    out = tmp_path / "out"
    interrupted(photos, out)
    (out / ".packing" / "train-000000047.parquet").write_bytes(b"of images that are in other shards now")
    assert packed(photos, out).kept == 3
    assert contents(out) == expected_files


def test_a_write_error_on_close(tmp_path):
    """Network file systems may report a full disk only when the file is closed."""

    class Late(io.FileIO):
        def close(self):
            if not self.closed:
                super().close()
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    class Target:
        def open(self, mode):
            return io.BufferedWriter(Late(tmp_path / "shard.parquet", mode))

    parts = open_sources("digits")
    with pytest.raises(OSError, match=os.strerror(errno.EDQUOT)), ShardWriter(Target(), make_schema(parts)) as writer:
        writer.add(Reencoding().encode(parts["train"], 0), parts["train"], 0)


def test_ctrl_c_before_the_first_shard(photos, run_cli, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(ShardWriter, "add", stop)
    done = run_cli("data", "pack", photos, tmp_path / "out", "--workers", 0)
    assert (done.returncode, done.stderr) == (130, "Interrupted; nothing was written.\n")
    assert not list(tmp_path.iterdir())


def test_invalid_sizes_and_options():
    sizes = {"500MB": 500_000_000, "64MiB": 64 << 20, "1.5 gb": 1_500_000_000, "12": 12, "3k": 3000}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    for text in ("", "much", "-5MB", "0", "5 bananas", "1e5"):
        with pytest.raises(UserError, match="write 500MB"):
            parse_bytes(text)
    for invalid in ({"resize": 0}, {"quality": 0}, {"format": "gif"}):
        with pytest.raises(UserError):
            Reencoding(**invalid)
    with pytest.raises(UserError, match="digits has no validation split, only train, test"):
        parquet_export.select_splits("digits", open_sources("digits"), ["val"])
    assert list(parquet_export.select_splits("digits", open_sources("digits"), ["testing"])) == ["test"]


def test_an_unknown_option_value_is_rejected(tmp_path):
    with pytest.raises(UserError, match="choose skip or fatal"):
        commands.pack("digits", tmp_path / "out", bad="maybe")
