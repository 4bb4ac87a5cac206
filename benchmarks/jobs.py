"""Trainings as processes of their own, some at a time, within a time limit; the same command continues where it was stopped."""

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from arguments import positive

import vitrail
from vitrail.atomic_files import atomic_write_text
from vitrail.data.workers import count_cores, default_workers
from vitrail.errors import UserError
from vitrail.formatting import pluralize
from vitrail.runs.train import Run

SAVING = 60  # seconds at the end of the time limit, in which stopped jobs write their checkpoints
OF_THE_MACHINE = ("device", "workers")  # settings that do not change a result


def different_settings(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The names of the settings that differ, "" if none does: any but those of the machine."""
    before, now = flatten(before), flatten(json.loads(json.dumps(now)))
    return ", ".join(sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name)))


def flatten(job: dict[str, Any]) -> dict[str, Any]:
    """Settings and changes of the recipe, without those of the machine.

    Data and results may be copied: of absolute paths the last part, of weights the last three, such as a/run/best.safetensors.
    """
    values = {name: value for name, value in job.items() if name not in ("changes", *OF_THE_MACHINE)} | job.get("changes", {})
    for name, value in values.items():
        if isinstance(value, str) and os.path.isabs(value):
            values[name] = "/".join(Path(value).parts[-3 if value.endswith(".safetensors") else -1 :])
    return values


def locate(path: str) -> str:
    """The absolute path of something that exists, else the text, such as the name of a data set."""
    return str(Path(path).resolve()) if Path(path).exists() else path


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


def describe_machine(device: torch.device) -> dict[str, Any]:
    """This machine and the versions, as a run records them."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    versions = {"vitrail": vitrail.__version__, "torch": torch.__version__}
    return {"machine": {"device": name, "cores": os.cpu_count()}, "versions": versions}


def list_machines(results: Iterable[dict[str, Any]]) -> str:
    """The device and the versions with which the results were computed; where they differ, with the number of results of each."""
    counts = Counter(map(machine_title, results))
    if len(counts) < 2:
        return "".join(counts)
    parts = [f"{title} ({pluralize(count, 'result')})" for title, count in counts.most_common()]
    return f"Results of different machines or versions: {'; '.join(parts)}"


def machine_title(result: dict[str, Any]) -> str:
    machine, versions = result.get("machine"), result.get("versions")
    if not machine or not versions:
        return "unknown machine"
    return f"{machine['device']}, torch {versions['torch']}, vitrail {versions['vitrail']}"


def add_options(parser: ArgumentParser, out: str, parallel: int) -> None:
    """The options of all programs that run jobs."""
    parser.add_argument("--parallel", type=positive, default=parallel, help="trainings at a time, on one device")
    parser.add_argument(
        "--minutes",
        type=float,
        help="end after this time, in whose last minute trainings are stopped and save a checkpoint; the same command continues",
    )
    parser.add_argument("--workers", type=int, help="processes that decode images; default: a core each, divided by --parallel")
    parser.add_argument("--device", default=None)
    parser.add_argument("--out", type=Path, default=Path(out), help="folder of trainings and results")


class Jobs:
    """Runs jobs, `--parallel` at a time, until `--minutes` have passed since it was created.

    A job is the command `program job FOLDER`, which reads FOLDER/job.json (its settings and "workers", the processes that decode
    its images) and writes FOLDER/result.json. A minute before the end of the time running jobs are stopped, so that they save a
    checkpoint; the rest is left to the next call. If a job fails, the others go on, and `exit_if_failed` names it after the
    results are printed.
    """

    def __init__(self, options: Namespace, program: str, show: Callable[[dict[str, Any]], str]) -> None:
        self.out, self.parallel, self.program, self.show = options.out, options.parallel, program, show
        self.end = time.monotonic() + 60 * options.minutes - SAVING if options.minutes else math.inf
        self.workers = max(default_workers() // self.parallel, 1) if options.workers is None else options.workers
        self.failed: list[str] = []
        # The compilers of all jobs together have a process for each core.
        self.environment = {"TORCHINDUCTOR_COMPILE_THREADS": str(max(count_cores() // self.parallel, 1))} | os.environ

    def run(self, jobs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """The results by name; those that are in `--out` already are not computed again.

        UserError if `--out` has one of the jobs with other settings.
        """
        for name, job in jobs.items():
            path = self.out / name / "job.json"
            if path.exists() and (other := different_settings(json.loads(path.read_text()), job)):
                raise UserError(f"{path.parent} has a training with other settings ({other}): give another --out.")
        with ThreadPoolExecutor(self.parallel) as pool:
            results = dict(zip(jobs, pool.map(self.compute, jobs, jobs.values()), strict=True))
        finished = {name: result for name, result in results.items() if result is not None}
        if len(finished) < len(jobs):
            print(f"{len(finished)} of {len(jobs)} trainings are finished: run the same command again for the rest.", flush=True)
        return finished

    def compute(self, name: str, job: dict[str, Any]) -> dict[str, Any] | None:
        """The result of a job, None if it failed or there was not enough time."""
        folder = self.out / name
        if (folder / "result.json").exists():
            return read_result(folder)
        if time.monotonic() > self.end:
            return None
        atomic_write_text(folder / "job.json", json.dumps(job | {"workers": self.workers}))
        with (folder / "log.txt").open("a") as log:
            command = [sys.executable, self.program, "job", str(folder)]
            self.wait(subprocess.Popen(command, stdout=log, stderr=log, env=self.environment))
        if (folder / "result.json").exists():
            result = read_result(folder)
            print(f"{name}: {self.show(result)}, {result['minutes']:.1f} min", file=sys.stderr, flush=True)
            return result
        if time.monotonic() < self.end:
            self.failed.append(name)
        return None

    def wait(self, running: "subprocess.Popen[bytes]") -> None:
        """Until a process has ended, which is stopped when the time is over."""
        try:
            running.wait(None if self.end == math.inf else max(self.end - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGTERM)
            try:
                running.wait(SAVING)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()

    def exit_if_failed(self) -> None:
        """Name the failed jobs on standard error and exit with code 1, if there are any."""
        for name in self.failed:
            print(f"{name} failed: see {self.out / name / 'log.txt'}.", file=sys.stderr)
        if self.failed:
            raise SystemExit(1)


def read_result(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def write_result(folder: Path, result: dict[str, Any]) -> None:
    """Write the result of a job; a process that is killed meanwhile leaves none."""
    atomic_write_text(folder / "result.json", json.dumps(result, indent=1))


def mean_and_sd(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}"
