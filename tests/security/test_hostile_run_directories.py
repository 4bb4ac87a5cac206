"""Run directories from strangers: links in place of the files that a training writes, and bundles of the NaN recorder."""

import json
import shutil

import pytest

import vitrail
from vitrail.atomic_files import atomic_write_text
from vitrail.checkpoints.training_checkpoints import read_checkpoint
from vitrail.errors import UserError
from vitrail.recipes import Recipe
from vitrail.runs.ablation import Cell, open_ablation
from vitrail.runs.nan_recorder import replay
from vitrail.training.checkpointing import lock_run_directory, write_checkpoint_file


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


@pytest.fixture
def bundle(run, tmp_path):
    """A bundle of the NaN recorder, made of a checkpoint of the run."""
    (tmp_path / "bundle").mkdir()
    shutil.copy(next((run / "checkpoints").iterdir()), tmp_path / "bundle" / "state.safetensors")
    content = {"step": 1, "run": json.loads((run / "run.json").read_text()), "found": None}
    (tmp_path / "bundle" / "bundle.json").write_text(json.dumps(content))
    return tmp_path / "bundle"


CHANGES = [
    {"source": 5},
    {"source": None},
    {"micro_batches": "x"},
    {"micro_batches": 0},
    {"micro_batches": 10**12},
    {"unreadable": [5]},
    {"architecture": [1]},
    {"architecture": {"depth": 10**6}},
    {"architecture": {"depth": "x"}},
    {"model": "x"},
    {"data": {"classes": 5}},
    {"data": {"classes": [[1]]}},
    {"recipe": []},
    {"recipe": {"task": "os"}},
    {"recipe": {"seed": []}},
]


def test_a_bundle_is_replayed(bundle):
    assert replay(bundle, "cpu")[1]["bad_weights"] == []


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_changed_descriptions_of_bundles(change, bundle):
    content = json.loads((bundle / "bundle.json").read_text())
    for name, value in change.items():
        content["run"][name] = content["run"][name] | value if isinstance(value, dict) else value
    (bundle / "bundle.json").write_text(json.dumps(content))
    with pytest.raises(UserError) as caught:
        replay(bundle, "cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", [{"found": {}}, {"found": 5}, {"run": 5}, {"run": None}], ids=str)
def test_changed_bundles(change, bundle):
    path = bundle / "bundle.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError):
        replay(bundle, "cpu")


@pytest.mark.parametrize("change", [{"skipped": None}, {"best": []}, {"best": {"epoch": 1}}, {"recipe": 5}], ids=str)
def test_changed_states(change, bundle, run):
    """The checksum of a checkpoint detects damage, not changes on purpose."""
    for path in (bundle / "state.safetensors", next((run / "checkpoints").iterdir())):
        step, groups, metadata = read_checkpoint(path)
        changed = {name: value for name, value in (metadata | change).items() if value is not None}
        write_checkpoint_file(path, step, groups, changed)
    with pytest.raises(UserError):
        replay(bundle, "cpu")
    with pytest.raises(UserError):
        vitrail.resume(run, device="cpu", workers=0)


@pytest.mark.parametrize("step", ["x", -1, 1e300, None])
def test_a_step_that_is_no_number(step, bundle):
    _, groups, metadata = read_checkpoint(bundle / "state.safetensors")
    write_checkpoint_file(bundle / "state.safetensors", step, groups, metadata)
    with pytest.raises(UserError, match="its step is not a number of steps"):
        replay(bundle, "cpu")
