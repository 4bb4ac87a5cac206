"""States of a training as weights: what is converted is what the training itself would write at that moment."""

import json
import os
import pickle
import shutil
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

import vitrail
from tests.training.small import ADAMW, EASY, begin
from vitrail.checkpoints.training_checkpoints import CLOSING, LAYOUT, LISTING, is_state, read_checkpoint, sum_of
from vitrail.recipes import lookup
from vitrail.runs.prepare import located, open_weights
from vitrail.training.checkpointing import write_checkpoint
from vitrail.training.trainer import Options

EVERY_STEP = Options(save_steps=1, keep=99)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A mean that is reported and differs from the weights; validated at the end alone."""
    folder = tmp_path_factory.mktemp("states") / "run"
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, value in EASY:
            patch.setattr(owner, name, value)
        begin(folder, ADAMW | {"schedule.length": "4 steps", "validation.every": "4 steps"}, EVERY_STEP)
    return folder


def state_of(run, step):
    return run / "checkpoints" / f"step-{step:09d}.safetensors"


@pytest.fixture(scope="module")
def sharded(run, tmp_path_factory):
    """The last state as processes that share it write it."""
    step, groups, facts = read_checkpoint(state_of(run, 4))
    folder = tmp_path_factory.mktemp("sharded") / "run"
    path = folder / "checkpoints" / "step-000000004.sharded"
    tensors = {f"{group}:{name}": tensor for group, members in groups.items() for name, tensor in members.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process writes alone
        dcp.save(tensors, checkpoint_id=path, no_dist=True)
    sums = {each.name: sum_of(each) for each in path.iterdir()}
    (path / CLOSING).write_text(json.dumps({"layout": LAYOUT, "step": step, "facts": facts, "sums": sums}))
    shutil.copy(run / "run.json", folder / "run.json")
    return path


def same_file(path, other):
    with safe_open(path, "pt") as one, safe_open(other, "pt") as two:
        assert one.metadata() == two.metadata()
        assert sorted(one.keys()) == sorted(two.keys())
        return all(torch.equal(one.get_tensor(name), two.get_tensor(name)) for name in one.keys())  # noqa: SIM118


@pytest.mark.parametrize("kind", ["one file", "sharded"])
def test_the_last_state_becomes_the_last_artifact(kind, run, sharded, typed, tmp_path):
    code, said, _ = typed("convert", state_of(run, 4) if kind == "one file" else sharded, tmp_path / "out.safetensors", "--check")
    assert code == 0, said
    assert same_file(tmp_path / "out.safetensors", run / "last.safetensors")


def test_a_state_before_the_first_validation_has_weights(run):
    path = state_of(run, 2)
    model = vitrail.load(path)
    _, groups, _ = read_checkpoint(path)
    own, mean = groups["model"]["head.weight"], groups["average"]["head.weight"]
    assert torch.equal(model.head.weight, mean)
    assert not torch.equal(own, mean)
    assert model.class_names == [str(number) for number in range(10)]
    assert json.loads(model.notes["metrics"]) == {"step": 2}


def test_the_mean_is_taken_where_it_is_reported_or_asked_for(run, tmp_path):
    step, groups, facts = read_checkpoint(state_of(run, 4))
    facts["recipe"]["average"]["report"] = False
    path = state_of(tmp_path / "run", 4)
    write_checkpoint(path, step, groups, facts)
    shutil.copy(run / "run.json", tmp_path / "run" / "run.json")
    assert torch.equal(vitrail.load(path).head.weight, groups["model"]["head.weight"])
    assert torch.equal(vitrail.load(path, ema=True).head.weight, groups["average"]["head.weight"])
    write_checkpoint(path, step, {"model": groups["model"]}, facts)
    assert torch.equal(vitrail.load(path).head.weight, groups["model"]["head.weight"])
    with pytest.raises(vitrail.UserError, match="holds no averaged"):
        vitrail.load(path, ema=True)


def test_a_training_may_start_from_one(run, sharded):
    for path in (state_of(run, 4), sharded):
        changes = {"init.weights": located(str(path)), "architecture.width": 16, "architecture.depth": 2}
        assert open_weights(lookup("finetune").set(changes)).class_names == [str(number) for number in range(10)]


def test_what_is_not_whole_is_told_in_a_sentence(run, sharded, refused, tmp_path):
    out = tmp_path / "out.safetensors"
    alone = shutil.copy(state_of(run, 4), tmp_path / "state.safetensors")
    assert "leave it in checkpoints/ of its run" in refused("convert", alone, out)
    folder = shutil.copytree(sharded.parents[1], tmp_path / "run")
    part = next((folder / "checkpoints" / sharded.name).glob("*.distcp"))
    content = part.read_bytes()
    part.write_bytes(content[:-1] + b"x")
    assert f"{part.name} is not what was written" in refused("convert", part.parent, out)
    part.unlink()
    assert f"{part.name} is missing" in refused("convert", part.parent, out)
    (part.parent / CLOSING).unlink()
    assert "is not a whole state of a training" in refused("convert", part.parent, out)
    whole = state_of(folder, 4)
    content = bytearray(state_of(run, 4).read_bytes())
    content[-1] ^= 1
    whole.write_bytes(content)
    assert "its checksum is wrong" in refused("convert", whole, out)
    assert not out.exists()
    assert not is_state(run)
    assert not is_state(run / "last.safetensors")
    assert not is_state(tmp_path / "nowhere")


class Harmful:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_a_list_of_tensors_that_could_run_code_is_not_opened(sharded, refused, tmp_path):
    """By one whose sums are right, too: whoever wrote the one wrote the others."""
    folder = shutil.copytree(sharded.parents[1], tmp_path / "run")
    path, mark = folder / "checkpoints" / sharded.name, tmp_path / "was here"
    (path / LISTING).write_bytes(pickle.dumps(Harmful(mark)))
    closing = json.loads((path / CLOSING).read_text())
    closing["sums"][LISTING] = sum_of(path / LISTING)
    (path / CLOSING).write_text(json.dumps(closing))
    assert "posix.mkdir, which could run code" in refused("convert", path, tmp_path / "out.safetensors")
    assert not mark.exists()
