"""Provenance of results, and which results may be in one table."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.evidence.claims import Claim
from vitrail.aliases import upgrade_key, upgrade_metrics, upgrade_value
from vitrail.atomic_files import file_sha256
from vitrail.checkpoints.bundled import find_bundled
from vitrail.data.datasets.lookup import is_built_in
from vitrail.errors import UserError
from vitrail.teachers.label_store import MANIFEST
from vitrail.teachers.sidecar import sidecar_path

FILES = {  # option: recipe key
    "teacher": "distillation.teacher",
    "labels": "token_labels.store",
    "weights": "init.weights",
    "tokenizer": "task_options.tokenizer",
}
IDENTIFYING = (MANIFEST, "best.safetensors", "model.safetensors", "pytorch_model.bin")  # files that identify a directory
CODE = ("vitrail", "benchmarks", ":(exclude)benchmarks/evidence/results")  # paths that affect a training
ROOT = Path(__file__).parents[2]


def load_results(file: Path) -> dict[str, Any]:
    """The content of a results file, with the keys of today."""
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    content["runs"] = [upgrade_metrics(run) for run in content["runs"]]
    for run in content["runs"]:
        run |= {name: upgrade_changes(run[name]) for name in ("changes", "set") if name in run}
    return content


def upgrade_changes(changes: dict[str, Any]) -> dict[str, Any]:
    """Changes of a recipe; those of a first stage are nested."""
    return {
        upgrade_key(key): upgrade_changes(value) if isinstance(value, dict) else upgrade_value(upgrade_key(key), value)
        for key, value in changes.items()
    }


def base_name(path: str) -> str:
    """The last part of a path; URLs, names of timm models and built-in data sets are returned unchanged."""
    if "://" in path or path.startswith("timm:") or is_built_in(path):
        return path
    return os.path.basename(os.path.abspath(os.path.expanduser(path)))


def describe_file(path: str) -> dict[str, str | None]:
    """Name and SHA-256 of a file, of the weights of a directory, or of the manifest of a label store.

    The SHA-256 is None if there is no local file, as for a timm model; `beside` is the SHA-256 of the sidecar file, if any.
    """
    parts = path.split("+") if not os.path.exists(os.path.expanduser(path)) else [path]  # weights may be base+delta
    digests = [_digest(part) for part in parts]
    record = {"name": "+".join(map(base_name, parts)), "sha256": "+".join(filter(None, digests)) if all(digests) else None}
    sidecar = sidecar_path(path)
    return record | ({"beside": file_sha256(Path(sidecar))} if os.path.isfile(sidecar) else {})


def _digest(path: str) -> str | None:
    location = find_bundled(path) or Path(path).expanduser()
    file = next(filter(os.path.isfile, (location, *(location / name for name in IDENTIFYING))), None)
    return None if file is None else file_sha256(Path(file))


def commit(root: Path = ROOT) -> str:
    """The commit of the code, followed by "+changes" if the working tree differs."""

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain", "--", *CODE) else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def needs(claim: Claim, variant: str) -> list[str]:
    """Options whose file a variant is trained with."""
    own = claim.base | claim.variants.get(variant, {})
    stages = (own, own.get("first", {}))
    return [option for option, key in FILES.items() if any(stage.get(key) == f"{{{option}}}" for stage in stages)]


def common(claim: Claim, run: dict[str, Any]) -> dict[str, Any]:
    """Changes by `--set` in all variants; if a run does not record them, they follow from its changes."""
    own = claim.base | claim.variants.get(run["cell"], {})
    return run.get("set", {key: value for key, value in run["changes"].items() if own.get(key) != value})


def check_compatible(file: Path, claim: Claim, stored: list[dict[str, Any]], planned: dict[str, dict[str, Any]]) -> None:
    """Raise UserError if planned runs cannot be in one table with the stored ones; `planned` has the metadata of each variant."""
    for run in stored:
        for variant, plan in planned.items():
            reason = difference(claim, run, plan, variant)
            if reason:
                raise UserError(f"{file} has results {reason}: choose another directory with --results.")


def difference(claim: Claim, run: dict[str, Any], plan: dict[str, Any], variant: str) -> str | None:
    """How a stored run differs from a planned one so that they cannot be in one table; None if they can."""
    if run["data"] != plan["data"]:
        return f"on {run['data']}, not on {plan['data']}"
    if run.get("fingerprint", plan["fingerprint"]) != plan["fingerprint"]:
        return f"on other images with the same name, {run['data']}"
    if common(claim, run) != plan["set"]:
        options = " ".join(f"--set {key}={value}" for key, value in common(claim, run).items())
        return f"with {options}" if options else "without --set"
    if run["cell"] == variant and run["changes"] != plan["changes"]:
        return f"of {variant} with other changes"
    for option in set(needs(claim, run["cell"])) & set(plan["files"]):
        stored, planned = run.get("files", {}).get(option), plan["files"][option]
        if stored is None:
            return f"that do not record their --{option}"
        if identity(stored) != identity(planned):
            return f"with another --{option}, {stored['name']}"
    return None


def identity(file: dict[str, Any]) -> tuple[str, str | None]:
    """What identifies a file independently of its name."""
    return file["sha256"] or file["name"], file.get("beside")
