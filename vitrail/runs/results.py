"""The numbers of runs, read from their folders."""

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from vitrail.errors import UserError
from vitrail.recipes import Recipe
from vitrail.runs.comparison import MEASURES, Result
from vitrail.runs.report import read_json
from vitrail.training.metrics import from_json, read_metrics

DEPTH = 4  # folders below the one that is named in which runs are looked for
PLAN = "ablation.json"  # what `vitrail ablate` leaves beside its runs
At = Literal["best", "last"]


def read_results(paths: Sequence[str | Path], metric: str = "top1", at: At = "best") -> tuple[list[Result], list[str]]:
    """The results of finished runs in these folders or below them, and a sentence for each run that is left out."""
    if metric not in MEASURES:
        raise UserError(f"--metric {metric} is not known; choose from {', '.join(MEASURES)}.")
    if metric == "test" and at == "last":
        raise UserError("The test images are only looked at with the best weights: leave --at last out.")
    found: list[Result] = []
    said: list[str] = []
    for origin, folder in find_runs(paths):
        try:
            result = read_result(folder, metric, at, origin)
        except UserError as error:
            result = str(error).rstrip(".")
        if isinstance(result, str):
            said.append(f"{folder} is left out: {result}.")
        else:
            found.append(result)
    return found, said


def find_runs(paths: Sequence[str | Path]) -> list[tuple[str, Path]]:
    """Every run once, with the path that it was found by."""
    found: dict[Path, tuple[str, Path]] = {}
    for path in paths:
        folder = Path(path).expanduser()
        if not folder.is_dir():
            raise UserError(f"{path} is no folder; give the folder of a run, or one that holds runs.")
        runs = list(below(folder, DEPTH))
        if not runs:
            raise UserError(f"{path} holds no run: there is no run.json in it or below it.")
        for run in runs:
            found.setdefault(run.resolve(), (str(path), run))
    return list(found.values())


def below(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / "run.json").is_file():
        yield folder
        return
    if not depth:
        return
    try:
        inside = [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith(".")]
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}.") from None
    order = {name: place for place, name in enumerate(planned_names(folder))}
    for each in sorted(inside, key=lambda path: (order.get(path.name, len(order)), natural(path.name))):
        yield from below(each, depth - 1)


def planned_names(folder: Path) -> list[str]:
    """The order of an ablation's cells, whose first is what the others are compared with."""
    try:
        plan = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        return [str(cell["name"]) for cell in plan["cells"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def natural(name: str) -> list[tuple[int, int, str]]:
    """seed-2 before seed-10."""
    return [(0, int(word), "") if word.isdecimal() else (1, 0, word) for word in re.split(r"(\d+)", name)]


def read_result(folder: Path, metric: str, at: At, origin: str = "") -> Result | str:
    """A result, or why there is none."""
    facts = read_json(folder)
    if not is_trained(facts):
        return "it is not finished"
    leaves = leaves_of(facts.get("recipe"))
    if leaves is None:
        return "its run.json has no recipe"
    value = read_value(folder, facts, metric, at)
    if value is None:
        return f"it has no {MEASURES[metric].title}"
    if not math.isfinite(value):
        return f"its {MEASURES[metric].title} is not a number"
    data = facts.get("data")
    return Result(folder, leaves, str(data.get("fingerprint", "")) if isinstance(data, dict) else "", value, origin)


def is_trained(facts: dict[str, Any]) -> bool:
    """Whether the last step has been taken and its result is in run.json."""
    return bool(facts.get("best")) and bool(facts.get("steps"))


def is_finished(folder: Path) -> bool:
    """Whether nothing is left to do: the report is the last thing that a run writes."""
    return (folder / "run.json").is_file() and is_trained(read_json(folder)) and (folder / "report.html").is_file()


def leaves_of(tree: Any) -> dict[str, Any] | None:
    """The leaves of a recipe as JSON has them; those that an older version did not know have their defaults."""
    if not isinstance(tree, dict) or "seed" not in tree:
        return None
    try:
        leaves = Recipe.from_dict(tree).leaves()
    except UserError:
        leaves = dict(flat(tree, ""))  # of another version, which knows more
    return json.loads(json.dumps(leaves))


def flat(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def read_value(folder: Path, facts: dict[str, Any], metric: str, at: At) -> float | None:
    group: Any = facts.get("test") if metric == "test" else facts.get("best")
    if at == "last":
        tested = [line for line in read_metrics(folder) if line["kind"] == "validation"]
        group = tested[-1] if tested and tested[-1]["step"] == facts["steps"] else None
    value = group.get("top1" if metric == "test" else metric) if isinstance(group, dict) else None
    try:
        return None if value is None else float(from_json(value))
    except (TypeError, ValueError):
        return None
