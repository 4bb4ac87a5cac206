"""Many tasks, one table: in the manner of VTAB (arXiv 1910.04867) a file lists data sets and how each is probed.

Every result is kept in a file of its own as soon as it is there, under a name that is made of everything it depends on: what was
interrupted goes on where it stopped, and what was changed is measured again.
"""

import dataclasses
import hashlib
import json
import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from vitrail.atomic_files import check_folder, write_aside
from vitrail.checkpoints.bundled import find_bundled
from vitrail.checkpoints.model_io import split_path
from vitrail.errors import UserError
from vitrail.evaluation.features import VECTORS, Readout
from vitrail.evaluation.probes.protocol import (
    MAIN,
    PROBES,
    Advance,
    Settings,
    Sides,
    column,
    embed_sides,
    known,
    open_sides,
    some,
    usual_vector,
)
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.version import __version__

USUAL = Settings()


@dataclass(frozen=True)
class Task:
    """One line of the table."""

    name: str
    source: str
    probe: str
    labels: str = MAIN
    memory: str | None = None  # splits, as the commands choose them if not given
    queries: str | None = None
    examples: int | None = None  # of the memory at most; VTAB-1k takes 1000
    vector: str | None = None
    group: str = ""
    settings: Settings = USUAL

    def open(self) -> Sides:
        sides = open_sides(self.source, self.memory, self.queries, seed=self.settings.seed)
        for side in (sides.memory, sides.queries):
            column(side, self.labels)
        if self.examples is not None:
            sides = sides._replace(memory=some(sides.memory, self.examples, self.settings.seed))
        return sides

    def pooling(self, model: VisionTransformer) -> Readout:
        return Readout(self.vector or usual_vector(self.probe, model))


class Row(NamedTuple):
    """One result as it is kept."""

    task: str
    weights: str
    score: float
    spread: float | None
    details: dict[str, Any]


FIELDS = tuple(field.name for field in dataclasses.fields(Task))


def read_suite(path: Path) -> list[Task]:
    """The tasks of a YAML or JSON file; paths in it are relative to its folder."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"The suite {path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"The suite {path} is not YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(content, dict) or not isinstance(content.get("tasks"), list) or not content["tasks"]:
        raise UserError(f"The suite {path} has no tasks: write `tasks:` and below it one `- source: …` for each.")
    unknown = next((key for key in content if key not in ("tasks", "defaults")), None)
    if unknown is not None:
        raise UserError(f"The suite {path} has the unknown key {unknown!r}; there are tasks and defaults.")
    defaults = content.get("defaults") or {}
    if not isinstance(defaults, dict):
        raise UserError(f"The defaults of the suite {path} are not a list of `key: value`.")
    tasks = [read_task(entry, defaults, number, path) for number, entry in enumerate(content["tasks"], 1)]
    names = [task.name for task in tasks]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"Two tasks of {path} are called {twice}: give each a name of its own.")
    return tasks


def read_task(entry: Any, defaults: dict[str, Any], number: int, path: Path) -> Task:
    where = f"Task {number} of {path}"
    if not isinstance(entry, dict):
        raise UserError(f"{where} is not a list of `key: value`: write `- source: …`.")
    settings: dict[str, Any] = {}
    for part in (defaults, entry):
        if not isinstance(part.get("settings") or {}, dict):
            raise UserError(f"The settings of {where[0].lower()}{where[1:]} are not a list of `key: value`.")
        settings |= part.get("settings") or {}
    values = {**defaults, **entry}
    unknown = next((key for key in values if key not in FIELDS), None)
    if unknown is not None:
        raise UserError(f"{where} has the unknown key {unknown!r}; there are {', '.join(FIELDS)}.")
    if "source" not in values:
        raise UserError(f"{where} has no source: say where its images are.")
    for key in set(values) - {"settings", "examples"}:
        if not isinstance(values[key], str) or (not values[key] and key != "group"):
            raise UserError(f"{where} has {key}: {values[key]!r}, which is no text: put it in quotes.")
    examples = values.get("examples")
    if examples is not None and (not isinstance(examples, int) or isinstance(examples, bool) or examples < 2):
        raise UserError(f"{where} has examples: {examples!r}; give a number of at least 2.")
    probe, vector = values.get("probe", "linear"), values.get("vector")
    if probe not in PROBES:
        raise UserError(f"{where} has the unknown probe {probe!r}: choose from {', '.join(PROBES)}.")
    if vector is not None and vector not in VECTORS:
        raise UserError(f"{where} has the unknown vector {vector!r}: choose from {', '.join(VECTORS)}.")
    source = values["source"]
    beside = path.parent / os.path.expanduser(source)
    found = str(beside) if source != "digits" and beside.exists() else source
    name = values.get("name") or f"{Path(source).name or source} {probe}"
    return Task(**{**values, "name": name, "source": found, "probe": probe, "settings": Settings.from_dict(settings, where)})


def unwatched(title: str, total: int) -> AbstractContextManager[Advance]:
    return nullcontext(lambda count: None)


def run_suite(
    tasks: Sequence[Task],
    weights: Sequence[Path],
    folder: Path,
    load: Callable[[Path], VisionTransformer],
    watch: Callable[[str, int], AbstractContextManager[Advance]] = unwatched,
    batch: int = 64,
    workers: int | None = None,
    say: Callable[[str], None] = lambda sentence: None,
) -> list[Row]:
    """A row for every task and weights, taken from the folder where it is there. Models are loaded one after the other."""
    opened = {task.name: task.open() for task in tasks}  # a misspelled path is told before hours of work
    rows: list[Row] = []
    for path in weights:
        content = digest(path)
        model: VisionTransformer | None = None
        for task in tasks:
            file = folder / f"{key(task, opened[task.name], content)}.json"
            row = read_row(file)
            if row is None:
                check_folder(folder)  # where all results are kept already, none is written
                model = model or load(path)
                sides = opened[task.name]
                try:
                    with watch(f"{task.name}, {path.name}", len(sides.memory) + len(sides.queries)) as advance:
                        row = run_task(task, sides, path, model, advance, batch, workers, say)
                except UserError as error:
                    raise UserError(f"The task {task.name} cannot be done with {path}: {error}") from None
                write_row(file, row)
            rows.append(row._replace(task=task.name, weights=str(path)))
    return rows


def run_task(
    task: Task,
    sides: Sides,
    path: Path,
    model: VisionTransformer,
    advance: Advance,
    batch: int,
    workers: int | None,
    say: Callable[[str], None],
) -> Row:
    pooling = task.pooling(model)
    memory, queries = embed_sides(model, sides, pooling, batch, workers, advance)
    bad = len(memory.problems) + len(queries.problems)
    if bad:
        say(f"{task.name}: {bad} images could not be read and are left out.")
    result = PROBES[task.probe](known(sides, memory, queries, task.labels), task.settings)
    details = result.details | {"unreadable": bad, "memory": len(memory.vectors), "vector": pooling.vector}
    return Row(task.name, str(path), result.score, result.spread, details)


def key(task: Task, sides: Sides, weights: str) -> str:
    """A file name that changes with everything the result depends on that can be known without computing."""
    values = dataclasses.asdict(task)
    for label in ("name", "group"):  # how the table is laid out
        del values[label]
    values["source"] = os.path.abspath(task.source) if os.path.exists(task.source) else task.source
    sizes = [len(sides.memory), len(sides.queries)]
    content = json.dumps([values, sizes, weights, __version__], sort_keys=True)
    name = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in task.name)[:60]
    return f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def digest(path: Path) -> str:
    """Of a file's bytes, of all files of a folder, of bundled weights, or of base+delta."""
    base, delta = split_path(path)
    if delta is not None:
        return hashlib.sha256((digest(Path(base)) + digest(Path(delta))).encode()).hexdigest()
    path = find_bundled(path) or path
    try:
        if path.is_file():
            with open(path, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        inside = sorted(each for each in path.iterdir() if each.is_file() and not each.name.startswith("."))
    except OSError as error:
        raise UserError(f"The weights {path} cannot be read: {error.strerror or error}.") from None
    return hashlib.sha256("".join(each.name + digest(each) for each in inside).encode()).hexdigest()


def read_row(file: Path) -> Row | None:
    """A kept result; one that is damaged is as good as none."""
    try:
        return Row(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def write_row(file: Path, row: Row) -> None:
    write_aside(file, lambda side: side.write_text(json.dumps(row._asdict(), indent=1), encoding="utf-8"))


def group_means(tasks: Sequence[Task], rows: Sequence[Row], weights: str) -> dict[str, float]:
    """Unweighted means over the tasks: of each group, and of all under the name mean."""
    scores = {row.task: row.score for row in rows if row.weights == weights}
    groups = dict.fromkeys(task.group for task in tasks if task.group)
    found = {group: statistics.fmean(scores[task.name] for task in tasks if task.group == group) for group in groups}
    return (found if len(found) > 1 else {}) | {"mean": statistics.fmean(scores.values())}
