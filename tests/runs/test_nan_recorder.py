"""The flight recorder: a step that is not finite is not taken, is kept with all that is needed, and can be computed again."""

import json
import math
import os
import shutil
import signal

import numpy as np
import pytest
import torch

from tests.images import make_folder
from tests.training.small import ADAMW, EASY, LAMB, SHORT, begin, differences, in_child, lines, recipe, state_differences, warm_up
from vitrail.checkpoints.training_checkpoints import read_checkpoint
from vitrail.cli import main
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.feed import Feed
from vitrail.errors import UserError
from vitrail.runs import train
from vitrail.runs.nan_recorder import examine, replay
from vitrail.runs.prepare import build
from vitrail.training.checkpointing import Checkpoints
from vitrail.training.distributed import Devices
from vitrail.training.metrics import merit
from vitrail.training.trainer import Options, Trainer

EVERY_STEP = Options(save_steps=1, log_steps=50, keep=99)


@pytest.fixture(autouse=True)
def easy(monkeypatch):
    warm_up()  # before anything else is patched
    for owner, name, value in EASY:
        monkeypatch.setattr(owner, name, value)


@pytest.fixture
def poison(monkeypatch):
    """Images of these steps are not finite."""
    original = Trainer.prepare
    steps = set()

    def prepare(training, batch, step, micro_batch):
        images, targets = original(training, batch, step, micro_batch)
        return (torch.full_like(images, torch.inf) if step in steps and micro_batch == 0 else images), targets

    monkeypatch.setattr(Trainer, "prepare", prepare)
    return steps.update


def bundle_of(folder):
    (found,) = folder.glob("not-finite-*")
    return found


def strictly(text):
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def state_of(folder, step):
    return folder / "checkpoints" / f"step-{step:09d}.safetensors"


@pytest.mark.parametrize(("changes", "micro_batch"), [(ADAMW, None), (LAMB, 4)], ids=["adamw", "lamb"])
def test_an_explosion_is_recorded_and_can_be_replayed(changes, micro_batch_size, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "run"
    with pytest.raises(UserError, match="The loss or a gradient was not a number at step 2; the state before it is in"):
        begin(folder, changes | {"optimizer.lr": 1e9}, EVERY_STEP, micro_batch_size)
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
    said = capsys.readouterr().out
    assert f"first output that is not finite: {found['first_bad_module']}" in said
    assert f"first gradient that is not finite: {found['first_bad_gradient']}" in said
    assert "This is what the run recorded." in said


def test_a_resumed_explosion_is_the_same(tmp_path):
    folder = tmp_path / "run"
    changes = ADAMW | {"optimizer.lr": 1e9}
    with pytest.raises(UserError):
        begin(folder, changes, EVERY_STEP)
    before = (bundle_of(folder) / "bundle.json").read_text()
    with pytest.raises(UserError, match=r"at step 2; .*--on-nan skip` leaves such steps out"):
        train.resume(folder, device="cpu", workers=0)
    assert (bundle_of(folder) / "bundle.json").read_text() == before


@pytest.fixture(params=["plain", "recompute", "compiled"])
def training(request, tmp_path):
    """At its first step; a ViT with every kind of owner of a parameter."""
    how = recipe(LAMB | {"architecture.residual": "layerscale", "architecture.layerscale_init": 0.1})
    splits = open_splits("digits")
    feed = Feed(splits.train, "cpu", 0)
    made = Trainer(how, build(how, splits.train), Devices(torch.device("cpu"), micro_batches=4), feed, feed, tmp_path, Options())
    if request.param == "recompute":
        made.model.recompute = True
    if request.param == "compiled":
        for block in made.model.blocks:
            block.compile(backend="eager")
        stream = made.train.stream(made.order, range(4), 4).run(0, 1)
        made._step(lambda: next(stream))
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


def test_a_planted_infinity_is_found_by_name(training):
    for parameter, module in PLANTED.items():
        tensor = training.model.get_parameter(parameter).detach()
        kept = tensor.clone()
        tensor.view(-1)[0] = torch.inf
        found = examine(training)
        assert (found["first_bad_module"], found["bad_weights"]) == (module, [parameter])
        assert found["largest_weights"][0] == [parameter, "inf"]
        tensor.copy_(kept)
    clean = examine(training)
    assert clean["first_bad_module"] is None
    assert clean["first_bad_gradient"] is None
    assert [block["block"] for block in clean["micro_batches"][0]["blocks"]] == ["blocks.0", "blocks.1"]


def test_what_happens_between_modules_is_their_caller_s(training):
    """Attention's product overflows though what goes into it is finite."""
    weight = training.model.get_parameter("blocks.0.mix.branches.0.body.qkv.weight").detach()
    weight.mul_(1e25)
    assert examine(training)["first_bad_module"] == "blocks.0.mix.branches.0.body"


def test_a_gradient_alone_is_found_where_the_backward_pass_meets_it(training):
    """The root of zero is zero and its slope is infinite: what comes before block 1 gets no number."""
    training.model.blocks[1].register_forward_pre_hook(lambda _, inputs: (inputs[0] + (inputs[0] * 0).sqrt(), *inputs[1:]))
    with torch.compiler.set_stance("force_eager"):
        found = examine(training)
    assert found["first_bad_module"] is None
    assert found["first_bad_gradient"].startswith("blocks.0.ffn.branches.0.")
    bad = found["micro_batches"][0]["bad_gradients"]
    assert "stem.proj.weight" in bad
    assert not any(name.startswith(("blocks.1", "head", "norm")) for name in bad)


def test_nothing_after_the_bad_step_is_saved_or_tested(poison, tmp_path):
    """It is noticed at the latest when something would be written: here at step 8, long before the numbers are logged."""
    folder = tmp_path / "run"
    poison([5])
    with pytest.raises(UserError, match="at step 5;"):
        begin(folder, ADAMW, Options(save_steps=4, log_steps=50))
    assert [path.name for path in Checkpoints(folder / "checkpoints").all()] == ["step-000000004.safetensors"]
    assert not (folder / "best.safetensors").exists()
    assert bundle_of(folder).name == "not-finite-000000005"


def test_the_state_in_the_bundle_is_that_before_the_step(poison, tmp_path):
    begin(tmp_path / "good", ADAMW, EVERY_STEP)
    poison([5])
    with pytest.raises(UserError, match="at step 5;"):
        begin(tmp_path / "bad", ADAMW, Options(log_steps=50))
    assert not state_differences(bundle_of(tmp_path / "bad") / "state.safetensors", state_of(tmp_path / "good", 5))


@pytest.mark.parametrize(("changes", "micro_batch"), [(ADAMW, None), (LAMB, 4)], ids=["adamw", "lamb"])
def test_skipped_steps_change_nothing_and_are_counted(changes, micro_batch_size, poison, tmp_path, capfd):
    folder = tmp_path / "run"
    poison([0, 5, 6, 13])
    done = begin(folder, changes, Options(save_steps=1, log_steps=3, keep=99, on_nan="skip"), micro_batch_size)
    assert done.finished
    assert "4 of 22 steps were left out: their loss or gradient was not a number." in capfd.readouterr().err
    before, after = (read_checkpoint(state_of(folder, step))[1] for step in (5, 7))
    for group in before.keys() - {"loop"}:
        for name, tensor in before[group].items():
            assert torch.equal(tensor, after[group][name]), (group, name)
    counts = [line.get("skipped", 0) for line in lines(folder) if line["kind"] == "train"]
    assert counts == [1, 2, 3, 3, 4, 4, 4, 4]
    assert all(np.isfinite(line["loss"]) for line in lines(folder))


def test_skipping_goes_on_after_a_kill(poison, tmp_path):
    poison([0, 5, 6, 13])
    options = Options(save_steps=4, log_steps=5, on_nan="skip")

    def killed():
        original = Trainer._step

        def step(training, *arguments):
            if training.step == 7:
                os.kill(os.getpid(), signal.SIGKILL)
            original(training, *arguments)

        Trainer._step = step
        begin(tmp_path / "run", ADAMW, options)

    assert in_child(lambda: begin(tmp_path / "whole", ADAMW, options), tmp_path / "output") == 0
    assert in_child(killed, tmp_path / "output") == -signal.SIGKILL
    assert in_child(lambda: train.resume(tmp_path / "run", device="cpu"), tmp_path / "output") == 0
    assert not differences(tmp_path / "run", tmp_path / "whole")


def test_a_stopped_training_may_go_on_by_skipping(poison, tmp_path):
    poison([5])
    begin(tmp_path / "skipped", ADAMW, Options(save_steps=4, log_steps=3, on_nan="skip"))
    with pytest.raises(UserError):
        begin(tmp_path / "run", ADAMW, Options(save_steps=4, log_steps=3))
    assert train.resume(tmp_path / "run", device="cpu", workers=0, on_nan="skip").finished
    assert not differences(tmp_path / "run", tmp_path / "skipped")


def test_nothing_but_bad_steps_is_said_to_have_no_loss(poison, tmp_path):
    poison(range(22))
    assert begin(tmp_path / "run", ADAMW, Options(log_steps=11, on_nan="skip")).finished
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        assert strictly(line)["kind"] == "validation" or strictly(line)["loss"] == "nan"
    strictly((tmp_path / "run" / "run.json").read_text())


def test_half_precision_scales_its_loss_across_a_kill(tmp_path):
    """Gradients that overflow at the first scale are no trouble: the step is left out and the scale goes down."""
    changes = ADAMW | {"precision": "fp16"}

    def work(name, last):
        original = Trainer._step

        def step(training, *arguments):
            if training.step == last:
                os.kill(os.getpid(), signal.SIGKILL)
            original(training, *arguments)
            if training.step == 3:
                training.scaler._scale.fill_(2.0**40)

        Trainer._step = step
        begin(tmp_path / name, changes)

    assert in_child(lambda: work("whole", 99), tmp_path / "output") == 0, (tmp_path / "output").read_text()
    assert in_child(lambda: work("run", 7), tmp_path / "output") == -signal.SIGKILL
    assert in_child(lambda: train.resume(tmp_path / "run", device="cpu"), tmp_path / "output") == 0
    assert not differences(tmp_path / "run", tmp_path / "whole")
    _, groups, facts = read_checkpoint(Checkpoints(tmp_path / "run" / "checkpoints").all()[-1])
    assert 0 < facts["scaler"]["scale"] < 2.0**40
    assert facts["skipped"] == 0
    assert groups["optimizer"]["head.weight/step"] < 22


@pytest.fixture
def images(tmp_path):
    return make_folder(tmp_path / "images", ("ant", "bee"), 20, (8, 8))


def test_a_replay_needs_the_bundle_and_its_images(images, tmp_path):
    with pytest.raises(UserError):
        begin(tmp_path / "run", SHORT | {"optimizer.lr": 1e9}, source=str(images))
    bundle = bundle_of(tmp_path / "run")
    assert replay(bundle, "cpu")[1]["first_bad_module"]
    (images / "ant" / "000.png").rename(images / "bee" / "x.png")
    with pytest.raises(UserError, match=r"are not those that .* was recorded with"):
        replay(bundle, "cpu")
    shutil.rmtree(images)
    with pytest.raises(UserError, match=f"The images that {bundle} was recorded with cannot be opened: There is nothing at"):
        replay(bundle, "cpu")
    for content in ("", "[]", "{}", '{"run": {}, "found": null}'):
        (bundle / "bundle.json").write_text(content)
        with pytest.raises(UserError, match="is not a whole bundle"):
            replay(bundle, "cpu")
    with pytest.raises(UserError, match="is not a whole bundle"):
        replay(tmp_path, "cpu")


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_weights_that_have_diverged_are_validated_and_the_training_goes_on(precision, tmp_path):
    """A validation without a number is the worst there is, in a run that skips such steps and in one that goes on."""
    changes = SHORT | {"optimizer.lr": 1e9, "optimizer.clip_grad_norm": 0, "precision": precision}
    options = Options(save_steps=1, log_steps=3, keep=99, on_nan="skip")
    assert begin(tmp_path / "run", changes, options).finished
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


def test_no_number_is_worse_than_any_accuracy():
    order = [{"top1": 0.9, "loss": "nan"}, {"top1": 0.1, "loss": "inf"}, {"top1": 0.1, "loss": 2.0}, {"top1": 0.1, "loss": 1.0}]
    ranks = [merit(each) for each in [*order, {"top1": 0.2, "loss": 9.0}]]
    assert ranks == sorted(ranks)
    assert len(set(ranks)) == 5
    assert not merit({"top1": 0.9, "loss": math.nan}) > merit(order[0])
