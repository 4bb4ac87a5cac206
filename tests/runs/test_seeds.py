"""One recipe with several seeds: what is finished is left alone, what was stopped goes on, what fails leaves the others alone."""

import json
import os
import signal

import pytest

import vitrail
from tests.training.small import EASY, SHORT
from vitrail.errors import UserError
from vitrail.runs import finish, seeds
from vitrail.runs.seeds import choose_home, is_home, plan_seeds, read_seeds, resumed, summaries, train_seeds
from vitrail.training.metrics import read_metrics
from vitrail.training.trainer import NonFiniteLoss, Trainer

CHANGES = SHORT | {"schedule.length": "4 steps", "validation.every": "2 steps"}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for owner, name, value in EASY:
        monkeypatch.setattr(owner, name, value)
    monkeypatch.setattr(finish, "write_report", lambda folder: (folder / "report.html").write_text(""))


def wanted(count, changes=None, **more):
    return plan_seeds("digits", "laptop", None, CHANGES | (changes or {}), count, "cpu", workers=0, **more)


def values(folder):
    return [json.loads((folder / f"seed-{seed}" / "run.json").read_text())["best"]["loss"] for seed in (0, 1, 2)]


@pytest.fixture
def at_step(monkeypatch):
    """Do something at the beginning of a step of a seed."""
    plain = Trainer._step

    def arrange(seed, step, deed):
        def wrapped(training, batch):
            if (training.recipe.seed, training.step) == (seed, step):
                deed(step)
            plain(training, batch)

        monkeypatch.setattr(Trainer, "_step", wrapped)

    return arrange


def ctrl_c(step):
    os.kill(os.getpid(), signal.SIGINT)


def not_finite(step):
    raise NonFiniteLoss(step)


def test_every_seed_and_their_spread(tmp_path):
    said = []
    assert train_seeds(tmp_path / "run", wanted(3), said.append)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock", "seeds.json", "seed-0", "seed-1", "seed-2"}
    assert len(set(values(tmp_path / "run"))) == 3
    top1, loss = summaries(tmp_path / "run")
    assert top1.startswith("validation top-1 ")
    assert "(mean ± sd, n = 3; 95 % interval of the mean" in top1
    assert loss.startswith(f"validation loss {sum(values(tmp_path / 'run')) / 3:.4f} ± ")
    single = vitrail.train("digits", "laptop", out=tmp_path / "one", changes=CHANGES | {"seed": 1}, device="cpu", workers=0)
    assert single.best["loss"] == values(tmp_path / "run")[1]


def test_stopped_and_gone_on_with(tmp_path, at_step, monkeypatch):
    train_seeds(tmp_path / "whole", wanted(3), print)
    at_step(1, 2, ctrl_c)
    said: list[str] = []
    assert not train_seeds(tmp_path / "run", wanted(3), said.append)
    assert said[-1] == f"`vitrail resume {tmp_path / 'run'}` goes on with this seed and those after it."
    assert not (tmp_path / "run" / "seed-2").exists()
    first = (tmp_path / "run" / "seed-0" / "run.json").stat().st_mtime_ns
    assert is_home(tmp_path / "run")
    at_step(9, 9, ctrl_c)
    said.clear()
    other = resumed(tmp_path / "run", None, None, keep=1, on_nan=None)
    assert (other.options.keep, other.options.on_nan) == (1, "stop")
    assert train_seeds(tmp_path / "run", other, said.append)
    assert said[0] == "seed 0 is finished"
    assert (tmp_path / "run" / "seed-0" / "run.json").stat().st_mtime_ns == first
    assert values(tmp_path / "run") == values(tmp_path / "whole")
    plain = [
        {name: value for name, value in line.items() if name != "speed"} for line in read_metrics(tmp_path / "run" / "seed-1")
    ]
    assert [line["step"] for line in plain if line["kind"] == "validation"] == [2, 4]


def test_a_seed_that_fails_leaves_the_others_alone(tmp_path, at_step, monkeypatch):
    monkeypatch.setattr("vitrail.runs.nan_recorder.record", lambda training, step, facts: training.folder / "not-finite")
    at_step(1, 2, not_finite)
    said: list[str] = []
    with pytest.raises(UserError, match=r"Seed 1 of .* did not come to an end"):
        train_seeds(tmp_path / "run", wanted(3), said.append)
    assert any("not a number at step 2" in sentence for sentence in said)
    assert "n = 2" in summaries(tmp_path / "run")[0]
    at_step(9, 9, not_finite)
    assert train_seeds(tmp_path / "run", wanted(3), said.append)
    assert "n = 3" in summaries(tmp_path / "run")[0]


def test_more_seeds_later(tmp_path):
    train_seeds(tmp_path / "run", wanted(1), print)
    assert summaries(tmp_path / "run")[0].endswith("% (n = 1)")
    train_seeds(tmp_path / "run", wanted(2), print)
    train_seeds(tmp_path / "run", wanted(1), print)  # fewer are asked for than there are: all of them stay
    assert read_seeds(tmp_path / "run").count == 2
    assert "n = 2" in summaries(tmp_path / "run")[0]


def test_the_same_command_finds_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(choose_home(None, wanted(2))) == "runs/digits-laptop-seeds"
    train_seeds(choose_home(None, wanted(1)), wanted(1), print)
    assert str(choose_home(None, wanted(5))) == "runs/digits-laptop-seeds"
    assert str(choose_home(None, wanted(5, {"batch_size": 8}))) == "runs/digits-laptop-seeds-2"
    with pytest.raises(UserError, match="the seeds of another training"):
        choose_home(tmp_path / "runs" / "digits-laptop-seeds", wanted(1, {"batch_size": 8}))
    with pytest.raises(UserError, match="holds a single run"):
        choose_home(tmp_path / "runs" / "digits-laptop-seeds" / "seed-0", wanted(1))


def test_what_never_begins_leaves_nothing(tmp_path):
    with pytest.raises(UserError, match="none"):
        train_seeds(tmp_path / "run", plan_seeds(str(tmp_path / "none"), "laptop", None, CHANGES, 2, "cpu", workers=0), print)
    assert not (tmp_path / "run").exists()
    assert summaries(tmp_path / "run") == []
    with pytest.raises(UserError, match="inside the data"):
        train_seeds(tmp_path / "run", plan_seeds(str(tmp_path), "laptop", None, CHANGES, 2, "cpu"), print)


def test_what_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="at least 1"):
        wanted(0)
    (tmp_path / "seeds.json").write_text("{")
    with pytest.raises(UserError, match=r"seeds\.json cannot be read"):
        read_seeds(tmp_path)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="with torchrun start one training for each seed"):
        wanted(2)
    assert seeds.PLAN == "seeds.json"
