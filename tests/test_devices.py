"""Threads and messages on a machine that other programs use too."""

import pytest
import torch

from vitrail import devices
from vitrail.devices import OtherPrograms, adapt_threads, set_threads

CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch):
    """A machine with 8 cores and threads, of which other programs use a given number."""
    chosen = []
    for name in devices.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(devices, "count_cores", lambda: 8)
    monkeypatch.setattr(devices, "default_threads", lambda: 8)
    monkeypatch.setattr(devices.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)

    def use(cores):
        monkeypatch.setattr(OtherPrograms, "cores", lambda self: cores)
        return chosen

    return use


@pytest.mark.parametrize(("busy", "threads"), [(0.0, 8), (0.2, 8), (0.5, 7), (3.1, 5), (7.9, 1), (8.0, 1)])
def test_threads_are_as_many_as_idle_cores(machine, busy, threads):
    chosen = machine(busy)
    messages = adapt_threads(CPU)
    assert chosen == [threads]
    expected = (
        f"using {threads} of 8 threads: other programs use {busy:.1f} of 8 cores; set OMP_NUM_THREADS to choose another number"
    )
    assert messages == ([] if threads == 8 else [expected])


def test_a_chosen_number_of_threads_stays(machine, monkeypatch):
    chosen = machine(7.0)
    assert adapt_threads(torch.device("cuda")) == []
    with monkeypatch.context() as patched:
        patched.setenv("RANK", "0")
        assert adapt_threads(CPU) == []
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert adapt_threads(CPU) == []
    set_threads(2)
    assert chosen == []


def test_a_resumed_run_has_the_threads_of_its_start(machine):
    chosen = machine(0.0)
    for recorded in (3, 64, None, "3", 0):
        set_threads(recorded)
    assert chosen == [3, 8]


def test_cores_of_other_programs(monkeypatch):
    """In 2 seconds the cores were busy for 3 seconds, for 0.5 of them with this process."""
    busy, now, own = iter([10.0, 13.0]), iter([100.0, 102.0]), iter([5.0, 5.5])
    monkeypatch.setattr(devices, "read_busy_seconds", lambda: next(busy))
    monkeypatch.setattr(devices.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(devices.time, "process_time", lambda: next(own))
    monkeypatch.setattr(devices, "count_cores", lambda: 2)
    assert OtherPrograms().cores() == pytest.approx(1.25)


def test_unknown_or_too_short(monkeypatch):
    assert OtherPrograms().cores() == 0.0
    monkeypatch.setattr(devices, "read_busy_seconds", lambda: None)
    others = OtherPrograms()
    monkeypatch.setattr(devices.time, "monotonic", lambda: others.start[0] + 10)
    assert others.cores() == 0.0
