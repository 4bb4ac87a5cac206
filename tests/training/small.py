"""Trainings of about a second in processes of their own, which can be killed at any moment."""

import json
import os
import signal
import sys
import tempfile
import traceback
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from unittest.mock import patch

import safetensors.torch
import torch

from vitrail.checkpoints.training_checkpoints import read_checkpoint
from vitrail.errors import UserError
from vitrail.recipes import lookup
from vitrail.runs import finish, prepare, train
from vitrail.runs.step_timing import Pace
from vitrail.training import checkpointing, trainer
from vitrail.training.checkpointing import CheckpointManager
from vitrail.training.metrics import FILE, MetricsWriter
from vitrail.training.trainer import Options, Trainer

SHORT = {"augmentation.image_size": [8, 8], "architecture.patch_size": 4, "architecture.width": 16, "architecture.depth": 2}
SHORT |= {
    "precision": "fp32",
    "architecture.heads": 2,
    "batch_size": 16,
    "schedule.length": "22 steps",
    "validation.every": "8 steps",
}
# BatchNorm, dropout, drop path, Mixup, CutMix and an EMA that is evaluated.
ADAMW = SHORT | {"architecture.drop_path": 0.2, "architecture.dropout": 0.1, "mixing.mixup": 0.8, "mixing.cutmix": 1.0}
ADAMW |= {"ema.decay": 0.8, "ema.evaluate": True, "augmentation.random_erasing": 0.25, "optimizer.lr": 5e-3}
# Four micro-batches per step, binary loss, repeated augmentation, bfloat16.
LAMB = SHORT | {"model": "deit_tiny_patch16", "optimizer.kind": "lamb", "loss.kind": "binary", "loss.label_smoothing": 0}
LAMB |= {"precision": "bf16", "data.repeats": 3, "mixing.mixup": 0.8, "architecture.drop_path": 0.1, "optimizer.lr": 0.02}
OPTIONS = Options(save_steps=4, log_steps=3)
# Replacements for what takes longer than such a training and has tests of its own.
FAST_PATCHES = [(prepare, "measure_pace", lambda *_: Pace(0.01))]
FAST_PATCHES += [(finish, "write_report", lambda folder: None), (finish, "evaluate_best", lambda *_: {})]


def start(folder, changes, options=OPTIONS, micro_batch_size=None, source="digits"):
    hardware = {"device": "cpu", "micro_batch_size": micro_batch_size, "workers": 0}
    return train.train(source, "laptop", out=folder, changes=changes, options=options, **hardware)


def recipe(changes):
    return lookup("laptop").set(changes)


@cache
def warm_up():
    """Train two steps in this process, so that forked children need not repeat late imports and FLOP counts."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for owner, name, value in FAST_PATCHES:
            stack.enter_context(patch.object(owner, name, value))
        for number, changes in enumerate((ADAMW, LAMB)):
            start(folder / f"run{number}", changes | {"schedule.length": "2 steps"})


def in_child(work, output):
    """Fork, do the work with all output written to `output`, and return the exit code; -n if signal n killed it."""
    warm_up()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        for number in (1, 2):
            os.dup2(file, number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        for owner, name, value in FAST_PATCHES:
            setattr(owner, name, value)
        work()
        code = 0
    except UserError as error:
        print(error, file=sys.stderr)
        code = 2
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class Killer:
    """Counts the events of a training and kills its process at event number `at`; 0: never."""

    def __init__(self, at=0, log=None):
        self.at, self.count, self.log, self.process = at, 0, log, os.getpid()

    def __call__(self, event):
        if os.getpid() != self.process:
            return  # a data loader process
        self.count += 1
        if self.log:
            with self.log.open("a") as file:
                file.write(event + "\n")
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self):
        """Count from now on: steps, validations, every write, flush, rename and removal of a file, resuming."""
        self._around(Trainer, "train_step", lambda *_: "step")
        self._around(Trainer, "_validate", lambda *_: "validation")
        self._around(Trainer, "evaluate", lambda *_: "evaluation")
        self._around(CheckpointManager, "prune", lambda *_: "pruning")
        self._around(MetricsWriter, "sync", lambda *_: "flush of metrics.jsonl")
        self._around(MetricsWriter, "_rewind", lambda *_: "rewinding")
        self._around(os, "fsync", lambda *_: "flush")
        self._around(os, "replace", lambda side, target: f"rename to {kind(target)}")
        self._around(os, "unlink", lambda path, **_: f"removal of {kind(path)}")
        self._around(checkpointing, "restore_training", lambda *_: "loading")
        self._around(finish, "write_report", lambda *_: "report")
        self._around(trainer, "save_artifact", lambda *_: "artifact")
        self._partial_files()
        self._partial_lines()

    def _around(self, owner, name, label):
        original = getattr(owner, name)

        def wrapped(*arguments, **named):
            what = label(*arguments, **named)
            self(f"before {what}")
            result = original(*arguments, **named)
            self(f"after {what}")
            return result

        setattr(owner, name, wrapped)

    def _partial_files(self):
        original = safetensors.torch.save_file

        def save_file(tensors, path, metadata):
            original(tensors, path, metadata=metadata)
            content = Path(path).read_bytes()
            for part in (0, 1, 2):
                Path(path).write_bytes(content[: part * len(content) // 3])
                self(f"{part} thirds of {kind(path)}")
            Path(path).write_bytes(content)

        safetensors.torch.save_file = save_file

    def _partial_lines(self):
        original = MetricsWriter.write

        def write(metrics, *arguments):
            size = metrics.path.stat().st_size
            original(metrics, *arguments)
            content = metrics.path.read_bytes()
            os.truncate(metrics.path, size + (len(content) - size) // 2)
            self("half a line")
            os.truncate(metrics.path, size)
            with metrics.path.open("ab") as file:
                file.write(content[size:])
            self("a line")

        MetricsWriter.write = write


def kind(path):
    """step-000000012.safetensors and .step-000000012.safetensors.4711.part are both a step."""
    return Path(path).name.lstrip(".").split(".")[0].split("-")[0]


def lines(folder):
    """The lines of metrics.jsonl without the key "speed", which varies between runs."""
    entries = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    return [{name: value for name, value in entry.items() if name != "speed"} for entry in entries]


def differences(folder, other):
    """What differs between two finished runs, compared bit for bit."""
    found = [] if lines(folder) == lines(other) else ["metrics.jsonl"]
    for name in ("best.safetensors", "last.safetensors", "recipe.yaml"):
        found += [] if (folder / name).read_bytes() == (other / name).read_bytes() else [name]
    parts = [
        (CheckpointManager(each / "checkpoints").all(), json.loads((each / "run.json").read_text())) for each in (folder, other)
    ]
    (ours, our_run), (theirs, their_run) = parts
    if [path.name for path in ours] != [path.name for path in theirs]:
        return [*found, "the checkpoints' names"]
    for one, two in zip(ours, theirs, strict=True):
        found += [f"{one.name}: {what}" for what in state_differences(one, two)]
    found += [name for name in ("recipe", "best", "data", "micro_batches") if our_run[name] != their_run[name]]
    return found


def state_differences(path, other):
    (step, groups, known), (their_step, their_groups, their_known) = read_checkpoint(path), read_checkpoint(other)
    ours = {f"{group}:{name}": value for group, members in groups.items() for name, value in members.items()}
    theirs = {f"{group}:{name}": value for group, members in their_groups.items() for name, value in members.items()}
    found = sorted(ours.keys() ^ theirs.keys())
    found += [name for name in ours.keys() & theirs.keys() if not torch.equal(ours[name], theirs[name])]
    found += [name for name in known if name != "seconds" and known[name] != their_known[name]]
    return found + ([] if step == their_step else ["step"])


def leftovers(folder):
    return [path for path in folder.rglob(".*") if path.name != ".lock"]
