"""An ablation before and after its trainings: cells, their folders, going on, the tables, the choice."""

import json
import shlex

import pytest
import yaml
from PIL import Image

from tests.training.runs import make_run
from vitrail.errors import UserError
from vitrail.recipes import Recipe, lookup
from vitrail.runs.ablation import (
    Ablation,
    Cell,
    choose_place,
    command_for,
    make_cells,
    open_ablation,
    parse_axis,
    pick,
    tabulate,
)

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
    cells, said = make_cells(
        LAPTOP, [("optimizer.lr", [1e-3, 2e-3]), ("batch_size", [32])], ["smoothing", "loss.label_smoothing"], False
    )
    assert names(cells) == ["base", "optimizer.lr=0.001", "batch_size=32", "no-smoothing"]
    assert cells[0].recipe == LAPTOP
    assert cells[3].recipe.loss.label_smoothing == 0
    assert said == ["optimizer.lr=0.002 is the same as base."]


def test_the_grid():
    cells, _ = make_cells(LAPTOP, [("optimizer.lr", [1e-3, 2e-3]), ("batch", [32, 64])], ["clip"], True)
    assert len(cells) == 8
    assert names(cells)[0] == "base"
    assert "optimizer.lr=0.001+batch=32+no-clip" in names(cells)
    last = next(cell for cell in cells if cell.name == "optimizer.lr=0.001+batch=32+no-clip")
    assert (last.recipe.lr, last.recipe.batch_size, last.recipe.optimizer.clip_grad_norm) == (1e-3, 32, 0)


def test_parts_that_are_not_there():
    cells, said = make_cells(LAPTOP, [], ["mixing", "clip"], False)
    assert names(cells) == ["base", "no-clip"]
    assert said == ["laptop is without mixing as it is: there is nothing to drop."]
    with pytest.raises(UserError, match=r"without mixing as it is.*Nothing is left to compare"):
        make_cells(LAPTOP, [], ["mixing"], False)
    with pytest.raises(UserError, match="Nothing is left to compare"):
        make_cells(LAPTOP, [], [], False)


def test_what_cannot_be_varied():
    with pytest.raises(UserError, match="--seeds N"):
        make_cells(LAPTOP, [("seed", [1, 2])], [], False)
    with pytest.raises(UserError, match=r"optimizer\.rate"):
        make_cells(LAPTOP, [("optimizer.rte", [1])], [], False)
    with pytest.raises(UserError, match="vary it or drop it"):
        make_cells(LAPTOP, [("optimizer.clip_grad_norm", [2.0])], ["clip"], True)
    with pytest.raises(UserError, match=r"optimizer\.rate='fast'"):
        make_cells(LAPTOP, [("optimizer.lr", ["fast"])], [], False)
    with pytest.raises(UserError, match="no model 'deitt_small'"):
        make_cells(LAPTOP, [("model", ["deitt_small"])], [], False)
    with pytest.raises(UserError, match="heads"):
        make_cells(lookup("deit_small"), [("architecture.heads", [7])], [], False)


def test_names_of_folders():
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
    cells, _ = make_cells(LAPTOP, [("optimizer.lr", [1e-3])], ["clip"], False)
    found = open_ablation(tmp_path / "out", "digits", cells, (0, 1))
    for cell, values in zip(cells, ((0.80, 0.82), (0.90, 0.93), (0.79, 0.82)), strict=True):
        for seed, value in enumerate(values):
            finish(found, cell, seed, value)
    return found


def finish(ablation: Ablation, cell: Cell, seed, value):
    recipe = cell.recipe.set({"seed": seed}).to_dict()
    make_run(ablation.run_folder(cell, seed), seed, recipe=recipe, best={"top1": value, "loss": 1 - value, "top5": 1.0})
    (ablation.run_folder(cell, seed) / "report.html").write_text("")


def test_a_cell_has_its_recipe(ablation):
    for cell in ablation.cells:
        tree = yaml.safe_load((ablation.folder / cell.name / "recipe.yaml").read_text())
        assert Recipe.from_dict(tree) == cell.recipe


def test_what_is_unfinished(ablation):
    assert ablation.unfinished() == []
    (ablation.run_folder(ablation.cells[1], 0) / "report.html").unlink()
    (ablation.run_folder(ablation.cells[0], 1) / "run.json").unlink()
    assert [(cell.name, seed) for cell, seed in ablation.unfinished()] == [("optimizer.lr=0.001", 0), ("base", 1)]


def test_going_on_with_more(ablation):
    cells, _ = make_cells(LAPTOP, [("batch_size", [32])], [], False)
    again = open_ablation(ablation.folder, "digits", cells, (0, 1, 2))
    assert [(cell.name, seed) for cell, seed in again.unfinished()] == [
        ("batch_size=32", 0),
        ("batch_size=32", 1),
        ("base", 2),
        ("batch_size=32", 2),
    ]
    plan = json.loads((ablation.folder / "ablation.json").read_text())
    assert [cell["name"] for cell in plan["cells"]] == ["base", "batch_size=32", "optimizer.lr=0.001", "no-clip"]


def test_another_ablation_is_not_gone_on_with(ablation, tmp_path):
    cells, _ = make_cells(LAPTOP.set({"batch_size": 16}), [("optimizer.lr", [1e-3])], [], False)
    with pytest.raises(UserError, match="another recipe or other data"):
        open_ablation(ablation.folder, "digits", cells, (0,))
    with pytest.raises(UserError, match="another recipe or other data"):
        open_ablation(ablation.folder, "hf://other/data", ablation.cells, (0,))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match="holds other things"):
        open_ablation(tmp_path / "full", "digits", ablation.cells, (0,))
    (ablation.folder / "ablation.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read"):
        open_ablation(ablation.folder, "digits", ablation.cells, (0,))


def test_not_inside_the_data(tmp_path):
    cells, _ = make_cells(LAPTOP, [], ["clip"], False)
    with pytest.raises(UserError, match="inside the data"):
        open_ablation(tmp_path / "out", str(tmp_path), cells, (0,))


def test_without_a_folder_the_same_ablation_is_found_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells, _ = make_cells(LAPTOP, [], ["clip"], False)
    place = choose_place(None, "digits", LAPTOP)
    assert str(place) == "runs/digits-laptop-ablation"
    open_ablation(place, "digits", cells, (0,))
    assert choose_place(None, "digits", LAPTOP.set({"seed": 3})) == place
    assert str(choose_place(None, "digits", LAPTOP.set({"batch_size": 3}))) == "runs/digits-laptop-ablation-2"


def test_the_tables(ablation):
    rows, said = tabulate(ablation, "top1", "best")
    assert said == []
    assert [row.group.name for row in rows] == ["base", "optimizer.lr=0.001", "no-clip"]
    assert [round(row.spread.mean, 4) for row in rows] == [0.81, 0.915, 0.805]
    assert rows[1].changes == {"optimizer.lr": (0.002, 0.001)}
    assert rows[1].difference.test == "paired t"
    assert "| no-clip | 2 | 80.50 |" in (ablation.folder / "table.md").read_text()
    assert json.loads((ablation.folder / "table.json").read_text())["groups"][1]["mean"] == pytest.approx(0.915)
    assert Image.open(ablation.folder / "table.png").size[0] == 1350


def test_what_is_not_there_is_said(ablation):
    for seed in (0, 1):
        (ablation.run_folder(ablation.base, seed) / "run.json").unlink()
    rows, said = tabulate(ablation, "top1", "best")
    assert [row.group.name for row in rows] == ["optimizer.lr=0.001", "no-clip"]
    assert said == ["No run of base is finished: differences are to optimizer.lr=0.001."]


def test_the_choice(ablation):
    rows, _ = tabulate(ablation, "top1", "best")
    assert pick(rows, "top1").group.name == "optimizer.lr=0.001"
    rows, _ = tabulate(ablation, "loss", "best")
    assert pick(rows, "loss").group.name == "optimizer.lr=0.001"
    with pytest.raises(UserError, match="would spoil the test images"):
        pick(rows, "test")
    command = shlex.split(command_for(ablation, "laptop", {"schedule.length": "3 epochs"}, "optimizer.lr=0.001"))
    assert command == shlex.split(
        "vitrail train digits --recipe laptop --set 'schedule.length=3 epochs' --set optimizer.lr=0.001"
    )


def test_a_cell_with_fewer_seeds_is_not_chosen(ablation):
    (ablation.run_folder(ablation.cells[1], 1) / "run.json").unlink()
    rows, _ = tabulate(ablation, "top1", "best")
    assert pick(rows, "top1").group.name == "base"
