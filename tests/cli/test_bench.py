"""vitrail bench as a person types it; in this process, for a new one loads torch for seconds each time."""

import json
import sys

import pytest

import vitrail
from tests.bench.test_candidates import Timm
from vitrail.bench.peak import Peak

SMALL = ("--size", "32", "--depth", "2", "--rounds", "2", "--device", "cpu")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Rounds of one run, and a ceiling that is not measured."""
    monkeypatch.setattr("vitrail.bench.timing.ROUND_SECONDS", 0.0)
    found = Peak(64, {"fp32": 1e11, "bf16": 2e11}, {"fp32": 0.01, "bf16": 0.0}, 5e9, 0.02)
    monkeypatch.setattr("vitrail.bench.peak.measure_peak", lambda device, precisions: found)


@pytest.fixture
def run(run_cli):
    return lambda *words: run_cli("bench", *words)


def test_help_has_an_example(run):
    assert "Example: vitrail bench" in run("--help").stdout


def test_table_json_and_plot(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    vitrail.save(vitrail.create("deit_tiny_patch16", 3, 32, depth=2), tmp_path / "[b].safetensors")
    words = ("--task", "inference,train", "--batch-size", "1,2", "--json", tmp_path / "b.json", "--plot", tmp_path / "b.png")
    result = run("deit_tiny_patch16", "[b].safetensors", *SMALL, *words)
    assert result.returncode == 0, result.stderr
    assert "[b].safetensors" in result.stdout
    assert all(
        text in result.stdout
        for text in ("images/s", "of peak", "n = 2 interleaved rounds", "0.1 TFLOP/s fp32", "5 GB/s", "thread")
    )
    found = json.loads((tmp_path / "b.json").read_text())
    assert found["complete"]
    assert len(found["measurements"]) == 2 * 2 * 2
    assert all(measurement["n"] == 2 and measurement["mfu"] > 0 for measurement in found["measurements"])
    assert (tmp_path / "b.png").stat().st_size > 1000


def test_run_directories(run, tmp_path):
    (tmp_path / "run").mkdir()
    vitrail.save(vitrail.create("deit_tiny_patch16", 3, 32, depth=1), tmp_path / "run" / "best.safetensors")
    result = run(tmp_path / "run", "--rounds", 1, "--batch-size", 1, "--json", "-")
    assert result.returncode == 0, result.stderr
    (measurement,) = json.loads(result.stdout)["measurements"]
    assert (measurement["size"], measurement["depth"]) == ([32, 32], 1)
    (tmp_path / "empty").mkdir()
    result = run(tmp_path / "empty")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)


def test_a_curve_as_json_on_standard_output(run):
    result = run(
        "deit_tiny_patch16", "--curve", "depth", "--depth", "1,2", "--size", 32, "--batch-size", 1, "--rounds", 1, "--json", "-"
    )
    assert result.returncode == 0, result.stderr
    measurements = json.loads(result.stdout)["measurements"]
    assert [measurement["depth"] for measurement in measurements] == [1, 2]
    assert measurements[0]["macs"] < measurements[1]["macs"]


def test_gpu_only_modes_and_out_of_memory(run):
    result = run("deit_tiny_patch16", *SMALL, "--mode", "graph,eager", "--batch-size", f"1,{1 << 23}", "--task", "train")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("needs a GPU") == 1
    assert result.stdout.count("out of memory") == 2


def test_a_failure_sets_the_exit_code(run, monkeypatch):
    def fail(*given):
        raise ValueError("no such kernel")

    monkeypatch.setattr("vitrail.bench.measurement.make_run", fail)
    result = run("deit_tiny_patch16", *SMALL)
    assert result.returncode == 1
    assert "failed: no such kernel" in result.stdout


def test_an_interrupt_prints_measurements(run, monkeypatch, tmp_path):
    calls = []

    def measure(groups, rounds, device, peak, advance):
        measurements = [entry.new_measurement(peak) for entry in groups[0]]
        measurements[0].seconds = [0.5]
        calls.append(1)
        yield measurements
        raise KeyboardInterrupt

    monkeypatch.setattr("vitrail.bench.measurement.measure_groups", measure)
    result = run("deit_tiny_patch16", *SMALL, "--batch-size", "2,4", "--json", tmp_path / "b.json")
    assert calls
    assert result.returncode == 130
    assert "4" in result.stdout
    assert result.stderr == "Interrupted: these are the measurements so far.\n"
    assert not json.loads((tmp_path / "b.json").read_text())["complete"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("deit_tyni",), "There is no model 'deit_tyni'"),
        (("gone.safetensors",), "There is no file gone.safetensors"),
        (("deit_tiny_patch16", "--against", "torch"), "the only choice is timm"),
        (("deit_tiny_patch16", "--batch-size", "0"), "--batch-size 0 is not a list"),
        (("deit_tiny_patch16", "--batch-size", "1,,2"), "is not a list"),
        (("deit_tiny_patch16", "--depth", "x"), "--depth x is not a list"),
        (("deit_tiny_patch16", "--size", "3"), "smaller than one patch"),
        (("deit_tiny_patch16", "--task", "sleep"), "--task sleep"),
        (("deit_tiny_patch16", "--mode", "fast"), "--mode fast"),
        (("deit_tiny_patch16", "--curve", "speed"), "--curve speed"),
        (("deit_tiny_patch16", "--plot", "a.jpg"), "such as bench.png"),
        (("deit_tiny_patch16", "--json", "a.safetensors"), "has the suffix of a checkpoint"),
        (("deit_tiny_patch16", "--device", "tpu"), "Unknown device"),
    ],
)
def test_invalid_arguments(run, words, reason):
    result = run(*words)
    assert (result.returncode, result.stdout) == (2, ""), result
    assert reason in result.stderr
    assert result.stderr.count("\n") == 1


def test_against_timm(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", Timm("deit_tiny_patch16_224"))
    result = run("deit_tiny_patch16", "lvvit_t", "--against", "timm", *SMALL, "--batch-size", 2, "--task", "train")
    assert result.returncode == 0, result.stderr
    assert result.stderr == "timm has no counterpart of lvvit_t.\n"
    heading, ours, theirs, alone = (
        line.split() for line in result.stdout.splitlines() if line.startswith(("model", "deit", "lv"))
    )
    assert heading[-2:] == ["vs", "timm"]
    assert (ours[1], theirs[1], alone[1]) == ("vitrail", "timm", "vitrail")
    # Both are the same network here, so that the ratio is that of two noisy measures of one thing.
    assert ours[-1] == "%"
    assert 0.02 < float(ours[-3]) < 50
    assert "±" not in "".join(theirs + alone)


def test_a_star_if_timed_separately(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", Timm("deit_tiny_patch16_224"))

    def measure(groups, rounds, device, peak, advance):
        measurements = [entry.new_measurement(peak) for group in groups for entry in group]
        for measurement, seconds in zip(measurements, (0.5, 1.0), strict=True):
            measurement.seconds, measurement.interleaved = [seconds] * 2, 1
        yield measurements

    monkeypatch.setattr("vitrail.bench.measurement.measure_groups", measure)
    result = run("deit_tiny_patch16", "--against", "timm", *SMALL)
    assert "2.000 ±0.0 % *" in result.stdout
    assert "* timed one after the other" in result.stdout


def test_without_timm(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    result = run("deit_tiny_patch16", "--against", "timm")
    assert result.returncode == 2
    assert result.stderr.startswith("timm ")
