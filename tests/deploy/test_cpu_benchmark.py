"""benchmarks/cpu.py, as typed: its table and its file."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from vitrail.deploy import onednn

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cpu.py"
pytestmark = pytest.mark.skipif(not onednn.can_quantize(), reason="this torch has no oneDNN")


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    description = importlib.util.spec_from_file_location("cpu_benchmark", SCRIPT)
    found = importlib.util.module_from_spec(description)
    description.loader.exec_module(found)
    # Seconds at full load, and nothing that a small model is compared with.
    monkeypatch.setattr(found, "measure_peak", lambda: (dict.fromkeys(found.BYTES, 1e11), 1e10))
    monkeypatch.setattr(found, "choose_repeats", lambda seconds: 1)
    threads, gradients = torch.get_num_threads(), torch.is_grad_enabled()
    yield lambda *words: (monkeypatch.setattr(sys, "argv", ["cpu.py", *map(str, words)]), found.main())
    torch.set_num_threads(threads)
    torch.set_grad_enabled(gradients)


def test_ours_alone(benchmark, tmp_path, capsys):
    out = tmp_path / "cpu.json"
    benchmark("vit_tiny_patch16_1x2", "--ours-only", "--batch-sizes", 1, 2, "--rounds", 2, "--cpu-time", "--out", out)
    rows = json.loads(out.read_text())["rows"]
    assert [(row["batch_size"], row["precision"], row["by"]) for row in rows[:5]] == [
        (1, "fp32", "ours"),
        (1, "fp32", "ours, plain"),
        (1, "bf16", "ours"),
        (1, "bf16", "ours, plain"),
        (1, "int8", "ours"),
    ]
    assert len(rows) == 10
    assert all(row["milliseconds"] > 0 and row["lower_bound"] > 0 and row["ratio"] is None for row in rows)
    printed = capsys.readouterr().out
    assert "1 thread" in printed
    assert printed.count("| `vit_tiny_patch16_1x2` |") == 10
