"""The second request to stop ends a program, whatever it is doing: computing, waiting in a library, or hanging in one."""

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
from vitrail.training.signals import listening

ROOT = Path(__file__).parents[2]
# A lock that is taken twice: the system puts the thread back to it after every signal.
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
HEARD = """
while not asked["stop"]:
    pass
"""  # and then hangs
PROGRAM = """
import ctypes, signal, sys
from vitrail.training.signals import listening
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    with listening("Stopped at once."):
        {}
except KeyboardInterrupt:
    print("in good order", file=sys.stderr)
    sys.exit(130)
"""


def started(text):
    body = "\n        ".join(text.strip().splitlines())
    program = PROGRAM.format(body).replace('listening("Stopped at once."):', 'listening("Stopped at once.") as asked:')
    child = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "here\n"
    return child


def hanging(text):
    """Started, and seen waiting for its lock."""
    child, seen = started(text), 0
    while seen < 20:
        state = Path(f"/proc/{child.pid}/stat").read_text().rsplit(") ", 1)[1][0]
        seen = seen + 1 if state == "S" else 0
    return child


def asked_twice(child, first, second):
    """How it ends and what it says; after the first request it must be there still."""
    child.send_signal(first)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.2)
    child.send_signal(second)
    said = child.communicate(timeout=30)[1]
    return child.returncode, said


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_in_a_loop(second):
    assert asked_twice(started(BUSY), signal.SIGTERM, second) == (130, "in good order\n")


def test_hanging_in_a_library():
    assert asked_twice(hanging(HANG), signal.SIGTERM, signal.SIGINT) == (130, "Stopped at once.\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_hanging_in_a_library_the_same_request_twice(number):
    assert asked_twice(hanging(HANG), number, number) == (130, "Stopped at once.\n")


def test_hanging_after_the_first_was_heard():
    """As a process does whose partner has died meanwhile."""
    text = HANG.replace('print("here", flush=True)', 'print("here", flush=True)\n' + HEARD.strip())
    assert asked_twice(started(text), signal.SIGTERM, signal.SIGTERM) == (130, "Stopped at once.\n")


def test_afterwards_all_is_as_before():
    handlers = [signal.getsignal(number) for number in signals.NUMBERS]
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        with listening("") as asked:
            assert asked["stop"] == 0
            os.kill(os.getpid(), signal.SIGTERM)
            assert asked["stop"] == 1
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012
                os.kill(os.getpid(), signal.SIGINT)
                assert asked["stop"]
        assert [signal.getsignal(number) for number in signals.NUMBERS] == handlers
        assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, files)
        assert signal.set_wakeup_fd(-1) == -1


def test_another_thread_leaves_signals_alone():
    found = []

    def work():
        with listening("") as asked:
            found.append((dict(asked), signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=work)
    before = signal.getsignal(signal.SIGTERM)
    thread.start()
    thread.join()
    assert found == [({"stop": 0.0}, before)]


def test_who_was_interrupted_once_is_told_what_is_wrong_later(tmp_path, monkeypatch):
    """As in a notebook, in which one training was stopped by two requests."""
    monkeypatch.setattr(State, "heard", True)
    with pytest.raises(UserError, match="nothing here"):
        vitrail.train(tmp_path / "nothing here", out=tmp_path / "run")
