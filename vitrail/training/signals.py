"""Requests to stop while a training runs: Ctrl-C and SIGTERM.

The first asks for a stop after the step in hand, the second ends the program at once, whatever it is doing. Python hears a signal
between two of its own instructions: a program that hangs in a library hears none. So a thread counts them too, and ends a
program that does not.
"""

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from vitrail.interrupts import CODE, State, tell

NUMBERS = (signal.SIGINT, signal.SIGTERM)
GRACE = 2.0  # seconds in which the program may leave in good order
OVER = 0  # what the thread is told when there is nothing to watch any more; no signal has this number


@contextlib.contextmanager
def listening(sentence: str) -> Iterator[dict[str, float]]:
    """`asked["stop"]` is 1 after the first request; the second raises KeyboardInterrupt. `sentence` is said if that is not heard.

    The command ends with 130 after any of them.
    """
    asked = {"stop": 0.0}
    before: dict[int, Any] = {}

    def hear(number: int, frame: Any) -> None:
        if asked["stop"]:
            State.heard = True  # for whoever finds what a library has made of it
            raise KeyboardInterrupt
        asked["stop"] = 1.0

    if threading.current_thread() is not threading.main_thread():
        yield asked  # whoever runs this answers for signals
        return
    try:
        with watched(sentence):
            for number in NUMBERS:
                before[number] = signal.signal(number, hear)
            yield asked
    finally:
        for heard, handler in before.items():
            signal.signal(heard, handler)


@contextlib.contextmanager
def watched(sentence: str) -> Iterator[None]:
    """A thread that is told of every signal as it comes, by the system itself."""
    heard, told = os.pipe()
    os.set_blocking(told, False)
    thread = threading.Thread(target=watch, args=(heard, sentence), daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(told, bytes([OVER]))  # closing it would not be noticed: loading processes have it, too
        thread.join()
        os.close(told)
        os.close(heard)


def watch(heard: int, sentence: str) -> None:
    """Ends the program `GRACE` seconds after the second request, or at the third."""
    count = 0
    while count < 3:
        if count == 2 and not select.select([heard], [], [], GRACE)[0]:
            break
        found = os.read(heard, 64)
        if OVER in found:
            return
        count += sum(found.count(number) for number in NUMBERS)
    if sys.stderr.isatty():
        os.write(2, b"\x1b[?25h\n")  # the cursor, which a display may have hidden
    tell(sentence)
    os._exit(CODE)
