"""Measurements as JSON, rewritten after every group so that an interrupted benchmark keeps its results."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitrail.atomic_files import atomic_write_text
from vitrail.bench.measurement import Measurement, speedup, timm_counterpart
from vitrail.bench.peak import Peak
from vitrail.formatting import pluralize


def make_document(
    machine: dict[str, Any], peak: Peak | None, measurements: Sequence[Measurement], rounds: int, complete: bool
) -> dict[str, Any]:
    return {
        "machine": machine,
        "peak": peak._asdict() if peak else None,
        "rounds": rounds,
        "complete": complete,  # false: interrupted or still running
        "measurements": [measurement.to_dict() | compare_with_timm(measurement, measurements) for measurement in measurements],
    }


def compare_with_timm(measurement: Measurement, measurements: Sequence[Measurement]) -> dict[str, Any]:
    """The speedup over timm's model, if it was measured."""
    other = timm_counterpart(measurement, measurements)
    return {"speedup": speedup(measurement, other)._asdict()} if other else {}


def write_json(path: Path, document: dict[str, Any]) -> None:
    atomic_write_text(path, json.dumps(document, indent=1) + "\n")


def describe_machine(machine: dict[str, Any]) -> str:
    """Device, cores and versions in one line."""
    hardware = f"{machine['device']}, {pluralize(machine['threads'], 'thread')} of {pluralize(machine['cores'], 'core')}"
    if machine["kind"] == "cuda":
        hardware = f"{machine['device']}, {machine['cores']} CPU cores"
    versions = [f"torch {machine['torch']}"] + ([f"timm {machine['timm']}"] if machine.get("timm") else [])
    return f"{hardware}; {', '.join(versions)}"
