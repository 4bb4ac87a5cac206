import torch

from vitrail.bench.peak import measure_ceiling
from vitrail.bench.timing import timed


def test_products_and_copies_are_counted(monkeypatch):
    monkeypatch.setattr("vitrail.bench.timing.timed", lambda run, device, repeats=1: 0.5)
    found = measure_ceiling(torch.device("cpu"), ["bf16", "fp32"], side=64, copied=1000, rounds=2)
    assert found.operations == {"bf16": 2 * 64**3 / 0.5, "fp32": 2 * 64**3 / 0.5}
    assert (found.bandwidth, found.bandwidth_spread) == (4000.0, 0.0)


def test_a_real_measure_agrees_with_a_stopwatch():
    device = torch.device("cpu")
    found = measure_ceiling(device, ["fp32"], side=256, copied=1 << 22, rounds=3)
    a = torch.randn(256, 256)
    alone = 2 * 256**3 / min(timed(lambda: a @ a, device, 20) for _ in range(5))
    assert alone / 30 < found.operations["fp32"] < alone * 30  # the same order, on a machine that others use
    assert found.bandwidth > 0
