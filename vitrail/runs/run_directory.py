"""The run directory: choosing it, and the content of run.json, written at the start and completed at the end."""

import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import vitrail
from vitrail.atomic_files import atomic_write_text, check_writable
from vitrail.data.datasets.lookup import is_built_in
from vitrail.data.source import Splits
from vitrail.errors import UserError
from vitrail.evaluation.probes.suite import hash_weights
from vitrail.models.flops import cost_of
from vitrail.recipes.schema import Recipe
from vitrail.runs.run_json import read_run_json
from vitrail.tasks.registry import find_task
from vitrail.training.checkpointing import LOCK
from vitrail.training.distributed import Devices
from vitrail.training.trainer import Trainer
from vitrail.version import __version__


def check_dependencies(recipe: Recipe, known: dict[str, str] | None, folder: Path) -> None:
    """Raise UserError if a teacher or a label store is not the one that the run was started with."""
    for path in known or {}:
        if not os.path.exists(path):
            raise UserError(f"{path}, which {folder} was trained with, is missing: restore it, or put a link there.")
    if known is not None and find_task(recipe.task).dependencies(recipe) != known:
        raise UserError(f"{', '.join(known)} is not what {folder} was trained with: restore the original.")


def describe_weights(path: str) -> dict[str, str]:
    """The file of pre-trained weights and its digest; empty without weights."""
    return {"path": path, "sha256": hash_weights(Path(path))} if path else {}


def check_weights(recipe: Recipe, known: dict[str, str] | None, folder: Path) -> None:
    """Raise UserError if the pre-trained weights are not those that the run was started with."""
    if known and describe_weights(recipe.init.weights) != known:
        raise UserError(f"{recipe.init.weights} is not what {folder} was started from: restore the original.")


def describe_run(source: str, splits: Splits, trainer: Trainer, unreadable: str) -> dict[str, Any]:
    """The content of run.json at the start of a run."""
    model, devices = trainer.model, trainer.devices
    price = cost_of(model)
    is_local = not is_built_in(source) and os.path.exists(os.path.expanduser(source))
    return {
        "version": __version__,
        "source": os.path.abspath(os.path.expanduser(source)) if is_local else source,
        "recipe": trainer.recipe.to_dict(),
        "options": dataclasses.asdict(trainer.options),
        "micro_batches": devices.micro_batches,
        "unreadable": unreadable,
        "metric": trainer.task.metric._asdict(),
        "model": {"name": model.name, "parameters": price.parameters, "macs": price.macs},
        "architecture": model.architecture.to_dict(),
        "data": {
            "name": splits.train.name,
            "train": len(splits.train),
            "validation": len(splits.validation),
            "classes": splits.train.classes,
            "fingerprint": fingerprint(splits),
        },
        "teachers": trainer.task.dependencies(trainer.recipe),
        "weights": describe_weights(trainer.recipe.init.weights),
        "machine": {
            "device": torch.cuda.get_device_name(devices.device) if devices.device.type == "cuda" else "CPU",
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "processes": devices.world_size,
            "system": platform.platform(),
        },
        "versions": {
            "vitrail": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
        "command": command_line(),
        "git": git_state(),
        "code": own_state(),
        "launch": os.environ.get("TORCHELASTIC_RUN_ID"),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def fingerprint(splits: Splits) -> str:
    """A hash of labels, class names, counts and the bytes of some images, to recognize the same data."""
    digest = hashlib.sha256()
    for part in (splits.train, splits.validation):
        digest.update(json.dumps([len(part), part.classes]).encode())
        if part.label is not None:
            digest.update(np.ascontiguousarray(part.label.values, dtype=np.int64).tobytes())
        for index in part.spread(32).tolist():
            with contextlib.suppress(OSError, ValueError):
                encoded = part.encoded(index)
                digest.update(encoded if isinstance(encoded, bytes) else np.ascontiguousarray(encoded).tobytes())
    return digest.hexdigest()[:16]


def command_line() -> str:
    """The command as typed; `python -m vitrail` is written as `vitrail`."""
    program = Path(sys.argv[0]).name
    return shlex.join(["vitrail" if program == "__main__.py" else program, *sys.argv[1:]])


def git_state(folder: Path | None = None) -> str | None:
    """Commit of a folder, and whether it has changes; by default the commit of the current folder. None if it is not under git.

    `git status` is not run in the current folder: the configuration of a downloaded repository can make it run commands.
    """

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], capture_output=True, text=True, timeout=5, check=True, cwd=folder)
        return done.stdout.strip()

    try:
        if folder is None:
            return git("rev-parse", "HEAD")
        git("ls-files", "--error-unmatch", "__init__.py")  # not a package installed inside another repository
        return git("rev-parse", "HEAD") + (" with changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def own_state(package: Path = Path(vitrail.__file__).parent) -> str:
    """The commit of Vitrail itself if it runs from a checkout, else its version."""
    return git_state(package) or __version__


def choose_folder(out: str | Path | None, source: str, recipe: str) -> tuple[Path, bool]:
    """The run directory, and whether torchrun has started the run there before and restarts its processes."""
    if out is None and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        raise UserError("torchrun with restarts needs a fixed run directory: give it with --out.")
    folder = Path(out).expanduser() if out is not None else next_folder(source, recipe)
    data = Path(source).expanduser()
    if data.is_dir() and Path(os.path.realpath(folder)).is_relative_to(data.resolve()):
        raise UserError(f"{folder} is inside the data, where it would become a class: give another run directory with --out.")
    restarts, launch = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), os.environ.get("TORCHELASTIC_RUN_ID", "none")
    try:
        if not (folder / "run.json").exists():
            if restarts == 0:  # an interrupted start may have left files
                check_empty(folder)
            return folder, False
    except OSError as error:
        raise UserError(f"{folder} cannot be a run directory: {error.strerror}.") from None
    # A changed number of machines restarts the processes without being counted; the launch then has an id.
    if restarts == 0 and (launch == "none" or read_run(folder).get("launch") != launch):
        raise UserError(f"{folder} already holds a run: `vitrail resume {folder}` continues it, --out starts another.")
    return folder, True


def check_empty(folder: Path) -> None:
    """Raise UserError, before anything is computed, if a folder cannot become a run directory."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: give a folder with --out.")
    check_writable(folder)
    left = next((path for path in (folder / "checkpoints", folder / "metrics.jsonl") if path.exists()), None)
    if left:
        raise UserError(f"{left} belongs to a run whose run.json is missing: give another folder with --out.")
    ours = ("recipe.yaml", LOCK)  # left by a start that was killed before run.json was written
    if folder.exists() and any(path.name not in ours and not path.name.endswith(".part") for path in folder.iterdir()):
        raise UserError(f"{folder} is not empty: give a new folder with --out.")


def missing_folders(folder: Path) -> list[Path]:
    """The folder and those of its parents that do not exist yet, innermost first."""
    return [each for each in (folder, *folder.absolute().parents) if not each.exists()]


def has_metrics(folder: Path) -> bool:
    metrics = folder / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


@contextlib.contextmanager
def removed_on_failure(folder: Path, created: list[Path] | None) -> Iterator[None]:
    """Remove a run that fails before its first metric; one with results keeps everything.

    `created` are the folders that were created for it, None in processes that do not clean up.
    """
    try:
        yield
    except BaseException:
        results = [folder / "checkpoints", folder / "best.safetensors", *folder.glob("not-finite-*")]
        if created is not None and not any(path.exists() for path in results) and not has_metrics(folder):
            for name in ("run.json", "recipe.yaml", "metrics.jsonl", LOCK):
                (folder / name).unlink(missing_ok=True)
            shutil.rmtree(folder / "tensorboard", ignore_errors=True)
            with contextlib.suppress(OSError):  # not empty: it holds other files
                for each in created:
                    each.rmdir()
        raise


def check_same_data(devices: Devices, run: dict[str, Any]) -> None:
    """Raise UserError if the machines have different data."""
    known = devices.broadcast(run["data"]["fingerprint"])
    with devices.sync_errors():
        if run["data"]["fingerprint"] != known:
            raise UserError(f"The machines have different images at {run['source']}.")


def next_folder(source: str, recipe: str) -> Path:
    """runs/<data>-<recipe>, numbered if it exists."""
    local = Path(source).expanduser()
    data = (local.resolve() if local.exists() else Path(source.rstrip("/"))).name.split(".")[0] or "data"
    stem = re.sub(r"[^\w.-]+", "-", f"{data}-{recipe}").lstrip(".-")
    for number in range(1, 10_000):
        folder = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        if not folder.exists():
            return folder
    raise UserError("runs/ has too many runs of this name; give --out.")


def read_run(folder: Path) -> dict[str, Any]:
    """The run.json of a run, with all that resuming needs."""
    run = read_run_json(folder)
    missing = [name for name in ("source", "recipe", "options", "micro_batches", "unreadable", "data") if name not in run]
    if missing:
        raise UserError(f"{folder / 'run.json'} cannot be read: it has no {missing[0]!r}.")
    return run


def write_json(path: Path, content: dict[str, Any]) -> None:
    atomic_write_text(path, json.dumps(content, indent=1))


def write_recipe(path: Path, recipe: Recipe) -> None:
    atomic_write_text(path, recipe.to_yaml())
