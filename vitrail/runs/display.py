"""The progress of a training: a live progress bar on a terminal, plain lines at intervals everywhere else."""

import math
import os
import sys
from collections.abc import Mapping
from time import monotonic
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vitrail.formatting import format_bytes, format_clock, format_epochs, format_significant, percent, pluralize
from vitrail.runs.reference_curves import BandStatus, ReferenceBand
from vitrail.training.metrics import SPEED, TOP1, Metric, SmoothedValue

REFRESH = 0.2  # minimum seconds between two refreshes
MAX_DRAWING = 0.003  # fraction of the time spent on drawing, however slow the terminal is
STYLES = {"within": "green", "above": "cyan", "below": "bold red"}
BLOCKS = "▁▂▃▄▅▆▇█"
SPARKLINE = 24  # characters of the loss curve, from the start of the training to its end
WIDE, NARROW = 100, 64  # columns
# Values with a label and a place of their own, or that are not shown.
SHOWN = frozenset(("loss", "lr", "gradient_norm", "skipped", "top1", "top5", "images", "best"))


class Display:
    """Shows the progress of one training. Use it as a context manager, which restores the terminal.

    `flops_share` (MFU), `data_wait`, `top1` and `top5` are fractions of 1, `memory` is in bytes; values that are missing or None
    are not shown. Drawing happens inside `step`, not in a thread, so that forked data loader processes never inherit a held lock.
    """

    def __init__(
        self,
        total_steps: int,
        steps_per_epoch: int,
        batch_size: int,
        start_step: int = 0,
        console: Console | None = None,
        log_seconds: float = 30.0,
        band: ReferenceBand | None = None,
        metric: Metric | None = None,
    ) -> None:
        """`log_seconds`: seconds between two plain lines where there is no terminal."""
        self.total, self.per_epoch, self.batch_size = max(total_steps, 1), max(steps_per_epoch, 1), batch_size
        self.start_step = self.current = start_step
        self.console = console or Console()
        self.log_seconds, self.band, self.metric = log_seconds, band, metric or TOP1
        capable = self.console.is_terminal and not self.console.is_dumb_terminal and self.console.encoding.startswith("utf")
        self.interactive = capable and not self.console.quiet
        self.values: dict[str, Any] = {}
        self.activity = ""
        self._smoothed = SmoothedValue()
        self._smoothed.progress = start_step / self.total
        self._loss: float | None = None
        self._sparkline: dict[int, float] = {}
        self._validation: tuple[float, float] | None = None  # progress and top-1 of the last validation
        self._printed_status: BandStatus | None = None  # the last one printed in plain lines
        self._started = self._next = monotonic()
        # Step and time from which the remaining time is extrapolated, after the first steps, which are slower.
        self._first: tuple[int, float] | None = None
        self._live: Live | None = None

    def __enter__(self) -> Self:
        self._started = monotonic()
        self._next = self._started if self.interactive else self._started + self.log_seconds
        if self.interactive:
            self._live = Live(console=self.console, auto_refresh=False, get_renderable=self.render)
            self._live.start(refresh=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    def show_activity(self, activity: str) -> None:
        """Show what happens between steps, such as "compiling" or "validating", until the next step."""
        self.activity = activity
        self._draw()

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        """Show the metrics of a logging point. Cheap: drawing is limited by time."""
        now, first = monotonic(), self._first is None
        self.current, self.values, self.activity = step, dict(values), ""
        self._first = self._first or (step, now)
        loss = values.get("loss")
        if loss is not None:
            progress = step / self.total
            self._loss = self._smoothed.add(progress, float(loss))
            if math.isfinite(self._loss):
                self._sparkline[min(int(progress * SPARKLINE), SPARKLINE - 1)] = self._loss
        if now < self._next and not first:
            return
        if self.interactive:
            self._draw()
            return
        self._next = now + self.log_seconds
        parts = [*self._position(), *self._metrics(), *self._throughput(), *self._times()]
        if self.band:
            before, (self._printed_status, message) = self._printed_status, self._band_status(self.band)
            parts += [Text(message)] if self._printed_status != before else []
        self._print(Text("  ").join(parts))

    def log_validation(self, epoch: float, values: Mapping[str, Any]) -> None:
        """Print a line that stays. `values` has loss, top1, top5, and `best`: whether this is the best result so far."""
        value = values.get(self.metric.name)
        parts = [labeled("epoch", aligned(format_epochs(epoch), format_epochs(self.total / self.per_epoch)))]
        if value is not None:
            parts.append(labeled(f"val {self.metric.title}", self.metric.format(value)))
            self._validation = (self.current / self.total, value)
        if values.get("top5") is not None:
            parts.append(labeled("val top-5", percent(values["top5"], 2)))
        if self._loss is not None:
            parts.append(labeled("loss", format_significant(self._loss)))
        if values.get("loss") is not None:
            parts.append(labeled("val loss", format_significant(values["loss"])))
        parts += labeled_values({name: value for name, value in values.items() if name not in SHOWN | {self.metric.name}})
        if values.get("best"):
            parts.append(Text("best", "bold green"))
        if self.band and not self.interactive:
            self._printed_status, message = self._band_status(self.band)
            parts.append(Text(message))
        self.activity = ""
        self._print(Text("  ").join(parts))
        self._draw()

    def warn(self, message: str) -> None:
        """Print a warning that stays."""
        self._print(Text(f"warning: {message}", "bold yellow"))
        self._draw()

    def finish(self) -> None:
        """Draw the bar for the last time and print a summary."""
        self.activity = ""
        self._stop()
        seconds, steps = monotonic() - self._started, self.current - self.start_step
        summary = f"{pluralize(steps, 'step')} in {format_clock(seconds)}"
        summary += f" ({steps * self.batch_size / seconds:,.0f} images/s overall)" if seconds > 0 and steps > 0 else ""
        self._print(Text(summary))

    def render(self) -> RenderableType:
        """The live display: progress bar, metrics, throughput, and the comparison with the reference band."""
        width = self.console.width
        head = Table.grid(expand=True, padding=(0, 2, 0, 0))
        head.add_column(ratio=1)
        texts = [Text(percent(self.current / self.total), "bold")]
        texts += self._position()[:: 1 if width >= WIDE else 2] if width >= NARROW else []
        texts += self._times() if width >= WIDE else self._times()[-1:]
        for _ in texts:
            head.add_column(no_wrap=True)
        head.add_row(ProgressBar(self.total, self.current, complete_style="cyan", finished_style="green"), *texts)
        lines: list[RenderableType] = [head]
        metrics = self._metrics()
        if self._loss is not None:
            metrics[0].append(" " + self._draw_sparkline(), "cyan")
        lines += [join_without_breaks(parts) for parts in (metrics, self._throughput()) if parts]
        if self.activity:
            lines.append(Text(f"◌ {self.activity} …", "yellow"))
        elif self.band:
            status, message = self._band_status(self.band)
            lines.append(Text(f"● {message}", STYLES[status]))
        return Group(*lines)

    def _position(self) -> list[Text]:
        epoch, epochs = self.current / self.per_epoch, self.total / self.per_epoch
        return [
            labeled("epoch", aligned(f"{epoch:.1f}", format_epochs(epochs))),
            labeled("step", aligned(f"{self.current:,}", f"{self.total:,}")),
        ]

    def _metrics(self) -> list[Text]:
        parts, values = [], self.values
        if self._loss is not None:
            parts.append(labeled("loss", format_significant(self._loss), "bold" if math.isfinite(self._loss) else "bold red"))
        if values.get("lr") is not None:
            parts.append(labeled("lr", f"{values['lr']:.2e}"))
        if values.get("gradient_norm") is not None:
            parts.append(labeled("grad norm", f"{values['gradient_norm']:.3g}"))
        parts += labeled_values({name: value for name, value in values.items() if name not in SHOWN | SPEED})
        if values.get("skipped"):
            parts.append(labeled("skipped", f"{values['skipped']:,.0f}", "red"))
        return parts

    def _throughput(self) -> list[Text]:
        parts, values = [], self.values
        if values.get("images_per_second") is not None:
            parts.append(Text.assemble(f"{values['images_per_second']:,.0f}", (" images/s", "dim")))
        if values.get("flops_share") is not None:
            parts.append(labeled("MFU", percent(values["flops_share"])))
        elif values.get("flops_per_second") is not None:
            parts.append(Text.assemble(f"{values['flops_per_second'] / 1e12:.3g}", (" TFLOP/s", "dim")))
        wait = values.get("data_wait")
        if wait is not None:
            parts.append(labeled("data wait", percent(wait), "red" if wait > 0.3 else "yellow" if wait > 0.1 else ""))
        if values.get("memory") is not None:
            parts.append(labeled("memory", format_bytes(values["memory"])))
        return parts

    def _times(self) -> list[Text]:
        now = monotonic()
        times = [Text.assemble(format_clock(now - self._started), (" elapsed", "dim"))]
        if self._first and self.total > self.current > self._first[0]:
            remaining = (self.total - self.current) * (now - self._first[1]) / (self.current - self._first[0])
            times.append(Text.assemble(format_clock(remaining), (" remaining", "dim")))
        return times

    def _draw_sparkline(self) -> str:
        if len(self._sparkline) < 2:
            return ""
        low, high = min(self._sparkline.values()), max(self._sparkline.values())
        scale = (len(BLOCKS) - 1) / (high - low or 1)
        return "".join(BLOCKS[round((self._sparkline[index] - low) * scale)] for index in sorted(self._sparkline))

    def _band_status(self, band: ReferenceBand) -> tuple[BandStatus, str]:
        """Status and message of the current loss or of the last validation, whichever is worse."""
        cases: list[tuple[float, float | None, float | None]] = [(self.current / self.total, self._loss, None)]
        if self._validation:
            cases.insert(0, (self._validation[0], None, self._validation[1]))
        results = [(band.status(*case), band.message(*case)) for case in cases]
        return min(results, key=lambda result: ("below", "above", "within").index(result[0]))

    def _draw(self) -> None:
        if self._live:
            before = monotonic()
            self._live.refresh()
            now = monotonic()
            self._next = now + max(REFRESH, (now - before) / MAX_DRAWING)

    def _stop(self) -> None:
        if self._live:
            live, self._live = self._live, None
            live.stop()

    def _print(self, line: Text) -> None:
        if self.interactive:
            self.console.print(line)
            return
        encoding = self.console.encoding
        self.console.print(Text(line.plain.encode(encoding, "replace").decode(encoding)), soft_wrap=True)


def labeled_values(values: Mapping[str, Any]) -> list[Text]:
    """Values that a task names itself, such as "effective_rank"."""
    return [labeled(name.replace("_", " "), format_significant(float(value))) for name, value in values.items()]


def labeled(label: str, value: str, style: str = "") -> Text:
    return Text.assemble((f"{label} ", "dim"), (value, style))


def aligned(part: str, total: str) -> str:
    """ "   12/1,000": of constant width, so that the display does not jitter."""
    return f"{part.rjust(len(total))}/{total}"


def join_without_breaks(parts: list[Text]) -> Text:
    """Parts in a row; a narrow terminal wraps between them, not inside one."""
    joined = Text("   ").join(parts)
    plain = "\0".join(part.plain.replace(" ", "\u00a0") for part in parts).replace("\0", "   ")
    return Text(plain, spans=joined.spans)


def restore_streams() -> None:
    """Restore the real streams in a forked process: rich replaces them, and printing would draw a second bar."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, FileProxy):
            setattr(sys, name, stream.rich_proxied_file)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=restore_streams)
