"""docs/evidence.md: every claim with what was published, its tables, the commands that train them, and what they say."""

import json
import shlex
import textwrap
from pathlib import Path
from typing import Any

from benchmarks.evidence.claims import CLAIMS, Claim
from benchmarks.evidence.findings import FINDINGS, UNRECORDED
from benchmarks.evidence.records import common, needs
from vitrail.evaluation.statistics import Difference, paired, summarize

RESULTS = Path(__file__).parent / "results"
HEAD = """# Evidence

Claims of the papers, tried again at a small scale: same budget, same recipe, several seeds. `python -m benchmarks.evidence run
CLAIM …` trains the cells of a claim, `… table` prints this page. Rows have the seeds 0, 1, 2, …; `benchmarks/evidence/results/`
has every run, with its changes and with its seconds, in which several trainings shared the GPU. Tables show mean ± standard
deviation of the seeds; the difference is to the first row, paired by seed; p is that of a paired t-test of this one difference,
which few seeds and many comparisons make a weak witness; operations are those of the network's products in a training. The
command below a table trains its rows anew, into the folder `again`, where data and files of these names lie in the current
folder; `… table --results again` prints what comes of it.
"""


def table(results: Path) -> str:
    lines = [HEAD]
    for name, claim in CLAIMS.items():
        file = results / f"{name.replace(' ', '-')}.json"
        if not file.exists():
            continue
        lines += [f"## {name.capitalize()}", "", wrap(claim.says), "", wrap(f"Published: {claim.paper}."), ""]
        runs = json.loads(file.read_text())["runs"]
        for alike in grouped(claim, runs):
            lines += section(name, claim, alike)
        # The sentences are about the results that are kept with the code, and may be wrong about others.
        if name in FINDINGS and results.resolve() == RESULTS.resolve():
            lines += [fill(FINDINGS[name], runs), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def grouped(claim: Claim, runs: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Runs that may stand in one table: the same length, data and common changes."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        key = json.dumps([run["epochs"], run["data"], common(claim, run)], sort_keys=True)
        groups.setdefault(key, []).append(run)
    return list(groups.values())


def section(name: str, claim: Claim, runs: list[dict[str, Any]]) -> list[str]:
    """A table of the cells that had the same budget, in the claim's order, and the commands that train them."""
    first, cells = runs[0], [cell for cell in claim.cells if any(run["cell"] == cell for run in runs)]
    prints = listed(f" (fingerprint {run['fingerprint']})" for run in runs if "fingerprint" in run)
    devices, torches = listed(run["device"] for run in runs), listed(run["versions"]["torch"] for run in runs)
    lines = [
        f"On {first['data']}{prints} at {first['size'][0]} pixels, {first['epochs']:g} epochs, judged on {first['images']:,} "
        f"images; {devices}, torch {torches}, commit {listed(run['versions']['commit'] for run in runs)}.",
        "",
        "| | parameters | top-1 | n | difference | p | operations |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for cell in cells:
        mine, some = accuracies(runs, cell), next(run for run in runs if run["cell"] == cell)
        spread = summarize(list(mine.values()))
        deviation = f" ± {spread.sd:.2f}" if spread.sd is not None else ""
        row = [cell, f"{some['parameters'] / 1e6:.1f} M", f"{spread.mean:.2f}{deviation}", str(len(mine)), "", ""]
        if cell != cells[0] and len(mine.keys() & accuracies(runs, cells[0]).keys()) > 1:
            test = between(runs, cells[0], cell)
            row[4:] = [f"{test.mean:+.2f}", "" if test.p is None else f"{test.p:.2g}"]
        lines.append("| " + " | ".join([*row, f"{some['operations'] / 1e15:.1f}e15"]) + " |")
    files = used_files(claim, runs)
    commands = [f"    {shlex.join(words)}" for words in command_lines(name, claim, runs, files)]
    return [*lines, "", *commands, "", *file_notes(name, files)]


def command_lines(name: str, claim: Claim, runs: list[dict[str, Any]], files: dict[str, Any]) -> list[list[str]]:
    """What to type for these rows: one command, or one for each number of seeds that cells have."""
    cells: dict[int, list[str]] = {}
    for cell in claim.cells:
        found = accuracies(runs, cell)
        if found:
            cells.setdefault(max(found) + 1, []).append(cell)
    commands = []
    for seeds, some in cells.items():
        words = ["python", "-m", "benchmarks.evidence", "run", name, "--data", runs[0]["data"]]
        words += ["--epochs", f"{runs[0]['epochs']:g}", "--seeds", f"{seeds}"]
        for option in files:
            if any(option in needs(claim, cell) for cell in some):
                words += [f"--{option}", files[option]["name"] if files[option] else UNRECORDED[name][0]]
        words += [f"--set={key}={value}" for key, value in common(claim, runs[0]).items()]
        words += ["--cells", *some] if len(some) < len(claim.cells) else []
        commands.append([*words, "--results", "again"])
    return commands


def used_files(claim: Claim, runs: list[dict[str, Any]]) -> dict[str, dict[str, Any] | None]:
    """By option the file that runs were given; None where they needed one and do not say which."""
    return {option: run.get("files", {}).get(option) for run in runs for option in needs(claim, run["cell"])}


def file_notes(name: str, files: dict[str, dict[str, Any] | None]) -> list[str]:
    lines = []
    for option, file in files.items():
        if file is None:
            lines += [wrap(f"These runs do not record what `--{option}` was: {UNRECORDED[name][1]}."), ""]
        elif file["sha256"]:
            lines += [f"`--{option} {file['name']}` has the SHA-256 {file['sha256'][:16]}….", ""]
    return lines


def fill(text: str, runs: list[dict[str, Any]]) -> str:
    """A finding with its numbers: `{p[a|b]}` and `{points[a|b]}` are of cell b against cell a."""
    filled = text.format(p=Field(runs, "p"), points=Field(runs, "mean"))
    return "\n\n".join(map(wrap, filled.strip().split("\n\n")))


def wrap(paragraph: str) -> str:
    return textwrap.fill(paragraph, 120, break_long_words=False, break_on_hyphens=False)


class Field:
    """A number of a comparison, by its key: `a|b`, at 15 epochs `a|b|15`; `a|b|5|15` is what changed from 5 to 15."""

    def __init__(self, runs: list[dict[str, Any]], what: str) -> None:
        self.runs, self.what = runs, what

    def __getitem__(self, key: str) -> float:
        first, second, *epochs = key.split("|")
        lengths = [float(length) for length in epochs] or sorted({run["epochs"] for run in self.runs})
        if len(epochs) < 2 and len(lengths) > 1:
            raise KeyError(f"{key} has to say at how many epochs")
        parts = [[run for run in self.runs if run["epochs"] == length] for length in lengths]
        if len(parts) == 1:
            return float(getattr(between(parts[0], first, second), self.what))
        before, after = ([gap for _, gap in sorted(gaps(part, first, second).items())] for part in parts)
        return float(getattr(paired(before, after), self.what))


def between(runs: list[dict[str, Any]], first: str, second: str) -> Difference:
    """Of the second cell to the first, paired by seed."""
    base, mine = accuracies(runs, first), accuracies(runs, second)
    seeds = sorted(base.keys() & mine.keys())
    return paired([base[seed] for seed in seeds], [mine[seed] for seed in seeds])


def gaps(runs: list[dict[str, Any]], first: str, second: str) -> dict[int, float]:
    base, mine = accuracies(runs, first), accuracies(runs, second)
    return {seed: mine[seed] - base[seed] for seed in base.keys() & mine.keys()}


def accuracies(runs: list[dict[str, Any]], cell: str) -> dict[int, float]:
    """By seed, in percent."""
    return {run["seed"]: 100 * run["top1"] for run in runs if run["cell"] == cell}


def listed(values: Any) -> str:
    return ", ".join(sorted(set(values)))
