"""Reading the `run.json` of a run directory."""

from pathlib import Path
from typing import Any

from vitrail.aliases import upgrade_run
from vitrail.errors import UserError
from vitrail.json_files import MissingFile, read_json

MAX_DEPTH = 32  # of lists and mappings


def read_run_json(folder: Path) -> dict[str, Any]:
    """Return the content of `run.json`, with keys of older versions renamed."""
    path = folder / "run.json"
    try:
        return check_run(read_json(path), path)
    except MissingFile:
        raise UserError(
            f"{folder} is not a run directory: it has no run.json; give a folder that `vitrail train` wrote under runs/."
        ) from None


def check_run(run: Any, path: Path) -> dict[str, Any]:
    """Return the content of a run.json, with keys of older versions renamed; values of other types are a UserError."""
    if not isinstance(run, dict):
        raise UserError(f"{path} cannot be read: it does not describe a run.")
    if is_deeper(run, MAX_DEPTH):
        raise UserError(f"{path} cannot be read: it is nested too deeply.")
    run = upgrade_run(run)
    wrong = find_mismatch(run, SHAPE)
    if wrong:
        raise UserError(f"{path} cannot be read: the value of {wrong} is not valid.")
    return {name: value for name, value in run.items() if value is not None or name not in SHAPE}


def is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and mappings are nested more than `levels` deep."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return bool(parts) and (levels == 0 or any(is_deeper(part, levels - 1) for part in parts))


def find_mismatch(value: Any, shape: Any, name: str = "") -> str:
    """Return the dotted name of the first value that does not have its shape, "" if there is none; null always has it."""
    if value is None:
        return ""
    if isinstance(shape, list):
        if not isinstance(value, list) or None in value:
            return name
        return next((found for part in value if (found := find_mismatch(part, shape[0], name))), "")
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return name
        known = {key: shape.get(key, shape.get("")) for key in value}
        parts = (find_mismatch(value[key], own, f"{name}.{key}".strip(".")) for key, own in known.items() if own is not None)
        return next(filter(None, parts), "")
    return "" if shape(value) else name


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def is_positive(value: Any) -> bool:
    return is_count(value) and value > 0


def is_number(value: Any) -> bool:
    """Whether `value` is a number that fits a float, or the text that stands for NaN or Inf in JSON."""
    return isinstance(value, float) or value in ("nan", "inf", "-inf") or (isinstance(value, int) and abs(value) < 1 << 62)


def is_duration(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < 1e12


def is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def read_run_info(folder: str | Path) -> dict[str, Any]:
    """Return the content of `run.json` for display: the groups recipe, model, data, versions and best exist, but may be empty."""
    run = read_run_json(Path(folder))
    return run | {name: run.get(name) or {} for name in ("recipe", "model", "data", "versions", "best")}


# What readers rely on. The key "" stands for all other keys of a mapping.
SHAPE: dict[str, Any] = {
    "source": is_text,
    "recipe": {"name": is_text},
    "options": {"save_seconds": is_duration, "save_steps": is_count, "keep": is_count, "log_steps": is_count},
    "micro_batches": is_positive,
    "unreadable": is_text,
    "metric": {"name": is_text, "title": is_text, "higher_is_better": is_flag, "percent": is_flag},
    "architecture": {},
    "model": {"name": is_text, "parameters": is_number, "macs": is_number},
    "data": {"name": is_text, "train": is_count, "validation": is_count, "classes": [is_text], "fingerprint": is_text},
    "teachers": {"": is_text},
    "weights": {"path": is_text, "sha256": is_text},
    "versions": {},
    "best": {"": is_number},
    "baselines": {"": is_number},
    "verdict": {"": is_number, "images": is_count, "validations": is_count},
    "test": {"": is_number, "images": is_count},
    "warnings": [{"": is_number, "message": is_text}],
    "steps": is_count,
    "seconds": is_duration,
    "per_class": [{"": is_number, "name": is_text, "images": is_count}],
    "confusion": {"names": [is_text], "matrix": [[is_count]], "pairs": [{"count": is_count, "of": is_count}]},
    "mistakes": [{"confidence": is_number}],
    "reconstructions": [{"location": is_text}],
    "segmentations": [{"": is_number, "image": is_text, "location": is_text}],
    "detections": [{"": is_number, "image": is_text, "location": is_text}],
    "boundaries": [{"": is_number, "pixels": is_text}],
    "protocol": is_text,
}
