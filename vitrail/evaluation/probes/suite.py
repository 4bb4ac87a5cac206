"""A suite of probes: a file lists data sets and the probe of each, as VTAB (arXiv 1910.04867) lists tasks.

Every result is written to a file of its own when it is computed. The file name contains a hash of everything the result depends
on: an interrupted suite continues where it stopped, and what was changed is computed again.
"""

import dataclasses
import hashlib
import json
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from vitrail.atomic_files import atomic_write_text, check_writable_folder
from vitrail.checkpoints.hub import find_named
from vitrail.checkpoints.model_io import split_delta_path
from vitrail.data.progress import Advance, Progress, no_progress
from vitrail.data.source import subsample
from vitrail.errors import UserError
from vitrail.evaluation.features import VECTORS, FeatureKind
from vitrail.evaluation.model import Model
from vitrail.evaluation.probes.protocol import (
    LABEL,
    PROBES,
    ProbeData,
    Settings,
    default_vector,
    embed_probe_data,
    label_column,
    open_probe_data,
    select_labeled,
)
from vitrail.recipes.schema import load_yaml
from vitrail.teachers.sidecar import sidecar_path
from vitrail.version import __version__

DEFAULT_SETTINGS = Settings()


@dataclass(frozen=True)
class ProbeTask:
    """One row of the table: a data set and its probe."""

    name: str
    source: str
    probe: str
    labels: str = LABEL
    memory: str | None = None  # splits; defaults as in the commands
    queries: str | None = None
    examples: int | None = None  # maximum number of images of the memory; 1000 in VTAB-1k
    vector: str | None = None
    group: str = ""
    settings: Settings = DEFAULT_SETTINGS

    def open(self) -> ProbeData:
        data = open_probe_data(self.source, self.memory, self.queries, seed=self.settings.seed)
        for source in (data.memory, data.queries):
            label_column(source, self.labels)
        if self.examples is not None:
            data = data._replace(memory=subsample(data.memory, self.examples, self.settings.seed))
        return data

    def feature_kind(self, model: Model) -> FeatureKind:
        return FeatureKind(self.vector or default_vector(self.probe, model))


class TaskResult(NamedTuple):
    """The result of a task, as it is stored."""

    task: str
    weights: str
    score: float
    sd: float | None
    details: dict[str, Any]


FIELDS = tuple(field.name for field in dataclasses.fields(ProbeTask))


def read_suite(path: Path) -> list[ProbeTask]:
    """The tasks of a YAML or JSON file; paths in it are relative to its folder."""
    try:
        content = load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"The suite {path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"The suite {path} is not YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(content, dict) or not isinstance(content.get("tasks"), list) or not content["tasks"]:
        raise UserError(f"The suite {path} has no tasks: write `tasks:` and below it one `- source: …` for each.")
    unknown = next((key for key in content if key not in ("tasks", "defaults")), None)
    if unknown is not None:
        raise UserError(f"The suite {path} has the unknown key {unknown!r}; there are tasks and defaults.")
    defaults = content.get("defaults") or {}
    if not isinstance(defaults, dict):
        raise UserError(f"The defaults of the suite {path} are not a mapping: write `key: value` pairs.")
    tasks = [parse_task(entry, defaults, number, path) for number, entry in enumerate(content["tasks"], 1)]
    names = [task.name for task in tasks]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise UserError(f"Two tasks of {path} have the name {duplicate}: give each task its own name.")
    return tasks


def parse_task(entry: Any, defaults: dict[str, Any], number: int, path: Path) -> ProbeTask:
    location = f"Task {number} of {path}"
    if not isinstance(entry, dict):
        raise UserError(f"{location} is not a mapping: write `- source: …`.")
    settings: dict[str, Any] = {}
    for part in (defaults, entry):
        if not isinstance(part.get("settings") or {}, dict):
            raise UserError(f"{location} has settings that are not a mapping: write `key: value` pairs.")
        settings |= part.get("settings") or {}
    values = {**defaults, **entry}
    unknown = next((key for key in values if key not in FIELDS), None)
    if unknown is not None:
        raise UserError(f"{location} has the unknown key {unknown!r}; there are {', '.join(FIELDS)}.")
    if "source" not in values:
        raise UserError(f"{location} has no source: give the path of a data set.")
    for key in set(values) - {"settings", "examples"}:
        if not isinstance(values[key], str) or (not values[key] and key != "group"):
            raise UserError(f"{location} has {key}: {values[key]!r}, which is not text: put it in quotes.")
    examples = values.get("examples")
    if examples is not None and (not isinstance(examples, int) or isinstance(examples, bool) or examples < 2):
        raise UserError(f"{location} has examples: {examples!r}; give a number of at least 2.")
    probe, vector = values.get("probe", "linear"), values.get("vector")
    if probe not in PROBES:
        raise UserError(f"{location} has the unknown probe {probe!r}: choose from {', '.join(PROBES)}.")
    if vector is not None and vector not in VECTORS:
        raise UserError(f"{location} has the unknown vector {vector!r}: choose from {', '.join(VECTORS)}.")
    source = values["source"]
    relative = path.parent / os.path.expanduser(source)
    changes = {
        "name": values.get("name") or f"{Path(source).name or source} {probe}",
        "source": str(relative) if source != "digits" and relative.exists() else source,
        "probe": probe,
        "settings": Settings.from_dict(settings, location),
    }
    return ProbeTask(**values | changes)


def run_suite(
    tasks: Sequence[ProbeTask],
    weights: Sequence[Path],
    folder: Path,
    load: Callable[[Path], Model],
    progress: Progress = no_progress,
    batch_size: int = 64,
    workers: int | None = None,
    log: Callable[[str], None] = lambda message: None,
    cache: bool = False,
) -> list[TaskResult]:
    """The result of every task with every weights, read from the folder if it exists there. One model is in memory at a time."""
    opened = {task.name: task.open() for task in tasks}  # first, so that a misspelled path is reported before any computation
    results: list[TaskResult] = []
    for path in weights:
        content_hash = hash_weights(path)
        model: Model | None = None
        for task in tasks:
            data = opened[task.name]
            file = folder / f"{result_name(task, data, content_hash)}.json"
            result = read_result(file)
            if result is None:
                check_writable_folder(folder)  # only if there is something to write
                model = model or load(path)
                try:
                    with progress(f"{task.name}, {path.name}", len(data.memory) + len(data.queries)) as advance:
                        result = run_task(task, data, path, model, advance, batch_size, workers, log, cache)
                except UserError as error:
                    raise UserError(f"The task {task.name} failed with {path}: {error}") from None
                write_result(file, result)
            results.append(result._replace(task=task.name, weights=str(path)))
    return results


def run_task(
    task: ProbeTask,
    data: ProbeData,
    path: Path,
    model: Model,
    advance: Advance,
    batch_size: int,
    workers: int | None,
    log: Callable[[str], None],
    cache: bool,
) -> TaskResult:
    kind = task.feature_kind(model)
    memory, queries = embed_probe_data(model, data, kind, batch_size, workers, advance, cache)
    unreadable = len(memory.problems) + len(queries.problems)
    if unreadable:
        log(f"{task.name}: {unreadable} images could not be read and were skipped.")
    result = PROBES[task.probe](select_labeled(data, memory, queries, task.labels), task.settings)
    details = result.details | {"unreadable": unreadable, "memory": len(memory.vectors), "vector": kind.vector}
    return TaskResult(task.name, str(path), result.score, result.sd, details)


def result_name(task: ProbeTask, data: ProbeData, weights_hash: str) -> str:
    """A file name with a hash of everything the result depends on that is known before the computation."""
    values = dataclasses.asdict(task)
    for label in ("name", "group"):  # only for the layout of the table
        del values[label]
    values["source"] = os.path.abspath(task.source) if os.path.exists(task.source) else task.source
    sizes = [len(data.memory), len(data.queries)]
    content = json.dumps([values, sizes, weights_hash, __version__], sort_keys=True)
    name = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in task.name)[:60]
    return f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def hash_weights(path: Path) -> str:
    """SHA-256 of a file with its sidecar file, of all files of a folder, of weights by name, or of base+delta."""
    base, delta = split_delta_path(path)
    if delta is not None:
        return hashlib.sha256((hash_weights(Path(base)) + hash_weights(Path(delta))).encode()).hexdigest()
    path = find_named(path) or path
    try:
        if path.is_file():
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256")
            sidecar = sidecar_path(path)
            if sidecar.is_file():
                digest.update(sidecar.read_bytes())
            return digest.hexdigest()
        files = sorted(each for each in path.iterdir() if each.is_file() and not each.name.startswith("."))
    except OSError as error:
        raise UserError(f"The weights {path} cannot be read: {error.strerror or error}.") from None
    return hashlib.sha256("".join(each.name + hash_weights(each) for each in files).encode()).hexdigest()


def read_result(file: Path) -> TaskResult | None:
    """A stored result; None if it is missing or damaged."""
    try:
        return TaskResult(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def write_result(file: Path, result: TaskResult) -> None:
    atomic_write_text(file, json.dumps(result._asdict(), indent=1))


def group_means(tasks: Sequence[ProbeTask], results: Sequence[TaskResult], weights: str) -> dict[str, float]:
    """Unweighted means over the tasks of each group if there are several, and over all tasks under the name "mean"."""
    scores = {result.task: result.score for result in results if result.weights == weights}
    groups = dict.fromkeys(task.group for task in tasks if task.group)
    means = {group: statistics.fmean(scores[task.name] for task in tasks if task.group == group) for group in groups}
    return (means if len(means) > 1 else {}) | {"mean": statistics.fmean(scores.values())}
