"""Several seeds of one recipe: finished ones are kept, stopped ones continue, a failed one does not stop the others."""

import json
import os
import signal

import numpy as np
import pytest

import vitrail
from tests.images import make_folder
from tests.training.small import FAST_PATCHES, SHORT
from vitrail.data.datasets.lookup import open_splits
from vitrail.errors import UserError
from vitrail.runs import finish, prepare, seeds
from vitrail.runs.request import DEFAULT_MINUTES, TrainRequest
from vitrail.runs.seeds import choose_folder, has_seeds, plan_seeds, read_seeds, resumed_seeds, summaries, train_seeds
from vitrail.training.metrics import read_metrics
from vitrail.training.trainer import NonFiniteLoss, Trainer

CHANGES = SHORT | {"schedule.length": "4 steps", "validation.every": "2 steps"}


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    for owner, name, value in FAST_PATCHES:
        monkeypatch.setattr(owner, name, value)
    monkeypatch.setattr(finish, "write_report", lambda folder: (folder / "report.html").write_text(""))


def planned(count, changes=None, source="digits", minutes=None):
    changes = CHANGES | (changes or {})
    if minutes:
        del changes["schedule.length"]
    return plan_seeds(TrainRequest(source, "laptop", changes=changes, device="cpu", workers=0, minutes=minutes), count)


def values(folder):
    return [json.loads((folder / f"seed-{seed}" / "run.json").read_text())["best"]["loss"] for seed in (0, 1, 2)]


@pytest.fixture
def at_step(monkeypatch):
    """A function that runs an action before a step of a seed."""
    original = Trainer.train_step

    def arrange(seed, step, action):
        def wrapped(training, batch):
            if (training.recipe.seed, training.step) == (seed, step):
                action(step)
            original(training, batch)

        monkeypatch.setattr(Trainer, "train_step", wrapped)

    return arrange


def ctrl_c(step):
    os.kill(os.getpid(), signal.SIGINT)


def not_finite(step):
    raise NonFiniteLoss(step)


def test_every_seed_is_trained_and_summarized(tmp_path, capsys):
    messages = []
    assert train_seeds(tmp_path / "run", planned(3), messages.append)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock", "seeds.json", "seed-0", "seed-1", "seed-2"}
    assert len(set(values(tmp_path / "run"))) == 3
    assert messages == ["seed 0 (1 of 3)", "seed 1 (2 of 3)", "seed 2 (3 of 3)"]
    printed = capsys.readouterr().err
    assert printed.count("; all 3 trainings about ") == printed.count("; all 2 trainings about ") == 1
    top1, loss = summaries(tmp_path / "run")
    assert top1.startswith("validation top-1 ")
    assert "(mean ± sd, n = 3; 95 % interval of the mean" in top1
    assert loss.startswith(f"validation loss {sum(values(tmp_path / 'run')) / 3:.4f} ± ")
    single = vitrail.train("digits", "laptop", out=tmp_path / "one", changes=CHANGES | {"seed": 1}, device="cpu", workers=0)
    assert single.best["loss"] == values(tmp_path / "run")[1]


def test_folds_validate_on_every_image_once(tmp_path):
    folder, plan = tmp_path / "folds", planned(3, {"data.folds": 3})
    assert train_seeds(folder, plan, lambda message: None)
    data = [json.loads((folder / f"seed-{seed}" / "run.json").read_text())["data"] for seed in range(3)]
    parts = [open_splits("digits", fold=(number, 3)).validation for number in range(3)]
    images = np.sort(np.concatenate([part.indices for part in parts]))
    assert np.array_equal(images, np.arange(len(parts[0].source)))
    assert [each["validation"] for each in data] == [len(part) for part in parts]
    assert len({each["fingerprint"] for each in data}) == 3
    assert "3 of 3 folds" in summaries(folder)[0]
    with pytest.raises(UserError, match=r"data\.folds=1 would leave no images to train on"):
        planned(1, {"data.folds": 1})


def test_all_seeds_have_the_length_that_the_first_chose_for_its_time(tmp_path, monkeypatch):
    """The speed varies from training to training; trainings of different lengths could not be compared."""
    lengths = iter(["3 steps", "2 steps", "4 steps"])
    monkeypatch.setattr(prepare, "choose_length", lambda *_: next(lengths))
    folder, plan = tmp_path / "seeds", planned(2, minutes=1.0)
    assert train_seeds(folder, plan, lambda message: None)
    assert train_seeds(folder, planned(3, minutes=1.0), lambda message: None)
    runs = [json.loads((folder / f"seed-{seed}" / "run.json").read_text()) for seed in range(3)]
    assert [run["recipe"]["schedule"]["length"] for run in runs] == ["3 steps"] * 3
    assert [run["recipe"]["seed"] for run in runs] == [0, 1, 2]
    with pytest.raises(UserError, match="seeds of another training"):
        choose_folder(folder, planned(2, minutes=2.0))


def test_the_default_time_budget_applies_to_every_seed(tmp_path):
    make_folder(tmp_path / "photos", size=(80, 80))
    request = TrainRequest(str(tmp_path / "photos"), device="cpu")
    assert plan_seeds(request, 2).request.minutes == DEFAULT_MINUTES
    assert planned(2).request.minutes is None


def test_a_stopped_training_continues(tmp_path, at_step, monkeypatch):
    train_seeds(tmp_path / "uninterrupted", planned(3), print)
    at_step(1, 2, ctrl_c)
    messages: list[str] = []
    assert not train_seeds(tmp_path / "run", planned(3), messages.append)
    assert messages[-1] == f"`vitrail resume {tmp_path / 'run'}` continues with this seed and the remaining ones."
    assert not (tmp_path / "run" / "seed-2").exists()
    first = (tmp_path / "run" / "seed-0" / "run.json").stat().st_mtime_ns
    assert has_seeds(tmp_path / "run")
    at_step(9, 9, ctrl_c)
    messages.clear()
    other = resumed_seeds(tmp_path / "run", None, None, keep=1, on_nan=None)
    assert (other.request.options.keep, other.request.options.on_nan) == (1, "stop")
    assert train_seeds(tmp_path / "run", other, messages.append)
    assert messages[0] == "seed 0 is finished"
    assert (tmp_path / "run" / "seed-0" / "run.json").stat().st_mtime_ns == first
    assert values(tmp_path / "run") == values(tmp_path / "uninterrupted")
    plain = [
        {name: value for name, value in line.items() if name != "speed"} for line in read_metrics(tmp_path / "run" / "seed-1")
    ]
    assert [line["step"] for line in plain if line["kind"] == "validation"] == [2, 4]


def test_a_failed_seed_does_not_stop_the_others(tmp_path, at_step, monkeypatch):
    monkeypatch.setattr(
        "vitrail.runs.nan_recorder.record_step", lambda training, loader, step, run: training.folder / "not-finite"
    )
    at_step(1, 2, not_finite)
    messages: list[str] = []
    with pytest.raises(UserError, match=r"Seed 1 of .* failed for the reason above"):
        train_seeds(tmp_path / "run", planned(3), messages.append)
    assert any("NaN or Inf at step 2" in message for message in messages)
    assert "n = 2" in summaries(tmp_path / "run")[0]
    at_step(9, 9, not_finite)
    assert train_seeds(tmp_path / "run", planned(3), messages.append)
    assert "n = 3" in summaries(tmp_path / "run")[0]


def test_more_seeds_later(tmp_path):
    train_seeds(tmp_path / "run", planned(1), print)
    assert summaries(tmp_path / "run")[0].endswith("% (n = 1)")
    train_seeds(tmp_path / "run", planned(2), print)
    train_seeds(tmp_path / "run", planned(1), print)  # fewer than there are: all of them are kept
    assert read_seeds(tmp_path / "run").count == 2
    assert "n = 2" in summaries(tmp_path / "run")[0]


def test_the_same_command_finds_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(choose_folder(None, planned(2))) == "runs/digits-laptop-seeds"
    train_seeds(choose_folder(None, planned(1)), planned(1), print)
    assert str(choose_folder(None, planned(5))) == "runs/digits-laptop-seeds"
    assert str(choose_folder(None, planned(5, {"batch_size": 8}))) == "runs/digits-laptop-seeds-2"
    assert str(choose_folder(None, planned(3, {"data.folds": 3}))) == "runs/digits-laptop-folds"
    with pytest.raises(UserError, match="the seeds of another training"):
        choose_folder(tmp_path / "runs" / "digits-laptop-seeds", planned(1, {"batch_size": 8}))
    with pytest.raises(UserError, match="holds a single run"):
        choose_folder(tmp_path / "runs" / "digits-laptop-seeds" / "seed-0", planned(1))


def test_a_training_that_never_starts_leaves_no_files(tmp_path):
    with pytest.raises(UserError, match="none"):
        train_seeds(tmp_path / "run", planned(2, source=str(tmp_path / "none")), print)
    assert not (tmp_path / "run").exists()
    assert summaries(tmp_path / "run") == []
    with pytest.raises(UserError, match="inside the data"):
        train_seeds(tmp_path / "run", planned(2, source=str(tmp_path)), print)


def test_invalid_requests_are_rejected(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="at least 1"):
        planned(0)
    (tmp_path / "seeds.json").write_text("{")
    with pytest.raises(UserError, match=r"seeds\.json cannot be read"):
        read_seeds(tmp_path)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="with torchrun start one training per seed"):
        planned(2)
    assert seeds.FILE == "seeds.json"
