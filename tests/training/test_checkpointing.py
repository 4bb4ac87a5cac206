"""Checkpoints that are damaged, missing, of another training or too large for the disk: one message, no valid data is lost."""

import json
import os
import random
import shutil
import signal
import subprocess

import pytest
import torch

from tests.images import make_folder
from tests.training.processes import kill_before
from tests.training.small import (
    ADAMW,
    FAST_PATCHES,
    SHORT,
    Killer,
    differences,
    in_child,
    lines,
    recipe,
    start,
    state_differences,
)
from vitrail.checkpoints.training_checkpoints import READ_ERRORS, read_checkpoint
from vitrail.errors import UserError
from vitrail.runs import train
from vitrail.training.checkpointing import CheckpointManager, write_checkpoint_file
from vitrail.training.metrics import MetricsWriter, read_metrics
from vitrail.training.trainer import Trainer

GROUPS = {
    "model": {"weight": torch.randn(3, 4).t(), "count": torch.tensor(7), "none": torch.zeros(0, 2)},
    "optimizer": {"weight/exp_avg": torch.randn(5).bfloat16(), "flags": torch.tensor([True, False])},
    "loop": {"window": torch.tensor([0.1, -1.0], dtype=torch.float64)},
}
METADATA = {"best": {"top1": 0.1 + 0.2, "loss": "nan"}, "skipped": 0, "recipe": {"name": "é"}}


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    for owner, name, value in FAST_PATCHES:
        monkeypatch.setattr(owner, name, value)


def check_state(state, step=3, groups=GROUPS, metadata=METADATA):
    saved_step, saved_groups, saved_metadata = state
    assert (saved_step, saved_metadata) == (step, metadata)
    assert {name: set(members) for name, members in saved_groups.items()} == {name: set(part) for name, part in groups.items()}
    for group, members in groups.items():
        for name, tensor in members.items():
            saved = saved_groups[group][name]
            assert saved.dtype == tensor.dtype
            assert torch.equal(saved, tensor)


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "step-000000003.safetensors"
    write_checkpoint_file(found, 3, GROUPS, METADATA)
    return found


def test_round_trip(path):
    check_state(read_checkpoint(path))


def test_a_flipped_bit_is_detected(path):
    """Or has no effect: some bits of a file are unused."""
    content, draw, detected = path.read_bytes(), random.Random(0), 0
    bits = [draw.randrange(8 * len(content)) for _ in range(1500)]
    for bit in bits:
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            state = read_checkpoint(path)
        except READ_ERRORS:
            detected += 1
        else:
            check_state(state)
    assert detected > 0.9 * len(bits)


def test_a_truncated_file_is_detected(path):
    content = path.read_bytes()
    for length in [*range(20), *range(20, len(content), 13), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(READ_ERRORS):
            read_checkpoint(path)


def test_only_the_newest_are_kept(tmp_path):
    checkpoints = CheckpointManager(tmp_path, keep=2)
    for step in (1, 2, 10, 9):
        checkpoints.save(step, GROUPS, METADATA)
    # The checkpoint of step 10 was damaged, and the training resumed before it.
    assert [path.name for path in checkpoints.all()] == ["step-000000002.safetensors", "step-000000009.safetensors"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A complete run, and one that was killed after the checkpoints of step 4 and 8."""
    folder = tmp_path_factory.mktemp("runs")

    def killed():
        killer = Killer(log=folder / "log")
        killer.watch()
        kill_before(10)
        start(folder / "killed", ADAMW)

    assert in_child(killed, folder / "killed.txt") == -signal.SIGKILL
    assert in_child(lambda: start(folder / "complete", ADAMW), folder / "complete.txt") == 0
    assert [path.name[-14:] for path in newest(folder / "killed", 9)] == ["04.safetensors", "08.safetensors"]
    return folder


@pytest.fixture
def killed(runs, tmp_path):
    return shutil.copytree(runs / "killed", tmp_path / "run")


def newest(folder, count=1):
    return CheckpointManager(folder / "checkpoints").all()[-count:]


def resume(folder):
    return train.resume(folder, device="cpu", workers=0)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def overwrite_header(path):
    content = path.read_bytes()
    path.write_bytes(content[:8] + b"\xff" * 64 + content[72:])


DAMAGES = {
    "a third is missing": lambda path: os.truncate(path, path.stat().st_size * 2 // 3),
    "a wrong bit": flip,
    "empty": lambda path: os.truncate(path, 0),
    "the header is garbage": overwrite_header,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_the_checkpoint_before_a_damaged_one_is_loaded(damage, killed, runs, capfd):
    damage(newest(killed)[0])
    assert resume(killed).finished
    stderr = capfd.readouterr().err
    assert "step-000000008.safetensors is damaged (" in stderr
    assert "resuming at step 4 of 22" in stderr
    assert not differences(killed, runs / "complete")


def test_all_checkpoints_damaged(killed):
    for path in newest(killed, 2):
        flip(path)
    with pytest.raises(UserError, match=r"All 2 checkpoints in .* are damaged"):
        resume(killed)
    newest(killed)[0].unlink()
    with pytest.raises(UserError, match=r"step-000000004.safetensors is damaged"):
        resume(killed)


def test_killed_before_the_first_checkpoint(killed, runs):
    shutil.rmtree(killed / "checkpoints")
    assert resume(killed).finished
    assert not differences(killed, runs / "complete")


def test_a_finished_run_is_unchanged(runs, tmp_path, capfd):
    folder = shutil.copytree(runs / "complete", tmp_path / "run")
    done = resume(folder)
    assert done.finished
    assert done.best["top1"] > 0
    assert "is finished" in capfd.readouterr().err
    assert not differences(folder, runs / "complete")
    ours, theirs = (json.loads((each / "run.json").read_text()) for each in (folder, runs / "complete"))
    assert ours["seconds"] == theirs["seconds"] > 0


def test_lost_metrics_do_not_prevent_resuming(killed, runs):
    (killed / "metrics.jsonl").unlink()
    assert resume(killed).finished
    assert lines(killed) == [line for line in lines(runs / "complete") if line["step"] > 8]


@pytest.mark.parametrize("content", ["", "{", "[]", "7", "null", "{}", '{"recipe": {}}'])
def test_a_damaged_run_json(content, killed):
    (killed / "run.json").write_text(content)
    with pytest.raises(UserError, match=r"run\.json cannot be read"):
        resume(killed)


@pytest.mark.parametrize(("name", "value"), [("recipe", 3), ("recipe", {"batc": 1}), ("options", {"x": 1}), ("data", {})])
def test_an_invalid_run_json(name, value, killed):
    metadata = json.loads((killed / "run.json").read_text()) | {name: value}
    (killed / "run.json").write_text(json.dumps(metadata))
    with pytest.raises(UserError):
        resume(killed)


def test_without_run_json_it_is_not_a_run(killed):
    (killed / "run.json").unlink()
    with pytest.raises(UserError, match=r"it has no run\.json"):
        resume(killed)
    with pytest.raises(UserError, match="another folder with --out"):
        start(killed, ADAMW)


def test_a_run_is_not_overwritten(killed):
    with pytest.raises(UserError, match=f"`vitrail resume {killed}`"):
        start(killed, ADAMW)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer.lr": 1e-3}, r"with optimizer\.lr=0\.001 instead of 0\.005"),
        ({"architecture.width": 32}, r"with architecture\.width=32 instead of 16"),
        ({"seed": 1}, "with seed=1 instead of 0"),
    ],
)
def test_a_checkpoint_of_another_training_is_rejected(change, message, killed):
    step, groups, metadata = read_checkpoint(newest(killed)[0])
    metadata["recipe"] = json.loads(json.dumps(recipe(ADAMW | change).to_dict()))
    write_checkpoint_file(killed / "checkpoints" / "step-000000020.safetensors", step, groups, metadata)
    with pytest.raises(UserError, match=f"belongs to another training, {message}: move it away"):
        resume(killed)
    assert len(newest(killed, 9)) == 3


@pytest.fixture
def images(tmp_path):
    return make_folder(tmp_path / "images", ("ant", "bee"), 20, (8, 8))


def test_changed_data_are_rejected(images, tmp_path):
    folder = tmp_path / "run"
    start(folder, SHORT | {"schedule.length": "4 steps"}, source=str(images))
    (images / "ant" / "000.png").rename(images / "bee" / "x.png")
    with pytest.raises(UserError, match=f"The images at {images} are not those that {folder} was started with"):
        resume(folder)
    shutil.rmtree(images)
    with pytest.raises(UserError, match=f"{images} does not exist"):
        resume(folder)


@pytest.fixture
def disk(tmp_path):
    """A small file system."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no small disk can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(disk, leave):
    """Use all space but `leave` bytes."""
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            file.truncate(max(file.tell() - leave, 0))


@pytest.mark.parametrize(("leave", "what"), [(0, "best.safetensors"), (60_000, "step-000000008.safetensors")])
def test_a_full_disk_loses_no_checkpoint(leave, what, disk, runs, tmp_path):
    folder, output = disk / "run", tmp_path / "output"

    def train():
        original = Trainer.train_step

        def step(trainer, *arguments):
            if trainer.step == 7:
                fill(disk, leave)
            original(trainer, *arguments)

        Trainer.train_step = step
        start(folder, ADAMW)

    assert in_child(train, output) == 2
    messages = output.read_text()
    assert "Traceback" not in messages
    assert f"{what} " in messages.splitlines()[-1]
    assert "No space left on device" in messages.splitlines()[-1]
    (kept,) = newest(folder, 9)
    assert kept.name == "step-000000004.safetensors"
    assert not state_differences(kept, newest(runs / "killed", 2)[0])
    assert in_child(lambda: resume(folder), output) == 2  # still full
    (disk / "filler").unlink()
    assert in_child(lambda: resume(folder), output) == 0, output.read_text()
    assert not differences(folder, runs / "complete")


def test_a_full_disk_while_writing_metrics(disk, tmp_path):
    def write():
        with MetricsWriter(disk / "run") as metrics:
            fill(disk, 8192)
            for step in range(1000):
                metrics.write("train", step, 0.0, {"loss": 1.0})

    assert in_child(write, tmp_path / "output") == 2
    (message,) = (tmp_path / "output").read_text().splitlines()
    assert "metrics.jsonl cannot be written" in message
    (disk / "filler").unlink()
    assert 0 < len(read_metrics(disk / "run")) < 1000


def test_a_read_only_folder(disk, runs, tmp_path):
    folder, output = shutil.copytree(runs / "killed", disk / "run"), tmp_path / "output"
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert in_child(lambda: resume(folder), output) == 2
    messages = output.read_text().splitlines()
    assert len(messages) == 1
    assert "Read-only file system" in messages[0]
