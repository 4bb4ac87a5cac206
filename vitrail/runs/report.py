"""The report of a finished or unfinished run: `report.png` with the curves and the self-contained page `report.html`.

These parts of `run.json` are optional and shown if present:

* `test`: {"top1", "top5", "images"} of the best weights;
* `baselines`: {"majority", "probe"}, accuracies on the validation images;
* `warnings`: [{"epoch", "last_epoch", "message"}] of the validations;
* `per_class`: [{"name", "top1", "precision", "recall", "f1", "images"}] of the validation images;
* `confusion`: {"names": […], "matrix": [[…]]} with a row per label, or {"pairs": `confused_pairs(…)`};
* `mistakes`: [{"image": `thumbnail(…)`, "label": …, "prediction": …, "confidence": …, "location": …, "map": …}];
* `segmentations`: [{"image": `thumbnail(…)` of an image beside its mask and its prediction, "location": …}], `protocol`, and
  `boundaries`: [{"pixels", "share", "miou", "pixel_accuracy"}]; their `per_class` has "iou" and "pixels";
* `levels`: [{"level", "classes", "knn", "map", …}], scores of neighbors at every level of labels;
* `figures`: [{"image": `thumbnail(…)`, "location": what it shows}];
* `detections`: [{"image": `thumbnail(…)` of an image with its objects and one with predictions, "location": …}], `protocol`;
  their `per_class` has "ap", "ap50", "mask_ap" and "objects";
* `reconstructions`: [{"image": `thumbnail(…)` of an image beside its reconstruction, "location": …}].
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.atomic_files import atomic_write
from vitrail.errors import UserError
from vitrail.evaluation.verdict import has_interval, judge_run, make_verdict
from vitrail.formatting import (
    format_bytes,
    format_count,
    format_epochs,
    format_significant,
    format_time_span,
    format_value,
    percent,
    pluralize,
)
from vitrail.pages import image_url, png_url, write_page
from vitrail.pages.charts import DARK, LIGHT
from vitrail.runs.curves import Curves
from vitrail.runs.reference_curves import find_reference_band
from vitrail.runs.run_json import read_run_info
from vitrail.training.metrics import TOP1, Metric, read_metrics

MAX_MATRIX_CLASSES = 40  # a larger confusion matrix is not readable
MAX_ROWS = 12
MAX_METRICS = 32  # of the task, besides loss and primary metric
PIXEL_COLUMNS = ("class", "IoU", "precision", "recall", "pixels")
OBJECT_COLUMNS = ("class", "box AP", "box AP50", "mask AP", "objects")
BOUNDARY_COLUMNS = ("pixels", "share", "mIoU", "accuracy")
LEVEL_COLUMNS = ("labels", "classes", "k-NN", "mAP", "mAP, conditional", "mAP, oracle")
NARROW, DARK_MODE = "(max-width: 40rem)", "(prefers-color-scheme: dark)"
Rows = list[tuple[str, str]]  # label and value


def write_report(folder: str | Path) -> Path:
    """Write `report.png` and `report.html` into a run directory, from its `run.json` and `metrics.jsonl`."""
    folder = Path(folder)
    run = read_run_info(folder)
    curves = make_curves(run, read_metrics(folder))
    light = curves.draw(LIGHT)
    atomic_write(folder / "report.png", lambda temporary: temporary.write_bytes(light))
    pairs, matrix, names = list_confusions(run)
    columns, classes = class_table(run)
    return write_page(
        folder / "report.html",
        "training.html.j2",
        title=" on ".join(str(part["name"]) for part in (run["model"], run["data"]) if part.get("name")) or "Training run",
        summary=summarize(run, curves),
        verdict=verdict.describe() if (verdict := judge_run(run, curves.lines)) else [],
        status=band_status(curves),
        warnings=[describe_warning(warning) for warning in run.get("warnings") or []],
        cards=list_highlights(run, curves),
        chart=[
            (f"{NARROW} and {DARK_MODE}", png_url(curves.draw(DARK, 1))),
            (DARK_MODE, png_url(curves.draw(DARK))),
            (NARROW, png_url(curves.draw(LIGHT, 1))),
            ("", png_url(light)),
        ],
        results=list_results(run, curves),
        class_columns=columns,
        classes=classes,
        confused_unit="pixels" if is_segmentation(run) else "images",
        pairs=pairs,
        matrix=matrix,
        names=names,
        errors=[
            {
                "url": image_url(error.get("image")),
                "label": error.get("label"),
                "prediction": error.get("prediction"),
                "confidence": None if error.get("confidence") is None else float(error["confidence"]),
                "location": error.get("location"),
                "map": image_url(error.get("map")),
            }
            for error in run.get("mistakes") or []
        ],
        reconstructions=[
            {"url": image_url(pair.get("image")), "location": pair.get("location")} for pair in run.get("reconstructions") or []
        ],
        segmentations=[
            {"url": image_url(each.get("image")), "location": each.get("location")} for each in run.get("segmentations") or []
        ],
        level_columns=LEVEL_COLUMNS,
        levels=list_levels(run),
        figures=[{"url": image_url(each.get("image")), "location": each.get("location")} for each in run.get("figures") or []],
        detections=[
            {"url": image_url(each.get("image")), "location": each.get("location")} for each in run.get("detections") or []
        ],
        boundary_columns=BOUNDARY_COLUMNS,
        boundaries=list_boundaries(run),
        recipe=run["recipe"],
        run=list_run(run),
    )


def list_levels(run: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Scores of neighbors at every level of labels."""
    rows = []
    for level in run.get("levels") or []:
        scores = (level.get(name) for name in ("knn", "map", "map_conditional", "map_oracle"))
        cells = ("" if score is None else percent(float(score), 1) for score in scores)
        rows.append((str(level.get("level")), str(level.get("classes")), *cells))
    return rows


def make_curves(run: Mapping[str, Any], lines: Sequence[dict[str, Any]]) -> Curves:
    last = lines[-1] if lines else {"step": 0, "epoch": 0}
    steps = run.get("steps") or last["step"]
    total = last["epoch"] * steps / last["step"] if last["step"] else 0.0
    best = best_validation(run, lines)
    band = find_reference_band(run["recipe"], run["data"])
    return Curves(lines, total, band, best["epoch"] if best else None, run_metric(run))


def summarize(run: Mapping[str, Any], curves: Curves) -> str:
    """Return the result of the run in one sentence."""
    best, last = best_validation(run, curves.lines), curves.lines[-1] if curves.lines else None
    subject = str(run["model"].get("name") or "The model")
    subject += f" on {run['data']['name']}" if run["data"].get("name") else ""
    subject += f", recipe {run['recipe']['name']}," if run["recipe"].get("name") else ""
    if last is None:
        return f"{subject} has not logged anything yet."
    finished = curves.total - last["epoch"] < 1e-6
    total = format_epochs(curves.total)
    length = f"{total} epochs" if finished else f"{last['epoch']:.1f} of {total} epochs"
    if best:
        metric = run_metric(run)
        result = f"reached a validation {metric.title} of {format_best(run, best)}"
        result += f" (top-5 {format_accuracy(best['top5'])})" if best.get("top5") is not None else ""
        result += f" at epoch {format_epochs(best['epoch'])} of {total}" if finished else f" after {length}"
    else:
        losses = curves.smooth_losses()[1]
        result = f"was trained for {length}"
        result += f" to a training loss of {format_significant(losses[-1])}" if len(losses) else ""
        result += " without validation"
    result += f", in {format_time_span(run['seconds'])}" if run.get("seconds") else ""
    result += f" on {format_device(run)}" if format_device(run) else ""
    return f"{subject} {result}."


def format_best(run: Mapping[str, Any], best: Mapping[str, Any]) -> str:
    """Format the metric of the best validation, an accuracy of a known number of images with its interval: "84.10 % ± 5.2"."""
    verdict, metric = judge_run(run, ()), run_metric(run)
    return verdict.plus_minus if verdict else metric.format(best.get(metric.name))


def describe_warning(warning: Mapping[str, Any]) -> str:
    """Format a warning with its epochs: "warning, epochs 3 to 7: …"."""
    first, last = (f"{float(warning.get(name) or 0):g}" for name in ("epoch", "last_epoch"))
    return f"warning, {f'epoch {first}' if first == last else f'epochs {first} to {last}'}: {warning.get('message', '')}"


def format_test(test: Mapping[str, Any], metric: Metric) -> str:
    """Format the metric on the test images: "81.20 % ± 3.4 (500 images)"."""
    value: Any = test[metric.name]
    images: Any = test.get("images")
    if metric.name == "top1" and has_interval(value, images):
        return f"{make_verdict(value, images).plus_minus} ({pluralize(images, 'image')})"
    return metric.format(value) + (f" ({pluralize(images, 'image')})" if images else "")


def format_accuracy(fraction: float | None) -> str:
    return "" if fraction is None else percent(float(fraction), 2)  # run.json has NaN as text


def format_device(run: Mapping[str, Any]) -> str:
    """Return "2 × NVIDIA H200"; `machine` is text or a dictionary with device and processes."""
    machine = run.get("machine") or ""
    if not isinstance(machine, Mapping):
        return str(machine)
    device, processes = str(machine.get("device") or ""), machine.get("processes") or 1
    return f"{processes} × {device}" if device and processes != 1 else device


def best_validation(run: Mapping[str, Any], lines: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the best validation recorded in `run.json`, else the best of the metrics by the same rule."""
    metric = run_metric(run)
    if run["best"].get(metric.name) is not None:
        best: dict[str, Any] = {"epoch": 0} | run["best"]
        return best
    validations = [line for line in lines if line["kind"] == "validation" and line.get(metric.name) is not None]
    sign = 1 if metric.higher_is_better else -1

    def rank(line: dict[str, Any]) -> tuple[float, float]:
        """Of equal ones the lower loss, and a NaN loss is worst, as classification chooses."""
        loss = line.get("loss", math.inf)
        return (-math.inf, -math.inf) if math.isnan(loss) else (sign * line[metric.name], -loss)

    return max(validations, key=rank) if validations else None


def run_metric(run: Mapping[str, Any]) -> Metric:
    """Return the metric by which the run chose its best weights; top-1 for runs that do not name it."""
    try:
        return Metric(**run["metric"])
    except (KeyError, TypeError):
        return TOP1


def band_status(curves: Curves) -> tuple[str, str] | None:
    """Compare the end of the curves with the reference band: ("within", "above" or "below"; message)."""
    epochs, losses = curves.smooth_losses()
    if not curves.band or not len(epochs):
        return None
    loss = float(losses[-1])
    validation_epochs, accuracies = curves.points("validation", "top1")
    progress = epochs[-1] / curves.total
    # A validation before the last step is not compared with the band at the last step.
    is_current = len(validation_epochs) and validation_epochs[-1] / curves.total >= progress - 1e-6
    top1 = float(accuracies[-1]) if is_current else None
    return curves.band.status(progress, loss, top1), curves.band.message(progress, loss, top1)


def list_highlights(run: Mapping[str, Any], curves: Curves) -> Rows:
    best, metric = best_validation(run, curves.lines) or {}, run_metric(run)
    speeds = curves.points("train", "images_per_second")[1]
    rows = [
        (metric.title, format_best(run, best)),
        ("top-5", format_accuracy(best.get("top5"))),
        ("time", format_time_span(run["seconds"]) if run.get("seconds") else ""),
        ("images/s", f"{statistics.median(speeds):,.0f}" if len(speeds) else ""),
        ("parameters", format_count(run["model"].get("parameters", ""))),
    ]
    return [(label, value) for label, value in rows if value]


def list_results(run: Mapping[str, Any], curves: Curves) -> Rows:
    rows = []
    best = best_validation(run, curves.lines)
    if best:
        rows.append(("Best epoch", format_epochs(best["epoch"])))
    test = run.get("test") or {}
    metric = run_metric(run)
    if isinstance(test.get(metric.name), float):
        rows.append((f"Test {metric.title}", format_test(test, metric)))
    if isinstance(test.get("top5"), float):
        rows.append(("Test top-5", format_accuracy(test["top5"])))
    for label, kind, name, show in (
        (f"Last validation {metric.title}", "validation", metric.name, metric.format),
        ("Last validation top-5", "validation", "top5", format_accuracy),
        ("Last validation loss", "validation", "loss", format_significant),
        ("Model FLOPs utilization (MFU)", "train", "flops_share", format_accuracy),
        ("Time waiting for data", "train", "data_wait", format_accuracy),
    ):
        values = curves.points(kind, name)[1]
        if len(values):
            rows.append((label, show(float(statistics.median(values) if kind == "train" else values[-1]))))
    for name in curves.other_metrics()[:MAX_METRICS]:
        values = curves.points("validation", name)[1]
        if len(values):
            rows.append((f"Last validation {name.replace('_', ' ')}", format_significant(float(values[-1]))))
    losses = curves.smooth_losses()[1]
    if len(losses):
        rows.append(("Last training loss, smoothed", format_significant(losses[-1])))
    memory = curves.points("train", "memory")[1]
    if len(memory):
        rows.append(("Peak memory", format_bytes(memory.max())))
    rows += [(f"Model: {name.replace('_', ' ')}", format_count(value)) for name, value in run["model"].items()]
    rows += [(f"Data: {name.replace('_', ' ')}", format_value(value)) for name, value in run["data"].items()]
    return rows


def list_run(run: Mapping[str, Any]) -> Rows:
    names = ("command", "git", "code", "started", "machine")
    rows = [(name.capitalize(), format_value(run[name])) for name in names if run.get(name)]
    return rows + [(str(name), format_value(value)) for name, value in run["versions"].items()]


def list_classes(run: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return name, precision, recall, F1 and images of the classes, or of the hardest if there are more than 40."""
    classes = run.get("per_class") or []
    if len(classes) > MAX_MATRIX_CLASSES:
        classes = sorted(classes, key=lambda row: float(row.get("f1") or row.get("top1") or 0))[:MAX_ROWS]
    return [
        (
            str(row.get("name")),
            format_accuracy(row.get("precision")),  # runs of older versions have only the recall, as top-1
            format_accuracy(row.get("top1")),
            format_accuracy(row.get("f1")),
            format_value(row.get("images")),
        )
        for row in classes
    ]


def class_table(run: Mapping[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the columns and the rows of the classes of a run of any task."""
    if is_segmentation(run):
        return PIXEL_COLUMNS, list_pixel_classes(run)
    if any("ap" in row for row in run.get("per_class") or []):
        return OBJECT_COLUMNS, list_object_classes(run)
    return ("class", "precision", "recall", "F1", "images"), list_classes(run)


def list_object_classes(run: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return name, AP of boxes and masks, and objects of the classes of a detection."""
    shown = ("ap", "ap50", "mask_ap")
    return [
        (str(row.get("name")), *(format_accuracy(row.get(name)) for name in shown), format_value(row.get("objects")))
        for row in run.get("per_class") or []
    ]


def is_segmentation(run: Mapping[str, Any]) -> bool:
    return any("iou" in row for row in run.get("per_class") or [])


def list_pixel_classes(run: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return name, IoU, precision, recall and pixels of the classes of a segmentation."""
    shown = ("iou", "precision", "recall")
    return [
        (str(row.get("name")), *(format_accuracy(row.get(name)) for name in shown), format_value(row.get("pixels")))
        for row in run.get("per_class") or []
    ]


def list_boundaries(run: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows of `BOUNDARY_COLUMNS`."""
    shown = ("share", "miou", "pixel_accuracy")
    return [(str(row.get("pixels")), *(format_accuracy(row.get(name)) for name in shown)) for row in run.get("boundaries") or []]


def list_confusions(run: Mapping[str, Any]) -> tuple[list[tuple[str, str, str]], Any, list[str]]:
    """Return rows of (label, prediction, images), the matrix or None, and the class names."""
    confusion = run.get("confusion") or {}
    matrix = confusion.get("matrix")
    names = [str(name) for name in confusion.get("names") or run["data"].get("classes") or range(len(matrix or []))]
    if matrix and (len(names) < len(matrix) or any(len(row) != len(matrix) for row in matrix)):
        raise UserError("The confusion matrix in run.json is not square with a name for each class.")
    pairs = confusion.get("pairs") or (confused_pairs(matrix, names) if matrix else [])
    return format_pairs(pairs), matrix if matrix and len(matrix) <= MAX_MATRIX_CLASSES else None, names


def format_pairs(pairs: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Return rows of (label, prediction, "5 of 10")."""
    return [
        (
            str(pair["label"]),
            str(pair["prediction"]),
            format_value(pair["count"]) + (f" of {format_value(pair['of'])}" if pair.get("of") else ""),
        )
        for pair in pairs
    ]


def confused_pairs(matrix: Any, names: Sequence[str], count: int = MAX_ROWS) -> list[dict[str, Any]]:
    """Return the most frequent confusions of a matrix [label, prediction] of counts, most frequent first."""
    counts = np.array(matrix, dtype=np.int64)
    wrong = counts.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:count]
    pairs = [divmod(int(index), len(counts)) for index in order if wrong.flat[index]]
    return [
        {"label": names[label], "prediction": names[other], "count": int(counts[label, other]), "of": int(counts[label].sum())}
        for label, other in pairs
    ]
