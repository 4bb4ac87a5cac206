"""A pool of worker processes that returns results in the order of the tasks.

Task n is always sent to worker n mod `num_workers`, so results need no sorting. Each worker has its own pipe. Tensors are
returned in shared memory; only their handles go through the pipe. A closed pipe shows at once that a worker has died.
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
from multiprocessing.util import Finalize, get_temp_dir
from typing import Any

import torch
import torch.multiprocessing  # registers the transfer of tensors through shared memory

from vitrail.errors import UserError

PREFETCH = 2  # tasks in flight per worker: one being processed, one finished


class Workers:
    """Worker processes that apply `function` to tasks; with `num_workers=0` the current process does it."""

    def __init__(self, function: Callable[[Any], Any], num_workers: int) -> None:
        if not isinstance(num_workers, int) or not 0 <= num_workers <= max_workers():
            raise UserError(f"{num_workers} is not a valid number of workers: give a number from 0 to {max_workers()}.")
        self.function, self.num_workers = function, num_workers
        self.processes: list[tuple[Any, Any]] = []  # (process, our end of its pipe)

    def run(self, tasks: Iterable[Any]) -> Iterator[Any]:
        """Yield the results in the order of the tasks."""
        if self.num_workers == 0:
            yield from map(self.function, tasks)
            return
        self._start()
        pending, sent, received, complete = iter(tasks), 0, 0, False
        try:
            while True:
                for task in islice(pending, self.num_workers * PREFETCH - (sent - received)):
                    with self._pipe(sent) as pipe:
                        pipe.send(task)
                    sent += 1
                if sent == received:
                    break
                with self._pipe(received) as pipe:
                    failure, result = pipe.recv()
                received += 1
                if failure:
                    raise failure
                yield result
            complete = True
        finally:
            if not complete:  # otherwise the next run would receive the results that are still in the pipes
                self.close()

    def _start(self) -> None:
        if not self.processes:  # kill the workers at exit, before multiprocessing joins them
            Finalize(self, kill_workers, (self.processes,), exitpriority=10)
            get_temp_dir()  # of sockets for shared tensors; made here, since killed workers do not remove their own
        while len(self.processes) < self.num_workers:
            ours, theirs = multiprocessing.Pipe()
            process = multiprocessing.Process(target=worker_loop, args=(self.function, theirs), daemon=True)
            with sigint_blocked():  # until the process is in the list of those to kill
                process.start()
                theirs.close()  # before the next fork: a sibling's copy would keep the pipe of a dead worker open
                self.processes.append((process, ours))

    @contextmanager
    def _pipe(self, task: int) -> Iterator[Any]:
        process, pipe = self.processes[task % self.num_workers]
        try:
            yield pipe
        except (EOFError, OSError) as error:
            process.join(2)
            code = process.exitcode
            cause = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
            raise UserError(
                f"A loading process died ({cause}), probably out of (shared) memory: use fewer workers or smaller batches."
            ) from error

    def close(self) -> None:
        kill_workers(self.processes)

    def __getstate__(self) -> dict[str, Any]:
        return {"function": self.function, "num_workers": self.num_workers, "processes": []}


def kill_workers(processes: list[tuple[Any, Any]]) -> None:
    """Kill and join the workers. They ignore SIGINT and SIGTERM."""
    for process, pipe in processes:
        pipe.close()
        process.kill()
    for process, _ in processes:
        process.join()
    processes.clear()


@contextmanager
def sigint_blocked() -> Iterator[None]:
    """Block SIGINT while a worker is forked: only the main process handles Ctrl-C, and it kills its workers."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def worker_loop(function: Callable[[Any], Any], pipe: Any) -> None:
    # Terminals and clusters signal every process of a job. The main process handles the signal and needs its workers until then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # torchrun signals the whole process group
    sys.excepthook = ignore_broken_pipes
    torch.set_num_threads(1)
    threading.Thread(target=exit_with_parent, args=(multiprocessing.parent_process(),), daemon=True).start()
    try:
        while True:
            task = pipe.recv()
            reply: tuple[Exception | None, Any]
            try:
                reply = (None, function(task))
            except UserError as error:
                reply = (error, None)
            except Exception as error:
                reply = (RuntimeError("in a loading process:\n" + "".join(traceback.format_exception(error))), None)
            pipe.send(reply)
    except (EOFError, OSError):
        return  # the main process has closed the pipe or has exited


def exit_with_parent(parent: Any) -> None:
    """Exit when the main process dies. Workers forked later hold a copy of its end of the pipe, so EOF may never arrive."""
    parent.join()
    os._exit(1)


def ignore_broken_pipes(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Exception hook that hides the errors of the tensor-sharing thread when the main process exits during a transfer."""
    if not issubclass(kind, OSError | EOFError):
        sys.__excepthook__(kind, error, trace)


def default_workers() -> int:
    """Return the number of CPU cores per process of this machine's run, at most 16, which is enough for any device."""
    return min(max(count_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1), 16)


def max_workers() -> int:
    """Return the largest accepted number of workers: 4 per CPU core, or 64 on small machines that wait for a network."""
    return max(4 * count_cores(), 64)


def count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
