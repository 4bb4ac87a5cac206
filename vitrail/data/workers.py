"""Processes that decode: task n is always waited for at worker n mod workers, so nothing needs sorting.

Each worker has a pipe of its own; pixels come back in shared memory, only their handle goes through the pipe. A pipe that closes
is a worker that died, noticed at once.
"""

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.multiprocessing  # teaches pipes to hand tensors over in shared memory

from vitrail.errors import UserError

AHEAD = 2  # tasks a worker may be ahead: one in its hands, one done


class Workers:
    """Processes that apply `work` to tasks; with 0 of them this one does it."""

    def __init__(self, work: Callable[[Any], Any], count: int) -> None:
        self.work, self.count = work, count
        self.processes: list[tuple[Any, Any]] = []  # process, our end of its pipe

    def run(self, tasks: Iterable[Any]) -> Iterator[Any]:
        """The results in the order of the tasks."""
        if self.count == 0:
            yield from map(self.work, tasks)
            return
        self._start()
        waiting, given, taken, complete = iter(tasks), 0, 0, False
        try:
            while True:
                for task in islice(waiting, self.count * AHEAD - (given - taken)):
                    with self._pipe(given) as pipe:
                        pipe.send(task)
                    given += 1
                if given == taken:
                    break
                with self._pipe(taken) as pipe:
                    failure, result = pipe.recv()
                taken += 1
                if failure:
                    raise failure
                yield result
            complete = True
        finally:
            if not complete:  # results still on their way would be taken for those of the next run
                self.close()

    def _start(self) -> None:
        if not self.processes:  # at the end of the program at the latest, before it would wait for them
            Finalize(self, end, (self.processes,), exitpriority=10)
        while len(self.processes) < self.count:
            ours, theirs = multiprocessing.Pipe()
            process = multiprocessing.Process(target=serve, args=(self.work, theirs), daemon=True)
            with interrupts_held():  # until it is known whom to end
                process.start()
                theirs.close()  # before the next fork: a pipe held open by a sibling would not show that its worker died
                self.processes.append((process, ours))

    @contextmanager
    def _pipe(self, turn: int) -> Iterator[Any]:
        process, pipe = self.processes[turn % self.count]
        try:
            yield pipe
        except (EOFError, OSError) as error:
            process.join(2)
            code = process.exitcode
            how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
            raise UserError(
                f"A loading process died ({how}); memory or shared memory often ran out: use fewer workers or smaller batches."
            ) from error

    def close(self) -> None:
        end(self.processes)

    def __getstate__(self) -> dict:
        return {"work": self.work, "count": self.count, "processes": []}


def end(processes: list[tuple[Any, Any]]) -> None:
    """Killed, for they are deaf to anything less."""
    for process, pipe in processes:
        pipe.close()
        process.kill()
    for process, _ in processes:
        process.join()
    processes.clear()


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C waits, so that a worker is born deaf to it: only the main process answers, and ends its workers."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(work: Callable[[Any], Any], pipe: Any) -> None:
    # Terminals and clusters ask every process of a job to stop and mean the main one, which needs its workers to the end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # torchrun asks the whole process group to stop; the main process still needs its workers then
    sys.excepthook = without_broken_pipes
    torch.set_num_threads(1)
    threading.Thread(target=end_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    try:
        while True:
            task = pipe.recv()
            answer: tuple[Exception | None, Any]
            try:
                answer = (None, work(task))
            except UserError as error:
                answer = (error, None)
            except Exception as error:
                answer = (RuntimeError("in a loading process:\n" + "".join(traceback.format_exception(error))), None)
            pipe.send(answer)
    except (EOFError, OSError):
        return  # the main process has closed the pipe or is gone


def end_with(parent: Any) -> None:
    """When the main process is killed. Workers forked later hold its end of a pipe open, so that reading it would never end."""
    parent.join()
    os._exit(1)


def without_broken_pipes(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """The thread that hands memory over complains when the main process goes away in the middle; nobody needs to read that."""
    if not issubclass(kind, OSError | EOFError):
        sys.__excepthook__(kind, error, trace)


def usual_workers() -> int:
    """The cores this process may use, shared with the other processes of its run on this machine; 16 feed any one device."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1), 16)
