"""Reference curves: the range of loss and accuracy over several seeds of a recipe, to show early whether a run is healthy.

`python -m vitrail.runs.reference_curves RUN RUN …` makes a reference band from finished runs. A band applies to a run with an
equal recipe (except for name, seed, origin and precision) and the same data. With `--copies` it applies to every copy of the
data, however its images are encoded and ordered: the numbers of images and the classes must match.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from vitrail.errors import UserError
from vitrail.formatting import format_significant
from vitrail.recipes.schema import Recipe

FOLDER = Path(__file__).parent
IGNORED = ("name", "seed", "about", "precision")  # recipe keys that do not shift the curves
BandStatus = Literal["within", "above", "below"]


class Finding(NamedTuple):
    """One metric compared with its range."""

    status: BandStatus
    message: str


@dataclass(frozen=True)
class ReferenceBand:
    """Ranges of the smoothed training loss and of the validation top-1 (fraction of 1) by training progress in [0, 1].

    Values are None before the first measurement. The status "above" means better than the reference, "below" means worse.
    """

    recipe: dict[str, Any]
    data: dict[str, Any]
    seeds: int
    machine: str
    progress: Sequence[float]
    loss_low: Sequence[float | None]
    loss_high: Sequence[float | None]
    top1_low: Sequence[float | None]
    top1_high: Sequence[float | None]

    def __post_init__(self) -> None:
        columns = (self.progress, self.loss_low, self.loss_high, self.top1_low, self.top1_high)
        if not self.progress or len({len(column) for column in columns}) != 1:
            raise ValueError("the columns of a band must have the same length, at least 1")
        if list(self.progress) != sorted(set(self.progress)):
            raise ValueError("the progress of a band must increase")

    def applies(self, recipe: Mapping[str, Any], data: Mapping[str, Any]) -> bool:
        return recipe_key(recipe) == recipe_key(self.recipe) and same_data(data, self.data)

    def loss(self, progress: float) -> tuple[float, float]:
        """The range of the smoothed training loss; NaN before its first value."""
        return self._at(progress, self.loss_low), self._at(progress, self.loss_high)

    def top1(self, progress: float) -> tuple[float, float]:
        """The range of the validation top-1; NaN before the first validation."""
        return self._at(progress, self.top1_low), self._at(progress, self.top1_high)

    def _at(self, progress: float, column: Sequence[float | None]) -> float:
        points = [(x, value) for x, value in zip(self.progress, column, strict=True) if value is not None]
        if not points or progress < points[0][0] - 1e-9:
            return math.nan
        xs, values = zip(*points, strict=True)
        return float(np.interp(progress, xs, values))

    def status(self, progress: float, loss: float | None, top1: float | None) -> BandStatus:
        """ "below" (worse) if one of the given metrics is, else "above" (better) if one of them is, else "within"."""
        statuses = [finding.status for finding in self._findings(progress, loss, top1)]
        return "below" if "below" in statuses else "above" if "above" in statuses else "within"

    def message(self, progress: float, loss: float | None, top1: float | None) -> str:
        """The status as text, with the values that determine it."""
        findings = self._findings(progress, loss, top1)
        if not findings:
            return "too early to compare with the reference band"
        status = self.status(progress, loss, top1)
        if status == "within":
            return f"within the reference band ({self.seeds} seeds)"
        details = "; ".join(finding.message for finding in findings if finding.status == status)
        return f"{'better' if status == 'above' else 'worse'} than the reference band ({self.seeds} seeds): {details}"

    def _findings(self, progress: float, loss: float | None, top1: float | None) -> list[Finding]:
        findings = []
        if loss is not None and not math.isnan(self.loss(progress)[0]):
            low, high = self.loss(progress)
            status: BandStatus = "above" if loss < low else "within" if loss <= high else "below"
            value, lower, upper = (format_significant(number, 3) for number in (loss, low, high))
            findings.append(Finding(status, f"loss {value}, band {lower}–{upper}"))
        if top1 is not None and not math.isnan(self.top1(progress)[0]):
            low, high = self.top1(progress)
            status = "above" if top1 > high else "within" if top1 >= low else "below"
            findings.append(Finding(status, f"top-1 {100 * top1:.1f} %, band {100 * low:.1f}–{100 * high:.1f} %"))
        return findings

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def recipe_key(recipe: Mapping[str, Any]) -> str:
    """The settings of a recipe that affect its curves, as text; settings newer than the recipe have their defaults."""
    try:
        values = Recipe.from_dict(dict(recipe)).to_dict()
    except UserError:
        values = dict(recipe)
    return json.dumps({name: value for name, value in values.items() if name not in IGNORED}, sort_keys=True, default=str)


def data_key(data: Mapping[str, Any]) -> str:
    """Identifies the data of a run: its fingerprint if there is one, else everything but the name.

    The name is often a path, which differs between machines.
    """
    if data.get("fingerprint"):
        return str(data["fingerprint"])
    return json.dumps({name: value for name, value in data.items() if name != "name"}, sort_keys=True, default=str)


def same_data(data: Mapping[str, Any], reference: Mapping[str, Any]) -> bool:
    """Whether the data match a reference; one without a fingerprint matches every copy with equal counts and classes."""
    if not reference.get("fingerprint"):
        data = {name: value for name, value in data.items() if name != "fingerprint"}
    return data_key(data) == data_key(reference)


def find_reference_band(recipe: Mapping[str, Any], data: Mapping[str, Any]) -> ReferenceBand | None:
    """The band for a recipe (`Recipe.to_dict()`) and data (from `run.json`); None if there is none."""
    for path in sorted(FOLDER.glob("*.json")):
        band = read_reference_band(path)
        if band.applies(recipe, data):
            return band
    return None


def read_reference_band(path: Path) -> ReferenceBand:
    try:
        return ReferenceBand(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} is not a reference band: {error}.") from None
