"""Ctrl-C during a command: one message and exit code 130, never a traceback.

Code that can report what was saved raises KeyboardInterrupt with that message; otherwise the message is "Stopped.".
"""

import atexit
import contextlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

EXIT_CODE = 130
RESEND_SECONDS = 0.05  # after which an interrupt that could not be raised is sent again


class CommandInterrupted(Exception):
    """Carries an interrupt through typer, which would exit without a message on KeyboardInterrupt."""


class State:
    """The command of this process."""

    interrupted = False
    needs_cleanup = False  # an interrupt must be raised, so that unfinished files are removed
    exiting = False  # the interrupt is reported; further ones are ignored
    finished = False


def install_handler() -> None:
    """Handle Ctrl-C here, unless another handler is set: shells ignore SIGINT in background jobs."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, handle_interrupt)


def remove_handler() -> None:
    """Restore Python's handler; ignore SIGINT if exiting, since a second one would end the program with a traceback."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is handle_interrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN if State.exiting else signal.default_int_handler)


def ignore_at_exit() -> None:
    """Ignore SIGINT during interpreter shutdown, where Python restores the system's handler, which kills the process."""
    if State.finished and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def start_command() -> None:
    """Reset the state and install the handlers."""
    State.interrupted = State.needs_cleanup = State.exiting = State.finished = False
    if sys.unraisablehook is not resend_unraisable:
        resend_unraisable.original = sys.unraisablehook
        sys.unraisablehook = resend_unraisable
    install_handler()


def require_cleanup() -> None:
    """Raise interrupts from here on, even during imports: files are being written."""
    State.needs_cleanup = True


def report_interrupt(message: str) -> int:
    """Write the last message of an interrupted command, ignore further interrupts and return the exit code."""
    State.exiting = True
    write_message(message)
    return EXIT_CODE


def handle_interrupt(number: int, frame: FrameType | None) -> None:
    if State.exiting:
        return
    State.interrupted = True
    if not State.needs_cleanup and is_importing(frame):
        # C extensions turn an interrupt during import into arbitrary errors; nothing has been written yet.
        write_message("Stopped.")
        exit_now(EXIT_CODE)
    raise KeyboardInterrupt


def is_importing(frame: FrameType | None) -> bool:
    """Whether the frame belongs to the import of a module."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


class ResendUnraisable:
    """Hook that sends an interrupt again if it came where nothing can be raised, for example in a destructor."""

    original: Any = sys.__unraisablehook__

    def __call__(self, unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            self.original(unraisable)
            return
        timer = threading.Timer(RESEND_SECONDS, send_interrupt)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:  # no new threads during interpreter shutdown; the command has ended
            exit_now(EXIT_CODE)


def send_interrupt() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)  # also ends a blocking system call


resend_unraisable = ResendUnraisable()


def write_message(message: str) -> None:
    """Write a line on standard error, in the first process of each machine only."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with contextlib.suppress(OSError):
            os.write(2, f"{message}\n".encode("utf-8", "replace"))


def exit_now(code: int) -> None:
    """Exit without cleanup."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


atexit.register(ignore_at_exit)
install_handler()  # while the commands are imported; `vitrail.cli.main` removes it afterwards
