"""Label hierarchies: models trained at one level, measured at every level (Grafit, arXiv 2011.12982, Tables 2.13 and 2.14).

Below the diagonal of the grid a model is asked for finer classes than it was trained with, above it for coarser ones.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.source import Labels, Source
from vitrail.errors import UserError
from vitrail.evaluation.features import Embedding
from vitrail.evaluation.probes.protocol import MAIN, PROBES, Settings, Sides, column, known
from vitrail.models.vision_transformer import VisionTransformer

NOTHING = "none"  # the level of a model that was trained without labels, or with a single one
SCORES = {"knn": "knn", "map": "retrieval", "linear": "linear"}  # what a grid may show -> the probe that gives it


GRAFIT = Settings(protocol="grafit")


class Level(NamedTuple):
    name: str
    labels: Labels
    classes: int  # that occur


def levels_of(source: Source) -> list[Level]:
    """All columns of labels, coarsest first."""
    names = [*([MAIN] if source.label is not None else []), *source.extra]
    found = [Level(name, column(source, name), 0) for name in dict.fromkeys(names)]
    counted = [level._replace(classes=len(np.unique(level.labels.values[level.labels.values >= 0]))) for level in found]
    usable = [level for level in counted if level.classes > 1]
    if not usable:
        raise UserError(f"{source.name} has no column of labels with two classes or more: there is no level to measure at.")
    return sorted(usable, key=lambda level: level.classes)


def strays(fine: Labels, coarse: Labels) -> list[str]:
    """Names of the finer classes whose images lie in more than one coarser class; none in a hierarchy."""
    both = (fine.values >= 0) & (coarse.values >= 0)
    pairs = np.unique(np.stack([fine.values[both], coarse.values[both]]), axis=1)
    values, counts = np.unique(pairs[0], return_counts=True)
    return [fine.names[value] for value in values[counts > 1]]


def level_of(model: VisionTransformer, levels: Sequence[Level]) -> str | None:
    """The level a model was trained at, by the names of its classes or else by their number; None if it is none of them."""
    if model.architecture.classes < 2:
        return NOTHING
    for level in levels:
        if model.class_names == level.labels.names:
            return level.name
    if model.class_names is not None:
        return None
    fitting = [level.name for level in levels if len(level.labels.names) == model.architecture.classes]
    return fitting[0] if len(fitting) == 1 else None


class Trained(NamedTuple):
    """A model's features, what it is called and the level it was trained at."""

    name: str
    level: str
    memory: Embedding
    queries: Embedding


class Grid(NamedTuple):
    """scores[what][row][column]: shares of one, a row per test level, a column per model."""

    models: list[str]
    train: list[str]  # the level each model was trained at
    test: list[str]
    scores: dict[str, list[list[float]]]

    def parts(self, what: str) -> dict[str, float]:
        """Means over the cells where training was as fine as the test, coarser, and finer."""
        place = {name: index for index, name in enumerate(self.test)} | {NOTHING: -1}
        cells: dict[str, list[float]] = {"same level": [], "coarse to fine": [], "fine to coarse": []}
        for row, test in enumerate(self.test):
            for number, train in enumerate(self.train):
                if train in place:
                    gap = place[test] - place[train]
                    part = "same level" if gap == 0 else "coarse to fine" if gap > 0 else "fine to coarse"
                    cells[part].append(self.scores[what][row][number])
        return {name: statistics.fmean(values) for name, values in cells.items() if values}

    def to_dict(self) -> dict[str, Any]:
        return self._asdict() | {"parts": {what: self.parts(what) for what in self.scores}}


def measure(
    sides: Sides,
    levels: Sequence[Level],
    models: Sequence[Trained],
    scores: Sequence[str] = ("knn", "map"),
    settings: Settings = GRAFIT,
    advance: Callable[[int], None] = lambda count: None,
) -> Grid:
    """Every model at every level."""
    unknown = next((what for what in scores if what not in SCORES), None)
    if unknown is not None:
        raise UserError(f"A grid has no score {unknown!r}: choose from {', '.join(SCORES)}.")
    order = [NOTHING, *(level.name for level in levels)]
    models = sorted(models, key=lambda each: order.index(each.level) if each.level in order else len(order))
    table: dict[str, list[list[float]]] = {what: [[] for _ in levels] for what in scores}
    for model in models:
        for row, level in enumerate(levels):
            data = known(sides, model.memory, model.queries, level.name)
            for what in scores:
                table[what][row].append(PROBES[SCORES[what]](data, settings).score)
                advance(1)
    return Grid([each.name for each in models], [each.level for each in models], [level.name for level in levels], table)
