import json

import pytest
import torch

from vitrail.bench import measurement
from vitrail.bench.candidates import Contender, open_contender
from vitrail.bench.measurement import STATE, UNFIT, beside, make_heats, run_heats, times_as_fast
from vitrail.bench.output import content, write_json
from vitrail.bench.peak import Ceiling
from vitrail.bench.settings import Setting
from vitrail.bench.workloads import CannotRun
from vitrail.errors import UserError

CPU = torch.device("cpu")
CEILING = Ceiling(64, {"fp32": 1e12}, {"fp32": 0.0}, 1e9, 0.0)


def small(name: str, project: str = "vitrail") -> Contender:
    found = open_contender(name)
    return Contender(name, project, found.architecture.replace(image_size=32, depth=2), found.recipe)


OURS = [small("deit_tiny_patch16"), small("resmlp_s12")]
THEIRS = [small("deit_tiny_patch16", "timm")]
PLAIN = Setting("inference", "fp32", "eager", 2)


@pytest.fixture
def instant(monkeypatch):
    """Runs that do nothing in a second each; gives the list of who ran."""
    ran = []

    def make_run(contender, setting, device):
        return lambda: ran.append(f"{contender.project} {contender.name}")

    def timed(run, device, repeats=1):
        run()
        return 1.0

    monkeypatch.setattr(measurement, "make_run", make_run)
    monkeypatch.setattr(measurement, "timed", timed)
    monkeypatch.setattr("vitrail.bench.timing.timed", timed)
    return ran


def measure(heats, rounds=3, ceiling=None):
    return [cell for cells in run_heats(heats, rounds, CPU, ceiling) for cell in cells]


def test_who_takes_turns_with_whom():
    alone = make_heats(OURS, [], [PLAIN, PLAIN._replace(batch=4)])
    assert [[entry.contender.name for entry in heat] for heat in alone] == [["deit_tiny_patch16", "resmlp_s12"]] * 2
    beside = make_heats(OURS, THEIRS, [PLAIN])
    assert [[entry.contender.project for entry in heat] for heat in beside] == [["vitrail", "timm"], ["vitrail"]]
    with pytest.raises(UserError, match="smaller than one patch"):
        make_heats(OURS, [], [PLAIN._replace(size=(4, 4))])


def test_turns_alternate(instant):
    cells = measure(make_heats(OURS[:1], THEIRS, [PLAIN]), rounds=2)
    ours, theirs = "vitrail deit_tiny_patch16", "timm deit_tiny_patch16"
    assert instant[-4:] == [ours, theirs, theirs, ours]
    assert [cell.n for cell in cells] == [2, 2]
    assert [cell.turns for cell in cells] == [2, 2]


def test_numbers_of_a_cell(instant):
    training = PLAIN._replace(task="train")
    first, second = measure(make_heats(OURS[:1], [], [PLAIN, training]), ceiling=CEILING)
    assert (first.rate, first.median, first.spread) == (2.0, 1.0, 0.0)
    assert first.operations == 2.0 * first.macs * 2
    assert second.operations == 3 * first.operations
    assert first.share == pytest.approx(first.operations / 1e12)
    found = first.to_dict()
    assert (found["images_per_second"], found["n"], found["milliseconds"]) == (2.0, 3, 1e3)
    assert (found["memory"], found["compile_seconds"]) == (None, None)
    assert found["floor_milliseconds"] == {"products": pytest.approx(1e3 * first.share)}  # of a run that takes a second
    second.memory = STATE * second.parameters + 10
    assert second.floors["memory"] == pytest.approx(20 / CEILING.bandwidth)


def test_a_real_run_gives_real_times():
    setting = PLAIN._replace(task="train")
    (cell,) = measure(make_heats([small("deit_tiny_patch16")], [], [setting]), rounds=2)
    assert not cell.trouble
    assert cell.n == 2
    assert all(0 < seconds < 10 for seconds in cell.seconds)


def test_times_as_fast_round_by_round(instant):
    ours, theirs = measure(make_heats(OURS[:1], THEIRS, [PLAIN]))
    ours.seconds, theirs.seconds = [1.0, 2.0, 4.0], [2.0, 4.0, 8.0]  # a clock that slows down for both
    assert beside(ours, [ours, theirs]) is theirs
    assert beside(theirs, [ours, theirs]) is None
    assert times_as_fast(ours, theirs) == (3, 2.0, 0.0)
    assert content({}, None, [ours, theirs], 3, True)["cells"][0]["times_as_fast"]["median"] == 2.0
    theirs.mode = "graph"
    assert beside(ours, [ours, theirs]) is None


def test_what_is_crowded_runs_alone(instant, monkeypatch):
    plain, alive = measurement.make_run, []

    def make_run(contender, setting, device):
        if alive:
            raise torch.OutOfMemoryError("CUDA out of memory")
        alive.append(1)
        return plain(contender, setting, device)

    monkeypatch.setattr(measurement, "make_run", make_run)
    monkeypatch.setattr(measurement, "clear", lambda device: alive.clear())
    # The first preparation that fails frees nothing of the others, so clearing is what the end of a heat does.
    first, second = measure(make_heats(OURS, [], [PLAIN]))
    assert (first.trouble, second.trouble) == ("", "")
    assert (first.n, second.n) == (3, 3)
    assert (first.turns, second.turns) == (1, 1)


def test_what_does_not_fit_is_said_and_the_others_go_on(instant, monkeypatch):
    plain = measurement.make_run

    def make_run(contender, setting, device):
        if setting.batch > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(contender, setting, device)

    monkeypatch.setattr(measurement, "make_run", make_run)
    cells = measure(make_heats(OURS, [], [PLAIN._replace(batch=4096), PLAIN]))
    assert [(cell.trouble, cell.n) for cell in cells] == [(UNFIT, 0), (UNFIT, 0), ("", 3), ("", 3)]
    json.dumps(cells[0].to_dict())


def test_a_batch_beyond_the_memory_of_a_cpu_is_not_tried(monkeypatch):
    monkeypatch.setattr(measurement, "make_run", lambda *given: pytest.fail("was tried"))
    (cell,) = measure(make_heats(OURS[:1], [], [PLAIN._replace(batch=1 << 23, task="train")]))
    assert cell.trouble == UNFIT


@pytest.mark.parametrize(
    ("error", "trouble"),
    [
        (CannotRun("needs a GPU"), "needs a GPU"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), UNFIT),
        (ValueError("bad\nthings"), "failed: bad"),
        (ValueError(), "failed: ValueError"),
    ],
)
def test_trouble_in_words(error, trouble):
    def work():
        raise error

    assert measurement.guarded(work) == trouble


def test_a_users_mistake_is_not_a_cell():
    def work():
        raise UserError("Do that.")

    with pytest.raises(UserError, match="Do that"):
        measurement.guarded(work)


def test_an_interrupted_heat_gives_what_it_has(instant, monkeypatch):
    calls = []

    def timed(run, device, repeats=1):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return 1.0

    monkeypatch.setattr("vitrail.bench.timing.timed", timed)
    heats = run_heats(make_heats(OURS, [], [PLAIN]), 3, CPU, None)
    assert [cell.n for cell in next(heats)] == [1, 2]
    with pytest.raises(KeyboardInterrupt):
        next(heats)


def test_shapes_stay_as_they_are_and_limits_are_put_back(instant):
    before = torch._dynamo.config.automatic_dynamic_shapes
    for _ in run_heats(make_heats(OURS[:1], [], [PLAIN]), 1, CPU, None):
        assert torch._dynamo.config.automatic_dynamic_shapes is False
    assert torch._dynamo.config.automatic_dynamic_shapes is before


def test_the_file_of_numbers(instant, tmp_path):
    cells = measure(make_heats(OURS, [], [PLAIN]), ceiling=CEILING)
    write_json(tmp_path / "a" / "bench.json", content({"device": "x"}, CEILING, cells, 3, True))
    found = json.loads((tmp_path / "a" / "bench.json").read_text())
    assert [cell["model"] for cell in found["cells"]] == ["deit_tiny_patch16", "resmlp_s12"]
    assert (found["ended"], found["ceiling"]["operations"]) == (True, {"fp32": 1e12})
