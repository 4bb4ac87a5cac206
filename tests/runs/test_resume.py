"""A training that is killed, stopped or cut off at any moment and resumed is the one that nobody disturbed, to the last bit."""

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

import pytest
import torch

import vitrail
from tests.training.small import ADAMW, EASY, LAMB, OPTIONS, Death, begin, differences, in_child, leftovers, recipe
from vitrail.checkpoints.training_checkpoints import read_checkpoint
from vitrail.data import feed
from vitrail.data.loader import Plan
from vitrail.errors import UserError
from vitrail.runs import train
from vitrail.training import checkpointing
from vitrail.training.checkpointing import Checkpoints
from vitrail.training.trainer import Trainer

CONFIGURATIONS = {"adamw": (ADAMW, None), "lamb": (LAMB, 4)}
KILLED = -signal.SIGKILL
DANGEROUS = ["1 thirds of step", "2 thirds of step", "before rename to step", "before tidying", "half a line", "2 thirds of best"]
OTHERS, ANY = 3, 1


def live(folder, name, at=0, log=None, prepare=None):
    """One life of a training: begun, or resumed if it can be, and killed at an event."""

    def work():
        Death(at, log).watch()
        if prepare:
            prepare()
        if (folder / "run.json").exists():
            train.resume(folder, device="cpu")
        else:
            changes, micro_batch_size = CONFIGURATIONS[name]
            begin(folder, changes, micro_batch_size=micro_batch_size)

    return in_child(work, said(folder))


def said(folder):
    return folder.with_suffix(".txt")


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def undisturbed(request, tmp_path_factory):
    """Name and folder of a run from start to end, and the events of its life."""
    return request.param, *whole_life(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def adamw(tmp_path_factory):
    return whole_life("adamw", tmp_path_factory)


def whole_life(name, factory):
    folder = factory.mktemp("undisturbed") / "run"
    log = folder.with_suffix(".log")
    assert live(folder, name, log=log) == 0, said(folder).read_text()
    assert not leftovers(folder)
    return folder, log.read_text().splitlines()


def moments(events, seed):
    """Numbers of the events to die at: some that matter most, some of other kinds, some of any."""
    draw = random.Random(seed)
    others = sorted(set(events) - set(DANGEROUS))
    kinds = [*DANGEROUS, *draw.sample(others, OTHERS)]
    chosen = [draw.choice([number for number, event in enumerate(events, 1) if event == kind]) for kind in kinds]
    return chosen + [draw.randrange(1, len(events) + 1) for _ in range(ANY)]


def test_killed_at_any_moment(undisturbed, tmp_path):
    name, whole, events = undisturbed
    draw = random.Random(name)
    for number, moment in enumerate(moments(events, name)):
        folder = tmp_path / f"run{number}"
        assert live(folder, name, moment) == KILLED
        again = 0
        if number % 2:  # and killed once more on the way on, often before the first step
            again = draw.choice([draw.randrange(1, 8), draw.randrange(1, len(events))])
            assert live(folder, name, again) in (KILLED, 0)
        assert live(folder, name) == 0, said(folder).read_text()
        assert not differences(folder, whole), (moment, events[moment - 1], again)
        assert not leftovers(folder), (moment, events[moment - 1], again)
        shutil.rmtree(folder)


def test_killed_again_and_again(adamw, tmp_path):
    whole, _ = adamw
    folder, draw = tmp_path / "run", random.Random(7)
    lives = 0
    while (code := live(folder, "adamw", draw.randrange(20, 90))) == KILLED:
        lives += 1
        assert lives < 40, said(folder).read_text()
    assert code == 0, said(folder).read_text()
    assert lives > 2
    assert not differences(folder, whole)


def decode_each_time():
    feed.choose_store = lambda *_, **__: Plan("files", "decoded each time")
    feed.usual_workers = lambda: 2


def test_killed_with_loading_processes(adamw, tmp_path):
    """They outlive the killed one for a moment, and must not keep the next from starting."""
    whole, events = adamw
    folder = tmp_path / "run"
    moment = [number for number, event in enumerate(events, 1) if event == "before step"][9]
    assert live(folder, "adamw", moment, prepare=decode_each_time) == KILLED
    assert live(folder, "adamw", prepare=decode_each_time) == 0, said(folder).read_text()
    assert "decoded each time" in said(folder).read_text()
    assert not differences(folder, whole)


def arguments(folder):
    """What one types to have the AdamW training."""
    changes = [part for name, value in ADAMW.items() for part in ("--set", f"{name}={value}")]
    steps = ["--save-steps", str(OPTIONS.save_steps), "--log-steps", str(OPTIONS.log_steps)]
    return ["train", "digits", "--recipe", "laptop", "--out", str(folder), *changes, *steps, "--device", "cpu", "--workers", "0"]


def meet_at(step, place="_step"):
    """From now on, in this process: say that a step is computed, or is to be saved, and wait for an answer."""
    original = getattr(Trainer, place)

    def method(training, *arguments):
        if training.step == step:
            print("here", flush=True)
            sys.stdin.readline()
        return original(training, *arguments)

    setattr(Trainer, place, method)


def command(words):
    sys.argv = ["vitrail", *words]
    runpy.run_module("vitrail", run_name="__main__", alter_sys=True)


PROGRAM = """
import sys
import torch
from tests.runs.test_resume import command, meet_at
torch.set_num_threads(1)
meet_at(5)
command(sys.argv[1:])
"""


def wait_for(file):
    for line in file:
        if line.strip() == "here":
            return
    pytest.fail("The training ended too early.")


def test_an_interrupt_of_the_command_saves_and_can_be_resumed(adamw, tmp_path):
    whole, _ = adamw
    folder = tmp_path / "run"
    with (tmp_path / "errors").open("w+") as errors:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors, "text": True}
        child = subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments(folder)], **pipes)
        wait_for(child.stdout)
        child.send_signal(signal.SIGINT)
        child.communicate("go on\n")
        errors.seek(0)
        sentence = errors.read().splitlines()[-1]
    assert child.returncode == 130
    assert sentence == f"Stopped at step 6 of 22; `vitrail resume {folder}` goes on."
    assert Checkpoints(folder / "checkpoints").all()[-1].name == "step-000000006.safetensors"
    code = [sys.executable, "-m", "vitrail", "resume", str(folder), "--device", "cpu", "--workers", "0"]
    again = subprocess.run(code, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    assert again.returncode == 0, again.stderr
    assert "going on at step 6 of 22" in again.stderr
    assert not differences(folder, whole)
    assert (folder / "report.html").exists()


def talking(work, errors):
    """Fork; the child does the work. Gives its number, what it says and where one answers it."""
    told, heard = os.pipe(), os.pipe()
    child = os.fork()
    if child:
        os.close(told[0])
        os.close(heard[1])
        return child, os.fdopen(heard[0]), os.fdopen(told[1], "w")
    code = 1
    try:
        os.dup2(told[0], 0)
        os.dup2(heard[1], 1)
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        sys.stderr = errors.open("w", buffering=1)
        work()
        code = 0
    except SystemExit as error:
        code = error.code or 0
    finally:
        os._exit(code)


def converse(words, errors, *conversation, prepare=None):
    """Run the command in a child; at each meeting (step, method) send the signal, to its own children too. The exit code."""

    def work():
        for (step, place), _ in conversation:
            meet_at(step, place)
        if prepare:
            prepare()
        command(words)

    child, answers, questions = talking(work, errors)
    with answers, questions:
        for _, number in conversation:
            wait_for(answers)
            for each in [*children(child), child]:
                os.kill(each, number)
            questions.write("go on\n")
            questions.flush()
        answers.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def children(process):
    listing = Path(f"/proc/{process}/task/{process}/children")
    return [int(number) for number in listing.read_text().split()] if listing.exists() else []


def test_a_request_to_terminate_saves_too(adamw, tmp_path):
    whole, _ = adamw
    folder, output = tmp_path / "run", tmp_path / "errors"
    assert converse(arguments(folder), output, ((6, "_step"), signal.SIGTERM)) == 130
    assert output.read_text().splitlines()[-1] == f"Stopped at step 7 of 22; `vitrail resume {folder}` goes on."
    assert live(folder, "adamw") == 0
    assert not differences(folder, whole)


def test_a_request_to_every_process_of_a_job_finds_the_loading_processes_deaf(adamw, tmp_path):
    whole, _ = adamw
    folder, output = tmp_path / "run", tmp_path / "errors"
    words = [*arguments(folder)[:-1], "2"]
    assert converse(words, output, ((6, "_step"), signal.SIGTERM), prepare=decode_each_time) == 130
    assert output.read_text().splitlines()[-1] == f"Stopped at step 7 of 22; `vitrail resume {folder}` goes on."
    assert live(folder, "adamw") == 0
    assert not differences(folder, whole)


def test_an_interrupt_while_validating_is_heard_before_the_next_step(tmp_path):
    folder, output = tmp_path / "run", tmp_path / "errors"
    assert converse(arguments(folder), output, ((8, "evaluate"), signal.SIGINT)) == 130
    assert "Stopped at step 8 of 22" in output.read_text()


def test_a_second_interrupt_ends_at_once(adamw, tmp_path):
    """Here while the state is being saved: the one before stays."""
    whole, _ = adamw
    folder, output = tmp_path / "run", tmp_path / "errors"
    meetings = [((4, "_step"), signal.SIGINT), ((5, "save"), signal.SIGINT)]
    assert converse(arguments(folder), output, *meetings) == 130
    assert "Traceback" not in output.read_text()
    assert [path.name for path in Checkpoints(folder / "checkpoints").all()] == ["step-000000004.safetensors"]
    assert live(folder, "adamw") == 0
    assert not differences(folder, whole)


def test_one_folder_is_trained_in_by_one_process(adamw, tmp_path):
    """The second would write over the first one's files."""
    whole, _ = adamw
    folder = shutil.copytree(whole, tmp_path / "run")

    def work():
        meet_at(12, "save")
        train.resume(folder, device="cpu", workers=0)

    for path in Checkpoints(folder / "checkpoints").all():
        path.unlink()
    child, answers, questions = talking(work, tmp_path / "errors")
    with answers, questions:
        wait_for(answers)
        assert live(folder, "adamw") == 2, said(folder).read_text()
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert said(folder).read_text() == f"Another process is training in {folder}: wait for it, or stop it first.\n"
    assert live(folder, "adamw") == 0
    assert not differences(folder, whole)


def test_the_best_artifact_is_the_running_mean_and_needs_nothing_else(adamw):
    whole, _ = adamw
    model = vitrail.load(whole / "best.safetensors")
    assert model.class_names == [str(digit) for digit in range(10)]
    assert model.preprocessing.image_size == (8, 8)
    assert model.preprocessing.crop_ratio == 1.0
    assert json.loads(model.notes["recipe"]) == json.loads(json.dumps(recipe(ADAMW).to_dict()))
    measured = json.loads((whole / "run.json").read_text())["best"]
    assert json.loads(model.notes["metrics"]) == measured
    last, (_, groups, _) = vitrail.load(whole / "last.safetensors"), read_checkpoint(Checkpoints(whole / "checkpoints").all()[-1])
    for name, value in last.state_dict().items():
        assert torch.equal(value, groups["average"][name]), name
    assert not torch.equal(groups["average"]["head.weight"], groups["model"]["head.weight"])


def test_a_full_disk_tells_how_to_go_on(tmp_path, monkeypatch):
    for owner, name, value in EASY:
        monkeypatch.setattr(owner, name, value)
    begin(tmp_path / "whole", ADAMW)
    original, count = checkpointing.write_safetensors, itertools.count(1)

    def full(*words):
        if next(count) == 3:
            raise OSError(errno.ENOSPC, "full")
        original(*words)

    monkeypatch.setattr(checkpointing, "write_safetensors", full)
    place = tmp_path / "run"
    says = rf"step-000000012.safetensors could not be written, No space left .*: make room there, then `vitrail resume {place}` "
    with pytest.raises(UserError, match=says + "goes on from step 8"):
        begin(place, ADAMW)
    assert train.resume(place, device="cpu", workers=0).finished
    assert not differences(place, tmp_path / "whole")


def test_a_disk_that_is_full_from_the_start_leaves_a_run_to_begin_with(tmp_path, monkeypatch):
    for owner, name, value in EASY:
        monkeypatch.setattr(owner, name, value)
    with monkeypatch.context() as patch:
        patch.setattr(checkpointing, "write_safetensors", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(UserError, match=r"make room there, then `vitrail resume .*` starts at its first step"):
            begin(tmp_path / "run", ADAMW)
    assert train.resume(tmp_path / "run", device="cpu", workers=0).finished
