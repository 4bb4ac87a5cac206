"""Results of finished runs, read from their run directories."""

import contextlib
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from vitrail.errors import UserError
from vitrail.json_files import read_json
from vitrail.recipes import Recipe
from vitrail.recipes.schema import flatten
from vitrail.runs.comparison import METRICS, Result, find_metric
from vitrail.runs.run_json import read_run_json
from vitrail.training.metrics import Metric, from_json, read_metrics

DEPTH = 4  # levels of subfolders that are searched for runs
PLAN = "ablation.json"  # written by `vitrail ablate`
At = Literal["best", "last"]


def choose_metric(paths: Sequence[str | Path], name: str) -> Metric:
    """The metric of this name; "primary" is that of the first run."""
    for _, folder in find_runs(paths):
        with contextlib.suppress(UserError, TypeError):
            if primary := read_run_json(folder).get("metric"):
                return find_metric(name, Metric(**primary))
    return find_metric(name)


def read_results(
    paths: Sequence[str | Path], metric: Metric = METRICS["top1"], at: At = "best"
) -> tuple[list[Result], list[str]]:
    """The results of finished runs in or below these folders, and a message for each ignored run."""
    if metric.name == "test" and at == "last":
        raise UserError("Test metrics exist only for the best weights: remove --at last.")
    results: list[Result] = []
    messages: list[str] = []
    for origin, folder in find_runs(paths):
        try:
            result = read_result(folder, metric, at, origin)
        except UserError as error:
            result = str(error).rstrip(".")
        if isinstance(result, str):
            messages.append(f"{folder} is ignored: {result}.")
        else:
            results.append(result)
    return results, messages


def find_runs(paths: Sequence[str | Path]) -> list[tuple[str, Path]]:
    """Every run once, with the given path under which it was found."""
    found: dict[Path, tuple[str, Path]] = {}
    for path in paths:
        folder = Path(path).expanduser()
        if not folder.is_dir():
            raise UserError(f"{path} is not a folder: give a run directory, or a folder that contains some.")
        runs = list(iter_runs(folder, DEPTH))
        if not runs:
            raise UserError(f"{path} contains no runs: there is no run.json in it or below it.")
        for run in runs:
            found.setdefault(run.resolve(), (str(path), run))
    return list(found.values())


def iter_runs(folder: Path, depth: int) -> Iterator[Path]:
    """Run directories in or below a folder; cells of an ablation in the order of its plan, others in natural order."""
    if (folder / "run.json").is_file():
        yield folder
        return
    if not depth:
        return
    try:
        subfolders = [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith(".")]
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}.") from None
    order = {name: index for index, name in enumerate(planned_names(folder))}
    for each in sorted(subfolders, key=lambda path: (order.get(path.name, len(order)), natural_key(path.name))):
        yield from iter_runs(each, depth - 1)


def planned_names(folder: Path) -> list[str]:
    """The cells of an ablation in the order of its plan; the first is the baseline of the comparison."""
    try:
        return [str(cell["name"]) for cell in read_json(folder / PLAN)["cells"]]
    except (UserError, KeyError, TypeError):
        return []


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts seed-2 before seed-10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def read_result(folder: Path, metric: Metric, at: At, origin: str = "") -> Result | str:
    """The result of a run, or the reason why there is none."""
    run = read_run_json(folder)
    if not is_trained(run):
        return "it is not finished"
    leaves = recipe_leaves(run.get("recipe"))
    if leaves is None:
        return "its run.json has no recipe"
    value = read_value(folder, run, metric, at)
    if value is None:
        return f"it has no {metric.title}"
    if not math.isfinite(value):
        return f"its {metric.title} is NaN or Inf"
    data = run.get("data")
    return Result(folder, leaves, str(data.get("fingerprint", "")) if isinstance(data, dict) else "", value, origin)


def is_trained(run: dict[str, Any]) -> bool:
    """Whether the last step is done and its result is in run.json."""
    return bool(run.get("best")) and bool(run.get("steps"))


def is_finished(folder: Path) -> bool:
    """Whether the run is complete; the report is the last file that it writes."""
    return (folder / "run.json").is_file() and is_trained(read_run_json(folder)) and (folder / "report.html").is_file()


def recipe_leaves(tree: Any) -> dict[str, Any] | None:
    """Recipe values by dotted key, as in JSON; keys that an older version lacks have their defaults."""
    if not isinstance(tree, dict) or "seed" not in tree:
        return None
    try:
        leaves = Recipe.from_dict(tree).leaves()
    except UserError:
        leaves = dict(flatten(tree))  # written by a newer version
    values: dict[str, Any] = json.loads(json.dumps(leaves))
    return values


def read_value(folder: Path, run: dict[str, Any], metric: Metric, at: At) -> float | None:
    name = (run.get("metric") or {}).get("name", "top1") if metric.name == "test" else metric.name
    group: Any = run.get("test") if metric.name == "test" else run.get("best")
    if at == "last":
        validations = [line for line in read_metrics(folder) if line["kind"] == "validation"]
        group = validations[-1] if validations and validations[-1]["step"] == run["steps"] else None
    value = group.get(name) if isinstance(group, dict) else None
    try:
        return None if value is None else float(from_json(value))
    except (TypeError, ValueError):
        return None
