import time

import pytest
import torch

from vitrail.bench import timing
from vitrail.bench.output import describe_machine
from vitrail.bench.timing import choose_repeats, machine, summarize, time_interleaved, time_run

CPU = torch.device("cpu")


def test_median_and_half_the_interquartile_range():
    found = summarize([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (found.n, found.median) == (5, 3.0)
    assert found.spread == pytest.approx((4.0 - 2.0) / 2 / 3.0)  # the outlier does not count
    assert summarize([2.0]) == (1, 2.0, 0.0)


def test_seconds_are_of_one_run(monkeypatch):
    clock = iter([10.0, 16.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    calls = []
    assert time_run(lambda: calls.append(1), CPU, 3) == 2.0
    assert len(calls) == 3


def test_runs_are_interleaved():
    order = []
    runs = [lambda name=name: order.append(name) for name in "abc"]
    times = [[], [], []]
    steps = []
    time_interleaved(runs, [1, 2, 1], times, 3, CPU, steps.append)
    assert "".join(order) == "abbc" + "bbca" + "cabb"
    assert [len(each) for each in times] == [3, 3, 3]
    assert sum(steps) == 9


def test_an_interrupt_keeps_times():
    def stop():
        raise KeyboardInterrupt

    times = [[], []]
    with pytest.raises(KeyboardInterrupt):
        time_interleaved([lambda: None, stop], [1, 1], times, 5, CPU)
    assert [len(each) for each in times] == [1, 0]


def test_short_runs_are_repeated_and_long_ones_are_not():
    assert choose_repeats(10.0) == 1
    assert choose_repeats(timing.ROUND_SECONDS / 10) == 10
    assert choose_repeats(0.0) == timing.MAX_REPEATS


def test_machine():
    found = machine(CPU)
    assert (found["kind"], found["threads"]) == ("cpu", torch.get_num_threads())
    assert found["device"]
    assert "1 thread of 1 core;" in describe_machine(found | {"threads": 1, "cores": 1})
