"""Label hierarchies: models trained at one level, evaluated at every level (Grafit, arXiv 2011.12982, Tables 2.13 and 2.14).

Below the diagonal of the grid the classes of the evaluation are finer than those of the training, above it they are coarser.
"""

import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.source import Labels, Source
from vitrail.errors import UserError
from vitrail.evaluation.features import Embedding
from vitrail.evaluation.model import Model, count_classes
from vitrail.evaluation.probes.protocol import LABEL, PROBES, ProbeData, Settings, label_column, select_labeled

NO_LEVEL = "none"  # the level of a model that was trained without labels or with a single one
SCORES = {"knn": "knn", "map": "retrieval", "linear": "linear"}  # score of a grid -> probe
GRAFIT = Settings(protocol="grafit")


class Level(NamedTuple):
    name: str
    labels: Labels
    classes: int  # that occur in the data


def find_levels(source: Source) -> list[Level]:
    """All label columns with at least two classes, coarsest first."""
    names = [*([LABEL] if source.label is not None else []), *source.extra]
    columns = {name: label_column(source, name) for name in names}
    levels = [Level(name, labels, len(np.unique(labels.values[labels.values >= 0]))) for name, labels in columns.items()]
    usable = [level for level in levels if level.classes > 1]
    if not usable:
        raise UserError(f"{source.name} has no label column with two classes or more.")
    return sorted(usable, key=lambda level: level.classes)


def inconsistent_classes(fine: Labels, coarse: Labels) -> list[str]:
    """Names of the fine classes with images in more than one coarse class; empty for a hierarchy."""
    both = (fine.values >= 0) & (coarse.values >= 0)
    pairs = np.unique(np.stack([fine.values[both], coarse.values[both]]), axis=1)
    values, counts = np.unique(pairs[0], return_counts=True)
    return [fine.names[value] for value in values[counts > 1]]


def training_level(model: Model, levels: Sequence[Level], main: str = LABEL) -> str | None:
    """The level that a model was trained at: by the labels of its recipe, its class names, or their number; None if unknown.

    `main` is the name of the main label column in the data.
    """
    chosen = recorded_label(model)
    chosen = LABEL if chosen == main else chosen
    if chosen in (NO_LEVEL, *(level.name for level in levels)):
        return chosen
    if count_classes(model) < 2:
        return NO_LEVEL if chosen is None else None
    for level in levels:
        if model.class_names is not None and sorted(model.class_names) == sorted(level.labels.names):
            return level.name
    if model.class_names is not None:
        return None
    fitting = [level.name for level in levels if len(level.labels.names) == count_classes(model)]
    return fitting[0] if len(fitting) == 1 else None


def recorded_label(model: Model) -> str | None:
    """The labels that the recipe in an artifact was trained on, of tasks whose model may have no classifier."""
    try:
        recipe = json.loads(str(getattr(model, "notes", {})["recipe"]))
        return str(recipe["data"]["label"] or LABEL) if recipe["task"] == "grafit" else None
    except (KeyError, TypeError, ValueError):
        return None


class EmbeddedModel(NamedTuple):
    """The features of a model, its name and the level it was trained at; several models of one name are seeds of one method."""

    name: str
    level: str
    memory: Embedding
    queries: Embedding
    trunk: tuple[Embedding, Embedding] | None = None  # those of memory and queries for the linear classifier, if others


class Grid(NamedTuple):
    """scores[score][row][column] in [0, 1]: a row per evaluated level, a column per model."""

    models: list[str]
    train: list[str]  # the level each model was trained at
    test: list[str]
    scores: dict[str, list[list[float]]]
    sds: dict[str, list[list[float | None]]] = {}  # noqa: RUF012 - standard deviations over models of one name, of `average`

    def average(self) -> "Grid":
        """The grid with one column for all models of one name and level: means, and standard deviations of several."""
        columns: dict[tuple[str, str], list[int]] = {}
        for place, key in enumerate(zip(self.models, self.train, strict=True)):
            columns.setdefault(key, []).append(place)
        means: dict[str, list[list[float]]] = {}
        sds: dict[str, list[list[float | None]]] = {}
        for score, rows in self.scores.items():
            cells = [[[row[place] for place in places] for places in columns.values()] for row in rows]
            means[score] = [[statistics.fmean(values) for values in row] for row in cells]
            sds[score] = [[statistics.stdev(values) if len(values) > 1 else None for values in row] for row in cells]
        return Grid([name for name, _ in columns], [level for _, level in columns], self.test, means, sds)

    def means(self, score: str) -> dict[str, float]:
        """Means over the cells whose training level is the same as, coarser than, and finer than the evaluated level."""
        order = {name: index for index, name in enumerate(self.test)} | {NO_LEVEL: -1}
        cells: dict[str, list[float]] = {"same level": [], "coarse to fine": [], "fine to coarse": []}
        for row, test in enumerate(self.test):
            for column, train in enumerate(self.train):
                if train in order:
                    difference = order[test] - order[train]
                    group = "same level" if difference == 0 else "coarse to fine" if difference > 0 else "fine to coarse"
                    cells[group].append(self.scores[score][row][column])
        return {name: statistics.fmean(values) for name, values in cells.items() if values}

    def to_dict(self) -> dict[str, Any]:
        return self._asdict() | {"means": {score: self.means(score) for score in self.scores}}


def measure_grid(
    data: ProbeData,
    levels: Sequence[Level],
    models: Sequence[EmbeddedModel],
    scores: Sequence[str] = ("knn", "map"),
    settings: Settings = GRAFIT,
    advance: Callable[[int], None] = lambda count: None,
) -> Grid:
    """The scores of every model at every level."""
    unknown = next((score for score in scores if score not in SCORES), None)
    if unknown is not None:
        raise UserError(f"There is no score called {unknown!r}: choose from {', '.join(SCORES)}.")
    order = [NO_LEVEL, *(level.name for level in levels)]
    models = sorted(models, key=lambda model: order.index(model.level) if model.level in order else len(order))
    table: dict[str, list[list[float]]] = {score: [[] for _ in levels] for score in scores}
    for model in models:
        for row, level in enumerate(levels):
            for score in scores:
                memory, queries = model.trunk if score == "linear" and model.trunk else (model.memory, model.queries)
                features = select_labeled(data, memory, queries, level.name)
                table[score][row].append(PROBES[SCORES[score]](features, settings).score)
                advance(1)
    return Grid([model.name for model in models], [model.level for model in models], [level.name for level in levels], table)
