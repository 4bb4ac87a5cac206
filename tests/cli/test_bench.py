"""vitrail bench as a person types it; in this process, for a new one loads torch for seconds each time."""

import json
import sys

import pytest

import vitrail
from tests.bench.test_candidates import Timm
from vitrail.bench.peak import Ceiling

SMALL = ("--size", "32", "--depth", "2", "--rounds", "2", "--device", "cpu")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Rounds of one run, and a ceiling that is not measured."""
    monkeypatch.setattr("vitrail.bench.timing.ROUND", 0.0)
    found = Ceiling(64, {"fp32": 1e11, "bf16": 2e11}, {"fp32": 0.01, "bf16": 0.0}, 5e9, 0.02)
    monkeypatch.setattr("vitrail.bench.peak.measure_ceiling", lambda device, precisions: found)


@pytest.fixture
def run(typed):
    return lambda *words: typed("bench", *words)


def test_help_has_an_example(run):
    assert "Example: vitrail bench" in run("--help").stdout


def test_a_table_a_file_and_a_image(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    vitrail.save(vitrail.create("deit_tiny_patch16", 3, 32, depth=2), tmp_path / "[b].safetensors")
    words = ("--task", "inference,train", "--batch", "1,2", "--json", tmp_path / "b.json", "--plot", tmp_path / "b.png")
    result = run("deit_tiny_patch16", "[b].safetensors", *SMALL, *words)
    assert result.returncode == 0, result.stderr
    assert "[b].safetensors" in result.stdout
    assert all(
        text in result.stdout for text in ("images/s", "of ceiling", "n = 2 rounds", "0.1 TFLOP/s fp32", "5 GB/s", "threads")
    )
    found = json.loads((tmp_path / "b.json").read_text())
    assert found["ended"]
    assert len(found["cells"]) == 2 * 2 * 2
    assert all(cell["n"] == 2 and cell["mfu"] > 0 for cell in found["cells"])
    assert (tmp_path / "b.png").stat().st_size > 1000


def test_the_folder_of_a_run_and_one_that_is_none(run, tmp_path):
    (tmp_path / "run").mkdir()
    vitrail.save(vitrail.create("deit_tiny_patch16", 3, 32, depth=1), tmp_path / "run" / "best.safetensors")
    result = run(tmp_path / "run", "--rounds", 1, "--batch", 1, "--json", "-")
    assert result.returncode == 0, result.stderr
    (cell,) = json.loads(result.stdout)["cells"]
    assert (cell["size"], cell["depth"]) == ([32, 32], 1)
    (tmp_path / "empty").mkdir()
    result = run(tmp_path / "empty")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)


def test_a_curve_as_json_on_standard_output(run):
    result = run(
        "deit_tiny_patch16", "--curve", "depth", "--depth", "1,2", "--size", 32, "--batch", 1, "--rounds", 1, "--json", "-"
    )
    assert result.returncode == 0, result.stderr
    cells = json.loads(result.stdout)["cells"]
    assert [cell["depth"] for cell in cells] == [1, 2]
    assert cells[0]["macs"] < cells[1]["macs"]


def test_what_needs_a_gpu_and_what_does_not_fit_are_said(run):
    result = run("deit_tiny_patch16", *SMALL, "--mode", "graph,eager", "--batch", f"1,{1 << 23}", "--task", "train")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("needs a GPU") == 1
    assert result.stdout.count("does not fit") == 2


def test_a_failure_is_told_by_the_exit_code(run, monkeypatch):
    def fail(*given):
        raise ValueError("no such kernel")

    monkeypatch.setattr("vitrail.bench.measurement.make_run", fail)
    result = run("deit_tiny_patch16", *SMALL)
    assert result.returncode == 1
    assert "failed: no such kernel" in result.stdout


def test_interrupted_it_tells_what_it_has(run, monkeypatch, tmp_path):
    calls = []

    def heats(heats, rounds, device, ceiling, advance):
        cells = [entry.cell(ceiling) for entry in heats[0]]
        cells[0].seconds = [0.5]
        calls.append(1)
        yield cells
        raise KeyboardInterrupt

    monkeypatch.setattr("vitrail.bench.measurement.run_heats", heats)
    result = run("deit_tiny_patch16", *SMALL, "--batch", "2,4", "--json", tmp_path / "b.json")
    assert calls
    assert result.returncode == 130
    assert "4" in result.stdout
    assert result.stderr == "Stopped: this is what was measured so far.\n"
    assert not json.loads((tmp_path / "b.json").read_text())["ended"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("deit_tyni",), "There is no model 'deit_tyni'"),
        (("gone.safetensors",), "There is no file gone.safetensors"),
        (("deit_tiny_patch16", "--against", "torch"), "the opponent is timm"),
        (("deit_tiny_patch16", "--batch", "0"), "--batch 0 is not a list"),
        (("deit_tiny_patch16", "--batch", "1,,2"), "is not a list"),
        (("deit_tiny_patch16", "--depth", "x"), "--depth x is not a list"),
        (("deit_tiny_patch16", "--size", "3"), "smaller than one patch"),
        (("deit_tiny_patch16", "--task", "sleep"), "--task sleep"),
        (("deit_tiny_patch16", "--mode", "fast"), "--mode fast"),
        (("deit_tiny_patch16", "--curve", "speed"), "--curve speed"),
        (("deit_tiny_patch16", "--plot", "a.jpg"), "call it bench.png"),
        (("deit_tiny_patch16", "--json", "a.safetensors"), "looks like a checkpoint"),
        (("deit_tiny_patch16", "--device", "tpu"), "There is no device"),
    ],
)
def test_what_is_refused_in_a_sentence(run, words, reason):
    result = run(*words)
    assert (result.returncode, result.stdout) == (2, ""), result
    assert reason in result.stderr
    assert result.stderr.count("\n") == 1


def test_beside_timm(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", Timm("deit_tiny_patch16_224"))
    result = run("deit_tiny_patch16", "lvvit_t", "--against", "timm", *SMALL, "--batch", 2, "--task", "train")
    assert result.returncode == 0, result.stderr
    assert result.stderr == "timm has no model like lvvit_t.\n"
    heading, ours, theirs, alone = (
        line.split() for line in result.stdout.splitlines() if line.startswith(("model", "deit", "lv"))
    )
    assert heading[-2:] == ["to", "timm"]
    assert (ours[1], theirs[1], alone[1]) == ("vitrail", "timm", "vitrail")
    # Both are the same network here, so that the ratio is that of two noisy measures of one thing.
    assert ours[-1] == "%"
    assert 0.02 < float(ours[-3]) < 50
    assert "±" not in "".join(theirs + alone)


def test_a_star_where_there_was_no_room_for_both(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", Timm("deit_tiny_patch16_224"))

    def heats(heats, rounds, device, ceiling, advance):
        cells = [entry.cell(ceiling) for heat in heats for entry in heat]
        for cell, seconds in zip(cells, (0.5, 1.0), strict=True):
            cell.seconds, cell.turns = [seconds] * 2, 1
        yield cells

    monkeypatch.setattr("vitrail.bench.measurement.run_heats", heats)
    result = run("deit_tiny_patch16", "--against", "timm", *SMALL)
    assert "2.000 ±0.0 % *" in result.stdout
    assert "* measured one after the other" in result.stdout


def test_without_timm_a_sentence(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    result = run("deit_tiny_patch16", "--against", "timm")
    assert result.returncode == 2
    assert result.stderr.startswith("timm ")
