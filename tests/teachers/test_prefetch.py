"""Made by a thread: the same things in the same order, and nothing of it outlives its user."""

import threading

import pytest

from vitrail.teachers.prefetch import ahead


@pytest.mark.parametrize("length", [0, 1, 2, 7])
def test_the_same_in_the_same_order(length):
    assert list(ahead(iter(range(length)))) == list(range(length))


def test_the_first_is_made_here_and_the_others_are_not():
    made = ahead(threading.get_ident() for _ in range(3))
    assert [next(made) == threading.get_ident() for _ in range(3)] == [True, False, False]


def test_trouble_comes_in_its_turn():
    def numbers():
        yield from (1, 2, 3)
        raise ValueError("four")

    found = []
    with pytest.raises(ValueError, match="four"):
        found.extend(ahead(numbers()))
    made = ahead(numbers())
    assert [next(made) for _ in range(3)] == [1, 2, 3]


def test_who_stops_early_leaves_no_thread():
    before, asked = threading.active_count(), []
    made = ahead(iter(asked.append(number) or number for number in range(100)))
    assert [next(made), next(made)] == [0, 1]
    made.close()
    assert threading.active_count() == before
    assert len(asked) <= 5
