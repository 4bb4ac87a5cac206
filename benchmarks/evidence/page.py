"""Writes docs/evidence.md: every claim with the published numbers, its tables, the commands that train them, and findings."""

import json
import shlex
import textwrap
from pathlib import Path
from typing import Any

from benchmarks.evidence.claims import CLAIMS, Claim
from benchmarks.evidence.findings import FINDINGS, UNRECORDED
from benchmarks.evidence.provenance import common, load_results, needs
from vitrail.evaluation.statistics import Difference, paired, summarize

RESULTS = Path(__file__).parent / "results"
HEAD = """# Evidence

Claims of the papers, tested at a small scale: the same number of epochs with labels, the same recipe, several seeds. Variants
with pre-training have further epochs without labels, which the text above their table names. `python -m benchmarks.evidence run
CLAIM …` trains the variants of a claim, `python -m benchmarks.evidence table` prints this page. Each row has the seeds 0, 1,
2, …; `benchmarks/evidence/results/` has every run with its changes of the recipe and its duration (several trainings shared
the GPU). Tables show mean ± standard deviation over seeds. The difference is to the first row, paired by seed; p is that of a
paired t-test of this one difference, which is weak evidence with few seeds and many comparisons. Operations are those of the
network's products in the whole training. The command below a table repeats its trainings with results in the directory
`again`, if data and files of these names are in the current directory; `python -m benchmarks.evidence table --results again`
prints the new tables.
"""


def table(results: Path) -> str:
    lines = [HEAD]
    for name, claim in CLAIMS.items():
        file = results / f"{name.replace(' ', '-')}.json"
        if not file.exists():
            continue
        lines += [f"## {name.capitalize()}", "", wrap(claim.text), "", wrap(f"Published: {claim.paper}."), ""]
        runs = load_results(file)["runs"]
        for group in grouped(claim, runs):
            lines += section(name, claim, group)
        # The findings describe the results stored in the repository, not others.
        if name in FINDINGS and results.resolve() == RESULTS.resolve():
            lines += [fill(FINDINGS[name], runs), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def grouped(claim: Claim, runs: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Groups of runs for one table each: the same length, data and common changes."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        key = json.dumps([run["epochs"], run["data"], common(claim, run)], sort_keys=True)
        groups.setdefault(key, []).append(run)
    return list(groups.values())


def section(name: str, claim: Claim, runs: list[dict[str, Any]]) -> list[str]:
    """A table of the variants with the same number of epochs, in the claim's order, and the commands that train them."""
    first, variants = runs[0], [name for name in claim.variants if any(run["cell"] == name for run in runs)]
    prints = join_distinct(f" (fingerprint {run['fingerprint']})" for run in runs if "fingerprint" in run)
    devices, torches = join_distinct(run["device"] for run in runs), join_distinct(run["versions"]["torch"] for run in runs)
    stages = [run["changes"].get("first", {}) for run in runs]
    further = join_distinct(f"{stage['own_epochs']:g}" for stage in stages if "own_epochs" in stage)
    lengths = f"{first['epochs']:g} epochs" + (f" with labels (pre-training: {further} epochs without)" if further else "")
    lines = [
        f"On {first['data']}{prints} at {first['size'][0]} pixels, {lengths}, evaluated on {first['images']:,} images; "
        f"{devices}, torch {torches}, commit {join_distinct(run['versions']['commit'] for run in runs)}.",
        "",
        "| | parameters | top-1 | n | difference | p | operations |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for variant in variants:
        values, run = accuracies(runs, variant), next(run for run in runs if run["cell"] == variant)
        summary = summarize(list(values.values()))
        deviation = f" ± {summary.sd:.2f}" if summary.sd is not None else ""
        row = [variant, f"{run['parameters'] / 1e6:.1f} M", f"{summary.mean:.2f}{deviation}", str(len(values)), "", ""]
        if variant != variants[0] and len(values.keys() & accuracies(runs, variants[0]).keys()) > 1:
            test = compare(runs, variants[0], variant)
            row[4:] = [f"{test.mean:+.2f}", "" if test.p is None else f"{test.p:.2g}"]
        lines.append("| " + " | ".join([*row, f"{run['operations'] / 1e15:.1f}e15"]) + " |")
    files = used_files(claim, runs)
    commands = [f"    {shlex.join(command)}" for command in command_lines(name, claim, runs, files)]
    return [*lines, "", *commands, "", *file_notes(name, files)]


def command_lines(name: str, claim: Claim, runs: list[dict[str, Any]], files: dict[str, Any]) -> list[list[str]]:
    """The command that trains these rows; several if variants have different numbers of seeds."""
    by_seeds: dict[int, list[str]] = {}
    for variant in claim.variants:
        seeds_of_variant = accuracies(runs, variant)
        if seeds_of_variant:
            by_seeds.setdefault(max(seeds_of_variant) + 1, []).append(variant)
    commands = []
    for seeds, variants in by_seeds.items():
        command = ["python", "-m", "benchmarks.evidence", "run", name, "--data", runs[0]["data"]]
        command += ["--epochs", f"{runs[0]['epochs']:g}", "--seeds", f"{seeds}"]
        for option in files:
            if any(option in needs(claim, variant) for variant in variants):
                command += [f"--{option}", files[option]["name"] if files[option] else UNRECORDED[name][0]]
        command += [f"--set={key}={value}" for key, value in common(claim, runs[0]).items()]
        command += ["--variants", *variants] if len(variants) < len(claim.variants) else []
        commands.append([*command, "--results", "again"])
    return commands


def used_files(claim: Claim, runs: list[dict[str, Any]]) -> dict[str, dict[str, Any] | None]:
    """The file of each option that the runs used; None if they do not record it."""
    return {option: run.get("files", {}).get(option) for run in runs for option in needs(claim, run["cell"])}


def file_notes(name: str, files: dict[str, dict[str, Any] | None]) -> list[str]:
    lines = []
    for option, file in files.items():
        if file is None:
            lines += [wrap(f"These runs do not record the `--{option}` file: {UNRECORDED[name][1]}."), ""]
        elif file["sha256"]:
            lines += [f"`--{option} {file['name']}` has the SHA-256 {file['sha256'][:16]}….", ""]
    return lines


def fill(text: str, runs: list[dict[str, Any]]) -> str:
    """A finding with its numbers: `{p[a|b]}` and `{points[a|b]}` compare variant b with variant a."""
    filled = text.format(p=Field(runs, "p"), points=Field(runs, "mean"))
    return "\n\n".join(map(wrap, filled.strip().split("\n\n")))


def wrap(paragraph: str) -> str:
    return textwrap.fill(paragraph, 120, break_long_words=False, break_on_hyphens=False)


class Field:
    """A number of a comparison by key: `a|b`, at 15 epochs `a|b|15`; `a|b|5|15` is the change from 5 to 15 epochs."""

    def __init__(self, runs: list[dict[str, Any]], name: str) -> None:
        self.runs, self.name = runs, name

    def __getitem__(self, key: str) -> float:
        first, second, *epochs = key.split("|")
        lengths = [float(length) for length in epochs] or sorted({run["epochs"] for run in self.runs})
        if len(epochs) < 2 and len(lengths) > 1:
            raise KeyError(f"{key} needs a number of epochs")
        parts = [[run for run in self.runs if run["epochs"] == length] for length in lengths]
        if len(parts) == 1:
            return float(getattr(compare(parts[0], first, second), self.name))
        before, after = ([value for _, value in sorted(seed_differences(part, first, second).items())] for part in parts)
        return float(getattr(paired(before, after), self.name))


def compare(runs: list[dict[str, Any]], first: str, second: str) -> Difference:
    """Difference of the second variant to the first, paired by seed."""
    base, other = accuracies(runs, first), accuracies(runs, second)
    seeds = sorted(base.keys() & other.keys())
    return paired([base[seed] for seed in seeds], [other[seed] for seed in seeds])


def seed_differences(runs: list[dict[str, Any]], first: str, second: str) -> dict[int, float]:
    base, other = accuracies(runs, first), accuracies(runs, second)
    return {seed: other[seed] - base[seed] for seed in base.keys() & other.keys()}


def accuracies(runs: list[dict[str, Any]], variant: str) -> dict[int, float]:
    """Top-1 accuracy in percent by seed."""
    return {run["seed"]: 100 * run["top1"] for run in runs if run["cell"] == variant}


def join_distinct(values: Any) -> str:
    return ", ".join(sorted(set(values)))
