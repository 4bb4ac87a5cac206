"""Reference curves: where several seeds of a recipe lay on a data set, so that a run is told early whether it is healthy.

`python -m vitrail.runs.reference_curves RUN RUN …` makes one from finished runs. A band applies to a run whose recipe has equal
content (its name, seed, origin and precision aside) and whose data is the same; to no other. With `--copies` it applies to every
copy of the data, however its images are encoded and ordered: as many images of the same classes.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from vitrail.errors import UserError
from vitrail.recipes.schema import Recipe
from vitrail.training.metrics import figures

FOLDER = Path(__file__).parent
NO_MATTER = ("name", "seed", "about", "precision")  # of a recipe: they do not change where a curve lies
Verdict = Literal["within", "above", "below"]


class Finding(NamedTuple):
    """One quantity beside its band."""

    verdict: Verdict
    words: str


@dataclass(frozen=True)
class Band:
    """The range of a training's smoothed loss and of its validation top-1 (a share in [0, 1]) by progress, None before the first.

    A verdict is about quality: "above" is better than the reference, "below" is worse.
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
            raise ValueError("a band's progress must grow")

    def applies(self, recipe: Mapping[str, Any], data: Mapping[str, Any]) -> bool:
        return content(recipe) == content(self.recipe) and is_same(data, self.data)

    def loss(self, progress: float) -> tuple[float, float]:
        """The range of the smoothed training loss; NaN before its first value."""
        return self._at(progress, self.loss_low), self._at(progress, self.loss_high)

    def top1(self, progress: float) -> tuple[float, float]:
        """The range of the validation top-1; NaN before the first validation."""
        return self._at(progress, self.top1_low), self._at(progress, self.top1_high)

    def _at(self, progress: float, column: Sequence[float | None]) -> float:
        known = [(place, value) for place, value in zip(self.progress, column, strict=True) if value is not None]
        if not known or progress < known[0][0] - 1e-9:
            return math.nan
        places, values = zip(*known, strict=True)
        return float(np.interp(progress, places, values))

    def verdict(self, progress: float, loss: float | None, top1: float | None) -> Verdict:
        """ "above": better than the reference, "below": worse; one quantity that is worse outweighs another that is better."""
        found = [finding.verdict for finding in self._findings(progress, loss, top1)]
        return "below" if "below" in found else "above" if "above" in found else "within"

    def sentence(self, progress: float, loss: float | None, top1: float | None) -> str:
        """The verdict in words, with the numbers that decided it."""
        findings = self._findings(progress, loss, top1)
        if not findings:
            return "too early to compare with the reference band"
        verdict = self.verdict(progress, loss, top1)
        if verdict == "within":
            return f"on track: within the band of {self.seeds} seeds"
        words = "; ".join(finding.words for finding in findings if finding.verdict == verdict)
        return f"{'better' if verdict == 'above' else 'worse'} than the band of {self.seeds} seeds: {words}"

    def _findings(self, progress: float, loss: float | None, top1: float | None) -> list[Finding]:
        findings = []
        if loss is not None and not math.isnan(self.loss(progress)[0]):
            low, high = self.loss(progress)
            verdict: Verdict = "above" if loss < low else "within" if loss <= high else "below"
            findings.append(Finding(verdict, f"loss {figures(loss, 3)}, band {figures(low, 3)}–{figures(high, 3)}"))
        if top1 is not None and not math.isnan(self.top1(progress)[0]):
            low, high = self.top1(progress)
            verdict = "above" if top1 > high else "within" if top1 >= low else "below"
            findings.append(Finding(verdict, f"top-1 {100 * top1:.1f} %, band {100 * low:.1f}–{100 * high:.1f} %"))
        return findings

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def content(recipe: Mapping[str, Any]) -> str:
    """What of a recipe decides where its curve lies; settings that are newer than the recipe take their defaults."""
    try:
        values = Recipe.from_dict(dict(recipe)).to_dict()
    except UserError:
        values = dict(recipe)
    return json.dumps({name: value for name, value in values.items() if name not in NO_MATTER}, sort_keys=True, default=str)


def identity(data: Mapping[str, Any]) -> str:
    """What of a run's data tells it from other data: a fingerprint if there is one, else all but the name.

    The name is often a path, and the same images lie elsewhere on another machine.
    """
    if data.get("fingerprint"):
        return str(data["fingerprint"])
    return json.dumps({name: value for name, value in data.items() if name != "name"}, sort_keys=True, default=str)


def is_same(data: Mapping[str, Any], reference: Mapping[str, Any]) -> bool:
    """A reference without a fingerprint means every copy: counts and classes decide."""
    if not reference.get("fingerprint"):
        data = {name: value for name, value in data.items() if name != "fingerprint"}
    return identity(data) == identity(reference)


def find_band(recipe: Mapping[str, Any], data: Mapping[str, Any]) -> Band | None:
    """The band for a run with this recipe (`Recipe.to_dict()`) and data (`run.json`'s), None if there is none."""
    for path in sorted(FOLDER.glob("*.json")):
        band = read_band(path)
        if band.applies(recipe, data):
            return band
    return None


def read_band(path: Path) -> Band:
    try:
        return Band(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} is not a reference band: {error}.") from None
