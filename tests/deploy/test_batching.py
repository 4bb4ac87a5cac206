"""The batcher: every accepted item gets exactly one answer, whatever happens to the thread, the item or the client."""

import ctypes
import threading
import time

import pytest

from vitrail.deploy.batching import Batcher, QueueClosed, QueueFull, WorkerStopped

LATER = 1e9  # a deadline


class Recorder:
    """Doubles numbers, keeps the batches, and waits at the gate."""

    def __init__(self):
        self.batches, self.gate, self.entered = [], threading.Event(), threading.Semaphore(0)
        self.gate.set()

    def __call__(self, key, items):
        self.batches.append((key, items))
        self.entered.release()
        assert self.gate.wait(20)
        if -1 in items:
            raise ValueError("bad item")
        if "end" in items:
            raise SystemExit
        return [2 * item for item in items]

    def computed(self):
        return [item for _, items in self.batches for item in items]


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def make(recorder):
    batchers = []

    def make(**options):
        batchers.append(Batcher(recorder, **options))
        return batchers[-1]

    yield make
    recorder.gate.set()
    for batcher in batchers:
        batcher.close()


def submit(batcher, *items, key="a", deadline=LATER):
    with batcher.admit(len(items)) as places:
        return places.submit(key, items, deadline)


def block(batcher, recorder):
    """Let the thread wait in a batch of its own."""
    recorder.gate.clear()
    first = submit(batcher, 100, key="blocked")
    assert recorder.entered.acquire(timeout=20)
    return first


def test_items_of_one_key_that_wait_become_one_batch(make, recorder):
    batcher = make(max_batch=4)
    block(batcher, recorder)
    a, b = submit(batcher, 1, 2, 3), submit(batcher, 7, key="b")
    more = submit(batcher, 4, 5)
    recorder.gate.set()
    assert [future.result(20) for future in (*a, *b, *more)] == [2, 4, 6, 14, 8, 10]
    assert recorder.batches[1:] == [("a", [1, 2, 3, 4]), ("b", [7]), ("a", [5])]


def test_a_single_item_does_not_wait_for_others(make):
    batcher = make(max_wait=60)
    started = time.monotonic()
    assert submit(batcher, 1)[0].result(20) == 2
    assert time.monotonic() - started < 10


def test_a_batch_waits_for_items_that_are_being_prepared(make, recorder):
    batcher = make(max_wait=60)
    with batcher.admit(1) as places:
        first = submit(batcher, 1)
        second = places.submit("a", [2], LATER)
    assert (first[0].result(20), second[0].result(20)) == (2, 4)
    assert recorder.batches == [("a", [1, 2])]


def test_max_wait_ends_the_waiting(make, recorder):
    batcher = make(max_wait=0.01)
    with batcher.admit(1):
        assert submit(batcher, 1)[0].result(20) == 2


def test_a_full_queue_rejects_at_once(make, recorder):
    batcher = make(max_queue=3)
    first = block(batcher, recorder)
    waiting = submit(batcher, 1, 2)
    with pytest.raises(QueueFull) as error:
        batcher.admit(2)
    assert error.value.retry_after >= 1
    with batcher.admit(1), pytest.raises(QueueFull):  # what is being prepared counts
        batcher.admit(1)
    with batcher.admit(1):
        pass
    waiting[0].cancel()  # its place is free again
    with batcher.admit(2):
        pass
    recorder.gate.set()
    assert first[0].result(20) == 200
    assert waiting[1].result(20) == 4


def test_cancelled_and_late_items_are_not_computed(make, recorder):
    batcher = make()
    block(batcher, recorder)
    cancelled, late, kept = submit(batcher, 1), submit(batcher, 2, deadline=time.monotonic()), submit(batcher, 3)
    assert cancelled[0].cancel()
    recorder.gate.set()
    assert kept[0].result(20) == 6
    with pytest.raises(TimeoutError):
        late[0].result(20)
    assert recorder.computed() == [100, 3]


def test_an_item_fails_alone(make):
    batcher = make()
    with batcher.admit(1) as places:  # so that the four wait for it
        good = submit(batcher, 1, 2, -1, 4)
        places.submit("a", [5], LATER)
    assert [future.result(20) for future in (good[0], good[1], good[3])] == [2, 4, 8]
    assert isinstance(good[2].exception(20), ValueError)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_is_replaced(make, recorder):
    batcher = make()
    recorder.gate.clear()
    ends = submit(batcher, "end")
    assert recorder.entered.acquire(timeout=20)
    waiting = submit(batcher, 1)
    recorder.gate.set()
    assert isinstance(ends[0].exception(20), WorkerStopped)
    assert waiting[0].result(20) == 2
    assert batcher.restarts == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_killed_thread_is_replaced(make):
    """Killed from outside while it waits; what comes next is answered."""
    batcher = make()
    assert submit(batcher, 1)[0].result(20) == 2
    worker = batcher._worker
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(worker.ident), ctypes.py_object(SystemExit))
    answers = [submit(batcher, number)[0] for number in range(20)]
    results = [future.exception(20) or future.result(20) for future in answers]
    assert all(result == 2 * number or isinstance(result, WorkerStopped) for number, result in enumerate(results))
    worker.join(20)
    assert submit(batcher, 3)[0].result(20) == 6
    assert batcher.restarts == 1


def test_closing_finishes_what_was_accepted(make, recorder):
    batcher = make()
    first = block(batcher, recorder)
    places = batcher.admit(1)
    closing = threading.Thread(target=batcher.close)
    closing.start()
    while True:  # until the batcher is closed
        try:
            with batcher.admit(1):
                pass
        except QueueClosed:
            break
    recorder.gate.set()
    last = places.submit("a", [4], LATER)
    closing.join(20)
    assert not closing.is_alive()
    assert (first[0].result(0), last[0].result(0)) == (200, 8)


def test_functions_run_between_batches(make, recorder):
    batcher = make()
    assert batcher.call(threading.current_thread).result(20) is batcher._worker
    assert isinstance(batcher.call(lambda: 1 / 0).exception(20), ZeroDivisionError)


def test_functions_are_not_counted_as_batches(make):
    sizes = []
    batcher = make(observe=lambda size, seconds: sizes.append(size))
    batcher.call(lambda: time.sleep(0.2)).result(20)
    assert submit(batcher, 1)[0].result(20) == 2
    batcher.close()
    assert sizes == [1]
    assert batcher._seconds_per_item < 0.02  # a tenth of the function
