"""A training's state on disk: written to the side, flushed, renamed; the newest whole one is where it goes on.

A checkpoint is one safetensors file with a checksum over every byte that matters, so that a torn or rotten one is noticed
and the one before is taken. A sharded training writes a folder in torch's distributed format instead, with a closing file
that is written last.
"""

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vitrail.atomic_files import flush, reason, write_aside
from vitrail.checkpoints.model_io import write_safetensors
from vitrail.checkpoints.training_checkpoints import DAMAGE, HEADER, LAYOUT, State, checksum, problem, words_of
from vitrail.errors import UserError

NAME = re.compile(r"step-(\d{9})(\.safetensors|\.sharded)")
# What `write_aside` calls the files of a run while it writes them.
UNFINISHED = re.compile(r"\.(step-\d{9}|best|last|run|recipe|metrics|report|state|bundle)\.[a-z]+(\.\d+)?\.part")
LOCK = ".lock"


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's state under the names of the parameters it belongs to."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    found = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            found[f"{names[parameter]}/{key}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    return found


def restore_optimizer(model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    """The inverse; goes through the optimizer's own loading, which knows where each tensor belongs."""
    state: dict[int, dict[str, Tensor]] = {}
    order = {parameter: place for place, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    by_name = dict(model.named_parameters())
    for path, tensor in tensors.items():
        name, key = path.rsplit("/", 1)
        state.setdefault(order[by_name[name]], {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


class Checkpoints:
    """The files of one run. `keep` newest ones stay."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep

    def all(self) -> list[Path]:
        """From the oldest to the newest, whole or not."""
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.iterdir() if NAME.fullmatch(path.name))

    def save(self, step: int, groups: dict[str, dict[str, Tensor]], facts: dict[str, Any]) -> Path:
        """Write one and let the oldest go."""
        path = self.folder / f"step-{step:09d}.safetensors"
        write_checkpoint(path, step, groups, facts)
        self.tidy(step)
        return path

    def tidy(self, step: int) -> None:
        """Remove all but the newest; `step` is the newest whole one.

        Any after it are damaged ones, which the training has gone back from: they must not push good ones out.
        """
        found = self.all()
        good = [path for path in found if number_of(path) <= step]
        for path in {*found} - {*good[-max(self.keep, 1) :]}:
            remove(path)

    def newest(self, say: Callable[[str], None], read: Callable[[Path], State]) -> State | None:
        """Step, groups and facts of the newest whole checkpoint, None if there has never been one."""
        found = self.all()
        for path in reversed(found):
            try:
                return read(path)
            except DAMAGE as error:
                say(f"{path.name} cannot be used ({problem(error)}); going back to the one before.")
        if found:
            count = f"None of the {len(found)} checkpoints in {self.folder} is" if len(found) > 1 else f"{found[0]} is not"
            raise UserError(f"{count} whole, so there is nothing to go on from: start the training anew in another folder.")
        return None


def number_of(path: Path) -> int:
    found = NAME.fullmatch(path.name)
    assert found
    return int(found[1])


def remove(path: Path) -> None:
    """A file or a folder; one that is gone already, or that cannot be removed, is no reason to stop a training."""
    with contextlib.suppress(OSError):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextlib.contextmanager
def alone(folder: Path, wanted: bool = True) -> Iterator[None]:
    """Nobody else trains in this folder meanwhile; what an interrupted writing left behind is removed."""
    with contextlib.ExitStack() as stack:
        if wanted:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                lock(stack.enter_context((folder / LOCK).open("a")), folder)
            except OSError as error:
                raise UserError(f"{folder} cannot be written: {reason(error)}.") from None
            for place in (folder, folder / "checkpoints", *folder.glob("not-finite-*")):
                for path in place.glob(".*.part"):
                    if UNFINISHED.fullmatch(path.name):
                        remove(path)
        yield


def lock(file: IO[str], folder: Path) -> None:
    """The system lets go of the lock however this process ends."""
    try:
        import fcntl
    except ImportError:
        return  # a system without such locks
    try:
        # A lock of the process (lockf), not of the open file (flock): loading processes that outlive a killed training for a
        # moment must not hold it.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # systems differ in what they call it
        raise UserError(f"Another process is training in {folder}: wait for it, or stop it first.") from None
    except OSError:
        pass  # a network file system without locks


def write_checkpoint(path: Path, step: int, groups: dict[str, dict[str, Tensor]], facts: dict[str, Any]) -> None:
    """`groups` are named collections of tensors, `facts` anything that JSON holds."""
    tensors = {
        f"{group}:{name}": tensor.detach().cpu().contiguous()
        for group, members in groups.items()
        for name, tensor in members.items()
    }
    control = checksum(tensors, words_of(step, facts))
    header = json.dumps({"layout": LAYOUT, "step": step, "checksum": control, "facts": facts})
    write_aside(path, lambda side: write_safetensors(tensors, side, {HEADER: header}))
    for folder in (path.parent, path.parent.parent):  # the folder may be as new as the file
        flush(folder)
