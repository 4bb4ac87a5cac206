"""Stop a training on Ctrl-C or SIGTERM.

The first signal stops the training after the current step, the second ends the program at once. Python handles signals between
two bytecode instructions, so a program that hangs in a library never handles them. Therefore a thread also counts the signals,
through a wakeup file descriptor, and ends a program that does not react.
"""

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from vitrail.interrupts import EXIT_CODE, State, write_message

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE = 2.0  # seconds from the second signal in which the program can exit by itself
END = 0  # byte that ends the watching thread; no signal has this number


@contextlib.contextmanager
def handle_stop_signals(message: str) -> Iterator[dict[str, float]]:
    """Yield `requested`: `requested["stop"]` is 1 after the first signal; the second signal raises KeyboardInterrupt.

    If the program does not react to the second signal, `message` is printed and the exit code is 130. Outside the main thread
    signals are left to the caller.
    """
    requested = {"stop": 0.0}
    original_handlers: dict[int, Any] = {}

    def handler(number: int, frame: Any) -> None:
        if requested["stop"]:
            State.interrupted = True  # for callers, if a library replaces the exception
            raise KeyboardInterrupt
        requested["stop"] = 1.0

    if threading.current_thread() is not threading.main_thread():
        yield requested
        return
    try:
        with watch_signals(message):
            for each in SIGNALS:
                original_handlers[each] = signal.signal(each, handler)
            yield requested
    finally:
        for handled, original in original_handlers.items():
            signal.signal(handled, original)


@contextlib.contextmanager
def watch_signals(message: str) -> Iterator[None]:
    """Run `count_signals` in a thread; the C-level signal handler writes every signal number to its pipe."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    thread = threading.Thread(target=count_signals, args=(read_end, message), daemon=True)
    thread.start()
    original = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(original)
        os.write(write_end, bytes([END]))  # closing the pipe does not end the thread: data loader processes inherit it
        thread.join()
        os.close(write_end)
        os.close(read_end)


def count_signals(read_end: int, message: str) -> None:
    """End the program `GRACE` seconds after the second signal, or at the third."""
    count = 0
    while count < 3:
        if count == 2 and not select.select([read_end], [], [], GRACE)[0]:
            break
        received = os.read(read_end, 64)
        if END in received:
            return
        count += sum(received.count(number) for number in SIGNALS)
    if sys.stderr.isatty():
        os.write(2, b"\x1b[?25h\n")  # show the cursor, which the progress display hides
    write_message(message)
    os._exit(EXIT_CODE)
