"""The numbers of run folders: which runs are found, which are left out, what their number is."""

import json

import pytest

from tests.training.runs import make_run
from vitrail.errors import UserError
from vitrail.runs.results import find_runs, is_finished, read_results


def test_runs_are_found_below_a_folder_once(tmp_path):
    for seed in (10, 2, 0):
        make_run(tmp_path / "group" / f"seed-{seed}", seed)
    make_run(tmp_path / "single")
    (tmp_path / "single" / "checkpoints" / "inner").mkdir(parents=True)
    found = find_runs([tmp_path / "single", tmp_path, tmp_path / "group" / "seed-2"])
    assert [str(folder.relative_to(tmp_path)) for _, folder in found] == [
        "single",
        "group/seed-0",
        "group/seed-2",
        "group/seed-10",
    ]


def test_the_cells_of_an_ablation_are_in_its_order(tmp_path):
    for name in ("a", "base", "c"):
        make_run(tmp_path / name / "seed-0")
    (tmp_path / "ablation.json").write_text(json.dumps({"cells": [{"name": "base"}, {"name": "c"}, {"name": "a"}]}))
    assert [folder.parent.name for _, folder in find_runs([tmp_path])] == ["base", "c", "a"]
    (tmp_path / "ablation.json").write_text("[")
    assert [folder.parent.name for _, folder in find_runs([tmp_path])] == ["a", "base", "c"]


def test_the_best_and_the_last_number(tmp_path):
    run = make_run(tmp_path / "run", seed=3)
    facts = json.loads((run / "run.json").read_text())
    facts["best"] |= {"top1": 0.875, "loss": 0.5}
    facts["test"] = {"top1": 0.25, "top5": 1.0, "images": 4}
    (run / "run.json").write_text(json.dumps(facts))
    assert [read_results([run], name)[0][0].value for name in ("top1", "loss", "top5", "test")] == [0.875, 0.5, 0.99, 0.25]
    result = read_results([run], "top1", "last")[0][0]
    assert result.value == pytest.approx(100 / 125 + 3 / 1000)
    assert (result.seed, result.data) == (3, "abc")


def test_what_is_left_out_is_named(tmp_path):
    make_run(tmp_path / "good")
    make_run(tmp_path / "begun", steps=None)
    make_run(tmp_path / "cut", last=50)  # its last validation is not that of the last step
    make_run(tmp_path / "lost", best={"top1": "nan"})
    make_run(tmp_path / "odd", best={"top1": "much"})
    make_run(tmp_path / "bare", recipe=None)
    (make_run(tmp_path / "torn") / "run.json").write_text("{")
    results, said = read_results([tmp_path])
    assert {result.folder.name for result in results} == {"good", "cut"}
    ends = {sentence.split(" is left out: ")[0].rsplit("/", 1)[-1]: sentence for sentence in said}
    assert ends.keys() == {"begun", "lost", "odd", "bare", "torn"}
    assert ends["begun"].endswith("it is not finished.")
    assert ends["lost"].endswith("validation top-1 is not a number.")
    assert "cannot be read" in ends["torn"]
    assert [result.folder.name for result in read_results([tmp_path], "top1", "last")[0]] == ["good", "lost", "odd"]
    assert len(read_results([tmp_path], "test")[1]) == 7


def test_recipes_of_other_versions(tmp_path):
    """A leaf that was not known then has its default; one that is not known now does not stop anything."""
    older, newer = make_run(tmp_path / "older"), make_run(tmp_path / "newer", seed=1)
    for run, change in ((older, lambda tree: tree.pop("average")), (newer, lambda tree: tree.update(of_tomorrow=1))):
        facts = json.loads((run / "run.json").read_text())
        change(facts["recipe"])
        (run / "run.json").write_text(json.dumps(facts))
    (old, new), said = read_results([older, newer])
    assert said == []
    assert old.leaves["ema.decay"] == 0.0
    assert new.leaves["of_tomorrow"] == 1


def test_a_finished_run_has_its_report(tmp_path):
    run = make_run(tmp_path / "run")
    assert not is_finished(run)
    (run / "report.html").write_text("")
    assert is_finished(run)
    assert not is_finished(tmp_path / "none")


@pytest.mark.parametrize("place", ["missing", "empty", "file"])
def test_places_without_runs(place, tmp_path):
    (tmp_path / "empty" / "inner").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is no folder" if place != "empty" else "holds no run"):
        read_results([tmp_path / place])


def test_numbers_that_do_not_exist(tmp_path):
    run = make_run(tmp_path / "run")
    with pytest.raises(UserError, match="--metric speed is not known; choose from top1"):
        read_results([run], "speed")
    with pytest.raises(UserError, match="only looked at with the best weights"):
        read_results([run], "test", "last")
