"""Trainings of our own that the documentation speaks of: keep what a run says of itself, or print the table of all that are kept.

    python -m benchmarks.house keep RUN house_small --data tiny-imagenet
    python -m benchmarks.house table tiny-imagenet

A kept run (`results/DATA-NAME.json`) has its command, recipe, versions, commit, machine, seed, seconds and all its validations.
"""

import argparse
import json
import re
import statistics
from pathlib import Path
from typing import Any

from vitrail.training.metrics import read_metrics
from vitrail.training.report import device_words, read_run
from vitrail.writing import write_aside

RESULTS = Path(__file__).parent / "results"
ASKED = ("model", "versions", "git", "started", "seconds", "steps")
COLUMNS = ("run", "parameters", "multiply-adds", "epochs", "top-1 at the end", "best", "minutes", "images/s", "fastest", "MFU")


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    keep_parser = commands.add_parser("keep", help="read a finished run")
    keep_parser.add_argument("run", type=Path)
    keep_parser.add_argument("name")
    keep_parser.add_argument("--data", required=True, help="what the documentation calls the data")
    table_parser = commands.add_parser("table", help="print kept runs in Markdown")
    table_parser.add_argument("data")
    options = parser.parse_args(words)
    if options.command == "table":
        print(table(options.data), end="")
        return
    text = json.dumps(kept(options.run, options.name, options.data), indent=1, ensure_ascii=False)
    path = RESULTS / f"{options.data}-{options.name}.json"
    write_aside(path, lambda aside: aside.write_text(text + "\n", encoding="utf-8"))


def kept(folder: Path, name: str, data: str) -> dict[str, Any]:
    """What of a run is worth keeping, without the paths of the machine that it ran on."""
    run = read_run(folder)
    command = re.sub(r" --out \S+", "", run["command"]).replace(str(run["source"]), f"{data}/")
    command = re.sub(r"=/\S*/(\w+)", r"=\1", command)
    recipe = json.loads(re.sub(r'"/[^"]*/([^"/]+)"', r'"\1"', json.dumps(run["recipe"])))
    lines = list(read_metrics(folder))
    speeds = [line["speed"] for line in lines if line["kind"] == "train"][1:]  # the first has the compiling in it
    validations = [line for line in lines if line["kind"] == "validation"]
    return {
        "name": name,
        "command": command,
        **{key: run.get(key) for key in ASKED},
        "device": device_words(run),
        "recipe": {key: value for key, value in recipe.items() if key != "about"},
        "data": {key: run["data"].get(key) for key in ("train", "validation", "fingerprint")} | {"name": data},
        "images_per_second": run["steps"] * run["recipe"]["batch"] / run["seconds"],
        "fastest_images_per_second": statistics.quantiles([speed["images_per_second"] for speed in speeds], n=20)[-1],
        "fastest_flops_share": statistics.quantiles([speed.get("flops_share", 0.0) for speed in speeds], n=20)[-1],
        "validations": [{key: line[key] for key in ("epoch", "top1", "top5", "loss")} for line in validations],
    }


def table(data: str) -> str:
    """The runs on a data set, the best first."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*.json")]
    runs = [run for run in runs if run["data"]["name"] == data]
    runs.sort(key=lambda run: -run["validations"][-1]["top1"])
    lines = ["| " + " | ".join(COLUMNS) + " |", "| --- " * len(COLUMNS) + "|"]
    for run in runs:
        end, best = run["validations"][-1], max(each["top1"] for each in run["validations"])
        model, share = run["model"], run["fastest_flops_share"]
        cells = [f"`{run['name']}`", f"{model['parameters'] / 1e6:.1f} M", f"{model['macs'] / 1e9:.2f} G", f"{end['epoch']:.0f}"]
        cells += [f"{end['top1']:.2%}", f"{best:.2%} of {len(run['validations'])}", f"{run['seconds'] / 60:.1f}"]
        cells += [f"{run['images_per_second']:,.0f}", f"{run['fastest_images_per_second']:,.0f}", f"{share:.0%}" if share else ""]
        lines.append(f"| {' | '.join(cells)} |".replace("%", " %"))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
