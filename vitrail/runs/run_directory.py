"""What run.json holds: everything that one needs to know about a run, written at its start and completed at its end."""

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
from vitrail.atomic_files import check_writable, write_aside
from vitrail.data.datasets.lookup import is_built_in
from vitrail.data.source import Splits
from vitrail.errors import UserError
from vitrail.models.flops import cost
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes import Recipe
from vitrail.runs.report import read_json
from vitrail.tasks.supervision import identities
from vitrail.training.checkpointing import LOCK
from vitrail.training.distributed import Devices
from vitrail.training.trainer import Options
from vitrail.version import __version__


def check_same_teachers(recipe: Recipe, known: dict[str, str] | None, folder: Path) -> None:
    """Complain if a teacher or a store is not what the run was started with."""
    for path in known or {}:
        if not os.path.exists(path):
            raise UserError(f"What {folder} learns from is not at {path} any more: put it, or a link to it, there.")
    if known is not None and identities(recipe) != known:
        raise UserError(f"What lies at {', '.join(known)} is not what {folder} has learnt from: put that back.")


def describe(
    source: str, splits: Splits, recipe: Recipe, model: VisionTransformer, devices: Devices, options: Options, bad: str
) -> dict[str, Any]:
    """What run.json holds from the start."""
    price = cost(model.architecture)
    is_local = not is_built_in(source) and os.path.exists(os.path.expanduser(source))
    return {
        "version": __version__,
        "source": os.path.abspath(os.path.expanduser(source)) if is_local else source,
        "recipe": recipe.to_dict(),
        "options": dataclasses.asdict(options),
        "micro_batches": devices.micro_batches,
        "unreadable": bad,
        "model": {"name": model.name, "parameters": price.parameters, "macs": price.macs},
        "architecture": model.architecture.to_dict(),
        "data": {
            "name": splits.train.name,
            "train": len(splits.train),
            "validation": len(splits.validation),
            "classes": splits.train.classes,
            "fingerprint": fingerprint(splits),
        },
        "machine": {
            "device": torch.cuda.get_device_name(devices.device) if devices.device.type == "cuda" else "CPU",
            "cores": os.cpu_count(),
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
    """A hash of labels, class names, counts and the bytes of some images: whether these are still the same data."""
    digest = hashlib.sha256()
    for part in (splits.train, splits.validation):
        digest.update(json.dumps([len(part), part.classes]).encode())
        if part.label is not None:
            digest.update(np.ascontiguousarray(part.label.values, dtype=np.int64).tobytes())
        for index in np.unique(np.linspace(0, len(part) - 1, 32).astype(np.int64)):
            with contextlib.suppress(OSError, ValueError):
                encoded = part.encoded(int(index))
                digest.update(encoded if isinstance(encoded, bytes) else np.ascontiguousarray(encoded).tobytes())
    return digest.hexdigest()[:16]


def command_line() -> str:
    """What was typed; `python -m vitrail` and the installed command are one and the same."""
    program = Path(sys.argv[0]).name
    return shlex.join(["vitrail" if program in ("__main__.py", "cli/main.py") else program, *sys.argv[1:]])


def git_state(folder: Path | None = None) -> str | None:
    """Commit and cleanliness of a folder, or of the one that one works in, if it is under git."""

    def ask(*words: str) -> str:
        done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=5, check=True, cwd=folder)
        return done.stdout.strip()

    try:
        if folder is not None:
            ask("ls-files", "--error-unmatch", "__init__.py")  # a package installed inside somebody's repository is not of it
        return ask("rev-parse", "HEAD") + (" with changes" if ask("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def own_state(package: Path = Path(vitrail.__file__).parent) -> str:
    """The commit of Vitrail itself where it runs from a checkout, else its version."""
    return git_state(package) or __version__


def choose_folder(out: str | Path | None, source: str, recipe: str) -> tuple[Path, bool]:
    """Where the run goes, and whether torchrun has begun it there already and starts its processes anew."""
    if out is None and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        raise UserError("After a restart the run must be found again: give its folder with --out.")
    folder = Path(out).expanduser() if out is not None else next_folder(source, recipe)
    data = Path(source).expanduser()
    if data.is_dir() and Path(os.path.realpath(folder)).is_relative_to(data.resolve()):
        raise UserError(
            f"{folder} lies inside the data, where it would become a class of its own: give another folder with --out."
        )
    restarts, launch = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), os.environ.get("TORCHELASTIC_RUN_ID", "none")
    try:
        if not (folder / "run.json").exists():
            if restarts == 0:  # a start that was cut off may have left something
                check_place(folder)
            return folder, False
    except OSError as error:
        raise UserError(f"{folder} cannot be the folder of a run: {error.strerror}.") from None
    # A changed number of machines restarts the processes too and is not counted; then the launch has a name.
    if restarts == 0 and (launch == "none" or read_run(folder).get("launch") != launch):
        raise UserError(f"{folder} holds a run already: `vitrail resume {folder}` goes on with it, --out starts another.")
    return folder, True


def check_place(folder: Path) -> None:
    """Complain about a folder that cannot become a run before anything is computed."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: give a folder with --out.")
    check_writable(folder)
    left = next((path for path in (folder / "checkpoints", folder / "metrics.jsonl") if path.exists()), None)
    if left:
        raise UserError(f"{left} belongs to a run whose run.json is gone: give another folder with --out.")
    ours = ("recipe.yaml", LOCK)  # what a start leaves that was killed before it had written run.json
    if folder.exists() and any(path.name not in ours and not path.name.endswith(".part") for path in folder.iterdir()):
        raise UserError(f"{folder} holds other things: give a new folder with --out.")


def missing_folders(folder: Path) -> list[Path]:
    """What has to be made for the folder to be there, from the inside out."""
    return [each for each in (folder, *folder.absolute().parents) if not each.exists()]


def has_numbers(folder: Path) -> bool:
    metrics = folder / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


@contextlib.contextmanager
def tidied(folder: Path, made: list[Path] | None) -> Iterator[None]:
    """A run that fails before its first number leaves nothing behind; one that has something to show keeps all of it.

    `made` are the folders that were made for it, None where somebody else tidies.
    """
    try:
        yield
    except BaseException:
        shown = [folder / "checkpoints", folder / "best.safetensors", *folder.glob("not-finite-*")]
        if made is not None and not any(path.exists() for path in shown) and not has_numbers(folder):
            for name in ("run.json", "recipe.yaml", "metrics.jsonl", LOCK):
                (folder / name).unlink(missing_ok=True)
            shutil.rmtree(folder / "tensorboard", ignore_errors=True)
            with contextlib.suppress(OSError):  # not empty: it holds what somebody else has put there
                for each in made:
                    each.rmdir()
        raise


def check_same_data(devices: Devices, facts: dict[str, Any]) -> None:
    known = devices.broadcast(facts["data"]["fingerprint"])
    with devices.sync_errors():
        if facts["data"]["fingerprint"] != known:
            raise UserError(f"Not all machines have the same images at {facts['source']}.")


def next_folder(source: str, recipe: str) -> Path:
    """runs/<data>-<recipe>, numbered if taken."""
    local = Path(source).expanduser()
    data = (local.resolve() if local.exists() else Path(source.rstrip("/"))).name.split(".")[0] or "data"
    stem = re.sub(r"[^\w.-]+", "-", f"{data}-{recipe}").lstrip(".-")
    for number in range(1, 10_000):
        folder = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        if not folder.exists():
            return folder
    raise UserError("The folder runs/ is full; give --out.")


def read_run(folder: Path) -> dict[str, Any]:
    """What is needed to go on with a run."""
    facts = read_json(folder)
    missing = [name for name in ("source", "recipe", "options", "micro_batches", "unreadable", "data") if name not in facts]
    if missing:
        raise UserError(f"{folder / 'run.json'} cannot be read: it has no {missing[0]!r}.")
    return facts


def write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=1)
    write_aside(path, lambda side: side.write_text(text))
