"""Numbers and names as text."""

from collections.abc import Mapping, Sequence
from typing import Any


def escape_control(text: str, keep: str = "") -> str:
    """Return the text with control characters and invalid UTF-8 as escape sequences, except the characters in `keep`.

    File and class names may contain anything, also commands to a terminal.
    """
    return "".join(
        letter if letter.isprintable() or letter in keep else letter.encode("unicode_escape").decode() for letter in text
    )


def shorten_path(path: str, length: int) -> str:
    """Return a path that is too long with "…" instead of its start."""
    return path if len(path) <= length else f"…{path[len(path) - length + 1 :]}"


def percent(fraction: float, digits: int = 0) -> str:
    """Format a fraction of 1 as "96.11 %"."""
    return f"{100 * fraction:.{digits}f} %"


def pluralize(number: int, noun: str) -> str:
    """Format a number and its noun: "1 image", "2,000 images", "2 classes"."""
    plural = noun if number == 1 else f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number:,} {plural}"


def format_ranges(numbers: Sequence[int]) -> str:
    """Format the ascending numbers [1, 2, 3, 7] as "1-3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def format_bytes(count: float) -> str:
    """Format a number of bytes as "1.9 GB", "23 MB" or "4 kB"."""
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if count >= 0.95 * unit:
            return f"{count / unit:.{1 if unit == 1e9 else 0}f} {name}"
    return f"{count / 1e3:.0f} kB"


def format_rate(rate: float) -> str:
    """Format a number per second as "1,574", "7.3" or "0.021": at least two digits, so that it is never 0."""
    return f"{rate:,.0f}" if rate >= 9.95 else f"{rate:.2g}"


def format_significant(value: float, digits: int = 4) -> str:
    """Format a number with significant digits: 1.400, 0.03120."""
    return f"{value:#.{digits}g}".rstrip(".")


def format_epochs(epochs: float) -> str:
    """Format a number of epochs, which a time budget may end within one: "20", "0.44"."""
    return f"{round(epochs, 2):g}"


def format_count(value: Any) -> str:
    """Format 5717416 as "5.72 M"; smaller numbers and other values as `format_value` does."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        for unit, name in ((1e9, " G"), (1e6, " M")):
            if abs(value) >= unit:
                return format_significant(value / unit, 3) + name
    return format_value(value)


def format_value(value: Any) -> str:
    """Format any JSON value: "10,000"; "train 50,000, validation 10,000"; the length of lists of more than 12 items."""
    if value in (None, "") or value == {} or value == []:
        return "–"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {format_value(part)}" for name, part in value.items())
    if isinstance(value, list | tuple):
        return f"{len(value):,}" if len(value) > 12 else ", ".join(map(format_value, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def format_time_span(seconds: float) -> str:
    """Format seconds as "41 s", "12 min", "3 h 5 min" or "5 days 18 hours"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if minutes < 90:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min".removesuffix(" 0 min")
    return f"{pluralize(hours // 24, 'day')} {pluralize(hours % 24, 'hour')}".removesuffix(" 0 hours")


def format_clock(seconds: float) -> str:
    """Format seconds of a display that changes: "2:05", "1:02:05" or "3 days 4 hours"."""
    seconds = round(seconds)
    if seconds >= 86400:
        return format_time_span(seconds)
    minutes, hours = seconds // 60, seconds // 3600
    return f"{hours}:{minutes % 60:02}:{seconds % 60:02}" if hours else f"{minutes}:{seconds % 60:02}"
