"""Trainings of our own that the documentation speaks of: keep what a run says of itself, or print the table of all that are kept.

    python -m benchmarks.default_recipes keep RUN vitrail_small --data tiny-imagenet
    python -m benchmarks.default_recipes table tiny-imagenet

A kept run (`results/DATA-NAME.json`) has its command, recipe, versions, commit, machine, seed, seconds and all its validations.
It is not replaced without `--replace`.
"""

import argparse
import json
import re
import statistics
from pathlib import Path
from typing import Any

from benchmarks.asking import run_program
from vitrail.atomic_files import write_aside
from vitrail.errors import UserError
from vitrail.runs.report import device_words, read_run
from vitrail.training.metrics import read_metrics

RESULTS = Path(__file__).parent / "results"
NEEDED = ("command", "source", "recipe", "model", "data", "seconds", "steps")
ENDS = ("seconds", "steps")  # a run is told them when it is over
ASKED = ("model", "versions", "git", "started", "seconds", "steps")
COLUMNS = ("run", "parameters", "multiply-adds", "epochs", "top-1 at the end", "best", "minutes", "images/s", "fastest", "MFU")


def main(words: list[str] | None = None) -> None:
    program = "python -m benchmarks.default_recipes"
    parser = argparse.ArgumentParser(program, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    keep_parser = commands.add_parser("keep", help="read a finished run")
    keep_parser.add_argument("run", type=Path)
    keep_parser.add_argument("name")
    keep_parser.add_argument("--data", required=True, help="what the documentation calls the data")
    keep_parser.add_argument("--replace", action="store_true", help="a run that was kept under this name")
    table_parser = commands.add_parser("table", help="print kept runs in Markdown")
    table_parser.add_argument("data")
    options = parser.parse_args(words)
    if options.command == "table":
        print(table(options.data), end="")
        return
    for what, word in (("name", options.name), ("--data", options.data)):
        if not re.fullmatch(r"\w+([.-]\w+)*", word):
            raise UserError(
                f"The {what} {word!r} becomes part of a file's name: give letters and digits, with -, _ or . between them."
            )
    path = RESULTS / f"{options.data}-{options.name}.json"
    if path.exists() and not options.replace:
        raise UserError(f"There is a {path.name} already: give another name, or --replace.")
    text = json.dumps(kept(options.run, options.name, options.data), indent=1, ensure_ascii=False)
    write_aside(path, lambda aside: aside.write_text(text + "\n", encoding="utf-8"))


def kept(folder: Path, name: str, data: str) -> dict[str, Any]:
    """What of a run is worth keeping, without the paths of the machine that it ran on."""
    run = read_run(folder)
    missing = next((key for key in NEEDED if not run.get(key)), None)
    if missing in ENDS:
        raise UserError(f"{folder} is a run that has not come to its end: finish it with `vitrail resume {folder}`.")
    if missing or "batch" not in run["recipe"]:
        raise UserError(f"{folder / 'run.json'} does not describe a training: it has no {missing or 'batch'}.")
    command = re.sub(r" --out \S+", "", run["command"]).replace(str(run["source"]), f"{data}/")
    command = re.sub(r"=/\S*/(\w+)", r"=\1", command)
    recipe = json.loads(re.sub(r'"/[^"]*/([^"/]+)"', r'"\1"', json.dumps(run["recipe"])))
    lines = list(read_metrics(folder))
    speeds = [line["speed"] for line in lines if line["kind"] == "train"]
    speeds = speeds[1:] or speeds  # the first has the compiling in it
    validations = [line for line in lines if line["kind"] == "validation"]
    if not validations:
        raise UserError(f"{folder} has no validations in its metrics.jsonl: there is nothing to keep.")
    return {
        "name": name,
        "command": command,
        **{key: run.get(key) for key in ASKED},
        "device": device_words(run),
        "recipe": {key: value for key, value in recipe.items() if key != "about"},
        "data": {key: run["data"].get(key) for key in ("train", "validation", "fingerprint")} | {"name": data},
        "images_per_second": run["steps"] * run["recipe"]["batch"] / run["seconds"],
        "fastest_images_per_second": nearly_most([speed["images_per_second"] for speed in speeds]),
        "fastest_flops_share": nearly_most([speed.get("flops_share", 0.0) for speed in speeds]),
        "validations": [
            {key: line[key] for key in ("epoch", "top1", "top5", "loss") if line.get(key) is not None} for line in validations
        ],
    }


def nearly_most(values: list[float]) -> float:
    """More than nineteen of twenty."""
    return statistics.quantiles(values, n=20)[-1] if len(values) > 1 else max(values, default=0.0)


def table(data: str) -> str:
    """The runs on a data set, the best first."""
    runs: dict[str, list[tuple[float, str]]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        try:
            run = json.loads(path.read_text(encoding="utf-8"))
            runs.setdefault(run["data"]["name"], []).append((run["validations"][-1]["top1"], row(run)))
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            raise UserError(f"{path} is not a run that was kept here: take it away.") from None
    if data not in runs:
        known = ", ".join(sorted(runs)) or "nothing yet"
        raise UserError(f"No run on {data!r} was kept; there are runs on {known}.")
    lines = ["| " + " | ".join(COLUMNS) + " |", "| --- " * len(COLUMNS) + "|"]
    lines += [text for _, text in sorted(runs[data], key=lambda pair: -pair[0])]
    return "\n".join(lines) + "\n"


def row(run: dict[str, Any]) -> str:
    """In Markdown."""
    end, best = run["validations"][-1], max(each["top1"] for each in run["validations"])
    model, share = run["model"], run["fastest_flops_share"]
    cells = [f"`{run['name']}`", f"{model['parameters'] / 1e6:.1f} M", f"{model['macs'] / 1e9:.2f} G", f"{end['epoch']:.0f}"]
    cells += [f"{end['top1']:.2%}", f"{best:.2%} of {len(run['validations'])}", f"{run['seconds'] / 60:.1f}"]
    cells += [f"{run['images_per_second']:,.0f}", f"{run['fastest_images_per_second']:,.0f}", f"{share:.0%}" if share else ""]
    return f"| {' | '.join(cells)} |".replace("%", " %")


if __name__ == "__main__":
    run_program(main)
