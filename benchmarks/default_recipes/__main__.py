"""Runs of the default recipes in the documentation: store the results of a run, or print a table of all stored runs.

    python -m benchmarks.default_recipes keep RUN vitrail_small --data tiny-imagenet
    python -m benchmarks.default_recipes table tiny-imagenet

A stored run (`results/DATA-NAME.json`) has its command, recipe, versions, commit, machine, seed, seconds and all validations.
It is not replaced without `--replace`.
"""

import argparse
import json
import re
import statistics
from pathlib import Path
from typing import Any

from benchmarks.arguments import run_program
from vitrail.aliases import upgrade_run
from vitrail.atomic_files import atomic_write
from vitrail.errors import UserError
from vitrail.runs.report import format_device
from vitrail.runs.run_json import read_run_info
from vitrail.training.metrics import read_metrics

RESULTS = Path(__file__).parent / "results"
REQUIRED = ("command", "source", "recipe", "model", "data", "seconds", "steps")
WRITTEN_AT_END = ("seconds", "steps")
COPIED = ("model", "versions", "git", "started", "seconds", "steps")
COLUMNS = ("run", "parameters", "multiply-adds", "epochs", "top-1 at the end", "best", "minutes", "images/s", "fastest", "MFU")


def main(args: list[str] | None = None) -> None:
    program = "python -m benchmarks.default_recipes"
    parser = argparse.ArgumentParser(program, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    keep_parser = commands.add_parser("keep", help="store the results of a finished run")
    keep_parser.add_argument("run", type=Path)
    keep_parser.add_argument("name")
    keep_parser.add_argument("--data", required=True, help="name of the data in the documentation")
    keep_parser.add_argument("--replace", action="store_true", help="replace a stored run of this name")
    table_parser = commands.add_parser("table", help="print a Markdown table of stored runs")
    table_parser.add_argument("data")
    options = parser.parse_args(args)
    if options.command == "table":
        print(table(options.data), end="")
        return
    for argument, text in (("name", options.name), ("--data", options.data)):
        if not re.fullmatch(r"\w+([.-]\w+)*", text):
            raise UserError(
                f"The {argument} {text!r} becomes part of a file name: use letters and digits, with -, _ or . between them."
            )
    path = RESULTS / f"{options.data}-{options.name}.json"
    if path.exists() and not options.replace:
        raise UserError(f"{path.name} already exists: choose another name, or pass --replace.")
    text = json.dumps(extract(options.run, options.name, options.data), indent=1, ensure_ascii=False)
    atomic_write(path, lambda temporary: temporary.write_text(text + "\n", encoding="utf-8"))


def extract(folder: Path, name: str, data: str) -> dict[str, Any]:
    """The results of a run to store, without paths of the machine."""
    run = read_run_info(folder)
    missing = next((key for key in REQUIRED if not run.get(key)), None)
    if missing in WRITTEN_AT_END:
        raise UserError(f"The run {folder} is not finished: continue it with `vitrail resume {folder}`.")
    if missing or "batch_size" not in run["recipe"]:
        raise UserError(f"{folder / 'run.json'} does not describe a training: it has no {missing or 'batch_size'}.")
    command = re.sub(r" --out \S+", "", run["command"]).replace(str(run["source"]), f"{data}/")
    command = re.sub(r"=/\S*/(\w+)", r"=\1", command)
    recipe = json.loads(re.sub(r'"/[^"]*/([^"/]+)"', r'"\1"', json.dumps(run["recipe"])))
    lines = list(read_metrics(folder))
    speeds = [line["speed"] for line in lines if line["kind"] == "train"]
    speeds = speeds[1:] or speeds  # the first includes compilation
    validations = [line for line in lines if line["kind"] == "validation"]
    if not validations:
        raise UserError(f"{folder} has no validations in its metrics.jsonl, so there is no result to store.")
    return {
        "name": name,
        "command": command,
        **{key: run.get(key) for key in COPIED},
        "device": format_device(run),
        "recipe": {key: value for key, value in recipe.items() if key != "about"},
        "data": {key: run["data"].get(key) for key in ("train", "validation", "fingerprint")} | {"name": data},
        "images_per_second": run["steps"] * run["recipe"]["batch_size"] / run["seconds"],
        "fastest_images_per_second": percentile_95([speed["images_per_second"] for speed in speeds]),
        "fastest_flops_share": percentile_95([speed.get("flops_share", 0.0) for speed in speeds]),
        "validations": [
            {key: line[key] for key in ("epoch", "top1", "top5", "loss") if line.get(key) is not None} for line in validations
        ],
    }


def percentile_95(values: list[float]) -> float:
    """The 95th percentile."""
    return statistics.quantiles(values, n=20)[-1] if len(values) > 1 else max(values, default=0.0)


def table(data: str) -> str:
    """A Markdown table of the runs on a data set, best first."""
    runs: dict[str, list[tuple[float, str]]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        try:
            run = upgrade_run(json.loads(path.read_text(encoding="utf-8")))
            name = path.stem.removeprefix(f"{run['data']['name']}-")
            runs.setdefault(run["data"]["name"], []).append((run["validations"][-1]["top1"], row(name, run)))
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            raise UserError(f"{path} is not a stored run: remove it.") from None
    if data not in runs:
        available = ", ".join(sorted(runs)) or "no data yet"
        raise UserError(f"No run on {data!r} is stored; there are runs on {available}.")
    lines = ["| " + " | ".join(COLUMNS) + " |", "| --- " * len(COLUMNS) + "|"]
    lines += [text for _, text in sorted(runs[data], key=lambda pair: -pair[0])]
    return "\n".join(lines) + "\n"


def row(name: str, run: dict[str, Any]) -> str:
    """A row of the Markdown table."""
    end, best = run["validations"][-1], max(each["top1"] for each in run["validations"])
    model, share = run["model"], run["fastest_flops_share"]
    columns = [f"`{name}`", f"{model['parameters'] / 1e6:.1f} M", f"{model['macs'] / 1e9:.2f} G", f"{end['epoch']:.0f}"]
    columns += [f"{end['top1']:.2%}", f"{best:.2%} of {len(run['validations'])}", f"{run['seconds'] / 60:.1f}"]
    columns += [f"{run['images_per_second']:,.0f}", f"{run['fastest_images_per_second']:,.0f}", f"{share:.0%}" if share else ""]
    return f"| {' | '.join(columns)} |".replace("%", " %")


if __name__ == "__main__":
    run_program(main)
