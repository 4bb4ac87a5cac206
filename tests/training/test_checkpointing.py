"""Files that rot, vanish, belong to somebody else or do not fit on the disk: one sentence, and nothing that was good is lost."""

import json
import os
import random
import shutil
import signal
import subprocess

import pytest
import torch

from tests.images import make_folder
from tests.training.small import ADAMW, EASY, SHORT, Death, begin, differences, in_child, lines, recipe, state_differences
from vitrail.checkpoints.training_checkpoints import DAMAGE, read_checkpoint
from vitrail.errors import UserError
from vitrail.runs import train
from vitrail.training.checkpointing import Checkpoints, write_checkpoint
from vitrail.training.metrics import Metrics, read_metrics
from vitrail.training.trainer import Trainer

GROUPS = {
    "model": {"weight": torch.randn(3, 4).t(), "count": torch.tensor(7), "none": torch.zeros(0, 2)},
    "optimizer": {"weight/exp_avg": torch.randn(5).bfloat16(), "flags": torch.tensor([True, False])},
    "loop": {"window": torch.tensor([0.1, -1.0], dtype=torch.float64)},
}
FACTS = {"best": {"top1": 0.1 + 0.2, "loss": "nan"}, "skipped": 0, "recipe": {"name": "é"}}


@pytest.fixture(autouse=True)
def easy(monkeypatch):
    for owner, name, value in EASY:
        monkeypatch.setattr(owner, name, value)


def same(state, step=3, groups=GROUPS, facts=FACTS):
    found_step, found_groups, found_facts = state
    assert (found_step, found_facts) == (step, facts)
    assert {name: set(members) for name, members in found_groups.items()} == {name: set(part) for name, part in groups.items()}
    for group, members in groups.items():
        for name, tensor in members.items():
            found = found_groups[group][name]
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor)


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "step-000000003.safetensors"
    write_checkpoint(found, 3, GROUPS, FACTS)
    return found


def test_what_is_written_is_read_back(path):
    same(read_checkpoint(path))


def test_a_single_wrong_bit_anywhere_is_noticed(path):
    """Or does not matter: some bits of a file mean nothing."""
    content, draw, noticed = path.read_bytes(), random.Random(0), 0
    places = [draw.randrange(8 * len(content)) for _ in range(1500)]
    for place in places:
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            state = read_checkpoint(path)
        except DAMAGE:
            noticed += 1
        else:
            same(state)
    assert noticed > 0.9 * len(places)


def test_a_file_cut_anywhere_is_noticed(path):
    content = path.read_bytes()
    for length in [*range(20), *range(20, len(content), 13), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(DAMAGE):
            read_checkpoint(path)


def test_only_the_newest_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 10, 9):
        checkpoints.save(step, GROUPS, FACTS)
    # The one of step 10 is from before the training went back: it was damaged.
    assert [path.name for path in checkpoints.all()] == ["step-000000002.safetensors", "step-000000009.safetensors"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A whole run, and one that was killed after the checkpoints of step 4 and 8."""
    folder = tmp_path_factory.mktemp("runs")

    def killed():
        death = Death(log=folder / "log")
        death.watch()
        original = Trainer._step

        def step(training, *arguments):
            if training.step == 10:
                os.kill(os.getpid(), signal.SIGKILL)
            original(training, *arguments)

        Trainer._step = step
        begin(folder / "killed", ADAMW)

    assert in_child(killed, folder / "killed.txt") == -signal.SIGKILL
    assert in_child(lambda: begin(folder / "whole", ADAMW), folder / "whole.txt") == 0
    assert [path.name[-14:] for path in newest(folder / "killed", 9)] == ["04.safetensors", "08.safetensors"]
    return folder


@pytest.fixture
def killed(runs, tmp_path):
    return shutil.copytree(runs / "killed", tmp_path / "run")


def newest(folder, count=1):
    return Checkpoints(folder / "checkpoints").all()[-count:]


def go_on(folder):
    return train.resume(folder, device="cpu", workers=0)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def spoil(path):
    content = path.read_bytes()
    path.write_bytes(content[:8] + b"\xff" * 64 + content[72:])


DAMAGES = {
    "a third is missing": lambda path: os.truncate(path, path.stat().st_size * 2 // 3),
    "a wrong bit": flip,
    "empty": lambda path: os.truncate(path, 0),
    "the header is garbage": spoil,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_the_one_before_a_damaged_one_is_taken(damage, killed, runs, capfd):
    damage(newest(killed)[0])
    assert go_on(killed).finished
    said = capfd.readouterr().err
    assert "step-000000008.safetensors cannot be used (" in said
    assert "going on at step 4 of 22" in said
    assert not differences(killed, runs / "whole")


def test_no_whole_one_is_one_sentence(killed):
    for path in newest(killed, 2):
        flip(path)
    with pytest.raises(UserError, match=r"None of the 2 checkpoints in .* is whole"):
        go_on(killed)
    newest(killed)[0].unlink()
    with pytest.raises(UserError, match=r"step-000000004.safetensors is not whole"):
        go_on(killed)


def test_killed_before_the_first_one_it_begins_again(killed, runs):
    shutil.rmtree(killed / "checkpoints")
    assert go_on(killed).finished
    assert not differences(killed, runs / "whole")


def test_a_finished_run_is_left_as_it_is(runs, tmp_path, capfd):
    folder = shutil.copytree(runs / "whole", tmp_path / "run")
    done = go_on(folder)
    assert done.finished
    assert done.best["top1"] > 0
    assert "is finished" in capfd.readouterr().err
    assert not differences(folder, runs / "whole")
    ours, theirs = (json.loads((each / "run.json").read_text()) for each in (folder, runs / "whole"))
    assert ours["seconds"] == theirs["seconds"] > 0


def test_lost_numbers_do_not_stop_it(killed, runs):
    (killed / "metrics.jsonl").unlink()
    assert go_on(killed).finished
    assert lines(killed) == [line for line in lines(runs / "whole") if line["step"] > 8]


@pytest.mark.parametrize("content", ["", "{", "[]", "7", "null", "{}", '{"recipe": {}}'])
def test_a_damaged_description_is_one_sentence(content, killed):
    (killed / "run.json").write_text(content)
    with pytest.raises(UserError, match=r"run\.json cannot be read"):
        go_on(killed)


@pytest.mark.parametrize(("name", "value"), [("recipe", 3), ("recipe", {"batc": 1}), ("options", {"x": 1}), ("data", {})])
def test_a_part_that_is_wrong_is_one_sentence(name, value, killed):
    facts = json.loads((killed / "run.json").read_text()) | {name: value}
    (killed / "run.json").write_text(json.dumps(facts))
    with pytest.raises(UserError):
        go_on(killed)


def test_without_a_description_it_is_not_a_run(killed):
    (killed / "run.json").unlink()
    with pytest.raises(UserError, match=r"it has no run\.json"):
        go_on(killed)
    with pytest.raises(UserError, match="another folder with --out"):
        begin(killed, ADAMW)


def test_a_run_is_not_begun_over_another(killed):
    with pytest.raises(UserError, match=f"`vitrail resume {killed}`"):
        begin(killed, ADAMW)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"optimizer.lr": 1e-3}, r"with optimizer\.rate=0\.001 instead of 0\.005"),
        ({"architecture.width": 32}, r"with architecture\.width=32 instead of 16"),
        ({"seed": 1}, "with seed=1 instead of 0"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(change, sentence, killed):
    step, groups, facts = read_checkpoint(newest(killed)[0])
    facts["recipe"] = json.loads(json.dumps(recipe(ADAMW | change).to_dict()))
    write_checkpoint(killed / "checkpoints" / "step-000000020.safetensors", step, groups, facts)
    with pytest.raises(UserError, match=f"belongs to another training, {sentence}: move it away"):
        go_on(killed)
    assert len(newest(killed, 9)) == 3


@pytest.fixture
def images(tmp_path):
    return make_folder(tmp_path / "images", ("ant", "bee"), 20, (8, 8))


def test_other_images_than_before_are_refused(images, tmp_path):
    folder = tmp_path / "run"
    begin(folder, SHORT | {"schedule.length": "4 steps"}, source=str(images))
    (images / "ant" / "000.png").rename(images / "bee" / "x.png")
    with pytest.raises(UserError, match=f"The images at {images} are not those that {folder} was started with"):
        go_on(folder)
    shutil.rmtree(images)
    with pytest.raises(UserError, match=f"There is nothing at {images}"):
        go_on(folder)


@pytest.fixture
def disk(tmp_path):
    """A small file system of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no small disk can be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill(disk, leave):
    """Take all the space but so much of it."""
    with (disk / "ballast").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            file.truncate(max(file.tell() - leave, 0))


@pytest.mark.parametrize(("leave", "what"), [(0, "best.safetensors"), (60_000, "step-000000008.safetensors")])
def test_a_full_disk_loses_nothing(leave, what, disk, runs, tmp_path):
    folder, output = disk / "run", tmp_path / "output"

    def train():
        original = Trainer._step

        def step(training, *arguments):
            if training.step == 7:
                fill(disk, leave)
            original(training, *arguments)

        Trainer._step = step
        begin(folder, ADAMW)

    assert in_child(train, output) == 2
    said = output.read_text()
    assert "Traceback" not in said
    assert f"{what} " in said.splitlines()[-1]
    assert "No space left on device" in said.splitlines()[-1]
    (kept,) = newest(folder, 9)
    assert kept.name == "step-000000004.safetensors"
    assert not state_differences(kept, newest(runs / "killed", 2)[0])
    assert in_child(lambda: go_on(folder), output) == 2  # still full
    (disk / "ballast").unlink()
    assert in_child(lambda: go_on(folder), output) == 0, output.read_text()
    assert not differences(folder, runs / "whole")


def test_a_line_that_does_not_fit_on_the_disk_is_one_sentence(disk, tmp_path):
    def write():
        with Metrics(disk / "run") as metrics:
            fill(disk, 8192)
            for step in range(1000):
                metrics.write("train", step, 0.0, {"loss": 1.0})

    assert in_child(write, tmp_path / "output") == 2
    (said,) = (tmp_path / "output").read_text().splitlines()
    assert "metrics.jsonl cannot be written" in said
    (disk / "ballast").unlink()
    assert 0 < len(read_metrics(disk / "run")) < 1000


def test_a_folder_that_cannot_be_written_is_one_sentence(disk, runs, tmp_path):
    folder, output = shutil.copytree(runs / "killed", disk / "run"), tmp_path / "output"
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert in_child(lambda: go_on(folder), output) == 2
    said = output.read_text().splitlines()
    assert len(said) == 1
    assert "Read-only file system" in said[0]
