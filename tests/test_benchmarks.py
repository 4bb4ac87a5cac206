"""Benchmarks that have no test of their own still run: in miniature, on a CPU."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODEL = "deit_tiny_patch16"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (f"finetuning.py --model {MODEL} --size 32 --device cpu --batch 2 --rounds 1 --repeats 1 --classes 5", "attention"),
        (f"optimisers.py {MODEL} --device cpu --rounds 1 --repeats 1", "running mean"),
        (f"gpu.py pairs {MODEL} --device cpu --batch 1 --rounds 1 --modes eager --no-timm --precision fp32 --out OUT", MODEL),
        (f"gpu.py latency {MODEL} --device cpu --rounds 1 --modes own --no-timm --precision fp32 --out OUT", "own"),
        ("forecast.py --rounds 1 -- --epochs 0.2 --device cpu --workers 0 --set architecture.width=16", "said / reached"),
    ],
    ids=lambda text: text.split(".")[0],
)
def test_it_runs(words, expected, tmp_path):
    program, *options = words.replace("OUT", str(tmp_path)).split()
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / program, *options], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
