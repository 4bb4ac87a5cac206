"""A finished (or unfinished) run as an image and one self-contained page.

The page needs nothing but itself: images are embedded, there is no script, and every name that comes from data is escaped.
Some parts of `run.json` are optional and may be large, so they are shown only if they are there:

* `test`: {"top1", "top5", "images"} of the best weights;
* `per_class`: [{"name", "top1", "images"}] of the validation images;
* `confusion`: {"names": […], "matrix": [[…]]} with a row per true class, or {"pairs": `confused_pairs(…)`};
* `mistakes`: [{"image": `thumbnail(…)`, "truth": …, "guess": …, "confidence": …}].
"""

import base64
import io
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitrail.aliases import upgrade_run
from vitrail.atomic_files import write_aside
from vitrail.errors import UserError
from vitrail.runs.curves import DARK, LIGHT, Curves
from vitrail.runs.page import PAGE, address, duration, embedded, heat_map, number, plain, section, share, table, tree
from vitrail.runs.reference_curves import find_band
from vitrail.training.metrics import figures, merit, read_metrics

MATRIX_LIMIT = 40  # classes; a larger matrix cannot be read
PAIRS = 12


def write_report(folder: str | Path) -> Path:
    """Write `report.png` and `report.html` into a run's folder, from its `run.json` and `metrics.jsonl`."""
    folder = Path(folder)
    run, lines = read_run(folder), read_metrics(folder)
    curves = curves_of(run, lines)
    light = curves.draw(LIGHT)
    write_aside(folder / "report.png", lambda side: side.write_bytes(light))
    text = page(run, curves, image(light, curves))
    write_aside(folder / "report.html", lambda side: side.write_text(text, encoding="utf-8"))
    return folder / "report.html"


def read_run(folder: str | Path) -> dict[str, Any]:
    """The `run.json` of a folder; groups that it does not have are empty."""
    run = read_json(Path(folder))
    groups = ("recipe", "model", "data", "versions", "best")
    if not all(isinstance(run.get(name) or {}, dict) for name in groups):
        raise UserError(f"{Path(folder) / 'run.json'} cannot be read: it does not describe a run.")
    return run | {name: run.get(name) or {} for name in groups}


def read_json(folder: Path) -> dict[str, Any]:
    """The `run.json` of a folder as it stands."""
    path = folder / "run.json"
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{folder} is not the folder of a run: it has no run.json.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from None
    if not isinstance(run, dict):
        raise UserError(f"{path} cannot be read: it does not describe a run.")
    return upgrade_run(run)


def curves_of(run: Mapping[str, Any], lines: Sequence[dict[str, Any]]) -> Curves:
    last = lines[-1] if lines else {"step": 0, "epoch": 0}
    steps = run.get("steps") or last["step"]
    total = last["epoch"] * steps / last["step"] if last["step"] else 0.0
    best = best_of(run, lines)
    return Curves(lines, total, find_band(run["recipe"], run["data"]), best["epoch"] if best else None)


def page(run: Mapping[str, Any], curves: Curves, drawn: str) -> str:
    title = " on ".join(str(part.get("name")) for part in (run["model"], run["data"]) if part.get("name")) or "Training run"
    sections = [
        headline(run, curves),
        drawn,
        section("Results", table(results(run, curves))),
        section("Hardest classes", hardest(run)),
        section("Most confused", confusions(run)),
        section("Some mistakes", mistakes(run)),
        section("Recipe", tree(run["recipe"])),
        section("This run", table(circumstances(run))),
    ]
    return PAGE.format(title=escape(title), body="\n".join(part for part in sections if part))


def headline(run: Mapping[str, Any], curves: Curves) -> str:
    verdict = judged(curves)
    badge = f'<p class="verdict {verdict[0]}">{escape(verdict[1])}</p>' if verdict else ""
    cards = "".join(
        f"<div><strong>{escape(value)}</strong><span>{escape(label)}</span></div>" for label, value in highlights(run, curves)
    )
    return f'<p class="summary">{escape(summary(run, curves))}</p>{badge}<div class="cards">{cards}</div>'


def summary(run: Mapping[str, Any], curves: Curves) -> str:
    """The whole run in one sentence."""
    best, last = best_of(run, curves.lines), curves.lines[-1] if curves.lines else None
    subject = str(run["model"].get("name") or "The model")
    subject += f" on {run['data']['name']}" if run["data"].get("name") else ""
    subject += f", recipe {run['recipe']['name']}," if run["recipe"].get("name") else ""
    if last is None:
        return f"{subject} has not logged anything yet."
    whole = curves.total - last["epoch"] < 1e-6
    length = f"{curves.total:.4g} epochs" if whole else f"{last['epoch']:.1f} of {curves.total:.4g} epochs"
    if best:
        result = f"reached a validation top-1 of {share(best['top1'])}"
        result += f" (top-5 {share(best['top5'])})" if best.get("top5") is not None else ""
        result += f" at epoch {best['epoch']:g} of {curves.total:.4g}" if whole else f" after {length}"
    else:
        losses = curves.smooth_losses()[1]
        result = f"was trained for {length}"
        result += f" to a training loss of {figures(losses[-1])}" if len(losses) else ""
        result += "; no validation was made"
    result += f", in {duration(run['seconds'])}" if run.get("seconds") else ""
    result += f" on {device_words(run)}" if device_words(run) else ""
    return f"{subject} {result}."


def device_words(run: Mapping[str, Any]) -> str:
    """ "2 × NVIDIA H200", from a machine that is text or a dictionary with device and processes."""
    machine = run.get("machine") or ""
    if not isinstance(machine, Mapping):
        return str(machine)
    device, processes = str(machine.get("device") or ""), machine.get("processes") or 1
    return f"{processes} × {device}" if device and processes != 1 else device


def best_of(run: Mapping[str, Any], lines: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """What the run says of itself, or the best of its validations, by the rule of the run."""
    if run["best"].get("top1") is not None:
        return {"epoch": 0} | run["best"]
    found = [line for line in lines if line["kind"] == "validation" and line.get("top1") is not None]
    return max(found, key=lambda line: merit({"loss": math.inf} | line)) if found else None


def judged(curves: Curves) -> tuple[str, str] | None:
    """What the reference band says about the end of the curves."""
    epochs, losses = curves.smooth_losses()
    if not curves.band or not len(epochs):
        return None
    loss = float(losses[-1])
    tested = curves.of("validation", "top1")
    here, there = epochs[-1] / curves.total, tested[0][-1] / curves.total if len(tested[0]) else 0.0
    # Between two validations top-1 is not of the same moment as the loss, and would be held against a later band.
    top1 = float(tested[1][-1]) if there >= here - 1e-6 else None
    return curves.band.verdict(here, loss, top1), curves.band.sentence(here, loss, top1)


def highlights(run: Mapping[str, Any], curves: Curves) -> list[tuple[str, str]]:
    best = best_of(run, curves.lines) or {}
    speeds = curves.of("train", "images_per_second")[1]
    found = [
        ("top-1", share(best.get("top1"))),
        ("top-5", share(best.get("top5"))),
        ("time", duration(run["seconds"]) if run.get("seconds") else ""),
        ("images/s", f"{statistics.median(speeds):,.0f}" if len(speeds) else ""),
        ("parameters", number(run["model"].get("parameters", ""))),
    ]
    return [(label, value) for label, value in found if value]


def results(run: Mapping[str, Any], curves: Curves) -> list[tuple[str, str]]:
    """Rows of label and HTML."""
    rows = []
    best = best_of(run, curves.lines)
    if best:
        rows.append(("Best epoch", f"{best['epoch']:g}"))
    test = run.get("test") or {}
    for label, name in (("Test top-1", "top1"), ("Test top-5", "top5")):
        if isinstance(test.get(name), float):
            rows.append((f"{label}, {test.get('images', 0):,} images", share(test[name])))
    for label, kind, name, show in (
        ("Last validation top-1", "validation", "top1", share),
        ("Last validation top-5", "validation", "top5", share),
        ("Last validation loss", "validation", "loss", figures),
        ("Share of the device's peak (MFU)", "train", "flops_share", share),
        ("Time waiting for data", "train", "data_wait", share),
    ):
        values = curves.of(kind, name)[1]
        if len(values):
            value = statistics.median(values) if name in ("flops_share", "data_wait") else values[-1]
            rows.append((label, show(float(value))))
    losses = curves.smooth_losses()[1]
    if len(losses):
        rows.append(("Last training loss, smoothed", figures(losses[-1])))
    memory = curves.of("train", "memory")[1]
    if len(memory):
        rows.append(("Most memory", f"{memory.max() / 2**30:.1f} GiB"))
    rows += [(f"Model: {name.replace('_', ' ')}", number(value)) for name, value in run["model"].items()]
    rows += [(f"Data: {name.replace('_', ' ')}", plain(value)) for name, value in run["data"].items()]
    return [(label, escape(value)) for label, value in rows]


def circumstances(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for name in ("command", "git", "code", "started", "machine"):
        if run.get(name):
            text = escape(plain(run[name]))
            rows.append((name.capitalize(), f"<code>{text}</code>" if name in ("command", "git", "code") else text))
    return rows + [(str(name), escape(plain(value))) for name, value in run["versions"].items()]


def hardest(run: Mapping[str, Any]) -> str:
    """The classes that are recognized least, if there are so many that the matrix does not show it."""
    classes = run.get("per_class") or []
    if len(classes) <= MATRIX_LIMIT:
        return ""
    worst = sorted(classes, key=lambda each: float(each["top1"]))[:PAIRS]
    return table([(str(each["name"]), f"{share(each['top1'])} of {escape(plain(each['images']))}") for each in worst])


def confused_pairs(matrix: Any, names: Sequence[str], count: int = PAIRS) -> list[dict[str, Any]]:
    """The most frequent confusions of a matrix [true class, guessed class] of counts, worst first."""
    counts = np.array(matrix, dtype=np.int64)
    wrong = counts.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:count]
    pairs = [divmod(int(place), len(counts)) for place in order if wrong.flat[place]]
    return [
        {"truth": names[truth], "guess": names[guess], "count": int(counts[truth, guess]), "of": int(counts[truth].sum())}
        for truth, guess in pairs
    ]


def confusions(run: Mapping[str, Any]) -> str:
    confusion = run.get("confusion") or {}
    matrix = confusion.get("matrix")
    names = [str(name) for name in confusion.get("names") or run["data"].get("classes") or range(len(matrix or []))]
    if matrix and (len(names) < len(matrix) or any(len(row) != len(matrix) for row in matrix)):
        raise UserError("The confusion matrix in run.json is not square with a name for each class.")
    pairs = confusion.get("pairs") or (confused_pairs(matrix, names) if matrix else [])
    if not pairs:
        return ""
    rows = "".join(
        f"<tr><td>{escape(str(pair['truth']))}</td><td>{escape(str(pair['guess']))}</td><td class='number'>{plain(pair['count'])}"
        + (f" of {plain(pair['of'])}" if pair.get("of") else "")
        + "</td></tr>"
        for pair in pairs
    )
    head = "<tr><th>is</th><th>was taken for</th><th class='number'>times</th></tr>"
    heat = heat_map(matrix, names) if matrix and len(matrix) <= MATRIX_LIMIT else ""
    return f"<table class='pairs'>{head}{rows}</table>{heat}"


def thumbnail(pixels: np.ndarray, side: int = 96) -> str:
    """An image (uint8 [height, width, 3]) as text for `run.json`, its longer side at most `side`."""
    image = Image.fromarray(np.asarray(pixels, dtype=np.uint8))
    image.thumbnail((side, side))
    file = io.BytesIO()
    image.save(file, "PNG" if max(image.size) <= 48 else "JPEG", quality=85)
    return base64.b64encode(file.getvalue()).decode()


def mistakes(run: Mapping[str, Any]) -> str:
    shown = []
    for mistake in run.get("mistakes") or []:
        words = f"<b>{escape(str(mistake.get('guess')))}</b>"
        words += f" {100 * float(mistake['confidence']):.0f} %" if mistake.get("confidence") is not None else ""
        words += f"<br>is {escape(str(mistake.get('truth')))}"
        words += f"<br><small>{escape(str(mistake['where']))}</small>" if mistake.get("where") else ""
        shown.append(f'<figure><img alt="" src="{embedded(mistake.get("image"))}"><figcaption>{words}</figcaption></figure>')
    return f"<div class='images'>{''.join(shown)}</div>" if shown else ""


def image(light: bytes, curves: Curves) -> str:
    """The curves four times: for dark and light, narrow and wide screens; the browser takes one."""
    narrow, dim = "(max-width: 40rem)", "(prefers-color-scheme: dark)"
    sources = ((f"{narrow} and {dim}", curves.draw(DARK, 1)), (dim, curves.draw(DARK)), (narrow, curves.draw(LIGHT, 1)))
    options = "".join(f'<source media="{media}" srcset="{address(content)}">' for media, content in sources)
    words = "Curves of loss, accuracy, learning rate and speed"
    return f'<image>{options}<img class="curves" alt="{words}" src="{address(light)}"></image>'
