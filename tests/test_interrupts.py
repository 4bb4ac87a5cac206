"""Ctrl-C at any time of a command: one message about what was saved, exit code 130, no traceback, no partial files."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.convnets import timm_state
from tests.teachers.predictions import network
from tests.training.small import FAST_PATCHES, SHORT
from vitrail import interrupts, teachers
from vitrail.cli import annotate as annotating_command
from vitrail.runs import finish, prepare, request, train
from vitrail.tasks.classification import Classification
from vitrail.teachers import annotation, label_store_writer
from vitrail.training import trainer
from vitrail.training.trainer import Trainer

ROOT = Path(__file__).parents[1]
KICK = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"


def run_program(text, *arguments, limit=60):
    """Run a Python program with the default SIGINT handler; shells ignore SIGINT in background jobs."""
    start = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    return subprocess.run(
        [sys.executable, "-c", start + text, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False
    )


def test_while_the_commands_are_imported():
    done = run_program(f"""
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
def test_while_a_command_imports_its_libraries(inside, tmp_path):
    (tmp_path / "slow_library.py").write_text(inside)
    done = run_program(f"""
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


def test_an_interrupt_in_a_destructor_is_sent_again():
    done = run_program(f"""
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


def test_a_library_that_converts_an_interrupt():
    text = f"""
import sys, time
from vitrail.cli import main as cli
@cli.app.command()
def wrap(interrupt: bool = False):
    try:
        if interrupt:
            {KICK}
            time.sleep(30)
    except KeyboardInterrupt:
        pass
    raise RuntimeError("something in C failed")
sys.argv = ["vitrail", *sys.argv[1:]]
cli.main()
"""
    done = run_program(text, "wrap", "--interrupt")
    assert (done.returncode, done.stderr) == (130, "Stopped.\n")
    assert "something in C failed" in run_program(text, "wrap").stderr  # not interrupted: a real error


def test_at_the_end_of_the_program():
    done = run_program(f"""
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
    assert (done.stderr, bool(done.stdout)) == ("", True)  # no further message


def test_while_processes_are_started():
    """A process that is not registered yet would not be terminated."""
    done = run_program(f"""
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


def test_a_background_job_ignores_sigint():
    done = run_program(f"signal.signal(signal.SIGINT, signal.SIG_IGN)\nfrom vitrail.cli import main\n{KICK}\nprint('on')")
    assert (done.returncode, done.stdout) == (0, "on\n")


def test_importing_the_commands_changes_nothing():
    done = run_program("from vitrail.cli import main\nprint(signal.getsignal(signal.SIGINT) is signal.default_int_handler)")
    assert done.stdout == "True\n"


def interrupt_before(monkeypatch, owner, name, call=1):
    """Send SIGINT when a function is called for the `call`-th time."""
    original, calls = getattr(owner, name), []

    def interrupted(*args, **kwargs):
        calls.append(name)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, interrupted)


NOTHING = "Stopped before the first step; nothing was kept."
CONTINUES = "Stopped at step {} of 6; `vitrail resume {{}}` continues."
REPORT = "Stopped after the last step; `vitrail resume {}` writes the report."
MOMENTS = {
    "recipe": (train, "resolve_recipe", 1, NOTHING),
    "data": (request, "open_splits", 1, NOTHING),
    "model": (prepare, "build_initial", 1, NOTHING),
    "memory": (prepare, "plan_memory", 1, NOTHING),
    "timing": (prepare, "measure_pace", 1, NOTHING),
    "decoding": (train, "ImageLoader", 1, NOTHING),
    "validation images": (train, "ImageLoader", 2, NOTHING),
    "optimizer": (trainer, "make_optimizer", 1, NOTHING),
    "display": (train, "Display", 1, NOTHING),
    "first batch": (Classification, "prepare_batch", 1, CONTINUES.format(1)),
    "a step": (Trainer, "forward_backward", 3, CONTINUES.format(3)),
    "validating": (Trainer, "evaluate", 1, CONTINUES.format(3)),
    "saving": (Trainer, "save", 1, CONTINUES.format(4)),
    "the last step": (Trainer, "forward_backward", 6, REPORT),
    "the last validation": (Trainer, "evaluate", 2, REPORT),
    "the last weights": (train, "gather_weights", 1, "Stopped at once; `vitrail resume {}` continues from step 6."),
    "finishing": (train, "finish_run", 1, REPORT),
    "the report": (finish, "write_report", 1, REPORT),
}
CHANGES = {**SHORT, "schedule.length": "6 steps", "validation.every": "3 steps"}


@pytest.fixture
def default_sigint():
    """Python's SIGINT handler; shells ignore SIGINT in background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def train(default_sigint, run_cli, tmp_path, monkeypatch):
    """Run `vitrail train` for six steps into the folder run."""
    for each, what, value in FAST_PATCHES:
        monkeypatch.setattr(each, what, value)
    changes = [part for key, value in CHANGES.items() for part in ("--set", f"{key}={value}")]
    args = ["train", "digits", "--recipe", "laptop", "--out", tmp_path / "run", *changes, "--device", "cpu", "--workers", 0]
    return lambda save_steps=0: run_cli(*args, "--save-steps", save_steps)


def convert_interrupts(count, error):
    """Return a function that is interrupted `count` times and raises another error."""

    def library(*_):
        try:
            for _ in range(count):
                os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            raise error from None

    return library


@pytest.mark.parametrize("moment", MOMENTS)
def test_every_moment_of_a_training(moment, train, run_cli, tmp_path, monkeypatch):
    owner, name, time, message = MOMENTS[moment]
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        interrupt_before(patch, owner, name, time)
        done = train(3 if moment == "saving" else 0)
    assert done.returncode == 130, done.stderr
    assert done.stderr.splitlines()[-1] == message.format(folder)
    assert "Traceback" not in done.stderr
    assert folder.exists() == (message != NOTHING)
    if folder.exists():
        again = run_cli("resume", folder, "--device", "cpu", "--workers", 0)
        assert again.returncode == 0, again.stderr
        assert "best validation top-1" in again.stderr


def test_a_library_that_converts_an_interrupt_at_the_end_of_a_training(train, tmp_path, monkeypatch):
    monkeypatch.setattr(finish, "write_report", convert_interrupts(1, ImportError("half loaded")))
    done = train()
    assert (done.returncode, done.stderr.splitlines()[-1]) == (130, REPORT.format(tmp_path / "run"))


def test_a_library_that_converts_the_second_interrupt_of_a_training(train, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "evaluate", convert_interrupts(2, RuntimeError("something in C failed")))
    done = train(save_steps=2)
    assert done.returncode == 130, done.stderr
    assert done.stderr.splitlines()[-1] == f"Stopped at once; `vitrail resume {tmp_path / 'run'}` continues from step 2."
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    path = tmp_path_factory.mktemp("teacher") / "net.pth"
    torch.save(timm_state(network(10)), path)
    return path


KEPT = "Stopped; 500 of 1,437 images are stored in {}: run the same command again to continue."
ANNOTATING = {
    "data": (annotating_command, "open_data", 1, "Stopped."),
    "the teacher": (teachers, "open_teacher", 1, "Stopped before the first shard was written: nothing is stored."),
    "looking up": (annotation, "find_unique_images", 1, "Stopped before the first shard was written: nothing is stored."),
    "first batch": (annotation.Annotator, "predict_batch", 1, "Stopped before the first shard was written: nothing is stored."),
    "second shard": (annotation.Annotator, "predict_batch", 3, KEPT),
}


@pytest.mark.parametrize("moment", ANNOTATING)
def test_every_moment_of_annotating(moment, default_sigint, teacher, run_cli, tmp_path, monkeypatch):
    owner, name, time, message = ANNOTATING[moment]
    original = label_store_writer.write_store
    monkeypatch.setattr(annotation, "write_store", lambda *args: original(*args[:-1], 500))
    out = tmp_path / "store"
    args = ["annotate", teacher, "digits", "--out", out, "--size", 32, "--device", "cpu", "--workers", 0, "--batch-size", 250]
    with monkeypatch.context() as patch:
        interrupt_before(patch, owner, name, time)
        done = run_cli(*args)
    assert (done.returncode, done.stderr) == (130, message.format(out) + "\n")
    assert out.exists() == (message == KEPT)
    again = run_cli(*args)
    assert again.returncode == 0, again.stderr
    assert ("from an earlier run" in again.stdout) == (message == KEPT)


def test_only_the_first_process_writes_a_message(monkeypatch, capfd):
    monkeypatch.setenv("LOCAL_RANK", "1")
    interrupts.write_message("Stopped.")
    monkeypatch.setenv("LOCAL_RANK", "0")
    interrupts.write_message("Stopped.")
    assert capfd.readouterr().err == "Stopped.\n"


def test_a_second_interrupt_while_exiting():
    """`timeout` sends SIGINT to a process group that has received it already."""
    done = run_program(f"""
from vitrail.cli import main as cli
from vitrail import interrupts, teachers
original = interrupts.write_message
def twice(message):
    original(message)
    {KICK}
interrupts.write_message = twice
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
        self.call = kick, process, number
    def __del__(self):  # at the end of the interpreter shutdown
        self.call[0](*self.call[1:])
late = Late()
"""


@pytest.mark.parametrize("code", [0, 130])
def test_during_interpreter_shutdown(code):
    """A training that was stopped exits with 130 itself; later interrupts are ignored."""
    done = run_program(f"""
import os, sys
from vitrail.cli import main as cli
@cli.app.command()
def work():
    print("done", flush=True)
    sys.exit({code})
{LATE}
sys.argv = ["vitrail", "work"]
cli.main()
""")
    assert (done.returncode, done.stdout, done.stderr) == (code, "done\n", "")


def test_a_second_interrupt_after_a_training_has_stopped():
    """Between its last message and the exit of the program."""
    done = run_program(f"""
import sys
from vitrail.cli import main as cli
def stopped():
    return 130
cli.run = stopped
original = cli.interrupts.remove_handler
def removed():
    original()
    {KICK}
cli.interrupts.remove_handler = removed
cli.main()
""")
    assert (done.returncode, done.stderr) == (130, "")
