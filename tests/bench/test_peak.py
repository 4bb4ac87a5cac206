import torch

from vitrail.bench.peak import measure_peak
from vitrail.bench.timing import time_run


def test_products_and_copies_are_counted(monkeypatch):
    monkeypatch.setattr("vitrail.bench.timing.time_run", lambda run, device, repeats=1: 0.5)
    monkeypatch.setattr("vitrail.bench.peak.time_run", lambda run, device, repeats=1: 0.5)
    found = measure_peak(torch.device("cpu"), ["bf16", "fp32"], matrix_size=64, copy_bytes=1000, rounds=2)
    assert found.flops == {"bf16": 2 * 64**3 / 0.5, "fp32": 2 * 64**3 / 0.5}
    assert (found.bandwidth, found.bandwidth_spread) == (4000.0, 0.0)


def test_a_real_measurement_has_the_right_order():
    device = torch.device("cpu")
    found = measure_peak(device, ["fp32"], matrix_size=256, copy_bytes=1 << 22, rounds=3)
    a = torch.randn(256, 256)
    alone = 2 * 256**3 / min(time_run(lambda: a @ a, device, 20) for _ in range(5))
    assert alone / 30 < found.flops["fp32"] < alone * 30  # the same order, on a machine with other load
    assert found.bandwidth > 0
