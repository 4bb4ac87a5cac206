"""Common parts of the probes: the images of memory and queries, their labels, the settings, and the probes by name."""

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrail.aliases import PROBE_SETTINGS
from vitrail.data.datasets.folder import SPLITS
from vitrail.data.datasets.lookup import check_usable, open_source, open_sources, open_splits, require_labels
from vitrail.data.label_choice import add_levels
from vitrail.data.loader import Problem
from vitrail.data.progress import Advance
from vitrail.data.source import Labels, Source, subsample
from vitrail.errors import UserError
from vitrail.evaluation.feature_cache import cached_embed
from vitrail.evaluation.features import Embedding, FeatureKind, embed
from vitrail.evaluation.model import Model, count_classes
from vitrail.evaluation.predict import has_image_extension, open_images
from vitrail.evaluation.probes import fewshot, knn, linear, retrieval
from vitrail.heads.embedding import EmbeddingHead
from vitrail.models.vision_transformer import VisionTransformer

LABEL = "label"  # name of the main label column


class ProbeData(NamedTuple):
    """The images to fit or search in (memory), the images to evaluate (queries), and the names of their splits."""

    memory: Source
    queries: Source
    memory_name: str
    queries_name: str


def open_probe_data(
    path: str,
    memory: str | None = None,
    queries: str | None = None,
    max_images: int | None = None,
    seed: int = 0,
    label_map: str | None = None,
) -> ProbeData:
    """By default the memory is the training split, and the queries are test, else validation, else a tenth of every class.

    With `max_images`, at most this many images of either, drawn by the seed. `label_map` is a file with coarser classes,
    further label columns (`vitrail.data.label_choice`).
    """
    sources = open_sources(path)
    memory_name = find_split(memory, sources, path) or ("train" if "train" in sources else next(iter(sources)))
    queries_name = find_split(queries, sources, path)
    if queries_name == memory_name:
        raise UserError(f"Memory and queries are both the {queries_name} split: choose two splits.")
    if queries_name is None:
        candidates = (name for name in ("test", "validation") if name in sources and name != memory_name)
        queries_name = next((name for name in candidates if sources[name].label is not None), None)
    if queries_name is not None:
        data = ProbeData(sources[memory_name], sources[queries_name], memory_name, queries_name)
    else:
        if not sources[memory_name].extra:
            require_labels(sources[memory_name])
        if len(sources) > 1 or memory is not None:
            raise UserError(f"{path} has no labeled split for queries other than {memory_name}: choose one with --queries.")
        splits = open_splits(path, seed)
        check_usable(splits[:2])
        data = ProbeData(splits.train, splits.validation, "nine tenths of every class", "the other tenth")
    if label_map is not None:
        for part in (data.memory, data.queries):
            require_labels(part)
        add_levels((data.memory, data.queries), label_map)
    return data._replace(memory=subsample(data.memory, max_images, seed), queries=subsample(data.queries, max_images, seed))


def find_split(name: str | None, sources: dict[str, Source], path: str) -> str | None:
    if name is None:
        return None
    split = SPLITS.get(name.lower())
    if split is None:
        raise UserError(f"There is no split called {name}: choose train, validation or test.")
    if split not in sources:
        raise UserError(f"{path} has no {split} split, only {', '.join(sources)}.")
    return split


def label_columns(source: Source) -> dict[str, Labels]:
    """The label columns by name; the main one is called `label`."""
    return ({LABEL: source.label} if source.label is not None else {}) | source.extra


def label_column(source: Source, name: str = LABEL) -> Labels:
    """A label column by name; the main one is called `label`."""
    if name in source.extra:
        return source.extra[name]
    if name == LABEL:
        return require_labels(source)
    raise UserError(f"{source.name} has no labels called {name}; there are {', '.join(label_columns(source)) or 'none'}.")


def labels_of(embedding: Embedding, name: str) -> Tensor:
    """The labels [N] of embedded images in a column that exists."""
    labels = embedding.extra.get(name, embedding.labels)
    assert labels is not None
    return labels


class LabeledFeatures(NamedTuple):
    """Features and labels of the labeled images of memory and queries, and the class names."""

    memory: Tensor  # [N, D]
    labels: Tensor  # [N]
    queries: Tensor  # [Q, D]
    query_labels: Tensor  # [Q]
    names: list[str]


def select_labeled(data: ProbeData, memory: Embedding, queries: Embedding, name: str = LABEL) -> LabeledFeatures:
    """The features of the images with a label in a column."""
    names = label_column(data.memory, name).names
    if label_column(data.queries, name).names != names:
        raise UserError(
            f"The {name} of {data.memory_name} and {data.queries_name} have different class names: use one list for both."
        )
    selected = []
    for embedding, source, split in ((memory, data.memory, data.memory_name), (queries, data.queries, data.queries_name)):
        labels = labels_of(embedding, name)
        rows = labels >= 0
        if not bool(rows.any()):
            raise UserError(f"No readable image of {source.name} ({split}) has a {name}.")
        selected += [embedding.vectors[rows], labels[rows]]
    if len(selected[1].unique()) < 2:
        raise UserError(f"{data.memory.name} ({data.memory_name}) has only one class in {name}: a probe needs at least two.")
    vectors, labels, query_vectors, query_labels = selected
    return LabeledFeatures(vectors, labels, query_vectors, query_labels, names)


@dataclass(frozen=True)
class Settings:
    """All settings that change the result of a probe, besides the features."""

    protocol: str = "dino"  # of knn
    k: int | None = None  # default: the protocol's
    temperature: float | None = None
    shots: int = 5
    penalty: float = fewshot.PENALTY
    seeds: int = fewshot.SEEDS
    weight_decays: tuple[float, ...] = linear.WEIGHT_DECAYS
    held_out: float = 0.1  # fraction of every class to choose the weight decay on
    seed: int = 0

    def __post_init__(self) -> None:
        knn.get_protocol(self.protocol)
        checks = [
            (self.k is not None and self.k < 1, "k must be at least 1"),
            (self.temperature is not None and not 0 < self.temperature < math.inf, "temperature must be above 0"),
            (self.shots < 1, "shots must be at least 1"),
            (self.seeds < 1, "seeds must be at least 1"),
            (not 0 < self.penalty < math.inf, "penalty must be above 0"),
            (
                not self.weight_decays or any(not 0 <= value < math.inf for value in self.weight_decays),
                "weight_decays must be numbers of at least 0",
            ),
            (not 0 < self.held_out < 1, "held_out must be between 0 and 1"),
        ]
        for failed, message in checks:
            if failed:
                raise UserError(f"Settings of a probe: {message}.")

    @classmethod
    def from_dict(cls, values: dict[str, Any], location: str) -> "Settings":
        fields = {field.name: field for field in dataclasses.fields(cls)}
        changed: dict[str, Any] = {}
        for given, value in values.items():
            key = PROBE_SETTINGS.get(given, given)
            if key not in fields:
                raise UserError(f"{location} has the unknown setting {key!r}; there are {', '.join(fields)}.")
            try:
                if key == "weight_decays":
                    changed[key] = tuple(float(each) for each in (value if isinstance(value, list | tuple) else [value]))
                elif key == "protocol":
                    changed[key] = str(value)
                else:
                    changed[key] = float(value) if key in ("penalty", "temperature", "held_out") else to_integer(value)
            except (TypeError, ValueError):
                raise UserError(f"{location} has {key}: {value!r}, which is not a valid number.") from None
        return cls(**changed)


def to_integer(value: Any) -> int:
    if isinstance(value, bool) or int(value) != float(value):
        raise ValueError(value)
    return int(value)


class Result(NamedTuple):
    """The score of a probe in [0, 1], its standard deviation if it was measured several times, and further values."""

    score: float
    sd: float | None
    details: dict[str, Any]


def run_knn(data: LabeledFeatures, settings: Settings) -> Result:
    protocol = knn.get_protocol(settings.protocol)
    temperature = settings.temperature or protocol.temperature
    classes = len(data.names)
    k = settings.k or protocol.k
    candidates = {"chosen_from": list(protocol.candidates)} if k is None else {}
    if k is None:
        k = knn.choose_k(data.memory, data.labels, classes, protocol.candidates, temperature, settings.seed)
    k = min(k, len(data.memory))
    accuracy = knn.knn_accuracy(*data[:4], classes, [k], temperature)[k]
    details = {"top1": accuracy.top1, "top5": accuracy.top5, "k": k, "temperature": temperature, **candidates}
    return Result(accuracy.top1, None, details | {"queries": accuracy.images})


def run_linear(data: LabeledFeatures, settings: Settings) -> Result:
    device = data.memory.device
    selected = linear.select_classifier(
        data.memory, data.labels, len(data.names), settings.weight_decays, settings.held_out, settings.seed
    )
    accuracy = linear.accuracy(selected.classifier, data.queries.to(device), data.query_labels.to(device))
    details = {
        "top1": accuracy.top1,
        "top5": accuracy.top5,
        "weight_decay": selected.weight_decay,
        "held_out": {f"{weight_decay:g}": score for weight_decay, score in selected.held_out.items()},
        "queries": accuracy.images,
        "weight_decay_at_edge": selected.at_edge,
    }
    return Result(accuracy.top1, None, details)


def run_fewshot(data: LabeledFeatures, settings: Settings) -> Result:
    device = data.memory.device
    accuracy = fewshot.fewshot_accuracy(
        data.memory,
        data.labels,
        data.queries.to(device),
        data.query_labels.to(device),
        len(data.names),
        settings.shots,
        settings.penalty,
        settings.seeds,
    )
    details = {"top1": accuracy.mean, "sd": accuracy.sd, "shots": accuracy.shots, "penalty": settings.penalty}
    return Result(accuracy.mean, accuracy.sd, details | {"draws": accuracy.top1, "queries": accuracy.images})


def run_retrieval(data: LabeledFeatures, settings: Settings) -> Result:
    precision = retrieval.mean_average_precision(*data[:4])
    details = {"map": precision.mean, "queries": precision.queries, "without_match": precision.without_match}
    return Result(precision.mean, None, details)


PROBES: dict[str, Callable[[LabeledFeatures, Settings], Result]] = {
    "knn": run_knn,
    "linear": run_linear,
    "fewshot": run_fewshot,
    "retrieval": run_retrieval,
}


def default_vector(probe: str, model: Model) -> str:
    """The vector of a probe: neighbors are searched by the projector's output, if there is one.

    ViT's few-shot probe uses the input of the last layer, if it is one vector; the others the input of the classifier.
    """
    if probe in ("knn", "retrieval") and isinstance(model, VisionTransformer) and isinstance(model.task_head, EmbeddingHead):
        return "projected"
    several = isinstance(model, VisionTransformer) and model.architecture.pooling == "per_class"
    return "penultimate" if probe == "fewshot" and not several else "pooled"


def embed_probe_data(
    model: Model,
    data: ProbeData,
    kind: FeatureKind,
    batch_size: int = 64,
    workers: int | None = None,
    advance: Advance = lambda count: None,
    cache: bool = False,
) -> tuple[Embedding, Embedding]:
    """The features of memory and queries, on one device; with `cache`, those on disk are used."""
    compute = cached_embed if cache else embed
    memory, queries = (compute(model, source, kind, batch_size, workers, advance) for source in (data.memory, data.queries))
    device = memory.vectors.device
    if queries.vectors.device != device:  # one of them did not fit on the GPU
        device = torch.device("cpu")
    return memory.to(device), queries.to(device)


def open_embedding_source(paths: Sequence[str], split: str | None = None) -> tuple[Source, list[Problem]]:
    """One split of a data set, or unlabeled images if the paths are image files or several; and paths that are not images."""
    path = paths[0] if len(paths) == 1 else None
    if path is not None and (path in ("", "digits") or not is_image_file(path)):
        return open_source(path, split), []
    if split is not None:
        raise UserError("Image files have no splits: remove --split.")
    return open_images(paths)


def is_image_file(path: str) -> bool:
    """By the extension alone: other paths are data sets, which may be on another machine."""
    return has_image_extension(path) and not os.path.isdir(os.path.expanduser(path))


def measure_retrieval(
    data: ProbeData,
    memory: Embedding,
    queries: Embedding,
    name: str = LABEL,
    coarse: str | None = None,
    coarse_by: Model | str = "memory",
    batch_size: int = 64,
    workers: int | None = None,
) -> dict[str, retrieval.Precision]:
    """Mean average precision by cosine; with a column of coarse labels also conditional on them, and of the oracle.

    `coarse_by` is the source of the probabilities of coarse labels: "memory", its nearest "neighbors", or a model's classifier.
    """
    if coarse is None:
        return {"cosine": retrieval.mean_average_precision(*select_labeled(data, memory, queries, name)[:4])}
    names = label_column(data.memory, coarse).names
    select_labeled(data, memory, queries, coarse)  # raises for inconsistent labels
    probabilities = None
    if not isinstance(coarse_by, str):
        probabilities = classifier_probabilities(coarse_by, data, names, coarse, batch_size, workers)
    rows = [(labels_of(part, name) >= 0) & (labels_of(part, coarse) >= 0) for part in (memory, queries)]
    if not all(bool(row.any()) for row in rows):
        raise UserError(f"No image has both a {name} and a {coarse}.")
    memory, queries = memory.select(rows[0]), queries.select(rows[1])
    features = select_labeled(data, memory, queries, name)
    groups = labels_of(memory, coarse)
    if probabilities is None:
        k = knn.PROTOCOLS["snca"].k if coarse_by == "neighbors" else None
        probabilities = retrieval.coarse_probabilities(features.memory, groups, features.queries, len(names), k=k)
    else:
        probabilities = probabilities.to(rows[1].device)[rows[1]]
    oracle = retrieval.one_hot(labels_of(queries, coarse), len(names))
    return {
        "cosine": retrieval.mean_average_precision(*features[:4]),
        "conditional": retrieval.mean_average_precision(*features[:4], retrieval.CoarseLabels(groups, probabilities)),
        "oracle": retrieval.mean_average_precision(*features[:4], retrieval.CoarseLabels(groups, oracle)),
    }


def classifier_probabilities(
    model: Model, data: ProbeData, names: list[str], coarse: str, batch_size: int, workers: int | None
) -> Tensor:
    """[Q, C] of a model that was trained with the coarse labels."""
    fits = model.class_names == names if model.class_names is not None else count_classes(model) == len(names)
    if not fits:
        raise UserError(
            f"The classes of this model are not the {len(names)} classes of {coarse}: use --coarse-by memory or neighbors."
        )
    return embed(model, data.queries, FeatureKind("logits"), batch_size, workers).vectors.softmax(1)
