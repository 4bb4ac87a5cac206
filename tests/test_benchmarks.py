"""Benchmarks that have no test of their own still run: in miniature, on a CPU."""

import importlib
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
MODEL = "deit_tiny_patch16"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (f"finetuning.py --model {MODEL} --size 32 --device cpu --batch 2 --rounds 1 --repeats 1 --classes 5", "attention"),
        (
            "ways.py branches vit_tiny_patch16_12x2_ls --device cpu --batch 1 --size 32 --depth 1 --mode eager --rounds 1",
            "one after the other, ms",
        ),
        ("ways.py branches vit_tiny_patch16_12x2 --errors --device cpu --batch 2 --size 32 --depth 1 --rounds 1", "as one"),
        ("ways.py skip cait_xxs24 --device cpu --batch 4 --size 32 --depth 1 --mode eager --rounds 1 --drop 0.5", "left out, ms"),
        ("ways.py scales cait_xxs24 --errors --device cpu --batch 2 --size 32 --depth 1 --rounds 1", "folded into it"),
        (f"optimisers.py {MODEL} --device cpu --rounds 1 --repeats 1", "running mean"),
        (f"gpu.py pairs {MODEL} --device cpu --batch 1 --rounds 1 --modes eager --no-timm --precision fp32 --out OUT", MODEL),
        (f"gpu.py latency {MODEL} --device cpu --rounds 1 --modes own --no-timm --precision fp32 --out OUT", "own"),
        ("overhead.py --device cpu --rounds 1 --repeats 1", "| backward |"),
        ("forecast.py --rounds 1 -- --epochs 0.2 --device cpu --workers 0 --set architecture.width=16", "said / reached"),
    ],
    ids=lambda text: " ".join(text.replace(".py", "").split()[:2]),
)
def test_it_runs(words, expected, tmp_path):
    program, *options = words.replace("OUT", str(tmp_path)).split()
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / program, *options], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def test_the_batches_of_the_printed_tables(monkeypatch):
    """Large and deep networks are trained with 128 pictures, everything else has 256, and --batch says otherwise."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    gpu = importlib.import_module("gpu")

    def batches(name, batch=None):
        options = Namespace(what="pairs", tasks="inference,train", modes="own", precision="bf16", batch=batch)
        ((_, settings),) = gpu.wanted(options, name, torch.device("cpu"))
        return {setting.task: setting.batch for setting in settings}

    assert batches("deit_small_patch16") == {"inference": 256, "train": 256}
    assert batches("deit3_large_patch16") == {"inference": 256, "train": 128}
    assert batches("deit3_large_patch16", 8) == {"inference": 8, "train": 8}
    assert set(gpu.TRAINED) < set(gpu.MODELS)
