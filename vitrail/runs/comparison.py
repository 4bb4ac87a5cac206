"""Compare finished runs: runs that differ only in their seed form a group, and groups are compared with the first one.

Runs of two groups with the same seed are paired: they start from the same weights and see the images in the same order, so that
their difference varies less than the two results do.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.errors import UserError
from vitrail.evaluation.statistics import Difference, Summary, holm, paired, summarize, welch
from vitrail.training.metrics import TOP1, Metric

IGNORED = re.compile(r"seed|name|about\..*")  # recipe keys that do not distinguish groups
SEED_FOLDER = re.compile(r"seed-\d+")


METRICS = {
    "top1": Metric("top1", "validation top-1", percent=True),
    "top5": Metric("top5", "validation top-5", percent=True),
    "knn": Metric("knn", "validation k-NN", percent=True),
    "agreement": Metric("agreement", "validation neighbor agreement", percent=True),
    "loss": Metric("loss", "validation loss", higher_is_better=False),
    "test": Metric("test", "test top-1", percent=True),
}
PRIMARY = "primary"  # the metric by which the runs chose their best weights


def find_metric(name: str, primary: Metric | None = None) -> Metric:
    """A metric by name; `primary` is that of the task, top-1 if not given."""
    primary = primary or TOP1
    if name in (PRIMARY, primary.name):
        return METRICS.get(primary.name, primary._replace(title=f"validation {primary.title}"))
    if name == "test":
        return primary._replace(name=name, title=f"test {primary.title}")
    if name.startswith("knn_"):  # at another column of labels
        return Metric(name, f"validation k-NN of {name.removeprefix('knn_')}", percent=True)
    if name not in METRICS:
        raise UserError(f"--metric {name} is not known; choose from {', '.join([PRIMARY, *METRICS])}.")
    return METRICS[name]


@dataclass(frozen=True)
class Result:
    """The result of one finished run."""

    folder: Path
    leaves: Mapping[str, Any]  # recipe values by dotted key
    data: str  # fingerprint of the images
    value: float
    origin: str = ""  # the path under which the user gave it

    @property
    def seed(self) -> int:
        return int(self.leaves["seed"])

    @property
    def content(self) -> str:
        """Data and recipe without the seed, as text: equal for the runs of a group."""
        kept = {name: value for name, value in self.leaves.items() if not IGNORED.fullmatch(name)}
        return json.dumps([self.data, kept], sort_keys=True)

    @property
    def home(self) -> Path:
        """The folder that names the group: the parent folder of seed-0, seed-1, …, otherwise the run directory."""
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
        """Results by seed; empty if several runs have the same seed."""
        values = {result.seed: result.value for result in self.results}
        return values if len(values) == len(self.results) else {}


@dataclass(frozen=True)
class Row:
    """A group compared with the first one; the first group itself has no difference."""

    group: Group
    spread: Summary
    changes: dict[str, tuple[Any, Any]]  # differing recipe keys: values of the first group and of this one
    difference: Difference | None = None
    p_holm: float | None = None


def group_results(results: Sequence[Result], by_folder: bool = False) -> tuple[list[Group], list[str]]:
    """Groups in the order of their first results, and messages about ignored results.

    Of runs with the same recipe, data and seed only the first counts: the others are not independent samples.
    """
    seen: dict[tuple[str, int], Path] = {}
    messages: list[str] = []
    members: dict[str, list[Result]] = {}
    for result in results:
        key = (result.content, result.seed)
        if key in seen:
            messages.append(f"{result.folder} is ignored: {seen[key]} has the same recipe, data and seed.")
            continue
        seen[key] = result.folder
        members.setdefault(result.origin if by_folder else result.content, []).append(result)
    parts = list(members.values())
    names = [part[0].origin for part in parts] if by_folder else group_names([[result.home for result in part] for part in parts])
    return [Group(name, tuple(part)) for name, part in zip(names, parts, strict=True)], messages


def group_names(homes: Sequence[Sequence[Path]]) -> list[str]:
    """A unique short name for each group: the folder name, with as many parent folders as needed."""
    paths = [part[0].absolute().parts for part in homes]
    lengths = range(1, 1 + max(map(len, paths), default=0))
    candidates = (["/".join(parts[-length:]) for parts in paths] for length in lengths)
    names = next((each for each in candidates if len(set(each)) == len(each)), None)
    if names is None:  # several recipes in one folder
        names = [f"{parts[-1]} ({number})" for number, parts in enumerate(paths, 1)]
    return [name + (" …" if len(set(part)) > 1 else "") for name, part in zip(names, homes, strict=True)]


def compare(groups: Sequence[Group]) -> list[Row]:
    """Statistics of every group, and from the second on its difference to the first."""
    if not groups:
        raise UserError("There is no finished run to compare.")
    first, *others = groups
    differences = [difference(first, group) for group in others]
    adjusted = holm([each.p for each in differences])
    rows = [Row(first, summarize(first.values), {})]
    for group, each, p in zip(others, differences, adjusted, strict=True):
        rows.append(Row(group, summarize(group.values), changes(first, group), each, p))
    return rows


def difference(first: Group, second: Group) -> Difference:
    """Paired t-test if at least half of the smaller group has a partner with the same seed, otherwise Welch's t-test."""
    ours, theirs = first.by_seed, second.by_seed
    common = sorted(ours.keys() & theirs.keys())
    smaller = min(len(ours), len(theirs))
    if 2 * len(common) >= smaller and (len(common) >= 2 or len(common) == smaller > 0):
        return paired([ours[seed] for seed in common], [theirs[seed] for seed in common])
    return welch(first.values, second.values)


def changes(first: Group, second: Group) -> dict[str, tuple[Any, Any]]:
    """Recipe keys in which two groups differ; of a group with several recipes the first is used."""
    before, after = first.results[0].leaves, second.results[0].leaves
    return {
        key: (before.get(key), after.get(key))
        for key in dict.fromkeys([*before, *after])
        if not IGNORED.fullmatch(key) and before.get(key) != after.get(key)
    }


def comparison_to_dict(rows: Sequence[Row], metric: Metric, at: str) -> dict[str, Any]:
    """The comparison as JSON values; accuracies are fractions of 1."""
    return {
        "metric": metric.name,
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
    """The column headers of the table."""
    names = ["group", "n", "mean", "sd", "95 % interval"]
    if len(rows) > 1:
        names += ["difference", "95 % interval", "p"]
    return [*names, "p (Holm)"] if len(rows) > 2 else names


def cells(row: Row, measure: Metric, count: int) -> list[str]:
    """The cells of a row in a table of `count` groups; undefined values are empty."""
    spread, other = row.spread, row.difference
    texts = [row.group.name, str(spread.n), measure.show(spread.mean), measure.show(spread.sd)]
    texts.append(measure.show_interval(spread.low, spread.high))
    if other is not None:
        texts += [measure.show(other.mean, signed=True), signed_interval(other, measure)]
        texts += [format_p(other.p), format_p(row.p_holm)]
    return [*texts, *[""] * 4][: 5 if count == 1 else 8 if count == 2 else 9]


def signed_interval(other: Difference, measure: Metric) -> str:
    return "" if other.low is None else f"{measure.show(other.low, signed=True)} to {measure.show(other.high, signed=True)}"


def format_p(p: float | None) -> str:
    return "" if p is None else f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"


def describe_changes(row: Row) -> str:
    """Recipe changes of a group relative to the first: "mixing.mixup 0.8 -> 0.0"."""
    pairs = (f"{name} {show(before)} -> {show(after)}" for name, (before, after) in row.changes.items())
    return ", ".join(pairs) or "the same recipe"


def show(value: Any) -> str:
    return "unset" if value is None else value if isinstance(value, str) and value else json.dumps(value)


def footnote(rows: Sequence[Row]) -> str:
    """The tests behind the p-values, and the groups of which only some seeds are compared."""
    first = rows[0]
    differing = [(row, row.difference) for row in rows if row.difference is not None]
    tested = [(row, each) for row, each in differing if each.test != "none"]
    partial = [
        row.group.name
        for row, each in tested or differing
        if each.test != "Welch t" and each.n < max(first.spread.n, row.spread.n)
    ]
    if not tested:
        return f"{', '.join(partial)}: differences to {first.group.name} over the common seeds only." if partial else ""
    descriptions = {"paired t": "paired t-test by seed", "Welch t": "Welch's t-test (different seeds)"}
    tests = dict.fromkeys(descriptions[each.test] for _, each in tested)
    text = f"Differences are to {first.group.name}; p: {'; '.join(tests)}; two-sided."
    return text + (f" {', '.join(partial)}: only the common seeds are paired." if partial else "")


def to_markdown(rows: Sequence[Row], metric: Metric, at: str) -> str:
    """The comparison as a Markdown table, followed by the recipe changes of each group."""
    heads = columns(rows)
    lines = [f"{title(metric, at)}, sd over seeds.", ""]
    lines += ["| " + " | ".join(heads) + " |", "| --- |" + " ---: |" * (len(heads) - 1)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells(row, metric, len(rows))) + " |" for row in rows]
    note = footnote(rows)
    lines += ["", note] if note else []
    lines += ["", *(f"* {row.group.name}: {describe_changes(row)}" for row in rows[1:])] if len(rows) > 1 else []
    return "\n".join(lines) + "\n"


def title(metric: Metric, at: str) -> str:
    when = "of the best weights" if at == "best" else "of the last step"
    return f"{metric.title[0].upper()}{metric.title[1:]} {when}{', %' if metric.percent else ''}"
