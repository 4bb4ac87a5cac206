"""How an ablation is seen while it runs."""

import io
import json

import pytest
from rich.console import Console

from tests.training.runs import make_run
from vitrail.recipes import lookup
from vitrail.runs.ablation import make_cells, open_ablation
from vitrail.runs.ablation_display import Standing, progress
from vitrail.runs.process_pool import Job

RECIPE = lookup("laptop").set({"schedule.length": "8 epochs"})


@pytest.fixture
def ablation(tmp_path):
    cells, _ = make_cells(RECIPE, [], ["clip", "smoothing"], False)
    return open_ablation(tmp_path / "out", "digits", cells, (0, 1))


@pytest.fixture
def jobs(ablation):
    """Of every cell the second seed; the first one was finished before."""
    for cell in ablation.cells:
        make_run(ablation.run_folder(cell, 0), best={"top1": 0.9375})
    folders = {(cell.name, 1): ablation.run_folder(cell, 1) for cell in ablation.cells}
    return {key: Job(folder, [], [], folder.with_suffix(".log")) for key, folder in folders.items()}


def test_the_table(ablation, jobs):
    jobs["base", 1].state = "running"
    make_run(jobs["base", 1].folder)  # 4 of 8 epochs
    jobs["no-clip", 1].state = "failed"
    console = Console(file=io.StringIO(), width=80, force_terminal=True, legacy_windows=False, color_system=None)
    with Standing(ablation, jobs, console) as standing:
        standing.look()
        standing.changed(jobs["base", 1])
    console = Console(file=io.StringIO(), width=80)
    console.print(standing.render())
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert lines == ["cell seed 0 seed 1", "base 93.75 % 50 %", "no-clip 93.75 % failed", "no-smoothing 93.75 % ·"]


def test_lines_where_there_is_no_terminal(ablation, jobs):
    console = Console(file=io.StringIO(), width=80)
    job = jobs["no-clip", 1]
    with Standing(ablation, jobs, console) as standing:
        standing.look()
        job.state, job.device = "running", "cuda:1"
        standing.changed(job)
        job.state = "done"
        make_run(job.folder, best={"top1": 0.5})
        standing.changed(job)
    assert console.file.getvalue().splitlines() == [
        "no-clip/seed-1 begins on cuda:1",
        "no-clip/seed-1 is done: 50.00 % (1 of 3)",
    ]


def test_progress(tmp_path):
    assert progress(tmp_path / "none", RECIPE) is None
    run = make_run(tmp_path / "run")
    assert progress(run, RECIPE) == 0.5
    assert progress(run, RECIPE.set({"schedule.length": "400 steps"})) == 0.25
    assert progress(run, RECIPE.set({"schedule.length": "6 epochs", "schedule.cooldown": "2 epochs"})) == 0.5
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1')  # a line that is being written
    assert progress(run, RECIPE) == 0.5
    (run / "metrics.jsonl").write_text(json.dumps([1]) + "\n")
    assert progress(run, RECIPE) is None
