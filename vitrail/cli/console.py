"""Printing: tables and text on standard output, messages on standard error."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from vitrail.formatting import escape_control, pluralize

if TYPE_CHECKING:
    from vitrail.data.loader import Problem

MAX_LISTED = 10  # unreadable images that are printed


def make_console(stderr: bool = False) -> Console:
    """Return a console as wide as the terminal, or 120 columns wide where output is redirected."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(width=None if stream.isatty() else 120, stderr=stderr)


def print_text(text: str, style: str | None = None) -> None:
    """Print text without markup and without wrapping: brackets in names are not markup."""
    make_console().print(escape_control(text, "\n"), style=style, highlight=False, markup=False, soft_wrap=True)


Columns = Sequence[str]
Rows = Iterable[Sequence[str | Text]]


def make_table(columns: Columns, rows: Rows, left: Columns | None = None, no_wrap: Columns = ()) -> Table:
    """A table without lines; the columns in `left` (default: the first) are left-aligned, the others right-aligned.

    Text is not markup: brackets in names are printed.
    """
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        justify: JustifyMethod = "left" if column in (columns[:1] if left is None else left) else "right"
        table.add_column(Text(escape_control(column, "\n")), justify=justify, overflow="fold", no_wrap=column in no_wrap)
    for row in rows:
        table.add_row(*(Text(escape_control(cell, "\n")) if isinstance(cell, str) else cell for cell in row))
    return table


def print_table(columns: Columns, rows: Rows, left: Columns | None = None, no_wrap: Columns = ()) -> None:
    make_console().print(make_table(columns, rows, left, no_wrap))


def print_json(content: Any) -> None:
    print(json.dumps(content, indent=1, ensure_ascii=False))


def print_message(message: str) -> None:
    """Print a message on standard error."""
    print(escape_control(message, "\n"), file=sys.stderr)


def print_skipped(problems: "Sequence[Problem]", remark: str = "") -> None:
    """Print the number of skipped images and the first of them on standard error; the manifest lists all."""
    if problems:
        print_message(f"Skipped {pluralize(len(problems), 'unreadable image')}.")
    for problem in problems[:MAX_LISTED]:
        print_message(f"  {problem.location}: {problem.reason}")
    if len(problems) > MAX_LISTED:
        print_message(f"  and {len(problems) - MAX_LISTED:,} more{remark}")


def print_problems(problems: "Sequence[Problem]") -> None:
    """Print unreadable images on standard error: the first by name, the others as a number."""
    for problem in problems[:MAX_LISTED]:
        print_message("{}: {}".format(*problem))
    if len(problems) > MAX_LISTED:
        print_message(f"… and {pluralize(len(problems) - MAX_LISTED, 'more image')} that could not be read.")
