"""Dynamic batching: one thread computes the items of many requests in batches, from a bounded queue."""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

Compute = Callable[[Any, list[Any]], Sequence[Any]]  # a key and the items with that key to one result for each

RESTART_SECONDS = 0.05  # before another thread is started


class QueueFull(Exception):
    """There is no place for a request; `retry_after`: seconds until there probably is."""

    def __init__(self, retry_after: int) -> None:
        super().__init__("The queue is full.")
        self.retry_after = retry_after


class QueueClosed(Exception):
    """The batcher accepts no more requests."""


class WorkerStopped(Exception):
    """The thread ended while it computed a batch."""


@dataclass(eq=False)
class Job:
    key: Hashable
    item: Any
    deadline: float  # of time.monotonic
    submitted: float
    future: "Future[Any]"


class Admission:
    """Places in the queue for the items of one request, which are given back at the end of the context if they are not used."""

    def __init__(self, batcher: "Batcher", count: int) -> None:
        self.batcher, self.count = batcher, count

    def __enter__(self) -> "Admission":
        return self

    def __exit__(self, *_: object) -> None:
        self.batcher._put(self, [])

    def submit(self, key: Hashable, items: Sequence[Any], deadline: float) -> "list[Future[Any]]":
        """Queue the items, at most as many as were admitted. A future that is cancelled in time is not computed."""
        assert len(items) <= self.count
        now = time.monotonic()
        jobs = [Job(key, item, deadline, now, Future()) for item in items]
        self.batcher._put(self, jobs)
        return [job.future for job in jobs]


class Batcher:
    """Calls `compute(key, items)` on one thread, for items of equal keys that wait at the same time.

    A batch is computed when it has `max_batch` items, when its first item has waited for `max_wait` seconds, or when no other
    admitted item is still being prepared. At most `max_queue` items are prepared or wait; more raise QueueFull. If `compute`
    raises, the halves of the batch are computed separately, so that an item fails alone. If the thread ends, the items that it
    computed raise WorkerStopped and another thread takes over.
    """

    def __init__(
        self,
        compute: Compute,
        max_batch: int = 32,
        max_wait: float = 0.005,
        max_queue: int = 256,
        start: Callable[[], object] = lambda: None,
        observe: Callable[[int, float], object] = lambda size, seconds: None,
    ) -> None:
        """`start` is called first on every thread; `observe` after a batch, with its size and seconds."""
        self.compute, self.start, self.observe = compute, start, observe
        self.max_batch, self.max_wait, self.max_queue = max_batch, max_wait, max_queue
        self.restarts = 0
        self._condition = threading.Condition()
        self._queue: deque[Job] = deque()
        self._running: list[Job] = []
        self._running_since = 0.0
        self._expected = 0  # admitted items that are not submitted yet
        self._seconds_per_item = 0.0  # EMA
        self._closed = False
        self._worker: threading.Thread | None = None
        self._supervisor = threading.Thread(target=self._supervise, name="vitrail-supervisor", daemon=True)
        self._supervisor.start()

    @property
    def waiting(self) -> int:
        """The number of items that are prepared or wait."""
        return self._expected + len(self._queue)

    @property
    def busy_seconds(self) -> float:
        """For how long the current batch has been computed."""
        running = self._running
        return time.monotonic() - self._running_since if running and not isinstance(running[0].key, Call) else 0.0

    def admit(self, count: int) -> Admission:
        """Reserve places for `count` items, as a context; raises QueueFull or QueueClosed."""
        with self._condition:
            if self._closed:
                raise QueueClosed("The server is shutting down.")
            if self.waiting + count > self.max_queue:
                self._drop()
            if self.waiting + count > self.max_queue:
                raise QueueFull(max(round(self.waiting * self._seconds_per_item), 1))
            self._expected += count
            return Admission(self, count)

    def _put(self, admission: Admission, jobs: list[Job]) -> None:
        with self._condition:
            self._expected -= admission.count
            admission.count = 0
            self._queue.extend(jobs)
            self._condition.notify_all()

    def call(self, function: Callable[[], Any]) -> "Future[Any]":
        """Run a function on the thread, between two batches."""
        job = Job(Call(function), None, float("inf"), 0.0, Future())
        with self._condition:
            if self._closed:
                raise QueueClosed("The server is shutting down.")
            self._queue.appendleft(job)
            self._condition.notify_all()
        return job.future

    def close(self) -> None:
        """Compute what was admitted, then end the thread."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._supervisor.join()

    def _supervise(self) -> None:
        """Keep one worker running until the batcher is closed and empty."""
        while True:
            self._worker = threading.Thread(target=self._work, name="vitrail-device", daemon=True)
            self._worker.start()
            self._worker.join()
            with self._condition:
                if self._closed and not self.waiting and not self._running:
                    return
                running, self._running = self._running, []
                self._queue = deque(job for job in self._queue if job not in running)
                self.restarts += 1
            for job in running:
                fail(job, WorkerStopped("The computation was interrupted."))
            time.sleep(RESTART_SECONDS)

    def _work(self) -> None:
        self.start()
        while batch := self._take():
            started = time.monotonic()
            self._run(batch)
            if not isinstance(batch[0].key, Call):
                seconds = time.monotonic() - started
                self.observe(len(batch), seconds)
                self._seconds_per_item += 0.1 * (seconds / len(batch) - self._seconds_per_item)
            batch = []  # its items and their model are not needed while the next batch is awaited

    def _take(self) -> list[Job]:
        """Wait for the next batch; [] if there is none and the batcher is closed."""
        with self._condition:
            self._running = []
            while True:
                self._drop()
                if not self._queue:
                    if self._closed and not self._expected:
                        return []
                    self._condition.wait()
                    continue
                first = self._queue[0]
                batch = [job for job in self._queue if job.key == first.key][: self.max_batch]
                remaining = first.submitted + self.max_wait - time.monotonic()
                if len(batch) < self.max_batch and self._expected and remaining > 0:
                    self._condition.wait(remaining)
                    continue
                # Before the jobs leave the queue: if the thread ends anywhere, the supervisor finds them.
                self._running, self._running_since = batch, time.monotonic()
                self._queue = deque(job for job in self._queue if job not in batch)
                if batch := [job for job in batch if job.future.set_running_or_notify_cancel()]:
                    return batch

    def _drop(self) -> None:
        """Remove cancelled and expired jobs."""
        now = time.monotonic()
        for job in self._queue:
            if job.deadline < now:
                fail(job, TimeoutError())
        self._queue = deque(job for job in self._queue if not job.future.done())  # also true of cancelled ones

    def _run(self, jobs: list[Job]) -> None:
        key = jobs[0].key
        try:
            results = [key.function()] if isinstance(key, Call) else self.compute(key, [job.item for job in jobs])
        except Exception as error:
            if len(jobs) == 1:
                fail(jobs[0], error)
                return
            self._run(jobs[: len(jobs) // 2])
            self._run(jobs[len(jobs) // 2 :])
            return
        for job, result in zip(jobs, results, strict=True):
            job.future.set_result(result)


@dataclass(frozen=True, eq=False)
class Call:
    """The key of a function that is not part of a batch."""

    function: Callable[[], Any]


def fail(job: Job, error: Exception) -> None:
    with suppress(InvalidStateError):  # it has a result, or was cancelled
        job.future.set_exception(error)
