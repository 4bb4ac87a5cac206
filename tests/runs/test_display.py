"""The progress display: exact plain lines, and a live display that restores the terminal."""

import io
import math
import multiprocessing
import sys

import pytest
from rich.console import Console

from tests.runs.test_reference_curves import BAND
from vitrail.formatting import format_clock
from vitrail.runs import display
from vitrail.runs.display import Display

VALUES = {
    "loss": 1.5,
    "lr": 5e-4,
    "gradient_norm": 1.25,
    "images_per_second": 12345.6,
    "flops_share": 0.412,
    "data_wait": 0.02,
    "memory": 3.4 * 2**30,
}


class Clock:
    """A clock that is set by hand."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def time(monkeypatch):
    made = Clock()
    monkeypatch.setattr(display, "monotonic", made)
    return made


def plain(**options):
    return Console(file=io.StringIO(), width=40, **options)


def terminal(width=120):
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=30, color_system="truecolor", _environ={})


def lines(console):
    return console.file.getvalue().splitlines()


def image(shown):
    """The live display without colors, as text."""
    console = Console(file=io.StringIO(), force_terminal=True, width=shown.console.width, color_system=None, _environ={})
    console.print(shown.render())
    return console.file.getvalue()


def test_plain_lines(time):
    console = plain()
    with Display(1000, 100, 256, console=console) as shown:
        for step in range(10, 1001, 10):
            time.now += 1
            shown.step(step, VALUES)
            if step == 100:
                shown.log_validation(1, {"loss": 1.25, "top1": 0.5, "top5": 0.875, "best": True})
        shown.log_validation(10.0, {"loss": 1.5, "top1": 0.25})
        shown.finish()
    numbers = "loss 1.500  lr 5.00e-04  grad norm 1.25  12,346 images/s  MFU 41 %  data wait 2 %  memory 3.7 GB"
    assert lines(console) == [
        f"epoch 0.1/10  step    10/1,000  {numbers}  0:01 elapsed",
        "epoch  1/10  val top-1 50.00 %  val top-5 87.50 %  loss 1.500  val loss 1.250  best",
        f"epoch 3.1/10  step   310/1,000  {numbers}  0:31 elapsed  1:09 remaining",
        f"epoch 6.1/10  step   610/1,000  {numbers}  1:01 elapsed  0:39 remaining",
        f"epoch 9.1/10  step   910/1,000  {numbers}  1:31 elapsed  0:09 remaining",
        "epoch 10/10  val top-1 25.00 %  loss 1.500  val loss 1.500",
        "1,000 steps in 1:40 (2,560 images/s overall)",
    ]
    assert all(letter.isprintable() or letter == "\n" for letter in console.file.getvalue())


def test_less_than_an_epoch(time):
    console = plain()
    with Display(4, 9, 8, console=console) as shown:
        shown.log_validation(4 / 9, {"loss": 1.25})
    assert lines(console)[0] == "epoch 0.44/0.44  val loss 1.250"


def test_missing_values_are_not_shown(time):
    console = plain()
    with Display(100, 50, 8, start_step=50, console=console) as shown:
        shown.step(60, {"loss": math.nan, "flops_share": None, "flops_per_second": 1.234e12, "memory": None, "skipped": 3.0})
        shown.log_validation(1.5, {})
        shown.finish()
    assert lines(console) == [
        "epoch 1.2/2  step  60/100  loss nan  skipped 3  1.23 TFLOP/s  0:00 elapsed",
        "epoch 1.5/2  loss nan",
        "10 steps in 0:00",
    ]


def test_band_status_is_printed_when_it_changes_and_at_validations(time):
    console = plain()
    with Display(100, 20, 8, console=console, log_seconds=0, band=BAND) as shown:
        for step, loss in ((20, 1.5), (40, 1.3), (60, 2.0)):
            shown.step(step, {"loss": loss})
        shown.log_validation(3, {"top1": 0.55})
    ends = [line.split("elapsed")[-1].strip() for line in lines(console)]
    assert ends[0] == "within the reference band (5 seeds)"
    assert ends[1].endswith("remaining")
    assert ends[2].endswith("worse than the reference band (5 seeds): loss 2.00, band 1.00–1.20")
    assert ends[3].endswith("worse than the reference band (5 seeds): loss 2.00, band 1.00–1.20")


def test_accuracy_is_compared_at_the_step_of_its_validation(time):
    with Display(100, 20, 8, console=plain(), band=BAND) as shown:
        shown.step(60, {"loss": 1.1})
        shown.log_validation(3, {"top1": 0.55})
        shown.step(100, {"loss": 0.9})
        assert shown._band_status(BAND)[0] == "within"


def test_a_console_without_unicode(time):
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with Display(100, 20, 8, console=Console(file=file, force_terminal=True, _environ={}), band=BAND) as shown:
        assert not shown.interactive
        shown.step(60, {"loss": 3.0})
    file.flush()
    assert b"band 1.00?1.20" in file.buffer.getvalue()


@pytest.mark.parametrize("console", [plain(quiet=True), Console(file=io.StringIO(), force_terminal=True, quiet=True)])
def test_a_quiet_console_stays_quiet(time, console):
    with Display(100, 20, 8, console=console) as shown:
        shown.show_activity("compiling")
        shown.step(1, VALUES)
        shown.finish()
    assert console.file.getvalue() == ""


def test_the_live_display(time):
    console = terminal()
    with Display(1000, 100, 256, console=console, band=BAND) as shown:
        shown.show_activity("compiling")
        assert "compiling" in image(shown)
        for step in range(100, 601, 100):
            time.now += 10
            shown.step(step, VALUES | {"loss": 2.0 - step / 600})
        drawn = image(shown)
        assert "60 %  epoch 6.0/10  step   600/1,000  1:00 elapsed  0:40 remaining" in drawn
        assert "█" in drawn
        assert "▁   lr" in drawn.replace("\u00a0", " ")
        assert "12,346 images/s   MFU 41 %   data wait 2 %   memory 3.7 GB" in drawn.replace("\u00a0", " ")
        assert "● within the reference band (5 seeds)" in drawn
        assert "compiling" not in drawn
        shown.finish()
    output = console.file.getvalue()
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1
    assert "600 steps in 1:00 (2,560 images/s overall)" in output


@pytest.mark.parametrize("width", [20, 50, 70, 99, 100, 200])
def test_any_width(time, width):
    with Display(1000, 100, 256, console=terminal(width), band=BAND) as shown:
        time.now = 5
        shown.step(10, VALUES)
        time.now = 10
        shown.step(700, VALUES)
        drawn = image(shown)
    assert all(len(line) <= width for line in drawn.splitlines())
    assert "70 %" in drawn
    assert ("step" in drawn) == (width >= 100)
    assert "0:02 remaining" in drawn.replace("\u00a0", " ") or width < 30


def test_drawing_is_limited_by_time(time):
    console = terminal()
    with Display(10_000, 100, 256, console=console) as shown:
        for step in range(1, 1001):
            time.now += 0.005
            shown.step(step, VALUES)
    assert 20 <= console.file.getvalue().count("images/s") <= 30


def test_a_slow_terminal_is_drawn_on_less_often(time, monkeypatch):
    console, drawn = terminal(), []

    def slow(shown):
        drawn.append(time.now)
        time.now += 0.2
        return "bar"

    monkeypatch.setattr(Display, "render", slow)
    with Display(10_000, 100, 256, console=console) as shown:
        drawn.clear()
        for step in range(1, 10_001):
            time.now += 0.01
            shown.step(step, VALUES)
        assert 2 <= len(drawn) <= 5


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_the_terminal_is_restored_whatever_happens(time, error):
    console, streams = terminal(), (sys.stdout, sys.stderr)

    def fail():
        with Display(1000, 100, 256, console=console) as shown:
            shown.step(10, VALUES)
            raise error

    with pytest.raises(error):
        fail()
    assert (sys.stdout, sys.stderr) == streams
    assert console.file.getvalue().rstrip().endswith("\x1b[?25h")


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork")
def test_a_forked_process_does_not_draw(time):
    console = terminal()
    with Display(1000, 100, 256, console=console):
        replaced = type(sys.stderr).__name__
        fork = multiprocessing.get_context("fork")
        ours, theirs = fork.Pipe()
        process = fork.Process(target=lambda: theirs.send(type(sys.stderr).__name__))
        process.start()
        assert ours.poll(30)
        assert ours.recv() != replaced == "FileProxy"
        process.join()


def test_format_clock():
    assert [format_clock(seconds) for seconds in (0, 59.4, 125, 3725, 273_600)] == [
        "0:00",
        "0:59",
        "2:05",
        "1:02:05",
        "3 days 4 hours",
    ]
