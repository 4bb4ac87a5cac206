"""The second stop signal ends a program, whether it computes, waits or hangs in a library."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import vitrail
from vitrail.errors import UserError
from vitrail.interrupts import State
from vitrail.training import signals
from vitrail.training.signals import handle_stop_signals

ROOT = Path(__file__).parents[2]
# A lock that is acquired twice: the thread waits for it again after every signal.
HANG = """
library = ctypes.CDLL(None)
lock = ctypes.create_string_buffer(64)
library.pthread_mutex_lock(lock)
print("here", flush=True)
library.pthread_mutex_lock(lock)
"""
BUSY = """
print("here", flush=True)
while True:
    pass
"""
AFTER_FIRST = """
while not requested["stop"]:
    pass
"""  # and then hangs
PROGRAM = """
import ctypes, signal, sys
from vitrail.training.signals import handle_stop_signals
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    with handle_stop_signals("Stopped at once.") as requested:
        {}
except KeyboardInterrupt:
    print("in good order", file=sys.stderr)
    sys.exit(130)
"""


def started(text):
    body = "\n        ".join(text.strip().splitlines())
    program = PROGRAM.format(body)
    child = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "here\n"
    return child


def hanging(text):
    """A program that is started and waits for its lock."""
    child, seen = started(text), 0
    while seen < 20:
        state = Path(f"/proc/{child.pid}/stat").read_text().rsplit(") ", 1)[1][0]
        seen = seen + 1 if state == "S" else 0
    return child


def signal_twice(child, first, second):
    """Exit code and standard error; after the first signal the program must still run."""
    child.send_signal(first)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.2)
    child.send_signal(second)
    stderr = child.communicate(timeout=30)[1]
    return child.returncode, stderr


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_in_a_loop(second):
    assert signal_twice(started(BUSY), signal.SIGTERM, second) == (130, "in good order\n")


def test_hanging_in_a_library():
    assert signal_twice(hanging(HANG), signal.SIGTERM, signal.SIGINT) == (130, "Stopped at once.\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_hanging_in_a_library_the_same_signal_twice(number):
    assert signal_twice(hanging(HANG), number, number) == (130, "Stopped at once.\n")


def test_hanging_after_the_first_signal():
    """Like a process that waits for another one that has ended."""
    text = HANG.replace('print("here", flush=True)', 'print("here", flush=True)\n' + AFTER_FIRST.strip())
    assert signal_twice(started(text), signal.SIGTERM, signal.SIGTERM) == (130, "Stopped at once.\n")


def test_handlers_and_files_are_restored():
    handlers = [signal.getsignal(number) for number in signals.SIGNALS]
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        with handle_stop_signals("") as requested:
            assert requested["stop"] == 0
            os.kill(os.getpid(), signal.SIGTERM)
            assert requested["stop"] == 1
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012
                os.kill(os.getpid(), signal.SIGINT)
                assert requested["stop"]
        assert [signal.getsignal(number) for number in signals.SIGNALS] == handlers
        assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, files)
        assert signal.set_wakeup_fd(-1) == -1


def test_other_threads_do_not_handle_signals():
    found = []

    def work():
        with handle_stop_signals("") as requested:
            found.append((dict(requested), signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=work)
    before = signal.getsignal(signal.SIGTERM)
    thread.start()
    thread.join()
    assert found == [({"stop": 0.0}, before)]


def test_errors_after_an_interrupted_training_are_reported(tmp_path, monkeypatch):
    """As in a notebook, in which an earlier training was interrupted."""
    monkeypatch.setattr(State, "interrupted", True)
    with pytest.raises(UserError, match="nothing here"):
        vitrail.train(tmp_path / "nothing here", out=tmp_path / "run")
