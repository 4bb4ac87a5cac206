"""A progress bar on standard error, shown only on a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from rich import progress as bars
from rich.console import Console
from rich.text import Text

Advance = Callable[[int], Any]  # called with the number of items just finished
Progress = Callable[[str, int], AbstractContextManager[Advance]]  # `progress`, or another function with its arguments


class Rate(bars.ProgressColumn):
    def render(self, task: bars.Task) -> Text:
        return Text(f"{task.speed:,.0f}/s" if task.speed else "", style="progress.data.speed")


@contextmanager
def progress(text: str, total: int) -> Iterator[Advance]:
    """Show a progress bar."""
    columns = (bars.TextColumn(text), bars.BarColumn(), bars.MofNCompleteColumn(), Rate(), bars.TimeRemainingColumn())
    with bars.Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)


@contextmanager
def no_progress(text: str, total: int) -> Iterator[Advance]:
    yield lambda count: None
