"""How results vary with the seed, from stored runs: the figures of DeiT III's study of 100 seeds (Figs 6.7 to 6.11)."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.errors import UserError
from vitrail.evaluation.statistics import summarize
from vitrail.json_files import MissingFile, read_json
from vitrail.pages.charts import (
    LIGHT,
    add_legend,
    marker_style,
    new_figure,
    render_png,
    series_colors,
    style_axes,
    use_integer_ticks,
)
from vitrail.runs.comparison import Group
from vitrail.runs.run_json import read_run_json
from vitrail.training.metrics import Metric, read_metrics

MIN_SEEDS = 3
EARLY = (0.5, 5 / 6, 29 / 30)  # of the training: epochs 150, 250 and 290 of 300
MAX_GROUPS = 3  # in one panel
MAX_LABEL = 48  # characters: the end of a longer path
EVALUATION = "evaluation"  # folder in a run directory for the results of `vitrail evaluate`

Point = tuple[float, float]


def validation_curves(group: Group, metric: Metric) -> tuple[np.ndarray, np.ndarray]:
    """Epochs of the validations that all runs of a group have [points], and their values [runs, points]."""
    curves = []
    for result in group.results:
        lines = [line for line in read_metrics(result.folder) if line["kind"] == "validation" and metric.name in line]
        curves.append({float(line["epoch"]): float(line[metric.name]) for line in lines})
    epochs = sorted(set(curves[0]).intersection(*curves[1:]))
    if len(epochs) < 2:
        raise UserError(f"The runs of {group.name} have fewer than two validations at the same epochs.")
    values = np.array([[curve[epoch] for epoch in epochs] for curve in curves])
    return np.array(epochs), values


def several_seeds(groups: Sequence[Group]) -> list[Group]:
    found = [group for group in groups if len(group.results) >= MIN_SEEDS]
    if not found:
        raise UserError(
            f"The noise of seeds needs at least {MIN_SEEDS} runs of one recipe: train with --seeds {MIN_SEEDS} or more."
        )
    return found[:MAX_GROUPS]


def draw_histogram(groups: Sequence[Group], metric: Metric) -> bytes:
    """Fig. 6.8: the results of the seeds of each group, and the normal distribution of their mean and deviation."""
    scale = 100 if metric.percent else 1
    with new_figure(LIGHT, (7, 3.8)) as figure:
        axes = figure.subplots()
        style_axes(axes, f"{metric.title} over seeds", LIGHT)
        for group, color in zip(several_seeds(groups), series_colors(MAX_GROUPS), strict=False):
            values = scale * np.array(group.values)
            spread = summarize(values.tolist())
            label = f"{group.name}: {spread.mean:.2f} ± {spread.sd or 0:.2f}, n = {spread.n}"
            axes.hist(values, bins="auto", density=True, color=color, alpha=0.35, label=label)
            if spread.sd:
                x = np.linspace(spread.mean - 3.5 * spread.sd, spread.mean + 3.5 * spread.sd, 200)
                y = np.exp(-(((x - spread.mean) / spread.sd) ** 2) / 2) / (spread.sd * np.sqrt(2 * np.pi))
                axes.plot(x, y, color=color)
        axes.set_yticks([])
        axes.legend(frameon=False, fontsize=8, labelcolor=LIGHT.foreground)
        figure.tight_layout()
        return render_png(figure)


def draw_epochs(groups: Sequence[Group], metric: Metric) -> bytes:
    """Fig. 6.9: mean, deviation and range over the seeds at every validation."""
    scale = 100 if metric.percent else 1
    with new_figure(LIGHT, (7, 3.8)) as figure:
        axes = figure.subplots()
        style_axes(axes, f"{metric.title}: mean, deviation (dark) and range (light) of the seeds", LIGHT)
        for group, color in zip(several_seeds(groups), series_colors(MAX_GROUPS), strict=False):
            epochs, values = validation_curves(group, metric)
            mean, sd = scale * values.mean(0), scale * values.std(0, ddof=1)
            axes.fill_between(epochs, scale * values.min(0), scale * values.max(0), color=color, alpha=0.15, linewidth=0)
            axes.fill_between(epochs, mean - sd, mean + sd, color=color, alpha=0.35, linewidth=0)
            axes.plot(epochs, mean, color=color, label=group.name, **marker_style(epochs))
        axes.set_xlabel("epoch", color=LIGHT.muted)
        use_integer_ticks(axes)
        add_legend(axes, LIGHT, "")
        figure.tight_layout()
        return render_png(figure)


def early_correlations(group: Group, metric: Metric) -> list[tuple[float, float, np.ndarray, np.ndarray]]:
    """Epoch, correlation, values then and at the end, for up to three times of the training; NaN where all values are equal."""
    epochs, values = validation_curves(group, metric)
    found = []
    for index in sorted({int(np.abs(epochs[:-1] - share * epochs[-1]).argmin()) for share in EARLY}):
        varied = values[:, index].std() > 0 and values[:, -1].std() > 0
        correlation = float(np.corrcoef(values[:, index], values[:, -1])[0, 1]) if varied else float("nan")
        found.append((float(epochs[index]), correlation, values[:, index], values[:, -1]))
    return found


def draw_early(groups: Sequence[Group], metric: Metric) -> bytes:
    """Fig. 6.10: the result at up to three times of the training against the final one; a point per seed of the first group."""
    group, scale = several_seeds(groups)[0], 100 if metric.percent else 1
    found = early_correlations(group, metric)
    with new_figure(LIGHT, (max(3 * len(found), 4), 3.2)) as figure:
        panels = figure.subplots(1, len(found), squeeze=False)[0]
        for axes, (epoch, correlation, early, final) in zip(panels, found, strict=True):
            style_axes(axes, f"epoch {epoch:g}: r = {correlation:.2f}", LIGHT)
            axes.plot(scale * early, scale * final, "o", color=LIGHT.blue, markersize=5, alpha=0.7)
            axes.set_xlabel(f"{metric.title} then", color=LIGHT.muted)
        panels[0].set_ylabel("at the end", color=LIGHT.muted)
        figure.tight_layout()
        return render_png(figure)


def draw_test(groups: Sequence[Group], metric: Metric) -> bytes:
    """Fig. 6.7: test against validation results, a point per run, with a linear fit."""
    points: list[list[Point]] = []
    for group in groups:
        points.append([])
        for result in group.results:
            run = read_run_json(result.folder)
            best, test = (run.get(part) or {} for part in ("best", "test"))  # the test results are of the best weights, too
            name = key_of(metric, run)
            if name in best and name in test:
                points[-1].append((float(best[name]), float(test[name])))
    reason = f"Test against validation needs {MIN_SEEDS} runs on data with a test split."
    return draw_points(groups, points, metric, "validation", "test", reason)


def draw_sources(groups: Sequence[Group], metric: Metric) -> bytes:
    """Fig. 6.11: results on a second data set against those on the first, a point per run, with a linear fit."""
    evaluated = [[read_evaluation(result.folder, metric) for result in group.results] for group in groups]
    first, second = next((list(found)[:2] for part in evaluated for found in part if len(found) > 1), ("", ""))
    points = [[(found[first], found[second]) for found in part if {first, second} <= found.keys()] for part in evaluated]
    command = f"vitrail evaluate RUN FIRST SECOND --out RUN/{EVALUATION}"
    reason = f"Results on two data sets need {MIN_SEEDS} runs that were evaluated on both: `{command}`."
    return draw_points(groups, points, metric, first, second, reason)


def key_of(metric: Metric, run: Mapping[str, Any]) -> str:
    """The key of a metric in results of a run; that of its task for `--metric test`."""
    return str((run.get("metric") or {}).get("name", "top1")) if metric.name == "test" else metric.name


def read_evaluation(folder: Path, metric: Metric) -> dict[str, float]:
    """A metric by data set, from the evaluation.json of `vitrail evaluate` in a run directory; empty without it."""
    name = key_of(metric, read_run_json(folder))
    try:
        content = read_json(folder / EVALUATION / "evaluation.json")
        return {str(each["source"]): float(each[name]) for each in content["evaluations"]}
    except (MissingFile, KeyError, TypeError, ValueError):
        return {}


def draw_points(groups: Sequence[Group], points: Sequence[Sequence[Point]], metric: Metric, x: str, y: str, reason: str) -> bytes:
    """The points of each group in a color of its own, and the linear fit to all of them; `reason` is the error of too few."""
    points = [[point for point in part if np.isfinite(point).all()] for part in points]
    if sum(map(len, points)) < MIN_SEEDS:
        raise UserError(reason)
    scale = 100 if metric.percent else 1
    first, second = np.array([point for part in points for point in part]).T
    with new_figure(LIGHT, (5.4, 4.4)) as figure:
        axes = figure.subplots()
        for group, part, color in zip(groups, points, series_colors(len(groups)), strict=True):
            if part:
                across, up = scale * np.array(part).T
                axes.plot(across, up, "o", color=color, markersize=5, alpha=0.7, label=group.name)
        title = f"{metric.title.removeprefix('validation ').removeprefix('test ')} of every run"
        if first.std() > 0 and second.std() > 0:
            slope, start = np.polyfit(first, second, 1)
            ends = np.array([first.min(), first.max()])
            axes.plot(scale * ends, scale * (slope * ends + start), color=LIGHT.muted, linestyle=":")
            title += f", r = {np.corrcoef(first, second)[0, 1]:.2f}"
        style_axes(axes, title, LIGHT)
        axes.set_xlabel(x[-MAX_LABEL:], color=LIGHT.muted, parse_math=False)
        axes.set_ylabel(y[-MAX_LABEL:], color=LIGHT.muted, parse_math=False)
        axes.legend(frameon=False, fontsize=8, labelcolor=LIGHT.foreground)
        figure.tight_layout()
        return render_png(figure)


FIGURES: dict[str, Callable[[Sequence[Group], Metric], bytes]] = {
    "seeds-histogram": draw_histogram,
    "seeds-epochs": draw_epochs,
    "seeds-early": draw_early,
    "seeds-test": draw_test,
    "seeds-sources": draw_sources,
}
