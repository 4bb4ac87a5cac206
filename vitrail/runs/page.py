"""What a report's page is made of: its frame and style, tables, trees, numbers in words. Text is escaped here."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from vitrail.training.metrics import figures

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #24292f; --faint: #6e7781; --line: #e6e8eb; --soft: #f6f7f9;
  --blue: #0969da; --green: #1a7f5a; --orange: #d9730d; --red: #c62f39; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181d; --ink: #e6e8eb; --faint: #8b949e; --line: #2b2f36;
  --soft: #1d2027; --blue: #58a6ff; --green: #4cc38a; --orange: #f0a050; --red: #ff7b82; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1.5rem 1rem 4rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.1rem; margin: 2.5rem 0 .5rem; }
.summary { font-size: 1.1rem; margin: 0 0 1rem; }
.verdict { display: inline-block; margin: 0 0 1rem; padding: .2rem .7rem; border: 1px solid; border-radius: 1rem;
  font-size: .9rem; }
.verdict.within { color: var(--green); } .verdict.above { color: var(--blue); } .verdict.below { color: var(--red); }
.cards { display: flex; flex-wrap: wrap; gap: .5rem; margin-bottom: 1.5rem; }
.cards div { flex: 1 1 7rem; padding: .7rem 1rem; border-radius: .6rem; background: var(--soft); }
.cards strong { display: block; font-size: 1.25rem; white-space: nowrap; } .cards span { color: var(--faint); font-size: .85rem; }
.curves { display: block; width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); }
th { font-weight: normal; color: var(--faint); width: 38%; } td { font-variant-numeric: tabular-nums; }
code { font: .88em ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
.pairs th { width: auto; } .number { text-align: right; white-space: nowrap; padding-right: 0; }
details { margin: .4rem 0; } summary { cursor: pointer; padding: .2rem 0; }
details details, details > table { margin-left: 1rem; width: calc(100% - 1rem); }
.wide { overflow-x: auto; }
.heat { width: auto; font-size: .75rem; margin: 0 !important; } .heat th { width: auto; white-space: nowrap; border: 0; }
.heat tr:first-child th { text-align: center; padding: .2rem; }
.heat td { min-width: 1.8rem; padding: .25rem; text-align: center; border: 1px solid var(--paper); --hue: var(--orange);
  background: color-mix(in srgb, var(--hue) var(--share), var(--soft)); } .heat .right { --hue: var(--green); }
.images { display: grid; grid-template-columns: repeat(auto-fill, minmax(7rem, 1fr)); gap: 1rem; }
figure { margin: 0; font-size: .82rem; line-height: 1.3; }
figure img { display: block; width: 100%; aspect-ratio: 1; object-fit: contain; border-radius: .4rem;
  background: var(--soft); margin-bottom: .3rem; } figure img[src^="data:image/png"] { image-rendering: pixelated; }
"""

# The policy makes the browser itself refuse scripts and anything from outside.
PAGE = (
    """<!doctype html>
<html lang="en-GB">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>"""
    + STYLE.replace("{", "{{").replace("}", "}}")
    + """</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""
)


def section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n{content}</section>" if content else ""


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Labels are escaped here; the second column is HTML already."""
    body = "".join(f"<tr><th>{escape(label)}</th><td>{content}</td></tr>" for label, content in rows)
    return f"<table>{body}</table>" if rows else ""


def tree(values: Mapping[str, Any]) -> str:
    """Nested settings: leaves first, then a group to fold open per branch."""
    leaves = [(str(name), f"<code>{escape(plain(value))}</code>") for name, value in values.items() if not branch(value)]
    groups = [
        f"<details><summary>{escape(str(name))}</summary>{tree(value)}</details>"
        for name, value in values.items()
        if branch(value)
    ]
    return table(leaves) + "".join(groups)


def branch(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value)


def heat_map(matrix: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    rows = []
    for truth, counts in enumerate(matrix):
        whole = sum(counts) or 1
        cells = "".join(
            f'<td title="{escape(names[truth])} → {escape(names[guess])}" class="{"right" if guess == truth else "wrong"}" '
            f'style="--share:{min(100, round(100 * (count / whole) ** 0.5))}%">{count or ""}</td>'
            for guess, count in enumerate(counts)
        )
        rows.append(f"<tr><th>{truth + 1} {escape(names[truth])}</th>{cells}</tr>")
    head = "".join(f"<th>{guess + 1}</th>" for guess in range(len(matrix)))
    body = f"<tr><th></th>{head}</tr>{''.join(rows)}"
    title = "Confusion matrix (rows: what it is; columns: what it was taken for)"
    return f"<details open><summary>{title}</summary><div class='wide'><table class='heat'>{body}</table></div></details>"


def embedded(text: Any) -> str:
    """A base64 image as a data address; anything else becomes no image."""
    try:
        content = base64.b64decode(str(text), validate=True)
    except (binascii.Error, ValueError):
        return ""
    kinds = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg"}
    kind = next((name for start, name in kinds.items() if content.startswith(start)), None)
    return f"data:image/{kind};base64,{text}" if kind else ""


def address(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f} %"


def number(value: Any) -> str:
    """5717416 as 5.72 M, anything that is not a large number as it is."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        for size, micro_batch in ((1e9, " G"), (1e6, " M")):
            if abs(value) >= size:
                return figures(value / size, 3) + micro_batch
    return plain(value)


def plain(value: Any) -> str:
    """Any value of a run as text: 10,000; train 50,000, validation 10,000; the number of names instead of very many."""
    if value in (None, "") or value == {} or value == []:
        return "–"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {plain(part)}" for name, part in value.items())
    if isinstance(value, list | tuple):
        return f"{len(value):,}" if len(value) > 12 else ", ".join(map(plain, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def duration(seconds: float) -> str:
    """Seconds in words: 41 s, 12 min, 3 h 5 min, 2 d 4 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, days = minutes // 60, minutes // 1440
    return f"{days} d {hours % 24} h" if days else f"{hours} h {minutes % 60} min"
