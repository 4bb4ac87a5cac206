"""Prefetching: the same items in the same order, and no thread remains."""

import threading

import pytest

from vitrail.teachers.prefetch import prefetch


@pytest.mark.parametrize("length", [0, 1, 2, 7])
def test_same_items_in_the_same_order(length):
    assert list(prefetch(iter(range(length)))) == list(range(length))


def test_only_the_first_item_is_computed_in_this_thread():
    made = prefetch(threading.get_ident() for _ in range(3))
    assert [next(made) == threading.get_ident() for _ in range(3)] == [True, False, False]


def test_exception_is_raised_in_order():
    def numbers():
        yield from (1, 2, 3)
        raise ValueError("four")

    found = []
    with pytest.raises(ValueError, match="four"):
        found.extend(prefetch(numbers()))
    made = prefetch(numbers())
    assert [next(made) for _ in range(3)] == [1, 2, 3]


def test_no_thread_remains_after_close():
    before, requested = threading.active_count(), []
    made = prefetch(iter(requested.append(number) or number for number in range(100)))
    assert [next(made), next(made)] == [0, 1]
    made.close()
    assert threading.active_count() == before
    assert len(requested) <= 5
