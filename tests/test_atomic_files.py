"""Places that take no files: told in a sentence that names them, before anything is computed."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

import vitrail
from tests.disks import small_disk
from tests.images import make_folder
from vitrail.atomic_files import check_folder, check_writable, write_aside
from vitrail.errors import UserError
from vitrail.evaluation.embeddings import save_array

SYSTEM = pytest.mark.skipif(not Path("/proc/self").exists(), reason="this system has no folder that takes nothing from anybody")


def test_places_that_take_files(tmp_path):
    (tmp_path / "old.txt").write_text("old")
    (tmp_path / "link.txt").symlink_to(tmp_path / "old.txt")
    before = sorted(tmp_path.rglob("*"))
    for place in (tmp_path, tmp_path / "new.txt", tmp_path / "a" / "b" / "new.txt", tmp_path / "old.txt", tmp_path / "link.txt"):
        check_writable(place)
    check_writable(None)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "old.txt").read_text() == "old"


def test_a_file_where_a_folder_is_meant(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file is a file: give a folder to write to"):
        check_folder(tmp_path / "file")
    for place in (None, tmp_path, tmp_path / "new"):
        check_folder(place)


def test_an_array_that_does_not_fit(tmp_path):
    with small_disk(tmp_path / "disk", "40k"), pytest.raises(UserError, match=r"x.npy could not be written, not all of it fits"):
        write_aside(tmp_path / "disk" / "x.npy", lambda side: save_array(side, np.zeros(40_000)))


def test_below_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=rf"{tmp_path}/file/x.png cannot be written, because {tmp_path}/file takes no new files"):
        check_writable(tmp_path / "file" / "x.png")


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"])
def test_names_that_no_file_has(name, tmp_path):
    for check in (check_writable, lambda path: write_aside(path, lambda side: side.write_text(""))):
        with pytest.raises(UserError, match=r"written, .*: choose another place"):
            check(tmp_path / name)


def test_links_in_a_circle_and_devices(tmp_path):
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for check in (check_writable, lambda path: write_aside(path, lambda side: side.write_text(""))):
        with pytest.raises(UserError, match=r"circle.* cannot be written"):
            check(tmp_path / "circle" / "x.png")
    with pytest.raises(UserError, match="/dev/null is a device; give the name of a file"):
        check_writable(Path("/dev/null"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_only_be_read(tmp_path):
    (tmp_path / "read").mkdir(0o555)
    with pytest.raises(UserError, match=rf"because {tmp_path}/read takes no new files \(Permission denied\): choose"):
        check_writable(tmp_path / "read" / "x.png")


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A model and images for it."""
    folder = tmp_path_factory.mktemp("given")
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


@SYSTEM
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_so(command, given, typed):
    words = [given.get(word, word.replace("OUT", "/proc/vitrail")) for word in command.split()]
    done = typed(*words)
    assert done.returncode == 2
    assert "/proc/vitrail" in done.stderr
    assert "choose another place" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
