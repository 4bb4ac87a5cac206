"""Damaged run directories, from fixed seeds: reports, comparisons and resumes succeed or raise a UserError."""

import copy
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.security.test_fuzz_data import damage
from vitrail.errors import UserError
from vitrail.runs.prepare import prepare_resumed
from vitrail.runs.report import write_report
from vitrail.runs.results import choose_metric, read_results
from vitrail.runs.run_json import read_run_info
from vitrail.training.distributed import Devices
from vitrail.training.metrics import MetricsWriter, read_metrics

OLD = Path(__file__).parents[1] / "old_files"
ROUNDS = int(os.environ.get("VITRAIL_FUZZ_ROUNDS", "40"))
DEEP: Any = 1
for _ in range(100):
    DEEP = [DEEP]
VALUES = [
    None,
    True,
    -1,
    0,
    1,
    2.5,
    10**400,
    -(10**30),
    float("nan"),
    float("inf"),
    "x",
    "",
    "nan",
    "\ud800",
    [],
    {},
    {"a": 1},
    [1],
]
VALUES += [[None], [[]], ["x"], DEEP, {"a": DEEP}, "9" * 5000, 2**63, [{"label": 1}], [{"top1": "x"}], {"matrix": [[1, 2]]}]


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a tree of JSON values."""
    items = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    for key, value in items:
        yield tree, key
        yield from places(value)


def mutate(tree: dict[str, Any], rng: np.random.Generator) -> bytes:
    """The tree as JSON with some values removed or replaced; sometimes with damaged bytes."""
    tree = copy.deepcopy(tree)
    for _ in range(int(rng.integers(1, 3))):
        # Half of the changes in the first levels, of which there are few.
        found = [(tree, key) for key in tree] if rng.random() < 0.5 else list(places(tree))
        container, key = found[int(rng.integers(0, len(found)))]
        if rng.random() < 0.2 and isinstance(container, dict):
            del container[key]
        else:
            container[key] = copy.deepcopy(VALUES[int(rng.integers(0, len(VALUES)))])
    text = json.dumps(tree).encode()
    return damage(text, rng) if rng.random() < 0.2 else text


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run; its curves are computed and not drawn, which takes longer than everything else."""
    compute = lambda curves, *_: (curves.smooth_losses(), curves.best_point(), b"\x89PNG")[-1]  # noqa: E731
    monkeypatch.setattr("vitrail.runs.curves.Curves.draw", compute)
    return Path(shutil.copytree(OLD / "finished_run", tmp_path / "run"))


def test_run_json(run: Path) -> None:
    content = json.loads((run / "run.json").read_text())
    rng = np.random.default_rng(1)
    outcomes = {"read": 0, "error": 0}
    for number in range(ROUNDS):
        (run / "run.json").write_bytes(mutate(content, rng))
        try:
            read_results([run], choose_metric([run], "primary"))
            write_report(run)
            outcomes["read"] += 1
        except UserError:
            outcomes["error"] += 1
        except Exception as error:
            error.add_note(f"round {number}")
            raise
    assert min(outcomes.values()) > ROUNDS // 10, outcomes


def test_metrics(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_bytes().splitlines()
    rng = np.random.default_rng(2)
    outcomes = {"read": 0, "error": 0}
    for number in range(ROUNDS):
        changed = list(lines)
        row = int(rng.integers(0, len(lines)))
        changed[row] = mutate(json.loads(lines[row]), rng)
        if rng.random() < 0.2:
            changed[row] = damage(lines[row], rng)
        (run / "metrics.jsonl").write_bytes(b"\n".join(changed) + b"\n")
        try:
            write_report(run)
            read_results([run], at="last")
            MetricsWriter(run, resume_step=1).close()
            read_metrics(run)
            outcomes["read"] += 1
        except UserError:
            outcomes["error"] += 1
        except Exception as error:
            error.add_note(f"round {number}: {changed[row][:300]!r}")
            raise
    assert min(outcomes.values()) > 0, outcomes


def test_resume(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(OLD / "interrupted_run", tmp_path / "run"))
    content = json.loads((folder / "run.json").read_text())
    rng = np.random.default_rng(3)
    outcomes = {"read": 0, "error": 0}
    for number in range(ROUNDS):
        (folder / "run.json").write_bytes(mutate(content, rng))
        try:
            prepare_resumed(folder, Devices(torch.device("cpu")), None, 0, {})
            outcomes["read"] += 1
        except UserError:
            outcomes["error"] += 1
        except Exception as error:
            error.add_note(f"round {number}")
            raise
    assert min(outcomes.values()) > 0, outcomes


def test_a_named_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises(UserError, match="is not a regular file"):
        read_run_info(tmp_path)
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert read_metrics(tmp_path) == []
