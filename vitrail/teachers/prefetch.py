"""Computation of the next items of an iterator in a thread."""

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
END = object()


def prefetch(items: Iterator[T], count: int = 2) -> Generator[T, None, None]:
    """Yield the items in order; up to `count` of them are computed in advance.

    The first item is computed in the calling thread: it may fork worker processes.
    """
    item = next(items, END)
    if item is END:
        return
    with ThreadPoolExecutor(1) as thread:
        pending: deque[Future[object]] = deque(thread.submit(next, items, END) for _ in range(count))
        while item is not END:
            yield item  # type: ignore[misc]  # not END
            item = pending.popleft().result()
            pending.append(thread.submit(next, items, END))
