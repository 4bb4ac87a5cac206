"""A training that is killed or stopped at any moment and resumed equals an uninterrupted one, bit for bit."""

import errno
import itertools
import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

import vitrail
from tests.training.small import (
    ADAMW,
    FAST_PATCHES,
    LAMB,
    OPTIONS,
    SHORT,
    Killer,
    differences,
    in_child,
    leftovers,
    lines,
    recipe,
    start,
)
from vitrail.checkpoints.training_checkpoints import read_checkpoint
from vitrail.data import image_loader
from vitrail.data.image_cache import CachePlan
from vitrail.errors import UserError
from vitrail.runs import train
from vitrail.runs.display import Display
from vitrail.runs.finish import read_best
from vitrail.training import checkpointing
from vitrail.training.checkpointing import CheckpointManager
from vitrail.training.trainer import Options, Trainer

CONFIGURATIONS = {"adamw": (ADAMW, None), "lamb": (LAMB, 4)}
KILLED = -signal.SIGKILL
CRITICAL = ["1 thirds of step", "2 thirds of step", "before rename to step", "before pruning", "half a line", "2 thirds of best"]
OTHERS, ANY = 3, 1


def run_once(folder, name, at=0, log=None, prepare=None):
    """Start a training, or resume it if possible, and kill it at an event."""

    def work():
        Killer(at, log).watch()
        if prepare:
            prepare()
        if (folder / "run.json").exists():
            train.resume(folder, device="cpu")
        else:
            changes, micro_batch_size = CONFIGURATIONS[name]
            start(folder, changes, micro_batch_size=micro_batch_size)

    return in_child(work, output_of(folder))


def output_of(folder):
    return folder.with_suffix(".txt")


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def uninterrupted(request, tmp_path_factory):
    """Name, folder and events of an uninterrupted run."""
    return request.param, *run_to_end(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def adamw(tmp_path_factory):
    return run_to_end("adamw", tmp_path_factory)


def run_to_end(name, factory):
    folder = factory.mktemp("uninterrupted") / "run"
    log = folder.with_suffix(".log")
    assert run_once(folder, name, log=log) == 0, output_of(folder).read_text()
    assert not leftovers(folder)
    return folder, log.read_text().splitlines()


def moments(events, name):
    """Numbers of the events to be killed at: critical ones, some of other kinds, and any.

    All critical events are tried with AdamW; LAMB writes the same files, so two of them suffice.
    """
    draw = random.Random(name)
    critical = CRITICAL if name == "adamw" else draw.sample(CRITICAL, 2)
    kinds = [*critical, *draw.sample(sorted(set(events) - set(CRITICAL)), OTHERS if name == "adamw" else 1)]
    chosen = [draw.choice([number for number, event in enumerate(events, 1) if event == kind]) for kind in kinds]
    return chosen + [draw.randrange(1, len(events) + 1) for _ in range(ANY)]


def test_killed_at_any_moment(uninterrupted, tmp_path):
    name, expected, events = uninterrupted
    draw = random.Random(name)
    for number, moment in enumerate(moments(events, name)):
        folder = tmp_path / f"run{number}"
        assert run_once(folder, name, moment) == KILLED
        again = 0
        if number % 2:  # and killed again after resuming, often before the first step
            again = draw.choice([draw.randrange(1, 8), draw.randrange(1, len(events))])
            assert run_once(folder, name, again) in (KILLED, 0)
        assert run_once(folder, name) == 0, output_of(folder).read_text()
        assert not differences(folder, expected), (moment, events[moment - 1], again)
        assert not leftovers(folder), (moment, events[moment - 1], again)
        shutil.rmtree(folder)


def test_killed_again_and_again(adamw, tmp_path):
    expected, _ = adamw
    folder, draw = tmp_path / "run", random.Random(7)
    kills = 0
    while (code := run_once(folder, "adamw", draw.randrange(20, 90))) == KILLED:
        kills += 1
        assert kills < 40, output_of(folder).read_text()
    assert code == 0, output_of(folder).read_text()
    assert kills > 2
    assert not differences(folder, expected)


def decode_each_time():
    image_loader.plan_cache = lambda *_, **__: CachePlan("files", "decoded each time")
    image_loader.default_workers = lambda: 2


def test_killed_with_data_loader_processes(adamw, tmp_path):
    """They outlive the killed process for a moment, and must not prevent the next one from starting."""
    expected, events = adamw
    folder = tmp_path / "run"
    moment = [number for number, event in enumerate(events, 1) if event == "before step"][9]
    assert run_once(folder, "adamw", moment, prepare=decode_each_time) == KILLED
    assert run_once(folder, "adamw", prepare=decode_each_time) == 0, output_of(folder).read_text()
    assert "decoded each time" in output_of(folder).read_text()
    assert not differences(folder, expected)


def arguments(folder):
    """Command line arguments of the AdamW training."""
    changes = [part for name, value in ADAMW.items() for part in ("--set", f"{name}={value}")]
    steps = ["--save-steps", str(OPTIONS.save_steps), "--log-steps", str(OPTIONS.log_steps)]
    return ["train", "digits", "--recipe", "laptop", "--out", str(folder), *changes, *steps, "--device", "cpu", "--workers", "0"]


def pause_at(step, method_name="train_step"):
    """Print "here" when this method is called at a step, and wait for a line on standard input."""
    original = getattr(Trainer, method_name)

    def method(trainer, *arguments):
        if trainer.step == step:
            print("here", flush=True)
            sys.stdin.readline()
        return original(trainer, *arguments)

    setattr(Trainer, method_name, method)


def command(arguments):
    sys.argv = ["vitrail", *arguments]
    runpy.run_module("vitrail", run_name="__main__", alter_sys=True)


PROGRAM = """
import sys
import torch
from tests.runs.test_resume import command, pause_at
torch.set_num_threads(1)
pause_at(5)
command(sys.argv[1:])
"""


def wait_for(file):
    for line in file:
        if line.strip() == "here":
            return
    pytest.fail("The training ended too early.")


def test_an_interrupt_of_the_command_saves_and_can_be_resumed(adamw, tmp_path):
    expected, _ = adamw
    folder = tmp_path / "run"
    with (tmp_path / "errors").open("w+") as errors:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors, "text": True}
        child = subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments(folder)], **pipes)
        wait_for(child.stdout)
        child.send_signal(signal.SIGINT)
        child.communicate("go on\n")
        errors.seek(0)
        message = errors.read().splitlines()[-1]
    assert child.returncode == 130
    assert message == f"Stopped at step 6 of 22; `vitrail resume {folder}` continues."
    assert CheckpointManager(folder / "checkpoints").all()[-1].name == "step-000000006.safetensors"
    code = [sys.executable, "-m", "vitrail", "resume", str(folder), "--device", "cpu", "--workers", "0"]
    again = subprocess.run(code, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    assert again.returncode == 0, again.stderr
    assert "resuming at step 6 of 22" in again.stderr
    assert not differences(folder, expected)
    assert (folder / "report.html").exists()


def fork_with_pipes(work, errors):
    """Fork; the child does the work. Returns its process id, its standard output and its standard input."""
    stdin, stdout = os.pipe(), os.pipe()
    child = os.fork()
    if child:
        os.close(stdin[0])
        os.close(stdout[1])
        return child, os.fdopen(stdout[0]), os.fdopen(stdin[1], "w")
    code = 1
    try:
        os.dup2(stdin[0], 0)
        os.dup2(stdout[1], 1)
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        sys.stderr = errors.open("w", buffering=1)
        work()
        code = 0
    except SystemExit as error:
        code = error.code or 0
    finally:
        os._exit(code)


def run_with_signals(arguments, errors, *events, prepare=None):
    """Run the command in a child; at each (step, method) send the signal to it and its children. Returns the exit code."""

    def work():
        for (step, method_name), _ in events:
            pause_at(step, method_name)
        if prepare:
            prepare()
        command(arguments)

    child, stdout, stdin = fork_with_pipes(work, errors)
    with stdout, stdin:
        for _, number in events:
            wait_for(stdout)
            for each in [*children(child), child]:
                os.kill(each, number)
            stdin.write("go on\n")
            stdin.flush()
        stdout.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def children(process):
    listing = Path(f"/proc/{process}/task/{process}/children")
    return [int(number) for number in listing.read_text().split()] if listing.exists() else []


def test_sigterm_saves_too(adamw, tmp_path):
    expected, _ = adamw
    folder, output = tmp_path / "run", tmp_path / "errors"
    assert run_with_signals(arguments(folder), output, ((6, "train_step"), signal.SIGTERM)) == 130
    assert output.read_text().splitlines()[-1] == f"Stopped at step 7 of 22; `vitrail resume {folder}` continues."
    assert run_once(folder, "adamw") == 0
    assert not differences(folder, expected)


def test_data_loader_processes_ignore_sigterm(adamw, tmp_path):
    expected, _ = adamw
    folder, output = tmp_path / "run", tmp_path / "errors"
    command_line = [*arguments(folder)[:-1], "2"]
    assert run_with_signals(command_line, output, ((6, "train_step"), signal.SIGTERM), prepare=decode_each_time) == 130
    assert output.read_text().splitlines()[-1] == f"Stopped at step 7 of 22; `vitrail resume {folder}` continues."
    assert run_once(folder, "adamw") == 0
    assert not differences(folder, expected)


def test_an_interrupt_during_validation_stops_before_the_next_step(tmp_path):
    folder, output = tmp_path / "run", tmp_path / "errors"
    assert run_with_signals(arguments(folder), output, ((8, "evaluate"), signal.SIGINT)) == 130
    assert "Stopped at step 8 of 22" in output.read_text()


def test_a_second_interrupt_ends_at_once(adamw, tmp_path):
    """Here while a checkpoint is being saved: the one before is kept."""
    expected, _ = adamw
    folder, output = tmp_path / "run", tmp_path / "errors"
    events = [((4, "train_step"), signal.SIGINT), ((5, "save"), signal.SIGINT)]
    assert run_with_signals(arguments(folder), output, *events) == 130
    assert "Traceback" not in output.read_text()
    assert [path.name for path in CheckpointManager(folder / "checkpoints").all()] == ["step-000000004.safetensors"]
    assert run_once(folder, "adamw") == 0
    assert not differences(folder, expected)


def test_a_run_directory_is_locked(adamw, tmp_path):
    """A second process would overwrite the files of the first."""
    expected, _ = adamw
    folder = shutil.copytree(expected, tmp_path / "run")

    def work():
        pause_at(12, "save")
        train.resume(folder, device="cpu", workers=0)

    for path in CheckpointManager(folder / "checkpoints").all():
        path.unlink()
    child, stdout, stdin = fork_with_pipes(work, tmp_path / "errors")
    with stdout, stdin:
        wait_for(stdout)
        assert run_once(folder, "adamw") == 2, output_of(folder).read_text()
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert (
        output_of(folder).read_text()
        == f"Another process is training in {folder}: wait until it has finished, or stop it first.\n"
    )
    assert run_once(folder, "adamw") == 0
    assert not differences(folder, expected)


def test_the_best_artifact_contains_the_ema(adamw):
    expected, _ = adamw
    model = vitrail.load(expected / "best.safetensors")
    assert model.class_names == [str(digit) for digit in range(10)]
    assert model.preprocessing.image_size == (8, 8)
    assert model.preprocessing.crop_ratio == 1.0
    assert json.loads(model.notes["recipe"]) == json.loads(json.dumps(recipe(ADAMW).to_dict()))
    metrics = json.loads((expected / "run.json").read_text())["best"]
    assert json.loads(model.notes["metrics"]) == metrics
    last, (_, groups, _) = (
        vitrail.load(expected / "last.safetensors"),
        read_checkpoint(CheckpointManager(expected / "checkpoints").all()[-1]),
    )
    for name, value in last.state_dict().items():
        assert torch.equal(value, groups["ema"][name]), name
    assert not torch.equal(groups["ema"]["head.weight"], groups["model"]["head.weight"])


def test_a_full_disk_reports_how_to_resume(tmp_path, monkeypatch):
    for owner, name, value in FAST_PATCHES:
        monkeypatch.setattr(owner, name, value)
    start(tmp_path / "expected", ADAMW)
    original, count = checkpointing.write_safetensors, itertools.count(1)

    def full(*arguments):
        if next(count) == 3:
            raise OSError(errno.ENOSPC, "full")
        original(*arguments)

    monkeypatch.setattr(checkpointing, "write_safetensors", full)
    folder = tmp_path / "run"
    advice = f"free some space there, then `vitrail resume {folder}` continues from step 8"
    with pytest.raises(UserError, match=rf"step-000000012.safetensors could not be written, No space left .*: {advice}"):
        start(folder, ADAMW)
    assert train.resume(folder, device="cpu", workers=0).finished
    assert not differences(folder, tmp_path / "expected")


def test_a_disk_that_is_full_from_the_start(tmp_path, monkeypatch):
    for owner, name, value in FAST_PATCHES:
        monkeypatch.setattr(owner, name, value)
    with monkeypatch.context() as patch:
        patch.setattr(checkpointing, "write_safetensors", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(UserError, match=r"free some space there, then `vitrail resume .*` starts at the first step"):
            start(tmp_path / "run", ADAMW)
    assert train.resume(tmp_path / "run", device="cpu", workers=0).finished


def test_the_printed_best_is_on_disk_after_a_kill(tmp_path):
    folder, log_validation = tmp_path / "run", Display.log_validation

    def print_and_die(display, epoch, values):
        log_validation(display, epoch, values)
        if values["best"]:
            os.kill(os.getpid(), signal.SIGKILL)

    def work():
        Display.log_validation = print_and_die
        start(folder, SHORT, Options(save_seconds=1e9))  # no checkpoint before the last step

    output = tmp_path / "output.txt"
    assert in_child(work, output) == -signal.SIGKILL
    assert "best" in output.read_text()
    with safe_open(folder / "best.safetensors", "pt") as file:
        saved = json.loads(json.loads(file.metadata()["vitrail"])["notes"]["metrics"])
    (validation,) = (line for line in lines(folder) if line["kind"] == "validation")
    assert (saved["step"], saved["top1"]) == (validation["step"], validation["top1"])


def test_the_best_of_the_file_is_reported(adamw):
    """After a kill the file may be newer than the checkpoint that the run is resumed from."""
    folder, _ = adamw
    best = json.loads((folder / "run.json").read_text())["best"]
    older = SimpleNamespace(trainer=SimpleNamespace(folder=folder, best={"step": 1, "top1": 0.0}))
    assert read_best(older) == best
    missing = SimpleNamespace(trainer=SimpleNamespace(folder=folder / "none", best={"step": 1}))
    assert read_best(missing) == {"step": 1}


def test_the_verdict_is_printed_and_recorded(adamw):
    folder, output = adamw[0], output_of(adamw[0]).read_text()
    run = json.loads((folder / "run.json").read_text())
    verdict = run["verdict"]
    assert verdict["top1"] == run["best"]["top1"]
    assert (verdict["images"], verdict["chance"], verdict["validations"]) == (142, 0.1, 3)
    assert verdict["low"] < verdict["top1"] < verdict["high"]
    assert verdict["majority"] == run["baselines"]["majority"] == pytest.approx(0.1, abs=0.05)
    margin = 50 * (verdict["high"] - verdict["low"])
    assert f"best validation top-1 {100 * verdict['top1']:.2f} % ± {margin:.1f} (epoch" in output
    assert "from 142 images; chance 10.0 %, always the most frequent class" in output
    assert f"Only 142 images: the interval is ± {margin:.0f} points; differences below that are noise." in output
    assert "It is the best of 3 validations on the same images and therefore optimistic" in output
    assert output.splitlines()[-1] == f"report {folder / 'report.html'}; weights {folder / 'best.safetensors'}"
