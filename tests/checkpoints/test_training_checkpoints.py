"""Training checkpoints read as weights: they are those that the training itself would write at that step."""

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
from tests.training.small import ADAMW, FAST_PATCHES, start
from vitrail.checkpoints.training_checkpoints import (
    COMPLETE,
    LAYOUT,
    SHARD_INDEX,
    file_checksum,
    is_training_checkpoint,
    read_checkpoint,
)
from vitrail.recipes import lookup
from vitrail.runs.initial_model import locate_weights, open_pretrained
from vitrail.training.checkpointing import write_checkpoint_file
from vitrail.training.trainer import Options

EVERY_STEP = Options(save_steps=1, keep=99)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that evaluates its EMA weights, with a checkpoint of every step."""
    folder = tmp_path_factory.mktemp("states") / "run"
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, value in FAST_PATCHES:
            patch.setattr(owner, name, value)
        start(folder, ADAMW | {"schedule.length": "4 steps", "validation.every": "4 steps"}, EVERY_STEP)
    return folder


def checkpoint_of(run, step):
    return run / "checkpoints" / f"step-{step:09d}.safetensors"


@pytest.fixture(scope="module")
def sharded(run, tmp_path_factory):
    """The last checkpoint as a sharded training writes it."""
    step, groups, metadata = read_checkpoint(checkpoint_of(run, 4))
    folder = tmp_path_factory.mktemp("sharded") / "run"
    path = folder / "checkpoints" / "step-000000004.sharded"
    tensors = {f"{group}:{name}": tensor for group, members in groups.items() for name, tensor in members.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about writing in a single process
        dcp.save(tensors, checkpoint_id=path, no_dist=True)
    sums = {each.name: file_checksum(each) for each in path.iterdir()}
    (path / COMPLETE).write_text(json.dumps({"layout": LAYOUT, "step": step, "facts": metadata, "sums": sums}))
    shutil.copy(run / "run.json", folder / "run.json")
    return path


def same_file(path, other):
    with safe_open(path, "pt") as one, safe_open(other, "pt") as two:
        assert one.metadata() == two.metadata()
        assert sorted(one.keys()) == sorted(two.keys())
        return all(torch.equal(one.get_tensor(name), two.get_tensor(name)) for name in one.keys())  # noqa: SIM118


@pytest.mark.parametrize("kind", ["one file", "sharded"])
def test_last_checkpoint_equals_last_artifact(kind, run, sharded, run_cli, tmp_path):
    code, said, _ = run_cli(
        "convert", checkpoint_of(run, 4) if kind == "one file" else sharded, tmp_path / "out.safetensors", "--check"
    )
    assert code == 0, said
    assert same_file(tmp_path / "out.safetensors", run / "last.safetensors")


def test_checkpoint_before_the_first_validation(run):
    path = checkpoint_of(run, 2)
    model = vitrail.load(path)
    _, groups, _ = read_checkpoint(path)
    own, mean = groups["model"]["head.weight"], groups["ema"]["head.weight"]
    assert torch.equal(model.head.weight, mean)
    assert not torch.equal(own, mean)
    assert model.class_names == [str(number) for number in range(10)]
    assert json.loads(model.notes["metrics"]) == {"step": 2}


def test_ema_weights_are_loaded_if_evaluated_or_requested(run, tmp_path):
    step, groups, metadata = read_checkpoint(checkpoint_of(run, 4))
    metadata["recipe"]["ema"]["evaluate"] = False
    path = checkpoint_of(tmp_path / "run", 4)
    write_checkpoint_file(path, step, groups, metadata)
    shutil.copy(run / "run.json", tmp_path / "run" / "run.json")
    assert torch.equal(vitrail.load(path).head.weight, groups["model"]["head.weight"])
    assert torch.equal(vitrail.load(path, ema=True).head.weight, groups["ema"]["head.weight"])
    write_checkpoint_file(path, step, {"model": groups["model"]}, metadata)
    assert torch.equal(vitrail.load(path).head.weight, groups["model"]["head.weight"])
    with pytest.raises(vitrail.UserError, match="contains no EMA weights"):
        vitrail.load(path, ema=True)


def test_training_can_start_from_a_checkpoint(run, sharded):
    for path in (checkpoint_of(run, 4), sharded):
        changes = {"init.weights": locate_weights(str(path)), "architecture.width": 16, "architecture.depth": 2}
        assert open_pretrained(lookup("finetune").set(changes)).class_names == [str(number) for number in range(10)]


def test_incomplete_and_damaged_checkpoints(run, sharded, cli_error, tmp_path):
    out = tmp_path / "out.safetensors"
    alone = shutil.copy(checkpoint_of(run, 4), tmp_path / "state.safetensors")
    assert "keep it in checkpoints/ of its run directory" in cli_error("convert", alone, out)
    folder = shutil.copytree(sharded.parents[1], tmp_path / "run")
    part = next((folder / "checkpoints" / sharded.name).glob("*.distcp"))
    content = part.read_bytes()
    part.write_bytes(content[:-1] + b"x")
    assert f"the checksum of {part.name} is wrong" in cli_error("convert", part.parent, out)
    part.unlink()
    assert f"{part.name} is missing" in cli_error("convert", part.parent, out)
    (part.parent / COMPLETE).unlink()
    assert "is not a complete training checkpoint" in cli_error("convert", part.parent, out)
    whole = checkpoint_of(folder, 4)
    content = bytearray(checkpoint_of(run, 4).read_bytes())
    content[-1] ^= 1
    whole.write_bytes(content)
    assert "its checksum is wrong" in cli_error("convert", whole, out)
    assert not out.exists()
    assert not is_training_checkpoint(run)
    assert not is_training_checkpoint(run / "last.safetensors")
    assert not is_training_checkpoint(tmp_path / "nowhere")


class Harmful:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_a_list_of_tensors_that_could_run_code_is_not_opened(sharded, cli_error, tmp_path):
    """Even if its checksums are right."""
    folder = shutil.copytree(sharded.parents[1], tmp_path / "run")
    path, mark = folder / "checkpoints" / sharded.name, tmp_path / "was here"
    (path / SHARD_INDEX).write_bytes(pickle.dumps(Harmful(mark)))
    closing = json.loads((path / COMPLETE).read_text())
    closing["sums"][SHARD_INDEX] = file_checksum(path / SHARD_INDEX)
    (path / COMPLETE).write_text(json.dumps(closing))
    assert "posix.mkdir, which could run code" in cli_error("convert", path, tmp_path / "out.safetensors")
    assert not mark.exists()
