"""Trainings as processes of their own, some at a time, within a time limit; the same command continues where it was stopped."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import vitrail
from vitrail.data.workers import count_cores
from vitrail.errors import UserError
from vitrail.runs.train import Run

SAVING = 60  # seconds that a stopped job has to write its checkpoint


def different_settings(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The names of the settings that differ, "" if none does: any but the device."""
    before, now = flatten(before), flatten(json.loads(json.dumps(now)))
    return ", ".join(sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name)))


def flatten(job: dict[str, Any]) -> dict[str, Any]:
    """Settings and changes of the recipe, without the device; of absolute paths the end, so that results can be copied."""
    values = {name: value for name, value in job.items() if name not in ("changes", "device")} | job.get("changes", {})
    for name, value in values.items():
        if isinstance(value, str) and os.path.isabs(value):
            values[name] = "/".join(Path(value).parts[-3:])
    return values


def weights_title(weights: str) -> str:
    """The name of weights in results: of the best weights of a run the name of its folder."""
    path = Path(weights)
    return path.parent.name if path.stem in ("best", "last") and path.parent.name else path.stem


def train_or_resume(folder: Path, start: Callable[[], Run], **options: Any) -> Run:
    """The finished run in a folder, continued with `options` if it was interrupted; a stopped one ends this process."""
    run = vitrail.resume(folder, **options) if (folder / "run.json").exists() else start()
    if not run.finished:
        raise SystemExit(1)  # stopped by the time limit: the next call continues
    return run


def describe_run(folder: Path) -> dict[str, Any]:
    """Minutes, machine and versions of the run in a folder."""
    run = json.loads((folder / "run.json").read_text())
    return {"minutes": run["seconds"] / 60, "machine": run.get("machine"), "versions": run.get("versions")}


def run_jobs(
    jobs: dict[str, dict[str, Any]],
    out: Path,
    parallel: int,
    program: str,
    show: Callable[[dict[str, Any]], str],
    minutes: float | None = None,
) -> dict[str, dict[str, Any]]:
    """The results of all jobs by name; those that are in `out` already are not computed again.

    A job is the command `program job FOLDER`, which reads FOLDER/job.json and writes FOLDER/result.json. After `minutes` running
    jobs are stopped, so that they save a checkpoint, and the rest is left to the next call. UserError if `out` has one of the
    jobs with other settings.
    """
    for name, job in jobs.items():
        path = out / name / "job.json"
        if path.exists() and (other := different_settings(json.loads(path.read_text()), job)):
            raise UserError(f"{path.parent} has a training with other settings ({other}): give another --out.")
    end = time.monotonic() + 60 * minutes if minutes else None
    # The compilers of all jobs together have a process for each core.
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": str(max(count_cores() // parallel, 1))} | os.environ

    def compute(name: str) -> dict[str, Any] | None:
        folder = out / name
        if not (folder / "result.json").exists():
            if end is not None and time.monotonic() > end:
                return None
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "job.json").write_text(json.dumps(jobs[name]))
            with (folder / "log.txt").open("a") as log:
                command = [sys.executable, program, "job", str(folder)]
                running = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
                try:
                    running.wait(None if end is None else max(end - time.monotonic(), 1))
                except subprocess.TimeoutExpired:
                    running.send_signal(signal.SIGTERM)
                    try:
                        running.wait(SAVING)
                    except subprocess.TimeoutExpired:
                        running.kill()
                        running.wait()
            if not (folder / "result.json").exists():
                if end is not None and time.monotonic() > end:
                    return None
                raise UserError(f"{name} failed: see {folder / 'log.txt'}.")
            result = json.loads((folder / "result.json").read_text())
            print(f"{name}: {show(result)}, {result['minutes']:.1f} min", file=sys.stderr, flush=True)
        found: dict[str, Any] = json.loads((folder / "result.json").read_text())
        return found

    with ThreadPoolExecutor(parallel) as pool:
        results = dict(zip(jobs, pool.map(compute, jobs), strict=True))
    finished = {name: result for name, result in results.items() if result is not None}
    if len(finished) < len(jobs):
        print(f"{len(finished)} of {len(jobs)} trainings are finished: run the same command again for the rest.", flush=True)
    return finished


def mean_and_sd(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}"
