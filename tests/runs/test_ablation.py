"""Ablations: cells, their folders, running and continuing, the tables, the choice of a cell."""

import json
import multiprocessing
import shlex
import shutil

import pytest
import yaml
from PIL import Image

from tests.training.runs import make_run
from vitrail.errors import UserError
from vitrail.recipes import Recipe, lookup
from vitrail.runs import ablation as ablations
from vitrail.runs.ablation import (
    Ablation,
    Cell,
    choose_folder,
    command_for,
    estimate_work,
    is_at_chance,
    is_locked,
    make_cells,
    open_ablation,
    parse_axis,
    pick,
    run_ablation,
    tabulate,
)
from vitrail.runs.comparison import METRICS
from vitrail.runs.request import TrainRequest
from vitrail.runs.train import Run
from vitrail.training.checkpointing import lock_run_directory

LAPTOP = lookup("laptop")


def names(cells):
    return [cell.name for cell in cells]


def test_axes():
    assert parse_axis("optimizer.lr=1e-3, 3e-3") == ("optimizer.lr", [1e-3, 3e-3])
    assert parse_axis("augmentation.scale=[0.2, 1.0],[0.5,1.0]") == ("augmentation.scale", [[0.2, 1.0], [0.5, 1.0]])
    assert parse_axis("schedule.length=3 epochs,20 steps") == ("schedule.length", ["3 epochs", "20 steps"])
    assert parse_axis("augmentation.image_size=16x16,24x24") == ("augmentation.image_size", [[16, 16], [24, 24]])
    assert parse_axis("ema.evaluate=true,false") == ("ema.evaluate", [True, False])
    for text in ("optimizer.lr", "=1,2", "optimizer.lr=", "optimizer.lr=,"):
        with pytest.raises(UserError, match="--vary takes KEY=VALUE,VALUE"):
            parse_axis(text)


def test_one_change_at_a_time():
    cells, messages = make_cells(
        LAPTOP, [("optimizer.lr", [1e-3, 2e-3]), ("batch_size", [32])], ["smoothing", "loss.label_smoothing"], False
    )
    assert names(cells) == ["base", "optimizer.lr=0.001", "batch_size=32", "no-label_smoothing"]
    assert cells[0].recipe == LAPTOP
    assert cells[3].recipe.loss.label_smoothing == 0
    assert messages == ["optimizer.lr=0.002 is the same as base."]


def test_the_grid():
    cells, _ = make_cells(LAPTOP, [("optimizer.lr", [1e-3, 2e-3]), ("batch", [32, 64])], ["clip_grad_norm"], True)
    assert len(cells) == 8
    assert names(cells)[0] == "base"
    assert "optimizer.lr=0.001+batch=32+no-clip_grad_norm" in names(cells)
    last = next(cell for cell in cells if cell.name == "optimizer.lr=0.001+batch=32+no-clip_grad_norm")
    assert (last.recipe.lr, last.recipe.batch_size, last.recipe.optimizer.clip_grad_norm) == (1e-3, 32, 0)


def test_dropped_parts_that_the_recipe_does_not_have():
    cells, messages = make_cells(LAPTOP, [], ["mixing", "clip_grad_norm"], False)
    assert names(cells) == ["base", "no-clip_grad_norm"]
    assert messages == ["laptop has no mixing: there is nothing to drop."]
    with pytest.raises(UserError, match=r"has no mixing.*There is nothing to compare"):
        make_cells(LAPTOP, [], ["mixing"], False)
    with pytest.raises(UserError, match="There is nothing to compare"):
        make_cells(LAPTOP, [], [], False)


def test_invalid_variations_are_rejected():
    with pytest.raises(UserError, match="--seeds N"):
        make_cells(LAPTOP, [("seed", [1, 2])], [], False)
    with pytest.raises(UserError, match=r"optimizer\.lr"):
        make_cells(LAPTOP, [("optimizer.rte", [1])], [], False)
    with pytest.raises(UserError, match="vary it or drop it"):
        make_cells(LAPTOP, [("optimizer.clip_grad_norm", [2.0])], ["clip_grad_norm"], True)
    with pytest.raises(UserError, match=r"optimizer\.lr='fast'"):
        make_cells(LAPTOP, [("optimizer.lr", ["fast"])], [], False)
    with pytest.raises(UserError, match="no model 'deitt_small'"):
        make_cells(LAPTOP, [("model", ["deitt_small"])], [], False)
    with pytest.raises(UserError, match="heads"):
        make_cells(lookup("deit_small"), [("architecture.heads", [7])], [], False)


def test_folder_names():
    values = ["../../x y", "a" * 300, "a" * 299 + "b"]
    cells, _ = make_cells(LAPTOP, [("init.weights", values)], [], False)
    assert len(set(names(cells))) == 4
    for name in names(cells):
        assert "/" not in name
        assert len(name) <= 100
        assert not name.startswith(".")


def test_two_cells_never_share_a_folder():
    with pytest.raises(UserError, match="share the folder"):
        make_cells(LAPTOP, [("init.weights", ["a b", "a  b"])], [], False)
    with pytest.raises(UserError, match="share the folder"):
        make_cells(LAPTOP, [("init.weights", ["A", "a"])], [], False)


@pytest.fixture
def ablation(tmp_path):
    """Three cells with two seeds each, trained: 0.80, 0.81 and so on by `shift`."""
    cells, _ = make_cells(LAPTOP, [("optimizer.lr", [1e-3])], ["clip_grad_norm"], False)
    found = open_ablation(tmp_path / "out", "digits", cells, (0, 1))
    for cell, values in zip(cells, ((0.80, 0.82), (0.90, 0.93), (0.79, 0.82)), strict=True):
        for seed, value in enumerate(values):
            finish(found, cell, seed, value)
    return found


def finish(ablation: Ablation, cell: Cell, seed, value):
    recipe = cell.recipe.set({"seed": seed}).to_dict()
    make_run(ablation.run_folder(cell, seed), seed, recipe=recipe, best={"top1": value, "loss": 1 - value, "top5": 1.0})
    (ablation.run_folder(cell, seed) / "report.html").write_text("")


def test_every_cell_has_its_recipe(ablation):
    for cell in ablation.cells:
        tree = yaml.safe_load((ablation.folder / cell.name / "recipe.yaml").read_text())
        assert Recipe.from_dict(tree) == cell.recipe


def test_unfinished_trainings(ablation):
    assert ablation.unfinished() == []
    (ablation.run_folder(ablation.cells[1], 0) / "report.html").unlink()
    (ablation.run_folder(ablation.cells[0], 1) / "run.json").unlink()
    assert [(cell.name, seed) for cell, seed in ablation.unfinished()] == [("optimizer.lr=0.001", 0), ("base", 1)]


@pytest.fixture
def trained(ablation, monkeypatch):
    """Four unfinished trainings, and the (cell, seed) that `run_ablation` trains; those of `outcomes` raise or stop."""
    for cell in ablation.cells[1:]:
        for seed in ablation.seeds:
            shutil.rmtree(ablation.run_folder(cell, seed))
    calls, outcomes = [], {}
    following.clear()

    def train_or_resume(folder, request, seed, others):
        assert (request.source, request.changes, request.out) == ("digits", {}, None)
        cell = next(cell for cell in ablation.cells if cell.name == folder.parent.name)
        assert (request.recipe, request.workers) == (cell.recipe, 3)
        assert {"batch_size", *cell.changes} <= {*request.explicit}
        calls.append((cell.name, seed))
        following.append(others)
        outcome = outcomes.get(calls[-1])
        if isinstance(outcome, UserError):
            raise outcome
        if outcome != "stopped":
            finish(ablation, cell, seed, 0.5)
        return Run(folder, outcome != "stopped", {})

    monkeypatch.setattr(ablations, "train_or_resume", train_or_resume)
    return calls, outcomes


following = []  # the relative times of the trainings after each one
REQUEST = TrainRequest(source="other", changes={"batch_size": 3}, out="other", workers=3)
FIRST, SECOND = "optimizer.lr=0.001", "no-clip_grad_norm"


def test_unfinished_trainings_run_seed_by_seed(ablation, trained):
    calls, _ = trained
    messages = []
    assert run_ablation(ablation, REQUEST, messages.append) == (True, [])
    assert calls == [(FIRST, 0), (SECOND, 0), (FIRST, 1), (SECOND, 1)]
    assert messages[0] == f"{FIRST}, seed 0 (1 of 4)"
    assert following == [[1.0] * 3, [1.0] * 2, [1.0], []]
    assert run_ablation(ablation, REQUEST, messages.append) == (True, [])
    assert len(calls) == 4


def test_a_stopped_training_stops_the_ablation(ablation, trained):
    calls, outcomes = trained
    outcomes[SECOND, 0] = "stopped"
    assert run_ablation(ablation, REQUEST, print) == (False, [])
    assert calls == [(FIRST, 0), (SECOND, 0)]


def test_a_failed_training_does_not_stop_the_others(ablation, trained):
    calls, outcomes = trained
    outcomes[SECOND, 0] = UserError("NaN or Inf.")
    finished, failed = run_ablation(ablation, REQUEST, print)
    assert finished
    assert failed == [f"{ablation.run_folder(ablation.cells[2], 0)} failed: NaN or Inf."]
    assert len(calls) == 4


def test_a_first_training_that_does_not_start_stops_the_ablation(ablation, trained):
    calls, outcomes = trained
    outcomes[FIRST, 0] = UserError("There is no data.")
    with pytest.raises(UserError, match="There is no data"):
        run_ablation(ablation, REQUEST, print)
    assert len(calls) == 1


def test_a_training_of_another_process_is_skipped(ablation, trained):
    calls, _ = trained
    folder = ablation.run_folder(ablation.cells[1], 0)
    messages = []
    ready, done = multiprocessing.Event(), multiprocessing.Event()

    def hold():
        with lock_run_directory(folder):
            ready.set()
            done.wait(60)

    process = multiprocessing.get_context("fork").Process(target=hold)
    process.start()
    assert ready.wait(60)
    try:
        assert run_ablation(ablation, REQUEST, messages.append) == (True, [])
    finally:
        done.set()
        process.join()
    assert messages[0] == f"{FIRST}, seed 0 is trained by another process"
    assert (FIRST, 0) not in calls
    assert not is_locked(folder)


def test_a_training_that_another_process_starts_first_has_not_failed(ablation, trained, monkeypatch):
    calls, outcomes = trained
    outcomes[FIRST, 0] = UserError("Another process is training there.")
    monkeypatch.setattr(ablations, "is_locked", lambda folder: calls == [(FIRST, 0)] and folder.parent.name == FIRST)
    assert run_ablation(ablation, REQUEST, print) == (True, [])
    assert len(calls) == 4


def test_an_ablation_runs_without_torchrun(ablation, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="without torchrun"):
        run_ablation(ablation, REQUEST, print)


def test_cells_and_seeds_can_be_added(ablation):
    cells, _ = make_cells(LAPTOP, [("batch_size", [32])], [], False)
    again = open_ablation(ablation.folder, "digits", cells, (0, 1, 2))
    assert [(cell.name, seed) for cell, seed in again.unfinished()] == [
        ("batch_size=32", 0),
        ("batch_size=32", 1),
        ("base", 2),
        ("batch_size=32", 2),
    ]
    plan = json.loads((ablation.folder / "ablation.json").read_text())
    assert [cell["name"] for cell in plan["cells"]] == ["base", "batch_size=32", "optimizer.lr=0.001", "no-clip_grad_norm"]


def test_the_folder_of_another_ablation_is_rejected(ablation, tmp_path):
    cells, _ = make_cells(LAPTOP.set({"batch_size": 16}), [("optimizer.lr", [1e-3])], [], False)
    with pytest.raises(UserError, match="another recipe or other data"):
        open_ablation(ablation.folder, "digits", cells, (0,))
    with pytest.raises(UserError, match="another recipe or other data"):
        open_ablation(ablation.folder, "hf://other/data", ablation.cells, (0,))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match="is not empty"):
        open_ablation(tmp_path / "full", "digits", ablation.cells, (0,))
    (ablation.folder / "ablation.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read"):
        open_ablation(ablation.folder, "digits", ablation.cells, (0,))


def test_a_folder_inside_the_data_is_rejected(tmp_path):
    cells, _ = make_cells(LAPTOP, [], ["clip_grad_norm"], False)
    with pytest.raises(UserError, match="inside the data"):
        open_ablation(tmp_path / "out", str(tmp_path), cells, (0,))


def test_without_a_folder_the_same_ablation_is_found_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells, _ = make_cells(LAPTOP, [], ["clip_grad_norm"], False)
    folder = choose_folder(None, "digits", LAPTOP)
    assert str(folder) == "runs/digits-laptop-ablation"
    open_ablation(folder, "digits", cells, (0,))
    assert choose_folder(None, "digits", LAPTOP.set({"seed": 3})) == folder
    assert str(choose_folder(None, "digits", LAPTOP.set({"batch_size": 3}))) == "runs/digits-laptop-ablation-2"


def test_the_tables(ablation):
    rows, messages = tabulate(ablation, METRICS["top1"], "best")
    assert messages == []
    assert [row.group.name for row in rows] == ["base", "optimizer.lr=0.001", "no-clip_grad_norm"]
    assert [round(row.spread.mean, 4) for row in rows] == [0.81, 0.915, 0.805]
    assert rows[1].changes == {"optimizer.lr": (0.002, 0.001)}
    assert rows[1].difference.test == "paired t"
    assert "| no-clip_grad_norm | 2 | 80.50 |" in (ablation.folder / "table.md").read_text()
    assert json.loads((ablation.folder / "table.json").read_text())["groups"][1]["mean"] == pytest.approx(0.915)
    assert Image.open(ablation.folder / "table.png").size[0] == 1350


def test_an_unfinished_base_is_reported(ablation):
    for seed in (0, 1):
        (ablation.run_folder(ablation.base, seed) / "run.json").unlink()
    rows, messages = tabulate(ablation, METRICS["top1"], "best")
    assert [row.group.name for row in rows] == ["optimizer.lr=0.001", "no-clip_grad_norm"]
    assert messages == ["No run of base is finished: differences are to optimizer.lr=0.001."]


def test_the_best_cell_is_picked(ablation):
    rows, _ = tabulate(ablation, METRICS["top1"], "best")
    assert pick(rows, METRICS["top1"]).group.name == "optimizer.lr=0.001"
    rows, _ = tabulate(ablation, METRICS["loss"], "best")
    assert pick(rows, METRICS["loss"]).group.name == "optimizer.lr=0.001"
    with pytest.raises(UserError, match="must not choose by the test images"):
        pick(rows, METRICS["test"])
    command = shlex.split(command_for(ablation, "laptop", {"schedule.length": "3 epochs"}, "optimizer.lr=0.001"))
    assert command == shlex.split(
        "vitrail train digits --recipe laptop --set 'schedule.length=3 epochs' --set optimizer.lr=0.001"
    )


def test_the_time_of_a_variant_follows_from_its_steps_and_multiply_adds():
    base = LAPTOP.set({"augmentation.image_size": 32})
    work = estimate_work(base)
    assert estimate_work(base.set({"optimizer.lr": 1e-3})) == work
    assert estimate_work(base.set({"schedule.length": "60 epochs"})) == pytest.approx(2 * work, rel=0.01)
    assert estimate_work(base.set({"augmentation.image_size": 64})) > 3 * work


def test_there_is_no_winner_at_chance_level(ablation):
    """Digits have ten classes; of 100 images 15 % is not clearly more than 10 %, but 20 % is."""
    for value, guessing in ((0.15, True), (0.2, False)):
        for cell in ablation.cells:
            for seed in (0, 1):
                file = ablation.run_folder(cell, seed) / "run.json"
                run = json.loads(file.read_text())
                run["best"]["top1"] = value if cell is ablation.cells[1] else 0.1
                run["data"] |= {"validation": 100, "classes": list("0123456789")}
                file.write_text(json.dumps(run))
        rows, _ = tabulate(ablation, METRICS["top1"], "best")
        assert is_at_chance(rows, METRICS["top1"]) is guessing
        assert not is_at_chance(rows, METRICS["loss"])


def test_a_cell_with_fewer_seeds_is_not_picked(ablation):
    (ablation.run_folder(ablation.cells[1], 1) / "run.json").unlink()
    rows, _ = tabulate(ablation, METRICS["top1"], "best")
    assert pick(rows, METRICS["top1"]).group.name == "base"
