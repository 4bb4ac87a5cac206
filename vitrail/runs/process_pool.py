"""Several commands at a time, each in a process of its own, so that one that fails leaves the others alone."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vitrail.errors import UserError
from vitrail.training.checkpointing import LOCK

POLL = 0.2  # seconds
ATTENDED = (sys.executable, "-m", "vitrail.cli.child_process")  # ends in good order when this process does
State = Literal["waiting", "running", "done", "failed", "stopped"]


@dataclass
class Job:
    """A training, and what has become of it."""

    folder: Path
    begin: list[str]  # words after `vitrail`, to begin it
    resume: list[str]  # to go on with it
    log: Path
    state: State = "waiting"
    device: str | None = None
    told: int = 0  # how often it has been asked to stop
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def reason(self) -> str:
        """The last thing that it has said."""
        with contextlib.suppress(OSError):
            lines = [line.strip() for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines()]
            return next((line for line in reversed(lines) if line), "it has said nothing")
        return "it has said nothing"


def run_jobs(
    jobs: Sequence[Job], at_once: int, devices: Sequence[str | None], look: Callable[[], None], changed: Callable[[Job], None]
) -> bool:
    """Run all of them, `at_once` at a time, spread over the devices; True if none was stopped.

    `look` is called again and again, `changed` with every job that has begun or ended. Ctrl-C and SIGTERM let every training save
    and leave; a second one ends them at once.
    """
    waiting, running = deque(jobs), list[Job]()
    asked = 0

    def hear(number: int, frame: object) -> None:
        nonlocal asked
        asked += 1

    before = {}
    with contextlib.suppress(ValueError):  # not the main thread: whoever runs this answers for signals
        before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while running or (waiting and not asked):
            for _ in range(len(waiting) if not asked else 0):
                if len(running) >= at_once:
                    break
                job = waiting.popleft()
                if is_busy(job.folder):
                    waiting.append(job)  # a process that an earlier call has left behind is still saving
                    continue
                start(job, least_used(devices, running), at_once)
                running.append(job)
                changed(job)
            for job in list(running):
                if job.told < asked:
                    tell(job, signal.SIGTERM if asked == 1 else signal.SIGKILL)
                    job.told = asked
                if job.process is not None and job.process.poll() is not None:
                    running.remove(job)
                    finish(job, bool(asked))
                    changed(job)
            look()
            time.sleep(POLL)
    finally:
        for job in running:  # something went wrong here: they save and leave
            tell(job, signal.SIGTERM)
        for number, handler in before.items():
            signal.signal(number, handler)
    return not asked


def tell(job: Job, number: signal.Signals) -> None:
    if job.process is not None:
        job.process.send_signal(number)


def start(job: Job, device: str | None, at_once: int) -> None:
    words = job.resume if (job.folder / "run.json").exists() else job.begin
    words = [*words, *(["--device", device] if device else [])]
    environment = dict(os.environ)
    if at_once > 1:
        environment.setdefault("OMP_NUM_THREADS", str(share_of_cores(at_once)))  # or each would take all
    try:
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with job.log.open("ab") as log:
            job.process = subprocess.Popen(
                [*ATTENDED, *words],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C is answered here, once for all
            )
    except OSError as error:
        raise UserError(f"A training in {job.folder} cannot be started: {error}.") from None
    job.device, job.state = device, "running"


def share_of_cores(at_once: int) -> int:
    return max((os.cpu_count() or 1) // at_once, 1)


def finish(job: Job, asked: bool) -> None:
    assert job.process is not None
    if job.process.stdin:
        job.process.stdin.close()
    code = job.process.returncode
    job.state = "done" if code == 0 else "stopped" if asked or code == 130 else "failed"
    if job.state == "failed" and code < 0:
        with job.log.open("ab") as log:
            log.write(f"It was killed by signal {-code}.\n".encode())
    job.process = None


def least_used(devices: Sequence[str | None], running: Sequence[Job]) -> str | None:
    used = [job.device for job in running]
    return min(devices, key=used.count) if devices else None


def is_busy(folder: Path) -> bool:
    """Whether another process trains in this folder."""
    try:
        import fcntl
    except ImportError:
        return False
    with contextlib.suppress(OSError), (folder / LOCK).open("r+") as file:  # not begun, or a file system without locks
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return True
    return False
