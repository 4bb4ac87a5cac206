"""Interrupted annotation: by a kill, a full disk, a failing network; the next run continues to the same bytes."""

import errno
import os
import random
import signal
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from tests.disks import small_disk
from tests.teachers.predictions import contents, in_a_process, make_source, make_store, make_teacher
from vitrail.atomic_files import atomic_replace
from vitrail.errors import UserError
from vitrail.teachers import label_store_writer, open_teacher
from vitrail.teachers.annotation import AnnotationRequest, annotate
from vitrail.teachers.label_store import LabelStore

ALL = ("logits", "tokens", "features")


def kill_process():
    os.kill(os.getpid(), signal.SIGKILL)


def dies_after(images):
    """A progress function that kills the process after a number of images."""

    @contextmanager
    def watch(title, total):
        done = 0

        def advance(count):
            nonlocal done
            done += count
            if title == "annotating" and done >= images:
                kill_process()

        yield advance

    return watch


def dies_while_writing(files, length):
    """`atomic_replace` that kills the process at a file: after `length` bytes; None: after the file, before the manifest."""
    written = []

    @contextmanager
    def write(path, side=None):
        written.append(path)
        with atomic_replace(path, side) as place:
            yield place
            if len(written) == files and length is not None:
                place.write_bytes(place.read_bytes()[:length])
                kill_process()
        if len(written) == files:
            kill_process()

    return write


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_times_it_continues_to_the_same_bytes(seed, tmp_path, monkeypatch):
    source, teacher = make_source(tmp_path / "p", 16), make_teacher()

    def run(folder, watch=label_store_writer.no_progress):
        annotate(
            teacher,
            source,
            tmp_path / folder,
            AnnotationRequest(ALL, 3, 2, batch_size=4),
            workers=0,
            progress=watch,
            shard_size=8,
        )

    run("whole")
    draw = random.Random(seed)
    killed = 0
    for _ in range(6):
        watch = label_store_writer.no_progress
        with monkeypatch.context() as patch:
            if draw.random() < 0.5:
                watch = dies_after(draw.randrange(1, 24))
            else:
                patch.setattr(
                    label_store_writer, "atomic_replace", dies_while_writing(draw.randrange(1, 6), draw.choice([None, 1, 40]))
                )
            code = in_a_process(partial(run, "cut", watch))
        assert code in (0, -signal.SIGKILL)
        if code == 0:
            break
        killed += 1
        with pytest.raises(UserError, match=r"is incomplete|no label store"):
            LabelStore.open(tmp_path / "cut")
    assert killed >= 2, "nothing was interrupted"
    run("cut")
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def full_at(name):
    """`atomic_replace` of a disk that is full as the file of that name would get it."""

    @contextmanager
    def full(path, side=None):
        with atomic_replace(path, side) as place:
            yield place
            if path.name == name:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return full


AGAIN = r"No space left on device \(.*B free\): free disk space and run the same command again"


def test_full_disk_keeps_finished_shards(tmp_path, monkeypatch):
    source, teacher = make_source(tmp_path / "p", 10), make_teacher()
    make_store(tmp_path / "whole", teacher, source)
    with monkeypatch.context() as patch:
        patch.setattr(label_store_writer, "atomic_replace", full_at("shard-00001.safetensors"))
        with pytest.raises(UserError, match=f"{AGAIN}, the finished shards are kept"):
            make_store(tmp_path / "s", teacher, source)
    assert sorted(contents(tmp_path / "s")) == ["manifest.json", "shard-00000.safetensors"]
    make_store(tmp_path / "s", teacher, source)
    assert contents(tmp_path / "s") == contents(tmp_path / "whole")
    for name in ("shard-00000.safetensors", "manifest.json"):
        with monkeypatch.context() as patch:
            patch.setattr(label_store_writer, "atomic_replace", full_at(name))
            with pytest.raises(UserError, match=rf"{AGAIN}\.$"):
                make_store(tmp_path / "new" / "none", teacher, source)
        assert not (tmp_path / "new").exists()
    monkeypatch.setattr(label_store_writer, "free_space", lambda out: 100)
    with pytest.raises(UserError, match=r"needs .* for 30 images, but .* are free"):
        make_store(tmp_path / "tight", teacher, source)


def test_a_disk_that_fills_while_a_store_is_written(tmp_path):
    source, teacher = make_source(tmp_path / "p", 10), make_teacher()

    def run(out):
        return annotate(teacher, source, out, AnnotationRequest(batch_size=4), workers=0, shard_size=2)

    run(tmp_path / "whole")
    disk = tmp_path / "disk"
    with small_disk(disk, "40k") as resize:  # a page for each shard: more than its images take, which is looked at before
        with pytest.raises(UserError, match=f"{AGAIN}, the finished shards are kept"):
            run(disk / "s")
        assert not list(disk.rglob(".*"))
        with pytest.raises(UserError, match="is incomplete"):
            LabelStore.open(disk / "s")
        resize("1m")
        assert run(disk / "s").reused_shards > 1
        assert contents(disk / "s") == contents(tmp_path / "whole")


class Broken(torch.nn.Module):
    """Fails on batches of more than two images."""

    def __init__(self, error):
        super().__init__()
        self.error, self.layer = error, torch.nn.Linear(3, 5)

    def forward(self, images):
        if len(images) > 2:
            raise self.error
        return self.layer(images.mean((2, 3)))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no"), KeyboardInterrupt(), RuntimeError("odd")])
def test_failure_before_the_first_shard_leaves_no_files(error, tmp_path):
    source, broken = make_source(tmp_path / "p", 4), open_teacher(Broken(error), preprocessing={"image_size": 16})
    out = tmp_path / "new" / "folder"
    with pytest.raises(UserError if isinstance(error, torch.OutOfMemoryError) else type(error)):
        make_store(out, broken, source)
    assert not (tmp_path / "new").exists()
    out.mkdir(parents=True)  # what was there before stays
    with pytest.raises(UserError if isinstance(error, torch.OutOfMemoryError) else type(error)):
        make_store(out, broken, source)
    assert list(out.iterdir()) == []
    assert len(make_store(out, make_teacher(), source, top_k=2)) == 12


def test_kill_before_the_first_shard_allows_other_options(tmp_path, monkeypatch):
    source = make_source(tmp_path / "p", 4)
    with monkeypatch.context() as patch:
        patch.setattr(
            label_store_writer, "atomic_replace", dies_while_writing(2, None)
        )  # the manifest, then a shard that it does not know of
        assert in_a_process(partial(make_store, tmp_path / "s", make_teacher(), source, 5)) == -signal.SIGKILL
    assert sorted(contents(tmp_path / "s")) == [".lock", "manifest.json", "shard-00000.safetensors"]
    store = make_store(tmp_path / "s", make_teacher(seed=1), source, views=2)
    assert store.views == 2
    make_store(tmp_path / "whole", make_teacher(seed=1), source, views=2)
    assert contents(tmp_path / "s") == contents(tmp_path / "whole")


def test_no_shard_is_written_after_one_that_failed(tmp_path, monkeypatch):
    """Although the next shards are already computed."""
    source, teacher = make_source(tmp_path / "p", 16), make_teacher()
    whole, requested = label_store_writer.write_shard, []

    def failing(path, *more):
        requested.append(path.name)
        if path.name == "shard-00002.safetensors":
            raise UserError("no more")
        return whole(path, *more)

    monkeypatch.setattr(label_store_writer, "write_shard", failing)
    with pytest.raises(UserError, match="no more"):
        make_store(tmp_path / "s", teacher, source, shard_size=4)
    assert requested == [f"shard-{number:05}.safetensors" for number in range(3)]
    assert sorted(contents(tmp_path / "s")) == ["manifest.json", "shard-00000.safetensors", "shard-00001.safetensors"]
