"""Run directories from strangers: links in place of the files that a training writes, and bundles of the NaN recorder."""

import shutil

import pytest

import vitrail
from vitrail.atomic_files import atomic_write_text
from vitrail.errors import UserError
from vitrail.recipes import Recipe
from vitrail.runs.ablation import Cell, open_ablation
from vitrail.training.checkpointing import lock_run_directory


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    changes = {"schedule.length": "1 steps", "schedule.warmup": "0 steps", "architecture.depth": 1, "batch_size": 4}
    folder = tmp_path_factory.mktemp("runs") / "run"
    return vitrail.train("digits", "laptop", out=folder, changes=changes, device="cpu", workers=0).folder


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


@pytest.mark.parametrize("name", ["metrics.jsonl", "report.html", "best.safetensors", "run.json", "checkpoints"])
def test_resuming_does_not_write_through_links(name, run, tmp_path, cli_error):
    other = (run / name).rename(tmp_path / "other")
    (run / name).symlink_to(other)
    before = sorted((path, path.stat().st_mtime_ns) for path in [other, *other.rglob("*")])
    assert "is a link to" in cli_error("resume", run, "--device", "cpu")
    assert sorted((path, path.stat().st_mtime_ns) for path in [other, *other.rglob("*")]) == before


@pytest.mark.parametrize("name", [".lock", "report.png", "checkpoints/step-000000001.safetensors", "not-finite-000000001"])
def test_links_to_files_that_do_not_exist(name, tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / name).symlink_to(tmp_path / "new")
    with pytest.raises(UserError, match="is a link to"), lock_run_directory(tmp_path / "run"):
        pass
    assert not (tmp_path / "new").exists()


def test_a_run_directory_may_be_a_link_and_have_links_inside(run, tmp_path):
    (tmp_path / "link").symlink_to(run)
    (run / "newest.safetensors").symlink_to(run / "best.safetensors")
    (run / "data").symlink_to(tmp_path)
    assert vitrail.resume(tmp_path / "link", device="cpu", workers=0).finished


def test_a_link_with_the_name_of_a_temporary_file(tmp_path, monkeypatch):
    monkeypatch.setattr("os.getpid", lambda: 7)
    (tmp_path / ".file.txt.7.part").symlink_to(tmp_path / "other.txt")
    atomic_write_text(tmp_path / "file.txt", "new")
    assert (tmp_path / "file.txt").read_text() == "new"
    assert not (tmp_path / "other.txt").exists()


@pytest.mark.parametrize("name", ["table.md", "base", "base/recipe.yaml"])
def test_an_ablation_does_not_write_through_links(name, tmp_path):
    cells = [Cell("base", {}, Recipe())]
    (tmp_path / "ablation" / name).parent.mkdir(parents=True)
    (tmp_path / "ablation" / name).symlink_to(tmp_path / "new")
    with pytest.raises(UserError, match="is a link to"):
        open_ablation(tmp_path / "ablation", "digits", cells, [0])
    assert not (tmp_path / "new").exists()
