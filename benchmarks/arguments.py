"""Command lines of the benchmarks: checked numbers and files, and error messages instead of tracebacks."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from vitrail.atomic_files import check_writable
from vitrail.errors import UserError
from vitrail.interrupts import EXIT_CODE


def positive(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return number


def check_file(path: Path | None) -> None:
    """Raise UserError if the file cannot be written; called before anything is measured. None is allowed."""
    if path is not None and path.is_dir():
        raise UserError(f"{path} is a directory: pass the name of a file.")
    check_writable(path)


def run_program(main: Callable[[], object]) -> None:
    """Call `main`; a `UserError` becomes a message on standard error and exit code 2, Ctrl-C a message and exit code 130."""
    path = Path(sys.argv[0])
    name = path.parent.name if path.name == "__main__.py" else path.name
    try:
        main()
    except UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print(f"{name}: Interrupted.", file=sys.stderr)
        raise SystemExit(EXIT_CODE) from None
