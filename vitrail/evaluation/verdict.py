"""What an accuracy on a number of images says: its interval, the baselines beside it, and how far it may be too high."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vitrail.evaluation.statistics import wilson
from vitrail.formatting import percent, pluralize

FEW_IMAGES = 200
NEIGHBORS = 2  # validations next to the best one


@dataclass(frozen=True)
class Verdict:
    """A top-1 accuracy with its 95 % interval, and baselines on the same images; None where unknown."""

    top1: float
    images: int
    low: float
    high: float
    chance: float | None = None
    majority: float | None = None  # always the most frequent class
    probe: float | None = None  # a classifier on the frozen features
    validations: int = 1  # of which this one is the best
    neighbors: float | None = None  # mean accuracy of the validations next to it
    highest: float | None = None  # of the validations, where a later one within one standard error was chosen
    frozen: bool = False  # the best weights are those before the first step, the frozen ones with the probe

    @property
    def margin(self) -> float:
        return (self.high - self.low) / 2

    @property
    def plus_minus(self) -> str:
        """The text "84.10 % ± 5.2"."""
        return f"{percent(self.top1, 2)} ± {100 * self.margin:.1f}"

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def describe(self) -> list[str]:
        """Sentences on the interval, the baselines, and the choice of the best epoch."""
        baselines = [
            f"{name} {percent(value, 1)}"
            for name, value in (
                ("chance", self.chance),
                ("always the most frequent class", self.majority),
                ("a probe on the frozen features", self.probe),
            )
            if value is not None
        ]
        interval = f"95 % interval {100 * self.low:.1f} to {percent(self.high, 1)} from {pluralize(self.images, 'image')}"
        sentences = [f"{interval}; {', '.join(baselines)}." if baselines else f"{interval}."]
        if self.majority is not None and self.low <= self.majority:
            sentences.append("This is not clearly better than always predicting the most frequent class.")
        elif self.frozen:
            longer = "; a longer training (--minutes, --epochs) may" if self.top1 < 1 else ""
            sentences.append(
                f"Training did not improve on the probe, so these are the initial weights with its classifier{longer}."
            )
        elif self.probe is not None and self.low <= self.probe:
            sentences.append("The difference to the probe on the frozen features is within the interval.")
        if self.images < FEW_IMAGES:
            points = f"{100 * self.margin:.0f}" if self.margin >= 0.0095 else f"{100 * self.margin:.1f}"
            sentences.append(
                f"Only {pluralize(self.images, 'image')}: the interval is ± {points} points; differences below that are noise."
            )
        if self.validations > 1:
            sentences.append(self._describe_selection())
        return sentences

    def _describe_selection(self) -> str:
        if self.highest is not None:
            return (
                f"The highest of {self.validations} validations is {percent(self.highest, 1)}; the latest within one standard "
                "error of it was chosen, since smaller differences are noise."
            )
        sentence = f"It is the best of {self.validations} validations on the same images and therefore optimistic"
        excess = 0.0 if self.neighbors is None else self.top1 - self.neighbors
        if self.neighbors is None or excess < 0.0005:
            return f"{sentence}."
        near = f"the validations next to it have {percent(self.neighbors, 1)}"
        return f"{sentence}: {near}, so by up to about {100 * excess:.1f} points."


def make_verdict(
    top1: float, images: int, classes: int = 0, baselines: Mapping[str, float] | None = None, **selection: Any
) -> Verdict:
    """The verdict on an accuracy; `baselines` may have "majority" and "probe"."""
    known, chance = baselines or {}, 1 / classes if classes else None
    return Verdict(top1, images, *wilson(top1, images), chance, known.get("majority"), known.get("probe"), **selection)


def judge_run(run: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> Verdict | None:
    """The verdict on the best validation of a run, from run.json and the lines of metrics.jsonl; None if it has no top-1."""
    best = run.get("best") or {}
    top1: Any = best.get("top1")
    images: Any = best.get("images")
    highest: Any = best.get("highest")
    if not has_interval(top1, images) or (run.get("metric") or {}).get("name", "top1") != "top1":
        return None
    baselines = {name: float(value) for name, value in (run.get("baselines") or {}).items() if isinstance(value, int | float)}
    validations = [line for line in lines if line["kind"] == "validation" and line.get("top1") is not None]
    place = next((index for index, line in enumerate(validations) if line["step"] == best.get("step")), None)
    frozen = "probe" in baselines and best.get("step") == 0  # trained weights beside them say nothing about these
    near: list[Mapping[str, Any]] = []
    if place is not None:  # the one before and the one after; at the end the two before
        order = sorted(range(len(validations)), key=lambda index: abs(index - place))
        near = [validations[index] for index in order[1 : 1 + NEIGHBORS]]
    return make_verdict(
        top1,
        images,
        len((run.get("data") or {}).get("classes") or ()),
        baselines,
        frozen=frozen,
        validations=max(len(validations), 1),
        neighbors=float(np.mean([line["top1"] for line in near])) if len(near) == NEIGHBORS and not frozen else None,
        highest=highest if has_interval(highest, images) and highest > top1 else None,
    )


def has_interval(top1: Any, images: Any) -> bool:
    """Whether these are an accuracy and a number of images; run.json may contain anything."""
    return isinstance(top1, float) and 0 <= top1 <= 1 and isinstance(images, int) and images > 0


def majority_share(train: np.ndarray, validation: np.ndarray) -> float:
    """The accuracy of always predicting the most frequent class of the training labels; -1 is no label."""
    majority = np.bincount(train[train >= 0]).argmax()
    return float((validation[validation >= 0] == majority).mean())
