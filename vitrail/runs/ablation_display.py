"""How an ablation stands while it runs: a table of cells and seeds on a terminal, a line for each beginning and end elsewhere."""

import json
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vitrail.formatting import percent
from vitrail.recipes.schema import Recipe, parse_span
from vitrail.runs.ablation import Ablation, Cell
from vitrail.runs.process_pool import Job
from vitrail.runs.report import read_json
from vitrail.training.metrics import FILE

REFRESH = 1.0  # seconds
TAIL = 4096  # bytes of metrics.jsonl in which its last line is looked for
STYLES = {"done": "green", "failed": "bold red", "running": "cyan"}


class Standing:
    """A context manager, so that the terminal is restored whatever happens."""

    def __init__(self, ablation: Ablation, jobs: dict[tuple[str, int], Job], console: Console | None = None) -> None:
        """`jobs` by cell and seed; what has none was finished before."""
        self.ablation, self.jobs = ablation, jobs
        self._done: dict[Path, str] = {}  # before Live, which draws at once
        self.console = console or Console(stderr=True)
        able = self.console.is_terminal and not self.console.is_dumb_terminal and self.console.encoding.startswith("utf")
        self._live = Live(console=self.console, auto_refresh=False, get_renderable=self.render) if able else None
        self._next = 0.0

    def __enter__(self) -> Self:
        if self._live:
            self._live.start(refresh=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.refresh()
            self._live.stop()

    def look(self) -> None:
        if self._live and monotonic() >= self._next:
            self._live.refresh()
            self._next = monotonic() + REFRESH

    def changed(self, job: Job) -> None:
        if self._live:
            self._next = 0.0
            return
        ended = sum(each.state in ("done", "failed", "stopped") for each in self.jobs.values())
        what: str = job.state
        if job.state == "running":
            what = "begins" if job.device is None else f"begins on {job.device}"
        elif job.state == "done":
            what = f"is done: {self._result(job.folder)}"
        where = job.folder.relative_to(self.ablation.folder)
        sentence = f"{where} {what}" + (f" ({ended} of {len(self.jobs)})" if job.state != "running" else "")
        self.console.print(Text(sentence), soft_wrap=True)

    def render(self) -> Table:
        table = Table(box=None, header_style="bold", pad_edge=False)
        table.add_column("cell", overflow="fold")
        for seed in self.ablation.seeds:
            table.add_column(f"seed {seed}", justify="right", no_wrap=True)
        for cell in self.ablation.cells:
            table.add_row(Text(cell.name), *(self._mark(cell, seed) for seed in self.ablation.seeds))
        return table

    def _mark(self, cell: Cell, seed: int) -> Text:
        job, folder = self.jobs.get((cell.name, seed)), self.ablation.run_folder(cell, seed)
        state = job.state if job else "done"
        if state == "done":
            return Text(self._result(folder), STYLES["done"])
        if state == "running":
            share = progress(folder, cell.recipe)
            return Text("starting" if share is None else percent(share), STYLES["running"])
        return Text("·" if state == "waiting" else state, STYLES.get(state, "dim"))

    def _result(self, folder: Path) -> str:
        """The best top-1 of a finished run, read once."""
        if folder not in self._done:
            top1 = read_json(folder).get("best", {}).get("top1")
            self._done[folder] = percent(top1, 2) if isinstance(top1, float) else "done"
        return self._done[folder]


def progress(folder: Path, recipe: Recipe) -> float | None:
    """How much of a running training is done, by the last line that it has written; None before the first."""
    try:
        with (folder / FILE).open("rb") as file:
            file.seek(max((folder / FILE).stat().st_size - TAIL, 0))
            lines = file.read().split(b"\n")
        line = json.loads(lines[-2])
        length, micro_batch = parse_span(recipe.schedule.length)
        more, its_unit = parse_span(recipe.schedule.cooldown)
        length += more if its_unit == micro_batch else 0
        return min(float(line[micro_batch]) / length, 1.0)
    except (OSError, IndexError, ValueError, KeyError, TypeError, ZeroDivisionError):
        return None
