"""What comes next is made by a thread while this one uses what there is."""

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
NOTHING = object()


def ahead(items: Iterator[T], count: int = 2) -> Generator[T, None, None]:
    """The same, up to `count` of them made before they are asked for.

    The first is made by the caller: it may start processes, which is no work for one of several threads.
    """
    first = next(items, NOTHING)
    if first is NOTHING:
        return
    with ThreadPoolExecutor(1) as helper:
        waiting: deque[Future] = deque(helper.submit(next, items, NOTHING) for _ in range(count))
        while first is not NOTHING:
            yield first  # type: ignore[misc]  # not the mark of the end
            first = waiting.popleft().result()
            waiting.append(helper.submit(next, items, NOTHING))
