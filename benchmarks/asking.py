"""How the benchmarks are asked: numbers that can be counted to, files that can be written, a sentence instead of a traceback."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from vitrail.atomic_files import check_writable
from vitrail.errors import UserError
from vitrail.interrupts import CODE


def positive(text: str) -> int:
    """For argparse."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number


def check_file(path: Path | None) -> None:
    """Complain, before anything is measured, about a file that could not be written in the end; None is none."""
    if path is not None and path.is_dir():
        raise UserError(f"{path} is a folder: give the name of a file to write.")
    check_writable(path)


def run_program(main: Callable[[], object]) -> None:
    """A `UserError` becomes the program's name and one sentence on standard error, and exit code 2; Ctrl-C a word, and 130."""
    place = Path(sys.argv[0])
    name = place.parent.name if place.name == "__main__.py" else place.name
    try:
        main()
    except UserError as problem:
        print(f"{name}: {problem}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print(f"{name}: Stopped.", file=sys.stderr)
        raise SystemExit(CODE) from None
