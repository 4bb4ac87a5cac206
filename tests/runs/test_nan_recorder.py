"""The NaN recorder: a step with NaN or Inf does not change the weights, is recorded and can be computed again."""

import json
import math
import shutil
import signal
from functools import cache

import numpy as np
import pytest
import torch

from tests.images import make_folder, make_masked_folder
from tests.shapes import make_coco
from tests.tasks.trainings import make
from tests.trainers import CPU, make_trainer
from tests.training.processes import kill_before
from tests.training.small import (
    ADAMW,
    FAST_PATCHES,
    LAMB,
    SHORT,
    differences,
    in_child,
    lines,
    recipe,
    start,
    state_differences,
    warm_up,
)
from vitrail.checkpoints.training_checkpoints import read_checkpoint
from vitrail.cli import main
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.image_loader import ImageLoader
from vitrail.errors import UserError
from vitrail.runs import train
from vitrail.runs.nan_recorder import diagnose_step, record_step, replay
from vitrail.runs.run_directory import describe_run
from vitrail.tasks.classification import Classification, validation_score
from vitrail.training.checkpointing import CheckpointManager
from vitrail.training.distributed import Devices
from vitrail.training.trainer import Options, Trainer

EVERY_STEP = Options(save_steps=1, log_steps=50, keep=99)


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    warm_up()  # before anything else is patched
    for owner, name, value in FAST_PATCHES:
        monkeypatch.setattr(owner, name, value)


@pytest.fixture
def poison(monkeypatch):
    """A function that makes the images of these steps infinite."""
    original = Classification.prepare_batch
    steps = set()

    def prepare_batch(task, batch, position):
        images, targets = original(task, batch, position)
        bad = position.step in steps and int(batch.position[0]) % task.recipe.batch_size == 0  # the first micro-batch
        return (torch.full_like(images, torch.inf) if bad else images), targets

    monkeypatch.setattr(Classification, "prepare_batch", prepare_batch)
    return steps.update


def bundle_of(folder):
    (found,) = folder.glob("not-finite-*")
    return found


def strictly(text):
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def state_of(folder, step):
    return folder / "checkpoints" / f"step-{step:09d}.safetensors"


@pytest.mark.parametrize(("changes", "micro_batch_size"), [(ADAMW, None), (LAMB, 4)], ids=["adamw", "lamb"])
def test_a_divergence_is_recorded_and_replayed(changes, micro_batch_size, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "run"
    with pytest.raises(UserError, match="The loss or a gradient was NaN or Inf at step 2; the state before it is in"):
        start(folder, changes | {"optimizer.lr": 1e9}, EVERY_STEP, micro_batch_size)
    bundle = bundle_of(folder)
    assert bundle.name == "not-finite-000000002"
    assert not state_differences(bundle / "state.safetensors", state_of(folder, 2))
    _, groups, _ = read_checkpoint(bundle / "state.safetensors")
    assert all(torch.isfinite(tensor).all() for members in groups.values() for tensor in members.values())
    found = strictly((bundle / "bundle.json").read_text())["found"]
    assert found["first_bad_module"]
    assert found["first_bad_gradient"]
    assert found["bad_weights"] == []
    assert found["largest_weights"][0][1] > 1e8
    assert sum(len(micro_batch["images"]) for micro_batch in found["micro_batches"]) == 16
    recorded, replayed = replay(bundle, "cpu")
    assert recorded == replayed == found
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["vitrail", "replay", str(bundle), "--device", "cpu"])
    with pytest.raises(SystemExit, match="0"):
        main.main()
    stdout = capsys.readouterr().out
    assert f"first output with NaN or Inf: {found['first_bad_module']}" in stdout
    assert f"first gradient with NaN or Inf: {found['first_bad_gradient']}" in stdout
    assert "The run recorded the same." in stdout


def test_a_resumed_divergence_is_the_same(tmp_path):
    folder = tmp_path / "run"
    changes = ADAMW | {"optimizer.lr": 1e9}
    with pytest.raises(UserError):
        start(folder, changes, EVERY_STEP)
    before = (bundle_of(folder) / "bundle.json").read_text()
    with pytest.raises(UserError, match=r"at step 2; .*--on-nan skip` skips such steps"):
        train.resume(folder, device="cpu", workers=0)
    assert (bundle_of(folder) / "bundle.json").read_text() == before


@cache
def digits():
    return ImageLoader(open_splits("digits").train, "cpu", 0)


@pytest.fixture(params=["plain", "recompute", "compiled"])
def training(request, tmp_path):
    """A trainer at its first step, of a ViT with parameters in every kind of module."""
    config = recipe(LAMB | {"architecture.residual": "layerscale", "architecture.layerscale_init": 0.1})
    made = make_trainer(config, digits().source, tmp_path, Devices(CPU, micro_batches=4))
    if request.param == "recompute":
        made.model.recompute = True
    if request.param == "compiled":
        for block in made.model.blocks:
            block.compile(backend="eager")
        stream = digits().train_loader(made.sampler, range(4), 4).iterate_steps(0, 1)
        made.train_step(lambda: next(stream))
    return made


PLANTED = {
    "stem.proj.weight": "stem.proj",
    "prefix": "model",
    "pos_embed.0.table": "pos_embed.0",
    "blocks.1.mix.branches.0.norm.weight": "blocks.1.mix.branches.0.norm",
    "blocks.1.mix.branches.0.body.qkv.weight": "blocks.1.mix.branches.0.body.qkv",
    "blocks.1.ffn.branches.0.scale.weight": "blocks.1.ffn.branches.0.scale",
    "blocks.0.ffn.branches.0.body.fc2.bias": "blocks.0.ffn.branches.0.body.fc2",
    "head.bias": "head",
}


def test_the_module_of_an_infinite_weight_is_found(training):
    for parameter, module in PLANTED.items():
        tensor = training.model.get_parameter(parameter).detach()
        kept = tensor.clone()
        tensor.view(-1)[0] = torch.inf
        found = diagnose_step(training, digits())
        assert (found["first_bad_module"], found["bad_weights"]) == (module, [parameter])
        assert found["largest_weights"][0] == [parameter, "inf"]
        tensor.copy_(kept)
    clean = diagnose_step(training, digits())
    assert clean["first_bad_module"] is None
    assert clean["first_bad_gradient"] is None
    assert [block["block"] for block in clean["micro_batches"][0]["blocks"]] == ["blocks.0", "blocks.1"]


def test_operations_between_modules_are_attributed_to_their_caller(training):
    """The attention product overflows although its inputs are finite."""
    weight = training.model.get_parameter("blocks.0.mix.branches.0.body.qkv.weight").detach()
    weight.mul_(1e25)
    assert diagnose_step(training, digits())["first_bad_module"] == "blocks.0.mix.branches.0.body"


def test_the_first_nan_gradient_of_the_backward_pass_is_found(training):
    """The square root of zero has an infinite derivative: the gradients before block 1 are NaN."""
    training.model.blocks[1].register_forward_pre_hook(lambda _, inputs: (inputs[0] + (inputs[0] * 0).sqrt(), *inputs[1:]))
    with torch.compiler.set_stance("force_eager"):
        found = diagnose_step(training, digits())
    assert found["first_bad_module"] is None
    assert found["first_bad_gradient"].startswith("blocks.0.ffn.branches.0.")
    bad = found["micro_batches"][0]["bad_gradients"]
    assert "stem.proj.weight" in bad
    assert not any(name.startswith(("blocks.1", "head", "norm")) for name in bad)


def test_nothing_after_the_bad_step_is_saved_or_validated(poison, tmp_path):
    """It is detected when something is written, here at step 8, long before the metrics are logged."""
    folder = tmp_path / "run"
    poison([5])
    with pytest.raises(UserError, match="at step 5;"):
        start(folder, ADAMW, Options(save_steps=4, log_steps=50))
    assert [path.name for path in CheckpointManager(folder / "checkpoints").all()] == ["step-000000004.safetensors"]
    assert not (folder / "best.safetensors").exists()
    assert bundle_of(folder).name == "not-finite-000000005"


def test_the_state_in_the_bundle_is_that_before_the_step(poison, tmp_path):
    start(tmp_path / "good", ADAMW, EVERY_STEP)
    poison([5])
    with pytest.raises(UserError, match="at step 5;"):
        start(tmp_path / "bad", ADAMW, Options(log_steps=50))
    assert not state_differences(bundle_of(tmp_path / "bad") / "state.safetensors", state_of(tmp_path / "good", 5))


@pytest.mark.parametrize(("changes", "micro_batch_size"), [(ADAMW, None), (LAMB, 4)], ids=["adamw", "lamb"])
def test_skipped_steps_have_no_effect_and_are_counted(changes, micro_batch_size, poison, tmp_path, capfd):
    folder = tmp_path / "run"
    poison([0, 5, 6, 13])
    done = start(folder, changes, Options(save_steps=1, log_steps=3, keep=99, on_nan="skip"), micro_batch_size)
    assert done.finished
    assert "4 of 22 steps were skipped: their loss or gradient was NaN or Inf." in capfd.readouterr().err
    before, after = (read_checkpoint(state_of(folder, step))[1] for step in (5, 7))
    for group in before.keys() - {"loop"}:
        for name, tensor in before[group].items():
            assert torch.equal(tensor, after[group][name]), (group, name)
    counts = [line.get("skipped", 0) for line in lines(folder) if line["kind"] == "train"]
    assert counts == [1, 2, 3, 3, 4, 4, 4, 4]
    assert all(np.isfinite(line["loss"]) for line in lines(folder))


def test_skipping_resumes_after_a_kill(poison, tmp_path):
    poison([0, 5, 6, 13])
    options = Options(save_steps=4, log_steps=5, on_nan="skip")

    def killed():
        kill_before(7)
        start(tmp_path / "run", ADAMW, options)

    assert in_child(lambda: start(tmp_path / "uninterrupted", ADAMW, options), tmp_path / "output") == 0
    assert in_child(killed, tmp_path / "output") == -signal.SIGKILL
    assert in_child(lambda: train.resume(tmp_path / "run", device="cpu"), tmp_path / "output") == 0
    assert not differences(tmp_path / "run", tmp_path / "uninterrupted")


def test_a_stopped_training_resumes_with_skipping(poison, tmp_path):
    poison([5])
    start(tmp_path / "skipped", ADAMW, Options(save_steps=4, log_steps=3, on_nan="skip"))
    with pytest.raises(UserError):
        start(tmp_path / "run", ADAMW, Options(save_steps=4, log_steps=3))
    assert train.resume(tmp_path / "run", device="cpu", workers=0, on_nan="skip").finished
    assert not differences(tmp_path / "run", tmp_path / "skipped")


def test_without_a_finite_step_the_loss_is_nan(poison, tmp_path):
    poison(range(22))
    assert start(tmp_path / "run", ADAMW, Options(log_steps=11, on_nan="skip")).finished
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        assert strictly(line)["kind"] == "validation" or strictly(line)["loss"] == "nan"
    strictly((tmp_path / "run" / "run.json").read_text())


def test_the_loss_scale_survives_a_kill(tmp_path):
    """Gradients that overflow in float16 only skip the step and lower the scale."""
    changes = ADAMW | {"precision": "fp16"}

    def work(name, last):
        original = Trainer.train_step

        def step(training, *arguments):
            original(training, *arguments)
            if training.step == 3:
                training.scaler._scale.fill_(2.0**40)

        Trainer.train_step = step
        kill_before(last)
        start(tmp_path / name, changes)

    assert in_child(lambda: work("uninterrupted", 99), tmp_path / "output") == 0, (tmp_path / "output").read_text()
    assert in_child(lambda: work("run", 7), tmp_path / "output") == -signal.SIGKILL
    assert in_child(lambda: train.resume(tmp_path / "run", device="cpu"), tmp_path / "output") == 0
    assert not differences(tmp_path / "run", tmp_path / "uninterrupted")
    _, groups, metadata = read_checkpoint(CheckpointManager(tmp_path / "run" / "checkpoints").all()[-1])
    assert 0 < metadata["scaler"]["scale"] < 2.0**40
    assert metadata["skipped"] == 0
    assert groups["optimizer"]["head.weight/step"] < 22


@pytest.fixture
def images(tmp_path):
    return make_folder(tmp_path / "images", ("ant", "bee"), 20, (8, 8))


def test_a_replay_needs_the_bundle_and_its_images(images, tmp_path):
    with pytest.raises(UserError):
        start(tmp_path / "run", SHORT | {"optimizer.lr": 1e9}, source=str(images))
    bundle = bundle_of(tmp_path / "run")
    assert replay(bundle, "cpu")[1]["first_bad_module"]
    (images / "ant" / "000.png").rename(images / "bee" / "x.png")
    with pytest.raises(UserError, match=r"are not those that .* was recorded with"):
        replay(bundle, "cpu")
    shutil.rmtree(images)
    with pytest.raises(UserError, match=f"The data of {bundle} cannot be opened: .* does not exist"):
        replay(bundle, "cpu")
    for content in ("", "[]", "{}", '{"run": {}, "found": null}'):
        (bundle / "bundle.json").write_text(content)
        with pytest.raises(UserError, match="is not a complete bundle"):
            replay(bundle, "cpu")
    with pytest.raises(UserError, match="is not a complete bundle"):
        replay(tmp_path, "cpu")


@pytest.mark.parametrize(("name", "folder"), [("segmentation", "boxes"), ("detection", "shapes")])
def test_a_replay_reads_masks_and_objects(name, folder, tmp_path):
    (make_masked_folder(tmp_path / "boxes", 24) / "classes.json").unlink()
    make_coco(tmp_path / "shapes", 24)
    trainer, splits = make(name, tmp_path, tmp_path / "run"), open_splits(tmp_path / folder)
    trainer.task.complete_data(trainer.recipe, splits)
    loader = ImageLoader(splits.train, CPU, 0, masks=trainer.task.reads_masks, objects=trainer.task.reads_objects)
    bundle = record_step(trainer, loader, 0, describe_run(str(tmp_path / folder), splits, trainer, "skip"))
    recorded, replayed = replay(bundle, "cpu")
    assert recorded == replayed
    assert recorded["micro_batches"][0]["loss"] > 0


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_diverged_weights_are_validated_and_training_continues(precision, tmp_path):
    """A NaN validation loss ranks last, also after resuming."""
    changes = SHORT | {"optimizer.lr": 1e9, "optimizer.clip_grad_norm": 0, "precision": precision}
    options = Options(save_steps=1, log_steps=3, keep=99, on_nan="skip")
    assert start(tmp_path / "run", changes, options).finished
    tested = [line for line in lines(tmp_path / "run") if line["kind"] == "validation"]
    assert [line["loss"] for line in tested] == ["nan"] * 3
    found = strictly((tmp_path / "run" / "run.json").read_text())
    assert found["best"]["step"] == 8  # the first of equals
    assert found["best"]["loss"] == "nan"
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    for step in range(10, 23):
        state_of(tmp_path / "other", step).unlink()
    assert train.resume(tmp_path / "other", device="cpu", workers=0, on_nan="skip").finished
    assert not differences(tmp_path / "run", tmp_path / "other")


def test_nan_ranks_below_any_accuracy():
    order = [{"top1": 0.9, "loss": "nan"}, {"top1": 0.1, "loss": "inf"}, {"top1": 0.1, "loss": 2.0}, {"top1": 0.1, "loss": 1.0}]
    ranks = [validation_score(each) for each in [*order, {"top1": 0.2, "loss": 9.0}]]
    assert ranks == sorted(ranks)
    assert len(set(ranks)) == 5
    assert not validation_score({"top1": 0.9, "loss": math.nan}) > validation_score(order[0])
