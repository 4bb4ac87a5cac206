"""Fixtures of all tests; one thread per process, since two test processes share two cores."""

import io
import itertools
import os
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from vitrail.cli import main

TESTS = Path(__file__).parent
# Files of more than two seconds; `make quick` leaves them out.
SLOW = {
    "bench/test_measurement.py",
    "checkpoints/test_bundled.py",
    "checkpoints/test_delta.py",
    "checkpoints/test_formats.py",
    "checkpoints/test_golden.py",
    "checkpoints/test_hub_upload.py",
    "checkpoints/test_old_files.py",
    "cli/test_bench.py",
    "cli/test_compare.py",
    "cli/test_delta.py",
    "cli/test_demo.py",
    "cli/test_evaluate.py",
    "cli/test_explore.py",
    "cli/test_main.py",
    "cli/test_tokenizer.py",
    "data/test_inspection.py",
    "data/test_loader.py",
    "data/test_parquet_export.py",
    "data/test_sampler.py",
    "data/test_training_batches.py",
    "deploy/test_export.py",
    "deploy/test_fold.py",
    "deploy/test_image_input.py",
    "deploy/test_onednn.py",
    "deploy/test_optimize.py",
    "deploy/test_saved_optimized.py",
    "deploy/test_serve.py",
    "deploy/test_serve_faults.py",
    "deploy/test_serve_page.py",
    "deploy/test_web_export.py",
    "explore/test_browser.py",
    "layers/test_fused_scales.py",
    "models/test_convnets.py",
    "models/test_every_model.py",
    "models/test_grid.py",
    "models/test_inputs.py",
    "models/test_published.py",
    "recipes/test_published_recipes.py",
    "runs/test_ablation.py",
    "runs/test_distillation_runs.py",
    "runs/test_finetuning.py",
    "runs/test_nan_recorder.py",
    "runs/test_report.py",
    "runs/test_resume.py",
    "runs/test_seeds.py",
    "runs/test_train.py",
    "runs/test_unlabeled_runs.py",
    "tasks/test_beit.py",
    "tasks/test_grafit_runs.py",
    "tasks/test_second_task.py",
    "tasks/test_trainings.py",
    "teachers/test_annotation_interrupted.py",
    "test_benchmarks.py",
    "test_evidence.py",
    "test_interrupts.py",
    "test_readme.py",
    "training/test_checkpointing.py",
    "training/test_distributed.py",
    "training/test_golden_losses.py",
    "training/test_guard.py",
    "training/test_sharded.py",
    "training/test_signals.py",
}

NUMBERS = itertools.count()

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # waiting OpenMP threads would occupy the cores of other tests


def pytest_collection_modifyitems(items):
    for item in items:
        if str(item.path.relative_to(TESTS)) in SLOW:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def cache_of_its_own(monkeypatch, tmp_path_factory):
    """No test reads or writes the user's cache, or that of another test."""
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path_factory.getbasetemp() / f"cache-{next(NUMBERS)}"))


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run_cli(monkeypatch, capfdbinary):
    """Run a command in this process, since starting another takes seconds; `stdin`: bytes on standard input."""

    def run_cli(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "argv", ["vitrail", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        before = signal.getsignal(signal.SIGINT)
        try:
            main.main()
            code = 0
        except SystemExit as exit:
            code = exit.code or 0
        finally:
            signal.signal(signal.SIGINT, before)  # an interrupted command leaves SIGINT ignored
        out, error = (text.decode(errors="surrogateescape") for text in capfdbinary.readouterr())  # file names may not be UTF-8
        return Done(code, out, error)

    return run_cli


@pytest.fixture
def cli_error(run_cli):
    """Run a command that fails with exit code 2 and return its message, one line on standard error."""

    def cli_error(*arguments):
        result = run_cli(*arguments)
        assert result.returncode == 2, result
        assert result.stderr.count("\n") == 1, result.stderr
        return result.stderr.strip()

    return cli_error
