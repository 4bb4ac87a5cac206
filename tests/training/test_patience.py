"""`validation.patience`: a training ends when its primary metric stops improving; a function of the validations so far."""

import json
import os
import signal
from types import SimpleNamespace

import pytest

from tests.training.small import SHORT, differences, in_child, lines, start
from vitrail.runs import train
from vitrail.training.trainer import Options, Trainer

# Validations after 4, 8, …, 32 steps: up to the sixth, the third is the best.
SCORES = {4: 0.3, 8: 0.2, 12: 0.5, 16: 0.4, 20: 0.5, 24: 0.1, 28: 0.9}
RECIPE = SHORT | {"schedule.length": "32 steps", "validation.every": "4 steps"}
OPTIONS = Options(save_steps=3, log_steps=3)


@pytest.fixture(autouse=True)
def scores(monkeypatch):
    """The validation accuracy is a table."""

    def evaluate(self):
        return {"loss": 1.0, "top1": SCORES.get(self.step, 0.0), "top5": 1.0, "images": 10}

    monkeypatch.setattr(Trainer, "evaluate", evaluate)


def run(folder, patience, kill_at=None, **changes):
    """Start or resume the run in a process of its own, which is killed after the validation of step `kill_at`."""
    validate = Trainer._validate

    def validate_and_die(trainer, *arguments):
        validate(trainer, *arguments)
        if trainer.step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def work():
        Trainer._validate = validate_and_die
        if (folder / "run.json").exists():
            train.resume(folder, device="cpu")
        else:
            start(folder, RECIPE | {"validation.patience": patience} | changes, OPTIONS)

    return in_child(work, folder.with_suffix(".txt"))


@pytest.mark.parametrize(("patience", "steps"), [(2, 20), (4, 32)])
def test_the_training_ends_after_validations_without_improvement(patience, steps, tmp_path):
    folder = tmp_path / "run"
    assert run(folder, patience) == 0
    content = json.loads((folder / "run.json").read_text())
    assert content["steps"] == steps
    assert content["stopped_early"] == (steps < 32)
    assert content["best"]["step"] == max((step for step in SCORES if step <= steps), key=SCORES.__getitem__)
    assert [line["step"] for line in lines(folder) if line["kind"] == "validation"] == list(range(4, steps + 1, 4))
    output = folder.with_suffix(".txt").read_text()
    assert ("in a row without a better top-1" in output) == (steps < 32)


@pytest.mark.parametrize("kill_at", [16, 24])
def test_a_resumed_run_keeps_the_count(kill_at, tmp_path):
    for name in ("whole", "killed"):
        code = run(tmp_path / name, 3, kill_at if name == "killed" else None)
        assert code == (0 if name == "whole" else -signal.SIGKILL)
    assert run(tmp_path / "killed", 3) == 0
    assert differences(tmp_path / "whole", tmp_path / "killed") == []


def test_a_finished_run_is_not_continued(tmp_path):
    folder = tmp_path / "run"
    assert run(folder, 2) == run(folder, 2) == 0
    assert "This run is finished; its report is written again." in folder.with_suffix(".txt").read_text()
    assert lines(folder)[-1]["step"] == 20


def test_weights_are_compared_with_the_loss_of_the_highest_validation():
    later = {"top1": 0.9, "loss": 0.3, "step": 8, "highest": 0.9, "highest_step": 0, "highest_loss": 0.4}
    trainer = SimpleNamespace(best=later, task=SimpleNamespace(metric=SimpleNamespace(name="top1")))
    found = Trainer.highest.fget(trainer)
    assert {name: found[name] for name in ("top1", "loss", "step")} == {"top1": 0.9, "loss": 0.4, "step": 0}


@pytest.mark.parametrize("kill_at", [None, 20])
def test_the_latest_weights_within_one_standard_error_are_kept(kill_at, tmp_path):
    folder = tmp_path / "run"
    for kill in (kill_at, None) if kill_at else (None,):
        run(folder, 3, kill, **{"validation.select_by": "latest"})
    content = json.loads((folder / "run.json").read_text())
    assert (content["steps"], content["stopped_early"]) == (24, True)  # three validations after the highest, that of step 12
    found = {name: content["best"][name] for name in ("step", "top1", "highest", "highest_step", "highest_loss")}
    assert found == {"step": 20, "top1": 0.5, "highest": 0.5, "highest_step": 12, "highest_loss": 1.0}
