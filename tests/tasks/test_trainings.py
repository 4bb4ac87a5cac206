"""Trainings of all tasks but classification: killed and resumed bit for bit, and the same in one process and in two."""

import json

import pytest
import torch

import vitrail
from tests.tasks.trainings import SAVED, STEPS, TRAININGS, trained, write_data
from tests.training.processes import side_by_side, start
from vitrail.checkpoints.training_checkpoints import read_checkpoint

PROGRAM = ["-m", "tests.tasks.trainings"]
KILLED = [name for name in TRAININGS if name != "grafit_in_one_group"]
KILLED_AT = SAVED + 2


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The folder of a training in one process, from the first to the last step."""
    folder = tmp_path_factory.mktemp("whole")

    def train(name):
        if not (folder / name).exists():
            trained(name, data, folder / name)
        return folder / name

    return train


@pytest.fixture(scope="module")
def killed(data, tmp_path_factory):
    """All trainings, each killed in its own process."""
    folder = tmp_path_factory.mktemp("killed")
    process = start(*PROGRAM, data, folder, *(f"{name}={KILLED_AT}" for name in KILLED))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return folder


@pytest.fixture(scope="module")
def divided(data, tmp_path_factory):
    """All trainings in two processes."""
    folder = tmp_path_factory.mktemp("divided")
    codes, outputs = side_by_side(*[[*PROGRAM, data, folder, *TRAININGS]] * 2)
    assert codes == [0, 0], outputs
    return folder


def checkpoint_of(folder):
    path = max((folder / "checkpoints").glob("*.safetensors"))
    assert path.stem == f"step-{STEPS:09d}"
    return {f"{group}:{name}": tensor for group, part in read_checkpoint(path)[1].items() for name, tensor in part.items()}


def weights_of(folder):
    return {f"best:{name}": tensor for name, tensor in vitrail.load(folder / "best.safetensors").state_dict().items()}


@pytest.mark.parametrize("name", KILLED)
def test_killed_and_resumed_bit_for_bit(name, data, killed, whole):
    assert [path.stem for path in (killed / name / "checkpoints").iterdir()] == [f"step-{SAVED:09d}"]
    assert trained(name, data, killed / name).finished
    ours, theirs = ({**checkpoint_of(folder), **weights_of(folder)} for folder in (killed / name, whole(name)))
    assert ours.keys() == theirs.keys()
    assert not [key for key in theirs if not torch.equal(ours[key], theirs[key])]


@pytest.mark.parametrize("name", TRAININGS)
def test_two_processes_are_one(name, divided, whole):
    training = TRAININGS[name]
    ours, theirs = checkpoint_of(divided / name), checkpoint_of(whole(name))
    for key, value in theirs.items():
        if not key.startswith(("optimizer:", "loop:")):
            relative, absolute = training.tolerance
            torch.testing.assert_close(ours[key], value, rtol=relative, atol=absolute, msg=key)
    one, two = (
        json.loads(vitrail.load(folder / "best.safetensors").notes["metrics"])[training.metric]
        for folder in (whole(name), divided / name)
    )
    assert two == pytest.approx(one, abs=training.error)
