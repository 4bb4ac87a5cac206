"""Atomic writes, and paths that cannot be written: rejected with a message before anything is computed."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

import vitrail
from tests.disks import small_disk
from tests.images import make_folder
from vitrail.atomic_files import atomic_write, check_writable, check_writable_folder
from vitrail.errors import UserError
from vitrail.evaluation.embeddings import save_array

needs_proc = pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that is never writable")


def test_writable_paths_are_left_unchanged(tmp_path):
    (tmp_path / "old.txt").write_text("old")
    (tmp_path / "link.txt").symlink_to(tmp_path / "old.txt")
    before = sorted(tmp_path.rglob("*"))
    for path in (tmp_path, tmp_path / "new.txt", tmp_path / "a" / "b" / "new.txt", tmp_path / "old.txt", tmp_path / "link.txt"):
        check_writable(path)
    check_writable(None)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "old.txt").read_text() == "old"


def test_a_file_is_not_a_writable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file is a file: give a folder to write to"):
        check_writable_folder(tmp_path / "file")
    for path in (None, tmp_path, tmp_path / "new"):
        check_writable_folder(path)


def test_full_disk_while_saving_an_array(tmp_path):
    with (
        small_disk(tmp_path / "disk", "40k"),
        pytest.raises(UserError, match=r"x.npy could not be written, not enough disk space"),
    ):
        atomic_write(tmp_path / "disk" / "x.npy", lambda temporary: save_array(temporary, np.zeros(40_000)))


def test_path_below_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=rf"{tmp_path}/file/x.png cannot be written, because {tmp_path}/file is not writable"):
        check_writable(tmp_path / "file" / "x.png")


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"])
def test_invalid_file_names(name, tmp_path):
    for check in (check_writable, lambda path: atomic_write(path, lambda temporary: temporary.write_text(""))):
        with pytest.raises(UserError, match=r"written, .*: choose another path"):
            check(tmp_path / name)


def test_symlink_loops_and_devices(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for check in (check_writable, lambda path: atomic_write(path, lambda temporary: temporary.write_text(""))):
        with pytest.raises(UserError, match=r"loop.* cannot be written"):
            check(tmp_path / "loop" / "x.png")
    with pytest.raises(UserError, match="/dev/null is a device: give the name of a file"):
        check_writable(Path("/dev/null"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder(tmp_path):
    (tmp_path / "read").mkdir(0o555)
    with pytest.raises(UserError, match=rf"because {tmp_path}/read is not writable \(Permission denied\): choose"):
        check_writable(tmp_path / "read" / "x.png")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model and images for it."""
    folder = tmp_path_factory.mktemp("files")
    torch.manual_seed(0)
    model = vitrail.create("vitrail_mini", 2, 32, depth=1)
    model.class_names = ["cats", "dogs"]
    vitrail.save(model, folder / "model.safetensors")
    make_folder(folder / "photos", ("cats", "dogs"))
    (folder / "tasks.yaml").write_text("tasks: [{source: photos, probe: knn}]")
    return {"MODEL": folder / "model.safetensors", "PHOTOS": folder / "photos", "TASKS": folder / "tasks.yaml"}


COMMANDS = (
    "convert MODEL OUT.safetensors",
    "data inspect PHOTOS --out OUT.png",
    "data pack PHOTOS OUT",
    "embed MODEL PHOTOS --out OUT.parquet",
    "train PHOTOS --out OUT --device cpu",
    "evaluate MODEL PHOTOS --out OUT",
    "predict MODEL PHOTOS --out OUT.csv",
    "annotate MODEL PHOTOS --out OUT",
    "disagree MODEL MODEL PHOTOS --out OUT.png",
    "bench MODEL --plot OUT.png",
    "bench MODEL --json OUT.json",
    "delta make MODEL MODEL --out OUT.safetensors",
    "suite TASKS MODEL --out OUT",
)


@needs_proc
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_checks_its_output(command, files, run_cli):
    arguments = [files.get(part, part.replace("OUT", "/proc/vitrail")) for part in command.split()]
    done = run_cli(*arguments)
    assert done.returncode == 2
    assert "/proc/vitrail" in done.stderr
    assert "choose another path" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
