"""Ctrl-C at every moment of a command: one sentence on what was kept, exit code 130, no traceback, nothing half done."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.teachers.predictions import network
from tests.training.small import EASY, SHORT
from vitrail import interrupts
from vitrail.cli import annotate as annotating_command
from vitrail.runs import finish, prepare, train
from vitrail.teachers import annotation, label_store_writer
from vitrail.training import trainer
from vitrail.training.trainer import Trainer

ROOT = Path(__file__).parents[1]
KICK = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"


def program(text, *words, limit=60):
    """What Python says to a program, and how it ends; hearing Ctrl-C, which a shell's background jobs do not."""
    start = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    return subprocess.run(
        [sys.executable, "-c", start + text, *words], cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False
    )


def test_while_the_commands_are_loaded():
    done = program(f"""
import sys
class Finder:
    def find_spec(self, name, *_):
        if name == "rich.table":
            {KICK}
sys.meta_path.insert(0, Finder())
from vitrail.cli.main import main
main()
""")
    assert (done.returncode, done.stderr, done.stdout) == (130, "Stopped.\n", "")


@pytest.mark.parametrize("inside", [KICK, f"try:\n    {KICK}\nexcept BaseException:\n    raise ImportError('half done')"])
def test_while_a_command_loads_its_libraries(inside, tmp_path):
    (tmp_path / "slow_library.py").write_text(inside)
    done = program(f"""
import sys
from vitrail.cli import main as cli
sys.path.insert(0, {str(tmp_path)!r})
@cli.app.command()
def slow():
    import slow_library
sys.argv = ["vitrail", "slow"]
cli.main()
""")
    assert (done.returncode, done.stderr) == (130, "Stopped.\n")


def test_an_interrupt_that_got_lost_is_sent_again():
    """In a destructor nothing can be raised."""
    done = program(f"""
import sys, time
from vitrail.cli import main as cli
class Careless:
    def __del__(self):
        {KICK}
@cli.app.command()
def work():
    Careless()
    time.sleep(30)
sys.argv = ["vitrail", "work"]
cli.main()
""")
    assert (done.returncode, done.stderr) == (130, "Stopped.\n")


def test_what_a_library_makes_of_an_interrupt():
    text = f"""
import sys, time
from vitrail.cli import main as cli
@cli.app.command()
def wrap(heard: bool = False):
    try:
        if heard:
            {KICK}
            time.sleep(30)
    except KeyboardInterrupt:
        pass
    raise RuntimeError("something in C failed")
sys.argv = ["vitrail", *sys.argv[1:]]
cli.main()
"""
    done = program(text, "wrap", "--heard")
    assert (done.returncode, done.stderr) == (130, "Stopped.\n")
    assert "something in C failed" in program(text, "wrap").stderr  # which is one, if nobody interrupted it


def test_at_the_end_of_the_program():
    done = program(f"""
import atexit, sys, time
from vitrail.cli import main as cli
def late():
    {KICK}
    time.sleep(30)
atexit.register(late)
sys.argv = ["vitrail", "--version"]
cli.main()
""")
    assert done.returncode in (0, 130)
    assert (done.stderr, bool(done.stdout)) == ("", True)  # all had been said


def test_while_processes_are_started():
    """One that is not known yet would not be ended, and waited for."""
    done = program(f"""
import multiprocessing
from vitrail.data.workers import Workers
original = multiprocessing.Process.start
def start(self):
    original(self)
    {KICK}
multiprocessing.Process.start = start
try:
    list(Workers(abs, 2).run([1, 2]))
except KeyboardInterrupt:
    print("interrupted", flush=True)
""")
    assert (done.returncode, done.stdout) == (0, "interrupted\n")


def test_a_background_job_stays_deaf():
    done = program(f"signal.signal(signal.SIGINT, signal.SIG_IGN)\nfrom vitrail import cli\n{KICK}\nprint('on')")
    assert (done.returncode, done.stdout) == (0, "on\n")


def test_importing_the_commands_changes_nothing():
    done = program("from vitrail import cli\nprint(signal.getsignal(signal.SIGINT) is signal.default_int_handler)")
    assert done.stdout == "True\n"


def interrupt_before(monkeypatch, owner, name, time=1):
    """Ctrl-C as a function is called for the `time`-th time."""
    original, calls = getattr(owner, name), []

    def interrupted(*words, **named):
        calls.append(name)
        if len(calls) == time:
            os.kill(os.getpid(), signal.SIGINT)
        return original(*words, **named)

    monkeypatch.setattr(owner, name, interrupted)


NOTHING = "Stopped before the first step; nothing was kept."
GOES_ON = "Stopped at step {} of 6; `vitrail resume {{}}` goes on."
REPORT = "Stopped after the last step; `vitrail resume {}` writes the report."
MOMENTS = {
    "recipe": (train, "resolve", 1, NOTHING),
    "data": (prepare, "open_splits", 1, NOTHING),
    "model": (train, "build", 1, NOTHING),
    "measuring": (train, "make_plan", 1, NOTHING),
    "rehearsing": (train, "rehearse", 1, NOTHING),
    "decoding": (train, "Feed", 1, NOTHING),
    "validation images": (train, "Feed", 2, NOTHING),
    "optimizer": (trainer, "make_optimizer", 1, NOTHING),
    "display": (train, "Display", 1, NOTHING),
    "first batch": (Trainer, "prepare", 1, GOES_ON.format(1)),
    "a step": (Trainer, "learn", 3, GOES_ON.format(3)),
    "validating": (Trainer, "evaluate", 1, GOES_ON.format(3)),
    "saving": (Trainer, "save", 1, GOES_ON.format(4)),
    "the last step": (Trainer, "learn", 6, REPORT),
    "the last validation": (Trainer, "evaluate", 2, REPORT),
    "the last weights": (train, "gather", 1, "Stopped at once; `vitrail resume {}` goes on from step 6."),
    "closing": (train, "close_run", 1, REPORT),
    "the report": (finish, "write_report", 1, REPORT),
}
WORDS = {**SHORT, "schedule.length": "6 steps", "validation.every": "3 steps"}


@pytest.fixture
def hearing():
    """Ctrl-C, which the background jobs of a shell do not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def train(hearing, typed, tmp_path, monkeypatch):
    """Types a training of six steps into the folder run."""
    for each, what, value in EASY:
        monkeypatch.setattr(each, what, value)
    changes = [part for key, value in WORDS.items() for part in ("--set", f"{key}={value}")]
    words = ["train", "digits", "--recipe", "laptop", "--out", tmp_path / "run", *changes, "--device", "cpu", "--workers", 0]
    return lambda save_steps=0: typed(*words, "--save-steps", save_steps)


def fails_of(count, error):
    """A library that is interrupted so often and makes something else of it."""

    def library(*_):
        try:
            for _ in range(count):
                os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            raise error from None

    return library


@pytest.mark.parametrize("moment", MOMENTS)
def test_every_moment_of_a_training(moment, train, typed, tmp_path, monkeypatch):
    owner, name, time, sentence = MOMENTS[moment]
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        interrupt_before(patch, owner, name, time)
        done = train(3 if moment == "saving" else 0)
    assert done.returncode == 130, done.stderr
    assert done.stderr.splitlines()[-1] == sentence.format(folder)
    assert "Traceback" not in done.stderr
    assert folder.exists() == (sentence != NOTHING)
    if folder.exists():
        again = typed("resume", folder, "--device", "cpu", "--workers", 0)
        assert again.returncode == 0, again.stderr
        assert "best validation accuracy" in again.stderr


def test_a_library_that_fails_of_it_at_the_end_of_a_training(train, tmp_path, monkeypatch):
    monkeypatch.setattr(finish, "write_report", fails_of(1, ImportError("half loaded")))
    done = train()
    assert (done.returncode, done.stderr.splitlines()[-1]) == (130, REPORT.format(tmp_path / "run"))


def test_a_library_that_fails_of_the_second_while_a_training_runs(train, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "evaluate", fails_of(2, RuntimeError("something in C failed")))
    done = train(save_steps=2)
    assert done.returncode == 130, done.stderr
    assert done.stderr.splitlines()[-1] == f"Stopped at once; `vitrail resume {tmp_path / 'run'}` goes on from step 2."
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    path = tmp_path_factory.mktemp("teacher") / "net.pth"
    torch.save(network(10).state_dict(), path)
    return path


KEPT = "Stopped; 500 of 1,437 images are kept in {}, and the same command goes on from there."
ANNOTATING = {
    "data": (annotating_command, "open_data", 1, "Stopped."),
    "the teacher": (annotating_command, "open_one", 1, "Stopped before the first shard was written: nothing was kept."),
    "looking up": (annotation, "shelve", 1, "Stopped before the first shard was written: nothing was kept."),
    "first batch": (annotation.Annotator, "ask", 1, "Stopped before the first shard was written: nothing was kept."),
    "second shard": (annotation.Annotator, "ask", 3, KEPT),
}


@pytest.mark.parametrize("moment", ANNOTATING)
def test_every_moment_of_annotating(moment, hearing, teacher, typed, tmp_path, monkeypatch):
    owner, name, time, sentence = ANNOTATING[moment]
    whole = label_store_writer.write_store
    monkeypatch.setattr(annotation, "write_store", lambda *words: whole(*words[:-1], 500))
    out = tmp_path / "store"
    words = ["annotate", teacher, "digits", "--out", out, "--size", 32, "--device", "cpu", "--workers", 0, "--batch", 250]
    with monkeypatch.context() as patch:
        interrupt_before(patch, owner, name, time)
        done = typed(*words)
    assert (done.returncode, done.stderr) == (130, sentence.format(out) + "\n")
    assert out.exists() == (sentence == KEPT)
    again = typed(*words)
    assert again.returncode == 0, again.stderr
    assert ("from an earlier run" in again.stdout) == (sentence == KEPT)


def test_a_sentence_is_said_once_where_torchrun_has_started_several(monkeypatch, capfd):
    monkeypatch.setenv("LOCAL_RANK", "1")
    interrupts.tell("Stopped.")
    monkeypatch.setenv("LOCAL_RANK", "0")
    interrupts.tell("Stopped.")
    assert capfd.readouterr().err == "Stopped.\n"


def test_again_while_leaving():
    """As `timeout` does, which hands on what its whole group has heard already."""
    done = program(f"""
from vitrail.cli import main as cli
from vitrail import interrupts
tell = interrupts.tell
def twice(sentence):
    tell(sentence)
    {KICK}
interrupts.tell = twice
def interrupted():
    {KICK}
cli.run = interrupted
import atexit
def late():
    {KICK}
atexit.register(late)
cli.main()
""")
    assert (done.returncode, done.stderr) == (130, "Stopped.\n")


LATE = """
class Late:
    def __init__(self, kick=os.kill, process=os.getpid(), number=signal.SIGINT):
        self.words = kick, process, number
    def __del__(self):  # when nothing else is left of the program
        self.words[0](*self.words[1:])
late = Late()
"""


@pytest.mark.parametrize("code", [0, 130])
def test_while_python_takes_itself_apart(code):
    """A training that was stopped leaves with 130 by itself; what comes then has nothing left to stop."""
    done = program(f"""
import os, sys
from vitrail.cli import main as cli
@cli.app.command()
def work():
    print("said", flush=True)
    sys.exit({code})
{LATE}
sys.argv = ["vitrail", "work"]
cli.main()
""")
    assert (done.returncode, done.stdout, done.stderr) == (code, "said\n", "")


def test_again_when_a_training_has_stopped():
    """Between its last word and the end of the program."""
    done = program(f"""
import sys
from vitrail.cli import main as cli
def stopped():
    return 130
cli.run = stopped
before = cli.interrupts.disarm
def disarmed():
    before()
    {KICK}
cli.interrupts.disarm = disarmed
cli.main()
""")
    assert (done.returncode, done.stderr) == (130, "")
