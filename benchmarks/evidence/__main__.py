"""Try claims: train their cells, several seeds each, in one process; or print the table of all that has been tried.

    python -m benchmarks.evidence run layerscale parallel --data cifar10/ --seeds 3 --epochs 15
    python -m benchmarks.evidence run distillation --data cifar10/ --teacher cifar10_resnet56.pt --seeds 3 --epochs 15
    python -m benchmarks.evidence table > docs/evidence.md

Results go to benchmarks/evidence/results/CLAIM.json, run by run: what is there already is not trained again.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.evidence.claims import CLAIMS, Claim
from benchmarks.evidence.findings import FINDINGS
from benchmarks.evidence.running import Pictures, attempt
from vitrail.evaluation.spread import paired, summarise

RESULTS = Path(__file__).parent / "results"


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    table_parser = commands.add_parser("table", help="print docs/evidence.md")
    run = commands.add_parser("run", help="train the cells of claims")
    run.add_argument("claims", nargs="+", choices=list(CLAIMS))
    run.add_argument("--data", required=True)
    run.add_argument("--epochs", type=float, required=True)
    run.add_argument("--seeds", type=int, default=3)
    run.add_argument("--cells", nargs="*", help="only these")
    run.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of all cells")
    run.add_argument("--device")
    for name in ("teacher", "labels", "weights"):
        run.add_argument(f"--{name}", default="")
    for command in (table_parser, run):
        command.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(words)
    if options.command == "table":
        print(table(options.results), end="")
        return
    pictures = Pictures(options.data, options.device)
    for name in options.claims:
        attempt(name, CLAIMS[name], pictures, options, lambda sentence: print(sentence, file=sys.stderr, flush=True))


def table(results: Path) -> str:
    lines = ["# Evidence", "", "Claims of the papers, tried again at a small scale: same budget, same recipe, several seeds."]
    lines += [
        "`python -m benchmarks.evidence run CLAIM …` trains the cells of a claim, `… table` prints this page. Rows have the"
    ]
    lines += [
        "seeds 0, 1, 2, …; `benchmarks/evidence/results/` has every run, with its changes and with its seconds, in which several"
    ]
    lines += ["trainings shared the GPU.", ""]
    for name, claim in CLAIMS.items():
        file = results / f"{name.replace(' ', '-')}.json"
        if not file.exists():
            continue
        lines += [f"## {name.capitalize()}", "", claim.says, "", f"Published: {claim.paper}.", ""]
        runs = json.loads(file.read_text())["runs"]
        for epochs in dict.fromkeys(run["epochs"] for run in runs):
            lines += section(claim, [run for run in runs if run["epochs"] == epochs])
        lines += [FINDINGS[name].strip(), ""] if name in FINDINGS else []
    return "\n".join(lines).rstrip("\n") + "\n"


def section(claim: Claim, runs: list[dict[str, Any]]) -> list[str]:
    """A table of the cells that had the same budget, in the claim's order."""
    first, cells = runs[0], [cell for cell in claim.cells if any(run["cell"] == cell for run in runs)]
    commits = ", ".join(sorted({run["versions"]["commit"] for run in runs}))
    lines = [
        f"On {first['data']} at {first['size'][0]} pixels, {first['epochs']:g} epochs, judged on {first['pictures']:,} pictures;",
        f"{first['device']}, torch {first['versions']['torch']}, commit {commits}. Mean ± standard deviation of the seeds; the",
        "difference is to the first row, paired by seed; operations are those of the network's products in a training.",
        "",
        "| | parameters | top-1 | n | difference | p | operations |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    base = accuracies(runs, cells[0])
    for cell in cells:
        mine, some = accuracies(runs, cell), next(run for run in runs if run["cell"] == cell)
        spread, common = summarise(list(mine.values())), sorted(mine.keys() & base.keys())
        deviation = f" ± {spread.sd:.2f}" if spread.sd is not None else ""
        row = [cell, f"{some['parameters'] / 1e6:.1f} M", f"{spread.mean:.2f}{deviation}", str(len(mine)), "", ""]
        if cell != cells[0] and len(common) > 1:
            test = paired([base[seed] for seed in common], [mine[seed] for seed in common])
            row[4:] = [f"{test.mean:+.2f}", "" if test.p is None else f"{test.p:.2g}"]
        lines.append("| " + " | ".join([*row, f"{some['operations'] / 1e15:.1f}e15"]) + " |")
    return [*lines, ""]


def accuracies(runs: list[dict[str, Any]], cell: str) -> dict[int, float]:
    """By seed, in percent."""
    return {run["seed"]: 100 * run["top1"] for run in runs if run["cell"] == cell}


if __name__ == "__main__":
    main()
