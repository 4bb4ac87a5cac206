"""An ablation: one recipe, and variants of it without a part or with another value, each with several seeds.

ablation.json          source, base recipe, variants
<cell>/recipe.yaml     the recipe of a variant
<cell>/seed-<n>/       its runs
table.md, .json, .png  the results

Trainings run one after the other. The same command in a second process (on another device) takes the next unfinished training.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.atomic_files import atomic_write, atomic_write_text, reject_links
from vitrail.errors import UserError
from vitrail.evaluation.statistics import wilson
from vitrail.json_files import read_json
from vitrail.models.config import Architecture
from vitrail.models.flops import cost
from vitrail.models.registry import lookup
from vitrail.recipes import Recipe
from vitrail.recipes.ablations import find_part, without
from vitrail.recipes.schema import parse_value
from vitrail.runs.comparison import Row, compare, comparison_to_dict, group_results, to_markdown
from vitrail.runs.request import Log, TrainRequest
from vitrail.runs.results import PLAN, At, is_finished, read_results
from vitrail.runs.run_directory import check_empty, next_folder, write_json, write_recipe
from vitrail.runs.run_json import read_run_json
from vitrail.runs.seed_plot import draw_seed_plot
from vitrail.runs.seeds import train_or_resume
from vitrail.training.checkpointing import LOCK, WRITTEN
from vitrail.training.metrics import Metric
from vitrail.training.schedules import total_steps

BASE = "base"
NOMINAL_IMAGES = 100_000  # of an epoch, where only ratios count
TABLES = ("table.md", "table.json", "table.png")
MAX_NAME = 100  # characters of a cell's name, which is a folder's
Axis = tuple[str, list[Any]]  # a recipe key and its values


@dataclass(frozen=True)
class Cell:
    """One recipe of an ablation and what it changes."""

    name: str
    changes: dict[str, Any]
    recipe: Recipe


@dataclass(frozen=True)
class Ablation:
    """All trainings of an ablation, in a folder."""

    folder: Path
    source: str
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...]

    @property
    def base(self) -> Cell:
        return self.cells[0]

    def run_folder(self, cell: Cell, seed: int) -> Path:
        return self.folder / cell.name / f"seed-{seed}"

    def unfinished(self) -> list[tuple[Cell, int]]:
        """Seed by seed, so that after the first round every cell has a result."""
        pairs = itertools.product(self.seeds, self.cells)
        return [(cell, seed) for seed, cell in pairs if not is_finished(self.run_folder(cell, seed))]


def parse_axis(text: str) -> Axis:
    """ "optimizer.lr=1e-3,3e-3" to its key and values; commas inside brackets and quotes do not separate."""
    key, sign, values = text.partition("=")
    parts = [part.strip() for part in re.findall(r"(?:\[[^\]]*\]|'[^']*'|\"[^\"]*\"|[^,])+", values)]
    if not sign or not key.strip() or not any(parts):
        raise UserError(f"--vary takes KEY=VALUE,VALUE, not {text!r}: for example --vary optimizer.lr=1e-3,3e-3.")
    return key.strip(), [parse_value(part) for part in parts if part]


def make_cells(base: Recipe, axes: Sequence[Axis], drops: Sequence[str], grid: bool) -> tuple[list[Cell], list[str]]:
    """The cells, the base first, and messages on variants without effect.

    One at a time: the base with each value and without each part. As a grid: with every combination of them.
    """
    messages: list[str] = []
    choices: list[list[tuple[str, dict[str, Any]]]] = []
    for key, values in axes:
        if key == "seed":
            raise UserError("The seed is not varied: give --seeds N for several seeds.")
        choices.append([(f"{key}={compact(value)}", {key: value}) for value in values])
    for name in dict.fromkeys(find_part(drop) for drop in drops):
        leaves = without(base, name)
        if leaves:
            choices.append([(f"no {name}", leaves)])
        else:
            messages.append(f"{base.name} has no {name}: there is nothing to drop.")
    found = {content(base): Cell(BASE, {}, base)}
    for picked in combinations(choices, len(axes)) if grid else [(option,) for options in choices for option in options]:
        name, changes = ", ".join(word for word, _ in picked), merged(picked)
        recipe = base.set(changes)
        check_network(recipe)
        key = content(recipe)
        if key in found:
            if picked:
                messages.append(f"{name} is the same as {found[key].name}.")
            continue
        found[key] = Cell(folder_name(name), changes, recipe)
    cells = list(found.values())
    if len(cells) < 2:
        raise UserError(" ".join([*messages, "There is nothing to compare: give --vary KEY=VALUE,VALUE or --drop PART."]))
    lowered = [cell.name.lower() for cell in cells]  # some file systems ignore case
    twice = next((name for name in lowered if lowered.count(name) > 1), None)
    if twice:
        raise UserError(f"Two variants would share the folder {twice!r}: write the values of --vary so that they differ.")
    return cells, messages


def check_network(recipe: Recipe) -> None:
    """Raise UserError for an invalid architecture before hours are spent on other cells."""
    if not recipe.init.weights:
        network_of(recipe)


def network_of(recipe: Recipe) -> Architecture:
    known, size = lookup(recipe.model)[1], recipe.augmentation.image_size
    return known.replace(**recipe.architecture | ({"image_size": size} if all(size) else {}))


def estimate_work(recipe: Recipe) -> float:
    """The multiply-adds of a training, up to a factor that is the same for all recipes on the same data."""
    steps = total_steps(recipe.schedule, NOMINAL_IMAGES // recipe.batch_size)
    return steps * recipe.batch_size * float(cost(network_of(recipe)).macs)


def combinations(choices: list[list[tuple[str, dict[str, Any]]]], axes: int) -> list[tuple[tuple[str, dict[str, Any]], ...]]:
    """Every value of every axis with every part, kept or dropped."""
    options: list[list[tuple[str, dict[str, Any]] | None]] = [
        [*each] if place < axes else [None, *each] for place, each in enumerate(choices)
    ]
    return [tuple(option for option in picked if option is not None) for picked in itertools.product(*options)]


def merged(picked: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word, changes in picked:
        clash = next((key for key in changes if key in found and found[key] != changes[key]), None)
        if clash:
            raise UserError(f"{word} sets {clash}, and so does another part of the grid: vary it or drop it, not both.")
        found |= changes
    return found


def compact(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "x".join(map(compact, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def folder_name(text: str) -> str:
    name = re.sub(r"[^\w.=+-]+", "-", text.replace(", ", "+").replace("no ", "no-")).strip(".-") or "cell"
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def content(recipe: Recipe) -> str:
    """The recipe as text, without name, origin and seed, which do not distinguish cells."""
    tree = recipe.to_dict()
    return json.dumps({key: value for key, value in tree.items() if key not in ("name", "about", "seed")}, sort_keys=True)


def choose_folder(out: Path | None, source: str, base: Recipe) -> Path:
    """The given folder, or the first under runs/ that holds the same ablation, or a new one there."""
    if out is not None:
        return out.expanduser()
    for path in sorted(Path("runs").glob(f"*/{PLAN}")):
        with contextlib.suppress(UserError):  # unreadable: not the requested one
            plan = read_plan(path.parent)
            if (plan["source"], plan["base"]) == (absolute(source), content(base)):
                return path.parent
    return next_folder(source, f"{base.name}-ablation")


def absolute(source: str) -> str:
    path = os.path.expanduser(source)
    return os.path.abspath(path) if os.path.exists(path) else source


def open_ablation(folder: Path, source: str, cells: Sequence[Cell], seeds: Sequence[int]) -> Ablation:
    """Start in a new folder, or continue in one with the same base recipe; cells and seeds may be added there."""
    source, known = absolute(source), []
    if os.path.isdir(source) and Path(os.path.realpath(folder)).is_relative_to(Path(source).resolve()):
        raise UserError(f"{folder} is inside the data, where it would become a class: give another folder with --out.")
    reject_links(folder, re.compile("|".join(map(re.escape, [PLAN, *TABLES, *(cell.name for cell in cells)]))))
    for cell in cells:
        reject_links(folder / cell.name, WRITTEN)
    if (folder / PLAN).exists():
        plan = read_plan(folder)
        if (plan["source"], plan["base"]) != (source, content(cells[0].recipe)):
            raise UserError(f"{folder} holds the ablation of another recipe or other data: give another folder with --out.")
        known = [cell for cell in plan["cells"] if cell["name"] not in {each.name for each in cells}]
    else:
        check_empty(folder)
    listed = [{"name": cell.name, "changes": cell.changes} for cell in cells]
    write_json(folder / PLAN, {"source": source, "base": content(cells[0].recipe), "cells": [*listed, *known]})
    for cell in cells:
        write_recipe(folder / cell.name / "recipe.yaml", cell.recipe)
    return Ablation(folder, source, tuple(cells), tuple(seeds))


def read_plan(folder: Path) -> dict[str, Any]:
    try:
        plan: dict[str, Any] = read_json(folder / PLAN)
        if not {"source", "base", "cells"} <= plan.keys() or not all("name" in cell for cell in plan["cells"]):
            raise ValueError("it does not describe an ablation")
    except (ValueError, AttributeError, TypeError) as error:
        raise UserError(f"{folder / PLAN} cannot be read: {error}.") from None
    return plan


def run_ablation(ablation: Ablation, request: TrainRequest, log: Log) -> tuple[bool, list[str]]:
    """Train what is unfinished, one after the other; False if stopped, and a message for each training that failed.

    A training that another process runs at this moment is skipped.
    """
    if "RANK" in os.environ:
        raise UserError("An ablation runs in one process: start it without torchrun, or once per device with --device.")
    failed: list[str] = []
    pairs = ablation.unfinished()
    work = {cell.name: estimate_work(cell.recipe) for cell in ablation.cells}
    for number, (cell, seed) in enumerate(pairs, 1):
        folder = ablation.run_folder(cell, seed)
        if is_locked(folder):
            log(f"{cell.name}, seed {seed} is trained by another process")
            continue
        log(f"{cell.name}, seed {seed} ({number} of {len(pairs)})")
        try:
            explicit = dataclasses.replace(request, changes=request.changes | cell.changes).explicit_keys
            training = dataclasses.replace(
                request, source=ablation.source, recipe=cell.recipe, changes={}, explicit=explicit, out=None
            )
            others = [work[each.name] / work[cell.name] for each, _ in pairs[number:]]
            if not train_or_resume(folder, training, seed, others).finished:
                return False, failed
        except UserError as error:
            if is_locked(folder):  # since the check above, during the preparation of this training
                log(f"{cell.name}, seed {seed} is trained by another process")
                continue
            if not (folder / "run.json").exists() and number == 1:
                raise  # nothing has started, and the others would fail alike
            failed.append(f"{folder} failed: {error}")
            log(str(error))
    return True, failed


def is_locked(folder: Path) -> bool:
    """Whether another process trains in this folder."""
    try:
        import fcntl
    except ImportError:
        return False
    with contextlib.suppress(OSError), (folder / LOCK).open("r+") as file:  # not started, or a file system without locks
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return True
    return False


def tabulate(ablation: Ablation, metric: Metric, at: At) -> tuple[list[Row], list[str]]:
    """Compare the finished trainings and write the table; messages name unfinished ones."""
    folders = [ablation.run_folder(cell, seed) for cell in ablation.cells for seed in ablation.seeds]
    begun = [folder for folder in folders if (folder / "run.json").is_file()]
    results, messages = read_results(begun, metric, at) if begun else ([], [])
    results = [dataclasses.replace(result, origin=result.folder.parent.name) for result in results]
    groups, more = group_results(results, by_folder=True)
    rows = compare(groups)
    if rows[0].group.name != ablation.base.name:
        messages.append(f"No run of {ablation.base.name} is finished: differences are to {rows[0].group.name}.")
    text, image = to_markdown(rows, metric, at), draw_seed_plot(rows, metric, at)
    atomic_write_text(ablation.folder / "table.md", text)
    write_json(ablation.folder / "table.json", comparison_to_dict(rows, metric, at))
    atomic_write(ablation.folder / "table.png", lambda side: side.write_bytes(image))
    return rows, [*messages, *more]


def is_at_chance(rows: Sequence[Row], metric: Metric) -> bool:
    """Whether no mean is clearly better than guessing: the same class for every validation image."""
    if metric.name != "top1":
        return False
    run = read_run_json(rows[0].group.results[0].folder)
    data, baselines = run.get("data") or {}, run.get("baselines") or {}
    images, classes = data.get("validation"), data.get("classes")
    if not images or not classes:
        return False
    guessing = max(1 / len(classes), baselines.get("majority") or 0.0)
    return all(wilson(row.spread.mean, images)[0] <= guessing for row in rows)


def pick(rows: Sequence[Row], metric: Metric) -> Row:
    """The row with the best mean among those with most seeds; of equal ones the first, which is closest to the base."""
    if metric.name == "test":
        raise UserError("--pick must not choose by the test images: use a validation metric.")
    most = max(row.spread.n for row in rows)
    sign = 1 if metric.higher_is_better else -1
    return max((row for row in rows if row.spread.n == most), key=lambda row: sign * row.spread.mean)


def command_for(ablation: Ablation, recipe: str, base_changes: dict[str, Any], name: str) -> str:
    """The command that trains a cell."""
    cell = next(cell for cell in ablation.cells if cell.name == name)
    words = ["vitrail", "train", ablation.source, "--recipe", recipe]
    for key, value in (base_changes | cell.changes).items():
        words += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    return shlex.join(words)
