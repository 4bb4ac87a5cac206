"""How a training is seen while it runs: a live bar on a terminal, plain lines now and then everywhere else."""

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

from vitrail.formatting import percent
from vitrail.runs.reference_curves import Band, Verdict
from vitrail.training.metrics import Smoothed, figures

REFRESH = 0.2  # seconds between two images of the bar
SHARE = 0.003  # of the time that drawing may take, however slow the terminal is
STYLES = {"within": "green", "above": "cyan", "below": "bold red"}
BLOCKS = "▁▂▃▄▅▆▇█"
SPARKS = 24  # characters of the small curve, from the start of the training to its end
WIDE, NARROW = 100, 64  # columns


class Display:
    """Shows the progress of one training; a context manager, so that the terminal is restored whatever happens.

    Shares (`flops_share`, `data_wait`, `top1`, `top5`) lie in [0, 1], `memory` is in bytes; what is missing or None is not shown.
    Drawing happens inside `step`, not in a thread: loading processes that are forked never inherit a held lock.
    """

    def __init__(
        self,
        total_steps: int,
        steps_per_epoch: int,
        batch: int,
        start_step: int = 0,
        console: Console | None = None,
        every: float = 30.0,
        band: Band | None = None,
    ) -> None:
        """`every`: seconds between plain lines where there is no terminal."""
        self.total, self.per_epoch, self.batch = max(total_steps, 1), max(steps_per_epoch, 1), batch
        self.start_step = self.current = start_step
        self.console = console or Console()
        self.every, self.band = every, band
        able = self.console.is_terminal and not self.console.is_dumb_terminal and self.console.encoding.startswith("utf")
        self.interactive = able and not self.console.quiet
        self.values: dict[str, Any] = {}
        self.status = ""
        self._smoothed = Smoothed()
        self._smoothed.progress = start_step / self.total
        self._loss: float | None = None
        self._sparks: dict[int, float] = {}
        self._tested: tuple[float, float] | None = None  # progress and top-1 of the last validation
        self._best: tuple[float, float] | None = None  # top-1 and its epoch
        self._verdict: Verdict | None = None  # the last one said in plain lines
        self._begun = self._next = monotonic()
        self._first: tuple[int, float] | None = None  # the time left is measured from here: the first steps are not like others
        self._live: Live | None = None

    def __enter__(self) -> Self:
        self._begun = monotonic()
        self._next = self._begun if self.interactive else self._begun + self.every
        if self.interactive:
            self._live = Live(console=self.console, auto_refresh=False, get_renderable=self.render)
            self._live.start(refresh=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    def note(self, sentence: str) -> None:
        """A line that stays. Names from data may be in it, so that nothing in it steers the terminal."""
        self._print(Text("".join(letter for letter in " ".join(sentence.split()) if letter.isprintable())))

    def doing(self, what: str) -> None:
        """What happens between steps and takes a while, such as "compiling" or "validating"; the next step ends it."""
        self.status = what
        self._draw()

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        """One logging point; cheap, since drawing is limited by the clock."""
        now, first = monotonic(), self._first is None
        self.current, self.values, self.status = step, dict(values), ""
        self._first = self._first or (step, now)
        loss = values.get("loss")
        if loss is not None:
            progress = step / self.total
            self._loss = self._smoothed.add(progress, float(loss))
            if math.isfinite(self._loss):
                self._sparks[min(int(progress * SPARKS), SPARKS - 1)] = self._loss
        if now < self._next and not first:
            return
        if self.interactive:
            self._draw()
            return
        self._next = now + self.every
        parts = [*self._place(), *self._learning(), *self._machine(), *self._times()]
        if self.band:
            before, (self._verdict, sentence) = self._verdict, self._opinion(self.band)
            parts += [Text(sentence)] if self._verdict != before else []
        self._print(Text("  ").join(parts))

    def validated(self, epoch: float, values: Mapping[str, Any]) -> None:
        """A line that stays: `epoch` epochs are done; `values` has loss, top1, top5, and best: whether no epoch was better."""
        top1, parts = values.get("top1"), [pair("epoch", aligned(f"{epoch:g}", f"{self.total / self.per_epoch:g}"))]
        if top1 is not None:
            parts.append(pair("top-1", percent(top1, 2)))
            self._tested = (self.current / self.total, top1)
            if values.get("best"):
                self._best = (top1, epoch)
        if values.get("top5") is not None:
            parts.append(pair("top-5", percent(values["top5"], 2)))
        if self._loss is not None:
            parts.append(pair("loss", figures(self._loss)))
        if values.get("loss") is not None:
            parts.append(pair("validation", figures(values["loss"])))
        if values.get("best"):
            parts.append(Text("best", "bold green"))
        if self.band and not self.interactive:
            self._verdict, sentence = self._opinion(self.band)
            parts.append(Text(sentence))
        self.status = ""
        self._print(Text("  ").join(parts))
        self._draw()

    def finish(self) -> None:
        """The last image of the bar, and a line that sums up."""
        self.status = ""
        self._stop()
        seconds, steps = monotonic() - self._begun, self.current - self.start_step
        words = f"{steps:,} steps in {clock(seconds)}"
        words += f" ({steps * self.batch / seconds:,.0f} images/s overall)" if seconds > 0 and steps > 0 else ""
        words += f"; best top-1 {percent(self._best[0], 2)} at epoch {self._best[1]:g}" if self._best else ""
        self._print(Text(words))

    def render(self) -> RenderableType:
        """The live image: the bar, what is learnt, how fast, and what the band says."""
        width = self.console.width
        head = Table.grid(expand=True, padding=(0, 2, 0, 0))
        head.add_column(ratio=1)
        texts = [Text(percent(self.current / self.total), "bold")]
        texts += self._place()[:: 1 if width >= WIDE else 2] if width >= NARROW else []
        texts += self._times() if width >= WIDE else self._times()[-1:]
        for _ in texts:
            head.add_column(no_wrap=True)
        head.add_row(ProgressBar(self.total, self.current, complete_style="cyan", finished_style="green"), *texts)
        lines: list[RenderableType] = [head]
        learning = self._learning()
        if self._loss is not None:
            learning[0].append(" " + self._spark(), "cyan")
        lines += [unbroken(parts) for parts in (learning, self._machine()) if parts]
        if self.status:
            lines.append(Text(f"◌ {self.status} …", "yellow"))
        elif self.band:
            verdict, sentence = self._opinion(self.band)
            lines.append(Text(f"● {sentence}", STYLES[verdict]))
        return Group(*lines)

    def _place(self) -> list[Text]:
        epoch, epochs = self.current / self.per_epoch, self.total / self.per_epoch
        return [
            pair("epoch", aligned(f"{epoch:.1f}", f"{epochs:g}")),
            pair("step", aligned(f"{self.current:,}", f"{self.total:,}")),
        ]

    def _learning(self) -> list[Text]:
        parts, values = [], self.values
        if self._loss is not None:
            parts.append(pair("loss", figures(self._loss), "bold" if math.isfinite(self._loss) else "bold red"))
        if values.get("lr") is not None:
            parts.append(pair("lr", f"{values['lr']:.2e}"))
        if values.get("gradient_norm") is not None:
            parts.append(pair("gradient", f"{values['gradient_norm']:.3g}"))
        if values.get("skipped"):
            parts.append(pair("skipped", f"{values['skipped']:,.0f}", "red"))
        return parts

    def _machine(self) -> list[Text]:
        parts, values = [], self.values
        if values.get("images_per_second") is not None:
            parts.append(Text.assemble(f"{values['images_per_second']:,.0f}", (" images/s", "dim")))
        if values.get("flops_share") is not None:
            parts.append(pair("MFU", percent(values["flops_share"])))
        elif values.get("flops_per_second") is not None:
            parts.append(Text.assemble(f"{values['flops_per_second'] / 1e12:.3g}", (" TFLOP/s", "dim")))
        wait = values.get("data_wait")
        if wait is not None:
            parts.append(pair("waiting for data", percent(wait), "red" if wait > 0.3 else "yellow" if wait > 0.1 else ""))
        if values.get("memory") is not None:
            parts.append(pair("memory", f"{values['memory'] / 2**30:.1f} GiB"))
        return parts

    def _times(self) -> list[Text]:
        now = monotonic()
        times = [Text.assemble(clock(now - self._begun), (" gone", "dim"))]
        if self._first and self.total > self.current > self._first[0]:
            left = (self.total - self.current) * (now - self._first[1]) / (self.current - self._first[0])
            times.append(Text.assemble(clock(left), (" left", "dim")))
        return times

    def _spark(self) -> str:
        if len(self._sparks) < 2:
            return ""
        low, high = min(self._sparks.values()), max(self._sparks.values())
        scale = (len(BLOCKS) - 1) / (high - low or 1)
        return "".join(BLOCKS[round((self._sparks[place] - low) * scale)] for place in sorted(self._sparks))

    def _opinion(self, band: Band) -> tuple[Verdict, str]:
        """The worse of what the loss says now and top-1 said at the last validation."""
        cases: list[tuple[float, float | None, float | None]] = [(self.current / self.total, self._loss, None)]
        if self._tested:
            cases.insert(0, (self._tested[0], None, self._tested[1]))
        opinions = [(band.verdict(*case), band.sentence(*case)) for case in cases]
        return min(opinions, key=lambda opinion: ("below", "above", "within").index(opinion[0]))

    def _draw(self) -> None:
        if self._live:
            before = monotonic()
            self._live.refresh()
            now = monotonic()
            self._next = now + max(REFRESH, (now - before) / SHARE)

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


def pair(label: str, value: str, style: str = "") -> Text:
    return Text.assemble((f"{label} ", "dim"), (value, style))


def aligned(part: str, whole: str) -> str:
    """ "  12/1,000": what does not change its width does not make the bar twitch."""
    return f"{part.rjust(len(whole))}/{whole}"


def unbroken(parts: list[Text]) -> Text:
    """Parts in a row; a narrow terminal wraps between them and never inside one."""
    joined = Text("   ").join(parts)
    spaces = "\0".join(part.plain.replace(" ", "\u00a0") for part in parts).replace("\0", "   ")
    return Text(spaces, spans=joined.spans)


def clock(seconds: float) -> str:
    """Seconds as 2:05, 1:02:05 or 3 d 4 h."""
    seconds = round(seconds)
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if days:
        return f"{days} d {hours % 24} h"
    return f"{hours}:{minutes % 60:02}:{seconds % 60:02}" if hours else f"{minutes}:{seconds % 60:02}"


def undisguise() -> None:
    """In a forked process, print to the real streams: what the bar has put in their place would draw a second bar."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, FileProxy):
            setattr(sys, name, stream.rich_proxied_file)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=undisguise)
