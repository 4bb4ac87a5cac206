"""Two test processes on two cores: one thread each, and one for every process that they start."""

import io
import os
import signal
import sys
from typing import NamedTuple

import pytest
import torch

from vitrail.cli import main

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # threads that wait by spinning take the cores of the other tests


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def typed(monkeypatch, capfdbinary):
    """What a command says and how it ends, in this process: starting one takes seconds. `given`: bytes on standard input."""

    def typed(*words, given=b""):
        monkeypatch.setattr(sys, "argv", ["vitrail", *map(str, words)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        before = signal.getsignal(signal.SIGINT)
        try:
            main.main()
            code = 0
        except SystemExit as exit:
            code = exit.code or 0
        finally:
            signal.signal(signal.SIGINT, before)  # a command that was stopped leaves deaf
        out, error = (said.decode(errors="surrogateescape") for said in capfdbinary.readouterr())  # file names may be no text
        return Done(code, out, error)

    return typed


@pytest.fixture
def refused(typed):
    """What a command that cannot be done says: exit code 2 and one sentence on standard error."""

    def refused(*words):
        result = typed(*words)
        assert result.returncode == 2, result
        assert result.stderr.count("\n") == 1, result.stderr
        return result.stderr.strip()

    return refused
