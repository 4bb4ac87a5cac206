"""What was measured as JSON: written anew after every heat, so that an end at any time leaves what there is."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitrail.atomic_files import write_aside
from vitrail.bench.measurement import Cell, beside, times_as_fast
from vitrail.bench.peak import Ceiling


def content(machine: dict[str, Any], ceiling: Ceiling | None, cells: Sequence[Cell], rounds: int, ended: bool) -> dict[str, Any]:
    return {
        "machine": machine,
        "ceiling": ceiling._asdict() if ceiling else None,
        "rounds": rounds,
        "ended": ended,  # false: interrupted, or still at it
        "cells": [cell.to_dict() | compared(cell, cells) for cell in cells],
    }


def compared(cell: Cell, cells: Sequence[Cell]) -> dict[str, Any]:
    """Ours beside timm's, where there is one."""
    other = beside(cell, cells)
    return {"times_as_fast": times_as_fast(cell, other)._asdict()} if other else {}


def write_json(path: Path, found: dict[str, Any]) -> None:
    write_aside(path, lambda side: side.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8"))


def headline(machine: dict[str, Any]) -> str:
    """The machine in a line."""
    where = f"{machine['device']}, {machine['threads']} threads of {machine['cores']} cores"
    if machine["kind"] == "cuda":
        where = f"{machine['device']}, {machine['cores']} CPU cores"
    versions = [f"torch {machine['torch']}"] + ([f"timm {machine['timm']}"] if machine.get("timm") else [])
    return f"{where}; {', '.join(versions)}"
