"""Reading the `run.json` of a run directory."""

import json
from pathlib import Path
from typing import Any

from vitrail.aliases import upgrade_run
from vitrail.errors import UserError


def read_run_json(folder: Path) -> dict[str, Any]:
    """Return the content of `run.json`, with keys of older versions renamed."""
    path = folder / "run.json"
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{folder} is not a run directory: it has no run.json.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from None
    if not isinstance(run, dict):
        raise UserError(f"{path} cannot be read: it does not describe a run.")
    return upgrade_run(run)


def read_run_info(folder: str | Path) -> dict[str, Any]:
    """Return the content of `run.json` for display: the groups recipe, model, data, versions and best exist, but may be empty."""
    run = read_run_json(Path(folder))
    groups = ("recipe", "model", "data", "versions", "best")
    if not all(isinstance(run.get(name) or {}, dict) for name in groups):
        raise UserError(f"{Path(folder) / 'run.json'} cannot be read: it does not describe a run.")
    return run | {name: run.get(name) or {} for name in groups}
