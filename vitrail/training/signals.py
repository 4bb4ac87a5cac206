"""Requests to stop while a training runs: Ctrl-C and SIGTERM.

The first asks for a stop after the step in hand, the second ends the program at once, whatever it is doing. Python hears a signal
between two of its own instructions: a program that hangs in a library hears none. So a thread counts them too, and ends a
program that does not; and where even that thread cannot run, the system's own way to end it is back after the first.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from vitrail.stopping import CODE, tell

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
            raise KeyboardInterrupt
        asked["stop"] = 1.0
        signal.signal(number, hear)
        once(number)

    if threading.current_thread() is not threading.main_thread():
        yield asked  # whoever runs this answers for signals
        return
    try:
        with watched(sentence):
            for number in NUMBERS:
                before[number] = signal.signal(number, hear)
                once(number)
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


def once(number: int) -> None:
    """Let the system forget the handler as it calls it, so that the next such signal ends the program; where it is able to."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        library = ctypes.CDLL(None)
        install = library.sysv_signal  # glibc's
        for each in (library.signal, install):
            each.restype, each.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
        with held(number):
            handler = library.signal(number, 0)  # Python's own, which calls ours
            install(number, handler)


@contextlib.contextmanager
def held(number: int) -> Iterator[None]:
    """A signal that comes now waits."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
