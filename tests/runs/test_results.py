"""Results of run directories: which runs are found, which are ignored, and their values."""

import json

import pytest

from tests.training.runs import make_run
from vitrail.errors import UserError
from vitrail.runs.comparison import METRICS
from vitrail.runs.results import choose_metric, find_runs, is_finished, read_results


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


def test_best_and_last_values(tmp_path):
    run = make_run(tmp_path / "run", seed=3)
    content = json.loads((run / "run.json").read_text())
    content["best"] |= {"top1": 0.875, "loss": 0.5}
    content["test"] = {"top1": 0.25, "top5": 1.0, "images": 4}
    (run / "run.json").write_text(json.dumps(content))
    assert [read_results([run], METRICS[name])[0][0].value for name in ("top1", "loss", "top5", "test")] == [
        0.875,
        0.5,
        0.99,
        0.25,
    ]
    result = read_results([run], METRICS["top1"], "last")[0][0]
    assert result.value == pytest.approx(100 / 125 + 3 / 1000)
    assert (result.seed, result.data) == (3, "abc")


def test_ignored_runs_are_named(tmp_path):
    make_run(tmp_path / "good")
    make_run(tmp_path / "begun", steps=None)
    make_run(tmp_path / "cut", last=50)  # its last validation is not that of the last step
    make_run(tmp_path / "lost", best={"top1": "nan"})
    make_run(tmp_path / "odd", best={"top1": "much"})
    make_run(tmp_path / "bare", recipe=None)
    (make_run(tmp_path / "torn") / "run.json").write_text("{")
    results, messages = read_results([tmp_path])
    assert {result.folder.name for result in results} == {"good", "cut"}
    ends = {message.split(" is ignored: ")[0].rsplit("/", 1)[-1]: message for message in messages}
    assert ends.keys() == {"begun", "lost", "odd", "bare", "torn"}
    assert ends["begun"].endswith("it is not finished.")
    assert ends["lost"].endswith("validation top-1 is NaN or Inf.")
    assert "cannot be read" in ends["torn"]
    assert [result.folder.name for result in read_results([tmp_path], METRICS["top1"], "last")[0]] == ["good", "lost"]
    assert len(read_results([tmp_path], METRICS["test"])[1]) == 7


def test_recipes_of_other_versions(tmp_path):
    """A key missing in an older recipe has its default; an unknown key of a newer one is kept."""
    older, newer = make_run(tmp_path / "older"), make_run(tmp_path / "newer", seed=1)
    for run, change in ((older, lambda tree: tree.pop("ema")), (newer, lambda tree: tree.update(of_tomorrow=1))):
        content = json.loads((run / "run.json").read_text())
        change(content["recipe"])
        (run / "run.json").write_text(json.dumps(content))
    (old, new), messages = read_results([older, newer])
    assert messages == []
    assert old.leaves["ema.decay"] == 0.0
    assert new.leaves["of_tomorrow"] == 1


def test_a_finished_run_has_its_report(tmp_path):
    run = make_run(tmp_path / "run")
    assert not is_finished(run)
    (run / "report.html").write_text("")
    assert is_finished(run)
    assert not is_finished(tmp_path / "none")


@pytest.mark.parametrize("name", ["missing", "empty", "file"])
def test_folders_without_runs(name, tmp_path):
    (tmp_path / "empty" / "inner").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is not a folder" if name != "empty" else "contains no runs"):
        read_results([tmp_path / name])


def test_unknown_metrics_are_rejected(tmp_path):
    run = make_run(tmp_path / "run")
    with pytest.raises(UserError, match="--metric speed is not known; choose from primary, top1"):
        choose_metric([run], "speed")
    with pytest.raises(UserError, match="exist only for the best weights"):
        read_results([run], METRICS["test"], "last")


@pytest.mark.parametrize(("name", "title"), [("knn", "k-NN"), ("agreement", "neighbor agreement")])
def test_metrics_of_trainings_without_labels(tmp_path, name, title):
    metric = {"name": name, "title": title, "higher_is_better": True, "percent": True}
    best = {"epoch": 4.0, "knn": 0.5, "agreement": 0.25, "loss": 1.0}
    run = make_run(tmp_path / "run", best=best | {}, metric=metric, test={name: 0.125, "images": 8})
    primary, test = choose_metric([run], "primary"), choose_metric([run], "test")
    assert (primary.name, primary.title) == (name, f"validation {title}")
    assert (test.title, test.percent) == (f"test {title}", True)
    assert [result.value for result in read_results([run], primary)[0]] == [best[name]]
    assert [result.value for result in read_results([run], test)[0]] == [0.125]
    assert choose_metric([run], "agreement").show(0.25) == "25.00"
