"""Test claims of the papers: train the variants of a claim with several seeds in one process, or print all results.

    python -m benchmarks.evidence run layerscale parallel --data cifar10/ --seeds 3 --epochs 15
    python -m benchmarks.evidence run distillation --data cifar10/ --teacher cifar10_resnet56.pt --seeds 3 --epochs 15
    python -m benchmarks.evidence table > docs/evidence.md

Results are written to benchmarks/evidence/results/CLAIM.json after each run; several processes may train variants (--variants)
and seeds (--first-seed 2 --seeds 1) of one claim at the same time. Runs that are already there with the same data,
changes and files are not repeated; other data, changes or files are rejected and need another directory: --results FOLDER.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.evidence.claims import CLAIMS
from benchmarks.evidence.page import RESULTS, table
from benchmarks.evidence.provenance import FILES, needs
from benchmarks.evidence.trials import Images, Trial, used_versions
from vitrail.errors import UserError


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    table_parser = commands.add_parser("table", help="print docs/evidence.md")
    run = commands.add_parser("run", help="train the variants of claims")
    run.add_argument("claims", nargs="+", choices=list(CLAIMS))
    run.add_argument("--data", required=True)
    run.add_argument("--epochs", type=float, required=True)
    run.add_argument("--seeds", type=int, default=3, help="number of seeds")
    run.add_argument("--first-seed", type=int, default=0)
    run.add_argument("--variants", nargs="*", help="default: all")
    run.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a change of all variants")
    run.add_argument("--device")
    for name in FILES:
        run.add_argument(f"--{name}", default="")
    for command in (table_parser, run):
        command.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(args)
    if options.command == "table":
        print(table(options.results), end="")
        return
    try:
        train(options)
    except UserError as error:
        parser.exit(2, f"{error}\n")


def train(options: argparse.Namespace) -> None:
    used = {option for name in options.claims for variant in CLAIMS[name].variants for option in needs(CLAIMS[name], variant)}
    unused = next((option for option in FILES if getattr(options, option) and option not in used), None)
    if unused:
        raise UserError(f"{' and '.join(options.claims)} would not use --{unused}: remove it.")
    images, versions = Images(options.data, options.device), used_versions()
    # All settings are checked before the first training.
    trials = [Trial(name, images, options, versions) for name in options.claims]
    for trial in trials:
        trial.run(lambda message: print(message, file=sys.stderr, flush=True))


if __name__ == "__main__":
    main()
