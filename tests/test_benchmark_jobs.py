"""Trainings of the benchmarks as processes of their own: time limit, failures, settings, results."""

import importlib
import json
import time
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import vitrail
from vitrail.errors import UserError

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def jobs(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("jobs")


def test_results_of_other_settings_are_not_reused(jobs, tmp_path):
    runner = jobs.Jobs(Namespace(out=tmp_path, parallel=1, minutes=None, workers=None), "no program", str)
    job = {
        "epochs": 1,
        "source": "/data/voc2012",
        "weights": "/a/run/best.safetensors",
        "changes": {"seed": 0, "size": (8, 8)},
        "device": "cpu",
    }
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "job.json").write_text(json.dumps(job))
    (tmp_path / "a" / "result.json").write_text('{"minutes": 1.0}')
    found = runner.run({"a": job | {"device": "cuda", "workers": 3}})
    assert found == {"a": {"minutes": 1.0}}
    assert runner.run({"a": job | {"source": "/elsewhere/copies/voc2012"}}) == found
    for other in (
        {"epochs": 60},
        {"weights": "/b/run/best.safetensors"},
        {"source": "/data/coco"},
        {"limit": 3},
        {"changes": {"seed": 1, "size": [8, 8]}},
    ):
        with pytest.raises(UserError, match=r"with other settings \((epochs|weights|source|limit|seed)\): give another --out"):
            runner.run({"a": job | other})
    assert [jobs.weights_title(each) for each in ("vitrail_tiny", "runs/a/best.safetensors")] == ["vitrail_tiny", "a"]


# A job that ends at once or, if it hangs, only by being killed.
PROGRAM = """
import json, signal, sys
from pathlib import Path
job = json.loads((Path(sys.argv[2]) / "job.json").read_text())
assert not job.get("fails"), "no memory"
if job.get("hangs"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        signal.pause()
(Path(sys.argv[2]) / "result.json").write_text(json.dumps({"minutes": 1.0, "workers": job["workers"]}))
"""
DONE = {"minutes": 1.0, "workers": 3}


@pytest.fixture
def make_jobs(jobs, monkeypatch, tmp_path):
    """Creates Jobs of the program above, one at a time."""
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setattr(jobs, "SAVING", 0.5)
    return lambda minutes=None: jobs.Jobs(
        Namespace(out=tmp_path / "out", parallel=1, minutes=minutes, workers=3), str(tmp_path / "program.py"), str
    )


def test_all_jobs_of_a_program_share_its_time(make_jobs):
    runner = make_jobs(10)
    assert runner.run({"a": {}}) == {"a": DONE}
    runner.end = time.monotonic() - 1
    assert runner.run({"a": {}, "b": {}}) == {"a": DONE}
    assert make_jobs().run({"b": {}}) == {"b": DONE}


def test_the_time_includes_that_to_save_checkpoints(make_jobs):
    before = time.monotonic()
    end = make_jobs(10).end
    assert before + 600 - 0.5 <= end <= time.monotonic() + 600 - 0.5


def test_a_job_is_stopped_when_the_time_is_over(make_jobs, tmp_path):
    runner = make_jobs(1.5 / 60)
    assert runner.run({"a": {"hangs": True}, "b": {}}) == {}
    assert runner.failed == []
    assert not (tmp_path / "out" / "b").exists()


def test_the_other_jobs_go_on_after_one_has_failed(make_jobs, tmp_path, capsys):
    runner = make_jobs()
    assert runner.run({"a": {"fails": True}, "b": {}}) == {"b": DONE}
    with pytest.raises(SystemExit, match="1"):
        runner.exit_if_failed()
    log = tmp_path / "out" / "a" / "log.txt"
    assert capsys.readouterr().err.splitlines()[-1] == f"a failed: see {log}."
    assert "no memory" in log.read_text()


def test_an_interrupted_write_leaves_no_result(jobs, monkeypatch, tmp_path):

    def write_half(path, text, **options):
        path.write_bytes(text[: len(text) // 2].encode())
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(KeyboardInterrupt):
        jobs.write_result(tmp_path, {"minutes": 1.0})
    assert not list(tmp_path.iterdir())


def test_a_table_names_the_machines_of_its_results(jobs):
    here = jobs.describe_machine(torch.device("cpu"))
    title = f"CPU, torch {torch.__version__}, vitrail {vitrail.__version__}"
    assert jobs.list_machines([here, here]) == title
    other = {"machine": {"device": "NVIDIA H200"}, "versions": {"torch": "2.11.0", "vitrail": "0.1.0"}}
    expected = "NVIDIA H200, torch 2.11.0, vitrail 0.1.0 (2 results); unknown machine (1 result)"
    assert jobs.list_machines([other, {"miou": 0.5}, other]) == f"Results of different machines or versions: {expected}"
