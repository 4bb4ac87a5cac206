"""Several trainings side by side: those that differ only by their seed are one group, and groups are compared with the first.

Where two groups have seeds in common the trainings of a seed are a pair: they start from the same weights and see the images in
the same order, so that their difference says more than the two numbers do.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.errors import UserError
from vitrail.evaluation.statistics import Difference, Spread, holm, paired, summarize, welch

NO_MATTER = re.compile(r"seed|name|about\..*")  # leaves of a recipe that do not make it another training, or only by chance
SEED_FOLDER = re.compile(r"seed-\d+")


class Measure(NamedTuple):
    """A number that trainings are compared by."""

    title: str
    percent: bool = True
    higher_is_better: bool = True

    def show(self, value: float | None, signed: bool = False) -> str:
        """With the digits that matter; shares as percent, without the sign."""
        if value is None:
            return ""
        sign = "+" if signed else ""
        return f"{100 * value:{sign}.2f}" if self.percent else f"{value:{sign}.4f}"


MEASURES = {
    "top1": Measure("validation top-1"),
    "top5": Measure("validation top-5"),
    "loss": Measure("validation loss", percent=False, higher_is_better=False),
    "test": Measure("test top-1"),
}


@dataclass(frozen=True)
class Result:
    """What one finished training has reached."""

    folder: Path
    leaves: Mapping[str, Any]  # of its recipe
    data: str  # the fingerprint of its images
    value: float
    origin: str = ""  # what the user has called it by

    @property
    def seed(self) -> int:
        return int(self.leaves["seed"])

    @property
    def content(self) -> str:
        """What two trainings have in common that differ by chance alone."""
        kept = {name: value for name, value in self.leaves.items() if not NO_MATTER.fullmatch(name)}
        return json.dumps([self.data, kept], sort_keys=True)

    @property
    def home(self) -> Path:
        """The folder that its group may be called by: that of the seeds, where seeds have folders."""
        return self.folder.parent if SEED_FOLDER.fullmatch(self.folder.name) else self.folder


@dataclass(frozen=True)
class Group:
    name: str
    results: tuple[Result, ...]

    @property
    def values(self) -> list[float]:
        return [result.value for result in self.results]

    @property
    def by_seed(self) -> dict[int, float]:
        """Empty where a seed stands for more than one training."""
        found = {result.seed: result.value for result in self.results}
        return found if len(found) == len(self.results) else {}


@dataclass(frozen=True)
class Row:
    """A group beside the first one, which itself has no difference."""

    group: Group
    spread: Spread
    changes: dict[str, tuple[Any, Any]]  # leaves that differ: the first group's value and this one's
    difference: Difference | None = None
    p_holm: float | None = None


def group_results(results: Sequence[Result], by_folder: bool = False) -> tuple[list[Group], list[str]]:
    """Groups in the order of their first results, and sentences on results that are left out.

    The same recipe with the same seed is the same training again, not one more draw.
    """
    seen: dict[tuple[str, int], Path] = {}
    said: list[str] = []
    members: dict[str, list[Result]] = {}
    for result in results:
        key = (result.content, result.seed)
        if key in seen:
            said.append(f"{result.folder} is left out: {seen[key]} is the same training with the same seed.")
            continue
        seen[key] = result.folder
        members.setdefault(result.origin if by_folder else result.content, []).append(result)
    parts = list(members.values())
    names = [part[0].origin for part in parts] if by_folder else names_of([[result.home for result in part] for part in parts])
    return [Group(name, tuple(part)) for name, part in zip(names, parts, strict=True)], said


def names_of(homes: Sequence[Sequence[Path]]) -> list[str]:
    """A short name for each group, no two alike: folders' names, with as much of the path before them as it takes."""
    paths = [part[0].absolute().parts for part in homes]
    lengths = range(1, 1 + max(map(len, paths), default=0))
    tries = (["/".join(parts[-length:]) for parts in paths] for length in lengths)
    names = next((each for each in tries if len(set(each)) == len(each)), None)
    if names is None:  # one folder with several recipes
        names = [f"{parts[-1]} ({number})" for number, parts in enumerate(paths, 1)]
    return [name + (" …" if len(set(part)) > 1 else "") for name, part in zip(names, homes, strict=True)]


def compare(groups: Sequence[Group]) -> list[Row]:
    """Every group with its spread, and from the second on with its difference to the first."""
    if not groups:
        raise UserError("There is no finished training to compare.")
    first, *others = groups
    differences = [difference(first, group) for group in others]
    raised = holm([each.p for each in differences])
    rows = [Row(first, summarize(first.values), {})]
    for group, each, p in zip(others, differences, raised, strict=True):
        rows.append(Row(group, summarize(group.values), changes(first, group), each, p))
    return rows


def difference(first: Group, second: Group) -> Difference:
    """Paired by seed where at least half of the smaller group has a partner, Welch's otherwise."""
    ours, theirs = first.by_seed, second.by_seed
    common = sorted(ours.keys() & theirs.keys())
    smaller = min(len(ours), len(theirs))
    if 2 * len(common) >= smaller and (len(common) >= 2 or len(common) == smaller > 0):
        return paired([ours[seed] for seed in common], [theirs[seed] for seed in common])
    return welch(first.values, second.values)


def changes(first: Group, second: Group) -> dict[str, tuple[Any, Any]]:
    """Leaves in which the recipes of two groups differ; a group with several recipes is spoken for by its first."""
    ours, theirs = first.results[0].leaves, second.results[0].leaves
    found = {}
    for name in dict.fromkeys([*ours, *theirs]):
        if not NO_MATTER.fullmatch(name) and ours.get(name) != theirs.get(name):
            found[name] = (ours.get(name), theirs.get(name))
    return found


def as_dict(rows: Sequence[Row], metric: str, at: str) -> dict[str, Any]:
    """Everything, as JSON has it; shares of 1."""
    return {
        "metric": metric,
        "at": at,
        "confidence": 0.95,
        "groups": [
            {
                "name": row.group.name,
                **row.spread._asdict(),
                "runs": [
                    {"folder": str(result.folder), "seed": result.seed, "value": result.value} for result in row.group.results
                ],
                "changes": {name: list(pair) for name, pair in row.changes.items()},
                "difference": row.difference and row.difference._asdict() | {"p_holm": row.p_holm},
            }
            for row in rows
        ],
    }


def columns(rows: Sequence[Row]) -> list[str]:
    """The heads of the table, whose lines are `cells`."""
    found = ["group", "n", "mean", "sd", "95 % interval"]
    if len(rows) > 1:
        found += ["difference", "95 % interval", "p"]
    return [*found, "p (Holm)"] if len(rows) > 2 else found


def cells(row: Row, measure: Measure, count: int) -> list[str]:
    """A line of the table for `count` groups; what cannot be told is empty."""
    spread, other = row.spread, row.difference
    found = [row.group.name, str(spread.n), measure.show(spread.mean), measure.show(spread.sd)]
    found.append(interval(spread.low, spread.high, measure))
    if other is not None:
        found += [measure.show(other.mean, signed=True), interval(other.low, other.high, measure, signed=True)]
        found += [chance(other.p), chance(row.p_holm)]
    return [*found, *[""] * 4][: 5 if count == 1 else 8 if count == 2 else 9]


def interval(low: float | None, high: float | None, measure: Measure, signed: bool = False) -> str:
    return "" if low is None else f"{measure.show(low, signed)} to {measure.show(high, signed)}"


def chance(p: float | None) -> str:
    return "" if p is None else f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"


def in_words(row: Row) -> str:
    """What a group has changed: "mixing.mixup 0.8 -> 0.0"."""
    pairs = (f"{name} {show(before)} -> {show(after)}" for name, (before, after) in row.changes.items())
    return ", ".join(pairs) or "the same recipe"


def show(value: Any) -> str:
    return "unset" if value is None else value if isinstance(value, str) and value else json.dumps(value)


def footnote(rows: Sequence[Row]) -> str:
    """Which tests the p-values are of."""
    differing = [(row, row.difference) for row in rows if row.difference is not None]
    tested = [(row, each) for row, each in differing if each.test != "none"]
    if not tested:
        fewer = [row.group.name for row, each in differing if each.n < max(rows[0].spread.n, row.spread.n)]
        return (
            f"Differences of {', '.join(fewer)} to {rows[0].group.name} are those of the seeds that both have." if fewer else ""
        )
    words = {"paired t": "paired t-test by seed", "Welch t": "Welch's t-test, the seeds being others"}
    tests = dict.fromkeys(words[each.test] for _, each in tested)
    found = f"Differences are to {rows[0].group.name}; p: {'; '.join(tests)}; two-sided."
    most = rows[0].spread.n
    some = [row.group.name for row, each in tested if each.test == "paired t" and each.n < max(most, row.spread.n)]
    return found + (f" Of {', '.join(some)} only the seeds that both have are paired." if some else "")


def as_markdown(rows: Sequence[Row], metric: str, at: str) -> str:
    """A table to paste, and under it what each group has changed."""
    measure, heads = MEASURES[metric], columns(rows)
    lines = [f"{title(metric, at)}, sd over seeds.", ""]
    lines += ["| " + " | ".join(heads) + " |", "| --- |" + " ---: |" * (len(heads) - 1)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells(row, measure, len(rows))) + " |" for row in rows]
    note = footnote(rows)
    lines += ["", note] if note else []
    lines += ["", *(f"* {row.group.name}: {in_words(row)}" for row in rows[1:])] if len(rows) > 1 else []
    return "\n".join(lines) + "\n"


def title(metric: str, at: str) -> str:
    measure = MEASURES[metric]
    when = "of the best weights" if at == "best" else "of the last step"
    return f"{measure.title[0].upper()}{measure.title[1:]} {when}{', %' if measure.percent else ''}"
