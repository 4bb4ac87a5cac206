"""What a result says about where it comes from, and which results may stand in one table."""

import os
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.evidence.claims import Claim
from vitrail.checkpoints.bundled import find_bundled
from vitrail.data.datasets.lookup import is_built_in
from vitrail.errors import UserError
from vitrail.tasks.supervision import digest
from vitrail.teachers.label_store import MANIFEST
from vitrail.teachers.sidecar import file_beside

FILES = {"teacher": "distillation.teacher", "labels": "token_labels.store", "weights": "init.weights"}  # by option
INSIDE = (MANIFEST, "best.safetensors", "model.safetensors", "pytorch_model.bin")  # of a folder, what tells it from others
CODE = ("vitrail", "benchmarks", ":(exclude)benchmarks/evidence/results")  # what decides how a training goes
ROOT = Path(__file__).parents[2]


def plain_name(path: str) -> str:
    """A path's last part: where things lie is of no use elsewhere. Names that are no paths stay what they are."""
    if "://" in path or path.startswith("timm:") or is_built_in(path):
        return path
    return os.path.basename(os.path.abspath(os.path.expanduser(path)))


def describe_file(given: str) -> dict[str, str | None]:
    """Name and SHA-256 of a file, of a folder's weights or of a store's list of shards, which has theirs.

    The SHA-256 is None for what is not on this disk, such as a network of timm; `beside` is that of what a person says about it.
    """
    parts = given.split("+") if not os.path.exists(os.path.expanduser(given)) else [given]  # weights may be base+delta
    found = [_digest(part) for part in parts]
    record = {"name": "+".join(map(plain_name, parts)), "sha256": "+".join(filter(None, found)) if all(found) else None}
    beside = file_beside(given)
    return record | ({"beside": digest(beside)} if os.path.isfile(beside) else {})


def _digest(given: str) -> str | None:
    path = find_bundled(given) or Path(given).expanduser()
    file = next(filter(os.path.isfile, (path, *(path / name for name in INSIDE))), None)
    return None if file is None else digest(file)


def commit(root: Path = ROOT) -> str:
    """Of the code; with a mark where it is not quite that commit's."""

    def ask(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return ask("rev-parse", "--short", "HEAD") + ("+changes" if ask("status", "--porcelain", "--", *CODE) else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def needs(claim: Claim, cell: str) -> list[str]:
    """Which of the options' files a cell is trained with."""
    own = claim.base | claim.cells.get(cell, {})
    return [option for option, leaf in FILES.items() if own.get(leaf) == f"{{{option}}}"]


def common(claim: Claim, run: dict[str, Any]) -> dict[str, Any]:
    """What `--set` changed in all cells; a run that does not say so shows it in its changes."""
    own = claim.base | claim.cells.get(run["cell"], {})
    return run.get("set", {key: value for key, value in run["changes"].items() if own.get(key) != value})


def check_alike(file: Path, claim: Claim, stored: list[dict[str, Any]], planned: dict[str, dict[str, Any]]) -> None:
    """Complain about results that cannot go beside those that a file has; `planned` is what every run of a cell would say."""
    for run in stored:
        for cell, plan in planned.items():
            different = difference(claim, run, plan, cell)
            if different:
                raise UserError(f"{file} has results {different}: give another folder with --results.")


def difference(claim: Claim, run: dict[str, Any], plan: dict[str, Any], cell: str) -> str | None:
    """What a stored run has and a planned one has not, if that keeps them out of one table; None if nothing does."""
    if run["data"] != plan["data"]:
        return f"on {run['data']}, not on {plan['data']}"
    if run.get("fingerprint", plan["fingerprint"]) != plan["fingerprint"]:
        return f"on other images that are called {run['data']}, too"
    if common(claim, run) != plan["set"]:
        said = " ".join(f"--set {key}={value}" for key, value in common(claim, run).items())
        return f"with {said}" if said else "without --set"
    if run["cell"] == cell and run["changes"] != plan["changes"]:
        return f"of {cell} with other changes"
    for option in set(needs(claim, run["cell"])) & set(plan["files"]):
        had, has = run.get("files", {}).get(option), plan["files"][option]
        if had is None:
            return f"that do not say which --{option} they had"
        if identity(had) != identity(has):
            return f"with another --{option}, {had['name']}"
    return None


def identity(file: dict[str, Any]) -> tuple[str, str | None]:
    """What two records of the same file have in common, whatever it is called."""
    return file["sha256"] or file["name"], file.get("beside")
