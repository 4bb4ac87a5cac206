"""Ctrl-C at any moment of a command: one sentence and the exit code 130, never a traceback.

Whoever has something to say of what was kept raises KeyboardInterrupt with that sentence; of others it is "Stopped.".
"""

import atexit
import contextlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

CODE = 130
AGAIN = 0.05  # seconds after which an interrupt that got lost is sent again


class Halted(Exception):
    """An interrupt on its way out of the command line's library, which would end the program without a word."""


class State:
    """Of this process: whether it was interrupted, whether there is anything to tidy up, whether all is said of an interrupt, and
    whether its command has ended."""

    heard = False
    working = False
    leaving = False
    over = False


def arm() -> None:
    """From now on Ctrl-C is answered here; not where somebody has said otherwise, as a shell says of its background jobs."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, hear)


def disarm() -> None:
    """Who is leaving stays deaf: that one was heard, and a second would end the program with a traceback or by the signal."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is hear:
        signal.signal(signal.SIGINT, signal.SIG_IGN if State.leaving else signal.default_int_handler)


def fall_silent() -> None:
    """The last thing before Python takes itself apart, in which it gives signals back to the system, to be ended by them."""
    if State.over and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def begin() -> None:
    """A command begins."""
    State.heard = State.working = State.leaving = State.over = False
    if sys.unraisablehook is not repeat:
        repeat.before = sys.unraisablehook
        sys.unraisablehook = repeat
    arm()


def work_begins() -> None:
    """There will be files from here on: an interrupt has to go the long way, past everybody who tidies up."""
    State.working = True


def say_last(sentence: str) -> int:
    """The last word of a command that was interrupted; further interrupts have nothing left to stop. Gives the exit code."""
    State.leaving = True
    tell(sentence)
    return CODE


def hear(number: int, frame: FrameType | None) -> None:
    if State.leaving:
        return
    State.heard = True
    if not State.working and is_loading(frame):
        # Modules in C make of an interrupt whatever they like, and nothing has been done yet.
        tell("Stopped.")
        leave(CODE)
    raise KeyboardInterrupt


def is_loading(frame: FrameType | None) -> bool:
    """Whether a module is being imported."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


class Repeat:
    """An interrupt that came where nothing can be raised (in a destructor, say) is not printed but sent again."""

    before: Any = sys.__unraisablehook__

    def __call__(self, trouble: Any) -> None:
        if not issubclass(trouble.exc_type, KeyboardInterrupt):
            self.before(trouble)
            return
        timer = threading.Timer(AGAIN, send)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:  # no threads any more: the program was ending anyway, and all is said
            leave(CODE)


def send() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)  # which wakes it, if it waits for something


repeat = Repeat()


def tell(sentence: str) -> None:
    """Once, where torchrun has started several."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with contextlib.suppress(OSError):
            os.write(2, f"{sentence}\n".encode("utf-8", "replace"))


def leave(code: int) -> None:
    """At once."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


atexit.register(fall_silent)
arm()  # while the commands are being loaded, at the end of which `vitrail.cli.main` disarms
