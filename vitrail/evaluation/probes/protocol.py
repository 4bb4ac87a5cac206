"""What the probes share: which images are remembered and which are asked about, their labels, and the probes by name."""

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.data.datasets.folder import EXTENSIONS, SPLITS
from vitrail.data.datasets.lookup import open_parts, open_source, open_splits
from vitrail.data.loader import Problem
from vitrail.data.source import Labels, Source, Subset
from vitrail.errors import UserError
from vitrail.evaluation.features import Embedding, Readout, embed
from vitrail.evaluation.predict import open_images
from vitrail.evaluation.probes import fewshot, knn, linear, retrieval
from vitrail.models.vision_transformer import VisionTransformer

Advance = Callable[[int], None]
MAIN = "label"  # what the main column is called where columns have names


class Sides(NamedTuple):
    """The two parts of a probe and what they are called."""

    memory: Source
    queries: Source
    memory_name: str
    queries_name: str


def open_sides(path: str, memory: str | None = None, queries: str | None = None, most: int | None = None, seed: int = 0) -> Sides:
    """The training split is remembered; test is asked about, or validation, or a tenth of every class set aside.

    `most` keeps at most so many images of either, the same for the same seed.
    """
    parts = open_parts(path)
    remembered = split_name(memory, parts, path) or ("train" if "train" in parts else next(iter(parts)))
    asked = split_name(queries, parts, path)
    if asked == remembered:
        raise UserError(f"The {asked} split would be asked about images that are remembered: name two splits.")
    if asked is None:
        likely = (name for name in ("test", "validation") if name in parts and name != remembered)
        asked = next((name for name in likely if parts[name].label is not None), None)
    if asked is not None:
        found = Sides(parts[remembered], parts[asked], remembered, asked)
    else:
        if len(parts) > 1 or memory is not None:
            raise UserError(f"{path} has no labelled images to ask about beside {remembered}: name a split with --queries.")
        splits = open_splits(path, seed)
        found = Sides(splits.train, splits.validation, "nine tenths of every class", "the other tenth")
    return found._replace(memory=some(found.memory, most, seed), queries=some(found.queries, most, seed))


def split_name(name: str | None, parts: dict[str, Source], path: str) -> str | None:
    if name is None:
        return None
    known = SPLITS.get(name.lower())
    if known is None:
        raise UserError(f"There is no split called {name}: ask for train, validation or test.")
    if known not in parts:
        raise UserError(f"{path} has no {known} split, only {', '.join(parts)}.")
    return known


def some(source: Source, most: int | None, seed: int = 0) -> Source:
    if most is None or len(source) <= most:
        return source
    return Subset(source, np.sort(np.random.default_rng(seed).permutation(len(source))[:most]))


def column(source: Source, name: str = MAIN) -> Labels:
    """A column of labels by its name; the main one is called label."""
    if name in source.extra:
        return source.extra[name]
    if name == MAIN:
        if source.label is None:
            raise UserError(f"{source.name} has no labels: put the images into one folder per class, or give a table.")
        return source.label
    columns = ", ".join([*([MAIN] if source.label else []), *source.extra]) or "none"
    raise UserError(f"{source.name} has no labels called {name}; there are {columns}.")


def values_of(embedding: Embedding, name: str) -> Tensor:
    """The labels [N] of embedded images in a column that `column` knows."""
    found = embedding.extra.get(name, embedding.labels)
    assert found is not None
    return found


class Known(NamedTuple):
    """Embedded images of both sides that have a label, and the classes' names."""

    memory: Tensor  # [N, D]
    labels: Tensor  # [N]
    queries: Tensor  # [Q, D]
    truth: Tensor  # [Q]
    names: list[str]


def known(sides: Sides, memory: Embedding, queries: Embedding, name: str = MAIN) -> Known:
    """What the probes with labels work on; images without a label are left out."""
    names = column(sides.memory, name).names
    if column(sides.queries, name).names != names:
        raise UserError(f"The {name} of {sides.memory_name} and {sides.queries_name} name other classes: use one list for both.")
    found = []
    for part, source, what in ((memory, sides.memory, sides.memory_name), (queries, sides.queries, sides.queries_name)):
        labels = values_of(part, name)
        rows = labels >= 0
        if not bool(rows.any()):
            raise UserError(f"No image of {source.name} ({what}) that can be read has a {name}.")
        found += [part.vectors[rows], labels[rows]]
    if len(found[1].unique()) < 2:
        raise UserError(f"{sides.memory.name} ({sides.memory_name}) has only one class in {name}: a probe needs at least two.")
    remembered, labels, asked, truth = found
    return Known(remembered, labels, asked, truth, names)


@dataclass(frozen=True)
class Settings:
    """Everything that changes a probe's number, beside the features."""

    protocol: str = "dino"  # of knn
    k: int | None = None  # the protocol's if not given
    temperature: float | None = None
    shots: int = 5
    penalty: float = fewshot.PENALTY
    seeds: int = fewshot.SEEDS
    decays: tuple[float, ...] = linear.DECAYS
    share: float = 0.1  # held out to choose the decay on
    seed: int = 0

    def __post_init__(self) -> None:
        knn.protocol_named(self.protocol)
        problems = [
            (self.k is not None and self.k < 1, "k must be at least 1."),
            (self.temperature is not None and not 0 < self.temperature < math.inf, "the temperature must be above 0."),
            (self.shots < 1, "shots must be at least 1."),
            (self.seeds < 1, "seeds must be at least 1."),
            (not 0 < self.penalty < math.inf, "the penalty must be above 0."),
            (not self.decays or any(not 0 <= decay < math.inf for decay in self.decays), "decays must be numbers of at least 0."),
            (not 0 < self.share < 1, "the share held out must lie between 0 and 1."),
        ]
        for wrong, sentence in problems:
            if wrong:
                raise UserError(f"Of a probe's settings {sentence}")

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str) -> "Settings":
        fields = {field.name: field for field in dataclasses.fields(cls)}
        changed: dict[str, Any] = {}
        for key, value in values.items():
            if key not in fields:
                raise UserError(f"{where} has the unknown setting {key!r}; there are {', '.join(fields)}.")
            try:
                if key == "decays":
                    changed[key] = tuple(float(each) for each in (value if isinstance(value, list | tuple) else [value]))
                elif key == "protocol":
                    changed[key] = str(value)
                else:
                    changed[key] = float(value) if key in ("penalty", "temperature", "share") else whole(value)
            except (TypeError, ValueError):
                raise UserError(f"{where} has {key}: {value!r}, which is not a number that fits.") from None
        return cls(**changed)


def whole(value: Any) -> int:
    if isinstance(value, bool) or int(value) != float(value):
        raise ValueError(value)
    return int(value)


class Result(NamedTuple):
    """A probe's number, a share of one; how far it scatters where it was taken several times; what else was found."""

    score: float
    spread: float | None
    details: dict[str, Any]


def by_neighbours(data: Known, settings: Settings) -> Result:
    protocol = knn.protocol_named(settings.protocol)
    temperature = settings.temperature or protocol.temperature
    classes = len(data.names)
    k = settings.k or protocol.k
    tried = {"chosen_from": list(protocol.candidates)} if k is None else {}
    if k is None:
        k = knn.choose_k(data.memory, data.labels, classes, protocol.candidates, temperature, settings.seed)
    k = min(k, len(data.memory))
    found = knn.classify_by_neighbours(*data[:4], classes, [k], temperature)[k]
    return Result(
        found.top1,
        None,
        {"top1": found.top1, "top5": found.top5, "k": k, "temperature": temperature, **tried, "queries": found.images},
    )


def by_line(data: Known, settings: Settings) -> Result:
    chosen = linear.choose(data.memory, data.labels, len(data.names), settings.decays, settings.share, settings.seed)
    found = linear.accuracy(chosen.model, data.queries.to(data.memory.device), data.truth.to(data.memory.device))
    held = {f"{decay:g}": score for decay, score in chosen.held_out.items()}
    details = {"top1": found.top1, "top5": found.top5, "decay": chosen.decay, "held_out": held, "queries": found.images}
    return Result(found.top1, None, details | {"decay_at_edge": chosen.at_edge})


def by_few(data: Known, settings: Settings) -> Result:
    place = data.memory.device
    found = fewshot.few_shots(
        data.memory,
        data.labels,
        data.queries.to(place),
        data.truth.to(place),
        len(data.names),
        settings.shots,
        settings.penalty,
        settings.seeds,
    )
    details = {"top1": found.mean, "spread": found.spread, "shots": found.shots, "penalty": settings.penalty}
    return Result(found.mean, found.spread, details | {"choices": found.top1, "queries": found.images})


def by_ranking(data: Known, settings: Settings) -> Result:
    found = retrieval.mean_average_precision(*data[:4])
    return Result(found.mean, None, {"map": found.mean, "queries": found.queries, "without_answer": found.without})


PROBES: dict[str, Callable[[Known, Settings], Result]] = {
    "knn": by_neighbours,
    "linear": by_line,
    "fewshot": by_few,
    "retrieval": by_ranking,
}


def usual_vector(probe: str, model: VisionTransformer) -> str:
    """ViT's few shots are taken of what the last layer reads, if that is one vector; else it is what the classifier reads."""
    return "penultimate" if probe == "fewshot" and model.architecture.pooling != "per_class" else "pooled"


def embed_sides(
    model: VisionTransformer,
    sides: Sides,
    pooling: Readout,
    batch: int = 64,
    workers: int | None = None,
    advance: Advance = lambda count: None,
) -> tuple[Embedding, Embedding]:
    """Memory and queries."""
    memory, queries = (embed(model, source, pooling, batch, workers, advance) for source in (sides.memory, sides.queries))
    place = memory.vectors.device
    if queries.vectors.device != place:  # one was too large for the device
        place = torch.device("cpu")
    return to_place(memory, place), to_place(queries, place)


def to_place(embedding: Embedding, place: torch.device) -> Embedding:
    labels = embedding.labels.to(place) if embedding.labels is not None else None
    extra = {name: values.to(place) for name, values in embedding.extra.items()}
    return Embedding(embedding.vectors.to(place), embedding.image.to(place), labels, extra, embedding.problems)


def open_for_embedding(paths: Sequence[str], split: str | None = None) -> tuple[Source, list[Problem]]:
    """One split of a data set, or plain images without labels where the paths are files or several; and what is not there."""
    one = paths[0] if len(paths) == 1 else None
    if one is not None and (one in ("", "digits") or not is_image(one)):
        return open_source(one, split), []
    if split is not None:
        raise UserError("Image files have no splits: leave --split out.")
    return open_images(paths)


def is_image(path: str) -> bool:
    """By the name: other files are data sets, and data sets may lie elsewhere than on this machine."""
    return path.rpartition(".")[2].lower() in EXTENSIONS and not os.path.isdir(os.path.expanduser(path))


def rank(
    sides: Sides,
    memory: Embedding,
    queries: Embedding,
    name: str = MAIN,
    coarse: str | None = None,
    by: VisionTransformer | str = "memory",
    batch: int = 64,
    workers: int | None = None,
) -> dict[str, retrieval.Precision]:
    """Mean average precision by cosine; with a column of coarse labels also conditional on them, and of the oracle.

    `by` says where a query's chances of coarse labels come from: the whole memory, its nearest neighbours, or a classifier.
    """
    if coarse is None:
        return {"cosine": retrieval.mean_average_precision(*known(sides, memory, queries, name)[:4])}
    names = column(sides.memory, coarse).names
    known(sides, memory, queries, coarse)  # complains about labels that do not go together
    chances = classifier_chances(by, sides, names, coarse, batch, workers) if isinstance(by, VisionTransformer) else None
    rows = [(values_of(part, name) >= 0) & (values_of(part, coarse) >= 0) for part in (memory, queries)]
    if not all(bool(row.any()) for row in rows):
        raise UserError(f"No image has both a {name} and a {coarse}.")
    kept, asked = memory.pick(rows[0]), queries.pick(rows[1])
    data = known(sides, kept, asked, name)
    groups = values_of(kept, coarse)
    if chances is None:
        k = knn.PROTOCOLS["snca"].k if by == "neighbours" else None
        chances = retrieval.coarse_chances(data.memory, groups, data.queries, len(names), k=k)
    else:
        chances = chances.to(rows[1].device)[rows[1]]
    truth = retrieval.certain(values_of(asked, coarse), len(names))
    return {
        "cosine": retrieval.mean_average_precision(*data[:4]),
        "conditional": retrieval.mean_average_precision(*data[:4], retrieval.Conditioning(groups, chances)),
        "oracle": retrieval.mean_average_precision(*data[:4], retrieval.Conditioning(groups, truth)),
    }


def classifier_chances(
    model: VisionTransformer, sides: Sides, names: list[str], coarse: str, batch: int, workers: int | None
) -> Tensor:
    """[Q, C] of a model that was trained with the coarse labels."""
    fits = model.class_names == names if model.class_names is not None else model.architecture.classes == len(names)
    if not fits:
        raise UserError(
            f"This model's classifier does not name the {len(names)} classes of {coarse}: take --coarse-by memory or neighbours."
        )
    return embed(model, sides.queries, Readout("logits"), batch, workers).vectors.softmax(1)
