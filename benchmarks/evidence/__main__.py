"""Try claims: train their cells, several seeds each, in one process; or print the table of all that has been tried.

    python -m benchmarks.evidence run layerscale parallel --data cifar10/ --seeds 3 --epochs 15
    python -m benchmarks.evidence run distillation --data cifar10/ --teacher cifar10_resnet56.pt --seeds 3 --epochs 15
    python -m benchmarks.evidence table > docs/evidence.md

Results go to benchmarks/evidence/results/CLAIM.json, run by run: what is there already with the same data, changes and files is
not trained again, and what has others is refused: --results FOLDER takes that.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.evidence.claims import CLAIMS
from benchmarks.evidence.page import RESULTS, table
from benchmarks.evidence.records import FILES, needs
from benchmarks.evidence.running import Attempt, Images, used_versions
from vitrail.errors import UserError


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
    for name in FILES:
        run.add_argument(f"--{name}", default="")
    for command in (table_parser, run):
        command.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(words)
    if options.command == "table":
        print(table(options.results), end="")
        return
    try:
        train(options)
    except UserError as error:
        parser.exit(2, f"{error}\n")


def train(options: argparse.Namespace) -> None:
    used = {option for name in options.claims for cell in CLAIMS[name].cells for option in needs(CLAIMS[name], cell)}
    idle = next((option for option in FILES if getattr(options, option) and option not in used), None)
    if idle:
        raise UserError(f"{' and '.join(options.claims)} would not use --{idle}: leave it out.")
    images, versions = Images(options.data, options.device), used_versions()
    # All of them are looked at before the first is trained.
    attempts = [Attempt(name, images, options, versions) for name in options.claims]
    for attempt in attempts:
        attempt.run(lambda sentence: print(sentence, file=sys.stderr, flush=True))


if __name__ == "__main__":
    main()
