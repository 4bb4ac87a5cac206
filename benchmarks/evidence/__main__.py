"""Try a claim: train its cells, several seeds each, in one process; or print the table of all that has been tried.

    python -m benchmarks.evidence run distillation --data cifar10/ --teacher cifar10_resnet56.pt --seeds 3 --epochs 20
    python -m benchmarks.evidence table > docs/evidence.md

Results go to benchmarks/evidence/results/CLAIM.json, run by run: what is there already is not trained again.
"""

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

import vitrail
from benchmarks.evidence.claims import CLAIMS, Claim
from vitrail.evaluation.spread import paired, summarise
from vitrail.version import __version__
from vitrail.writing import write_aside

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("table", help="print docs/evidence.md")
    run = commands.add_parser("run", help="train the cells of a claim")
    run.add_argument("claim", choices=list(CLAIMS))
    run.add_argument("--data", required=True)
    run.add_argument("--epochs", type=float, required=True)
    run.add_argument("--seeds", type=int, default=3)
    run.add_argument("--cells", nargs="*", help="only these")
    run.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of all cells")
    run.add_argument("--runs", type=Path, default=Path("runs/evidence"))
    run.add_argument("--results", type=Path, default=RESULTS)
    for name in ("teacher", "labels", "weights"):
        run.add_argument(f"--{name}", default="")
    options = parser.parse_args()
    if options.command == "table":
        print(table(), end="")
    else:
        attempt(options)


def attempt(options: argparse.Namespace) -> None:
    claim, file = CLAIMS[options.claim], options.results / f"{options.claim.replace(' ', '-')}.json"
    content = json.loads(file.read_text()) if file.exists() else {"claim": options.claim, "runs": []}
    done = {(run["cell"], run["seed"]) for run in content["runs"]}
    given = {name: getattr(options, name) for name in ("teacher", "labels", "weights")}
    more = dict(pair.split("=", 1) for pair in options.set)
    for seed in range(options.seeds):
        for cell in options.cells or claim.cells:
            if (cell, seed) in done:
                continue
            content["runs"].append(one(claim, cell, seed, options, given, more))
            text = json.dumps(content, indent=1)
            options.results.mkdir(parents=True, exist_ok=True)
            write_aside(file, lambda side, text=text: side.write_text(text))
            print(json.dumps(content["runs"][-1]), flush=True)


def one(claim: Claim, cell: str, seed: int, options: argparse.Namespace, given: dict[str, str], more: dict[str, str]) -> dict:
    changes: dict[str, Any] = claim.base | claim.cells[cell] | more
    changes = {key: value.format(**given) if isinstance(value, str) else value for key, value in changes.items()}
    changes |= {"seed": seed, "schedule.length": f"{options.epochs:g} epochs", "testing.every": "100%"}
    folder = options.runs / options.claim.replace(" ", "-") / f"{cell.replace(' ', '-')}-{seed}"
    start = time.time()
    run = vitrail.train(options.data, claim.recipe, out=folder, changes=changes)
    facts = json.loads((folder / "run.json").read_text())
    return {
        "cell": cell,
        "seed": seed,
        "top1": run.best["top1"],
        "pictures": run.best["pictures"],
        "epochs": options.epochs,
        "parameters": facts["model"]["parameters"],
        "seconds": round(time.time() - start, 1),
        "device": facts["machine"]["device"],
        "versions": {"vitrail": __version__, "torch": torch.__version__, "commit": commit()},
        "data": facts["data"]["name"],
        "changes": {key: value for key, value in changes.items() if key not in ("seed", "schedule.length", "testing.every")},
    }


def commit() -> str:
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def table() -> str:
    lines = ["# Evidence", "", "Claims of the papers, tried again at a small scale: same budget, same recipe, several seeds."]
    lines += ["`python -m benchmarks.evidence run CLAIM …` trains a row's cells, `… table` prints this page.", ""]
    for name, claim in CLAIMS.items():
        file = RESULTS / f"{name.replace(' ', '-')}.json"
        if file.exists():
            lines += section(name, claim, json.loads(file.read_text())["runs"])
    return "\n".join(lines) + "\n"


def section(name: str, claim: Claim, runs: list[dict[str, Any]]) -> list[str]:
    lines = [f"## {name.capitalize()}", "", claim.says, "", f"Published: {claim.paper}.", ""]
    first = runs[0]
    lines += [f"Tried on {claim.data}, {first['epochs']:g} epochs, {first['device']}, torch {first['versions']['torch']}:", ""]
    lines += ["| cell | parameters | top-1 | n | against the first | p |", "| --- | --- | --- | --- | --- | --- |"]
    base = {run["seed"]: 100 * run["top1"] for run in runs if run["cell"] == first["cell"]}
    for cell in dict.fromkeys(run["cell"] for run in runs):
        mine = {run["seed"]: 100 * run["top1"] for run in runs if run["cell"] == cell}
        size = next(run["parameters"] for run in runs if run["cell"] == cell)
        spread, common = summarise(list(mine.values())), sorted(mine.keys() & base.keys())
        row = [
            cell,
            f"{size / 1e6:.1f} M",
            f"{spread.mean:.2f}" + (f" ± {spread.sd:.2f}" if spread.sd is not None else ""),
            str(len(mine)),
        ]
        if cell != first["cell"] and len(common) > 1:
            test = paired([mine[seed] for seed in common], [base[seed] for seed in common])
            row += [f"{test.mean:+.2f}", "" if test.p is None else f"{test.p:.2g}"]
        lines.append("| " + " | ".join([*row, "", ""][:6]) + " |")
    return [*lines, ""]


if __name__ == "__main__":
    main()
