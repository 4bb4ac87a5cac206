import json

import pytest
import torch

from vitrail.aliases import upgrade_benchmark
from vitrail.bench import measurement as module
from vitrail.bench.candidates import Candidate, open_candidate
from vitrail.bench.measurement import BYTES_PER_PARAMETER, OUT_OF_MEMORY, make_groups, measure_groups, speedup, timm_counterpart
from vitrail.bench.output import make_document, write_json
from vitrail.bench.peak import Peak
from vitrail.bench.settings import Setting
from vitrail.bench.workloads import CannotRun
from vitrail.errors import UserError

CPU = torch.device("cpu")
PEAK = Peak(64, {"fp32": 1e12}, {"fp32": 0.0}, 1e9, 0.0)


def small(name: str, project: str = "vitrail") -> Candidate:
    found = open_candidate(name)
    return Candidate(name, project, found.architecture.replace(image_size=32, depth=2), found.recipe)


OURS = [small("deit_tiny_patch16"), small("resmlp_s12")]
THEIRS = [small("deit_tiny_patch16", "timm")]
PLAIN = Setting("inference", "fp32", "eager", 2)


@pytest.fixture
def instant(monkeypatch):
    """Runs that do nothing in a second each; gives the list of who ran."""
    ran = []

    def make_run(candidate, setting, device):
        return lambda: ran.append(f"{candidate.project} {candidate.name}")

    def time_run(run, device, repeats=1):
        run()
        return 1.0

    monkeypatch.setattr(module, "make_run", make_run)
    monkeypatch.setattr(module, "time_run", time_run)
    monkeypatch.setattr("vitrail.bench.timing.time_run", time_run)
    return ran


def measure(groups, rounds=3, peak=None):
    return [measurement for measurements in measure_groups(groups, rounds, CPU, peak) for measurement in measurements]


def test_groups():
    alone = make_groups(OURS, [], [PLAIN, PLAIN._replace(batch_size=4)])
    assert [[entry.candidate.name for entry in group] for group in alone] == [["deit_tiny_patch16", "resmlp_s12"]] * 2
    paired = make_groups(OURS, THEIRS, [PLAIN])
    assert [[entry.candidate.project for entry in group] for group in paired] == [["vitrail", "timm"], ["vitrail"]]
    with pytest.raises(UserError, match="smaller than one patch"):
        make_groups(OURS, [], [PLAIN._replace(size=(4, 4))])


def test_rounds_are_interleaved(instant):
    measurements = measure(make_groups(OURS[:1], THEIRS, [PLAIN]), rounds=2)
    ours, theirs = "vitrail deit_tiny_patch16", "timm deit_tiny_patch16"
    assert instant[-4:] == [ours, theirs, theirs, ours]
    assert [measurement.n for measurement in measurements] == [2, 2]
    assert [measurement.interleaved for measurement in measurements] == [2, 2]


def test_values_of_a_measurement(instant):
    training = PLAIN._replace(task="train")
    first, second = measure(make_groups(OURS[:1], [], [PLAIN, training]), peak=PEAK)
    assert (first.images_per_second, first.median, first.spread) == (2.0, 1.0, 0.0)
    assert first.flops == 2.0 * first.macs * 2
    assert second.flops == 3 * first.flops
    assert first.mfu == pytest.approx(first.flops / 1e12)
    found = first.to_dict()
    assert (found["images_per_second"], found["n"], found["milliseconds"]) == (2.0, 3, 1e3)
    assert (found["memory"], found["compile_seconds"]) == (None, None)
    assert found["lower_bound_milliseconds"] == {"products": pytest.approx(1e3 * first.mfu)}  # of a run that takes a second
    second.memory = BYTES_PER_PARAMETER * second.parameters + 10
    assert second.lower_bounds["memory"] == pytest.approx(20 / PEAK.bandwidth)


def test_a_real_run():
    setting = PLAIN._replace(task="train")
    (measurement,) = measure(make_groups([small("deit_tiny_patch16")], [], [setting]), rounds=2)
    assert not measurement.error
    assert measurement.n == 2
    assert all(0 < seconds < 10 for seconds in measurement.seconds)


def test_speedup_within_rounds(instant):
    ours, theirs = measure(make_groups(OURS[:1], THEIRS, [PLAIN]))
    ours.seconds, theirs.seconds = [1.0, 2.0, 4.0], [2.0, 4.0, 8.0]  # a clock that slows down for both
    assert timm_counterpart(ours, [ours, theirs]) is theirs
    assert timm_counterpart(theirs, [ours, theirs]) is None
    assert speedup(ours, theirs) == (3, 2.0, 0.0)
    assert make_document({}, None, [ours, theirs], 3, True)["measurements"][0]["speedup"]["median"] == 2.0
    theirs.mode = "graph"
    assert timm_counterpart(ours, [ours, theirs]) is None


def test_out_of_memory_together_runs_separately(instant, monkeypatch):
    plain, alive = module.make_run, []

    def make_run(candidate, setting, device):
        if alive:
            raise torch.OutOfMemoryError("CUDA out of memory")
        alive.append(1)
        return plain(candidate, setting, device)

    monkeypatch.setattr(module, "make_run", make_run)
    monkeypatch.setattr(module, "clear", lambda device: alive.clear())
    # The first preparation that fails frees nothing of the others, so clearing is what the end of a heat does.
    first, second = measure(make_groups(OURS, [], [PLAIN]))
    assert (first.error, second.error) == ("", "")
    assert (first.n, second.n) == (3, 3)
    assert (first.interleaved, second.interleaved) == (1, 1)


def test_out_of_memory_does_not_stop_the_others(instant, monkeypatch):
    plain = module.make_run

    def make_run(candidate, setting, device):
        if setting.batch_size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(candidate, setting, device)

    monkeypatch.setattr(module, "make_run", make_run)
    measurements = measure(make_groups(OURS, [], [PLAIN._replace(batch_size=4096), PLAIN]))
    assert [(measurement.error, measurement.n) for measurement in measurements] == [
        (OUT_OF_MEMORY, 0),
        (OUT_OF_MEMORY, 0),
        ("", 3),
        ("", 3),
    ]
    json.dumps(measurements[0].to_dict())


def test_a_batch_larger_than_the_memory_is_not_run(monkeypatch):
    monkeypatch.setattr(module, "make_run", lambda *given: pytest.fail("was tried"))
    (measurement,) = measure(make_groups(OURS[:1], [], [PLAIN._replace(batch_size=1 << 23, task="train")]))
    assert measurement.error == OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (CannotRun("needs a GPU"), "needs a GPU"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), OUT_OF_MEMORY),
        (ValueError("bad\nthings"), "failed: bad"),
        (ValueError(), "failed: ValueError"),
    ],
)
def test_failures_become_messages(error, message):
    def work():
        raise error

    assert module.describe_failure(work) == message


def test_user_errors_are_raised():
    def work():
        raise UserError("Do that.")

    with pytest.raises(UserError, match="Do that"):
        module.describe_failure(work)


def test_an_interrupted_group_yields_its_measurements(instant, monkeypatch):
    calls = []

    def time_run(run, device, repeats=1):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return 1.0

    monkeypatch.setattr("vitrail.bench.timing.time_run", time_run)
    groups = measure_groups(make_groups(OURS, [], [PLAIN]), 3, CPU, None)
    assert [measurement.n for measurement in next(groups)] == [1, 2]
    with pytest.raises(KeyboardInterrupt):
        next(groups)


def test_dynamo_config_is_restored(instant):
    before = torch._dynamo.config.automatic_dynamic_shapes
    for _ in measure_groups(make_groups(OURS[:1], [], [PLAIN]), 1, CPU, None):
        assert torch._dynamo.config.automatic_dynamic_shapes is False
    assert torch._dynamo.config.automatic_dynamic_shapes is before


def test_the_json_file(instant, tmp_path):
    measurements = measure(make_groups(OURS, [], [PLAIN]), peak=PEAK)
    write_json(tmp_path / "a" / "bench.json", make_document({"device": "x"}, PEAK, measurements, 3, True))
    found = json.loads((tmp_path / "a" / "bench.json").read_text())
    assert [measurement["model"] for measurement in found["measurements"]] == ["deit_tiny_patch16", "resmlp_s12"]
    assert (found["complete"], found["peak"]["flops"]) == (True, {"fp32": 1e12})


def test_old_files_are_upgraded():
    old = {"ceiling": None, "ended": True, "cells": [{"model": "a", "batch": 8, "trouble": "", "turns": 2, "times_as_fast": {}}]}
    assert upgrade_benchmark(old) == {
        "peak": None,
        "complete": True,
        "measurements": [{"model": "a", "batch_size": 8, "error": "", "interleaved": 2, "speedup": {}}],
    }
