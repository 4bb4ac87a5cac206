"""The images of a folder in the explorer: thumbnails, predictions, labels, and a 2-D map of their features."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.data.class_matching import match_classes, read_wordnet_ids
from vitrail.data.decode import decode
from vitrail.data.source import Source, Subset
from vitrail.errors import UserError
from vitrail.evaluation.predict import read_batches
from vitrail.explore.explored_model import ExploredModel, to_jpeg
from vitrail.formatting import escape_control, pluralize
from vitrail.json_files import read_json
from vitrail.models.vision_transformer import VisionTransformer

THUMBNAIL_SIDE = 128


class Scan(NamedTuple):
    """The predictions of one model for the readable images."""

    prediction: np.ndarray  # int64 [N]: the most probable class, -1 without a classifier
    probability: np.ndarray  # float32 [N]
    wrong: np.ndarray | None  # bool [N]; None: labels cannot be compared
    note: str  # why not
    points: np.ndarray  # float32 [N, 2]: the first two principal components of the features, each scaled to 0 ... 1
    explained: float  # their share of the variance


@dataclass
class Collection:
    """The readable images of a source, in its order. Images are read by index only, never by a path of the client."""

    source: Source
    root: str  # the folder that no image is read outside of; "" if the source is not a folder
    title: str
    index: list[int]
    thumbnails: list[bytes]
    scans: list[Scan]
    notes: list[str]

    def read(self, row: int, min_side: int | None) -> np.ndarray:
        """Decode an image; UserError if it cannot be read any more, or is now a link that leads out of the folder."""
        index = self.index[row]
        location = self.source.location(index)
        if not is_inside(location, self.root):
            raise UserError(f"{location} is a link that leads out of the folder.")
        try:
            return decode(self.source.encoded(index), min_side)
        except (OSError, ValueError) as error:
            raise UserError(f"{location} cannot be read: {error}.") from None

    def label(self, row: int) -> str | None:
        value = int(self.source.label.values[self.index[row]]) if self.source.label else -1
        return self.source.classes[value] if value >= 0 else None

    def describe(self, models: Sequence[ExploredModel]) -> dict[str, Any]:
        """Everything that the page shows of the collection, but the images."""
        rows = range(len(self.index))
        return {
            "title": self.title,
            "notes": self.notes,
            "names": [shown_location(self.source.location(self.index[row]), self.root) for row in rows],
            "labels": [self.label(row) for row in rows] if self.source.label else None,
            "scans": [
                {
                    "predictions": [model.names[index] if index >= 0 else None for index in scan.prediction.tolist()],
                    "probabilities": [round(value, 4) for value in scan.probability.tolist()],
                    "wrong": scan.wrong.astype(int).tolist() if scan.wrong is not None else None,
                    "points": np.round(scan.points, 4).tolist(),
                    "explained": round(scan.explained, 4),
                }
                for model, scan in zip(models, self.scans, strict=True)
            ],
        }


def is_inside(location: str, root: str) -> bool:
    """Whether a file is in the folder after all links are followed; locations that are no files are inside of an archive."""
    if not root or not os.path.lexists(location):
        return True
    return Path(os.path.realpath(location)).is_relative_to(os.path.realpath(root))


def shown_location(location: str, root: str) -> str:
    inside = os.path.relpath(location, root) if root and location.startswith(root) else location
    return escape_control(inside)


def choose_images(source: Source, root: str, limit: int, evaluation: Path | None) -> tuple[Source, list[str]]:
    """At most `limit` images inside of the folder, drawn at random, or those that an evaluation lists as wrong; and notes."""
    inside = [index for index in range(len(source)) if is_inside(source.location(index), root)]
    notes = []
    if len(inside) < len(source):
        notes.append(f"{pluralize(len(source) - len(inside), 'link')} out of the folder left out")
    if evaluation is not None:
        listed = map(os.path.abspath, read_wrong(evaluation))
        position = {os.path.abspath(source.location(index)): index for index in inside}
        chosen = list(dict.fromkeys(position[location] for location in listed if location in position))
        if not chosen:
            raise UserError(f"None of the wrong images of {evaluation} is in {source.name}: give the folder that was evaluated.")
        notes.append(f"wrong images of the evaluation {evaluation.name}")
    else:
        chosen = inside
    if len(chosen) > limit:
        drawn = np.random.default_rng(0).permutation(len(chosen))[:limit]
        notes.append(f"drawn at random from {len(chosen):,}")
        chosen = [chosen[row] for row in sorted(drawn.tolist())]
    return Subset(source, np.array(chosen, dtype=np.int64)), notes


def read_wrong(path: Path) -> list[str]:
    """The locations of the wrong images of `evaluation.json`, which `vitrail evaluate --out` writes."""
    file = path / "evaluation.json" if path.is_dir() else path
    try:
        return [str(row["image"]) for each in read_json(file)["evaluations"] for row in each["wrong"]]
    except (UserError, KeyError, TypeError):
        raise UserError(f"{file} is not the evaluation.json that `vitrail evaluate --out FOLDER` writes.") from None


def scan(
    models: Sequence[ExploredModel],
    source: Source,
    root: str,
    title: str,
    notes: list[str],
    batch_size: int,
    workers: int | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> Collection:
    """Predict and embed all images with every model."""
    index: list[int] = []
    thumbnails: list[bytes] = []
    outputs: list[list[tuple[Tensor, Tensor]]] = [[] for _ in models]
    min_side = None if any(model.min_side is None for model in models) else max(model.min_side or 0 for model in models)
    unreadable = 0
    for batch in read_batches(source, models[0].device, min_side, batch_size, workers):
        unreadable += len(batch.problems)
        if len(batch.index):
            index += batch.index.tolist()
            for pixels, size in zip(batch.pixels, batch.sizes.tolist(), strict=True):
                own = pixels[:, : size[0], : size[1]].permute(1, 2, 0).cpu().numpy()
                thumbnails.append(to_jpeg(np.ascontiguousarray(own), 75, THUMBNAIL_SIDE))
            for model, output in zip(models, outputs, strict=True):
                output.append(predict_and_embed(model.model, model.model.preprocessing.apply(batch.pixels, batch.sizes)))
        advance(len(batch.index) + len(batch.problems))
    if not index:
        raise UserError(f"No image of {title} could be read.")
    notes = notes + ([f"{pluralize(unreadable, 'unreadable image')} left out"] if unreadable else [])
    scans = [summarize(model, source, index, output) for model, output in zip(models, outputs, strict=True)]
    notes += sorted({each.note for each in scans if each.note})
    return Collection(source, root, title, index, thumbnails, scans, notes)


@torch.inference_mode()
def predict_and_embed(model: VisionTransformer, images: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [B, C] and features [B, D] of one forward pass."""
    features = model.features(images)
    pooled = features.pooled if features.pooled.ndim == 2 else features.pooled.mean(1)  # a query per class
    return model.classify(features).logits.float().cpu(), pooled.float().cpu()


def summarize(model: ExploredModel, source: Source, index: list[int], outputs: list[tuple[Tensor, Tensor]]) -> Scan:
    logits, features = (torch.cat(parts) for parts in zip(*outputs, strict=True))
    points, explained = project(features)
    if not model.names:
        nothing = np.full(len(index), -1)
        return Scan(nothing, np.zeros(len(index), dtype=np.float32), None, "", points, explained)
    probability, prediction = (x.numpy() for x in logits.softmax(1).max(1))
    wrong, note = find_wrong(model, source, index, prediction)
    return Scan(prediction, probability, wrong, note, points, explained)


def find_wrong(model: ExploredModel, source: Source, index: list[int], prediction: np.ndarray) -> tuple[np.ndarray | None, str]:
    """Which predictions differ from the label, or None and the reason if the classes of model and data do not match."""
    if source.label is None:
        return None, ""
    try:
        ids = read_wordnet_ids(source.name)
        match = match_classes(model.model.class_names, len(model.names), source.classes, source.name, ids=ids)
    except UserError:
        return None, f"labels are not compared with {model.title}: its classes are others"
    labels = source.label.values[index]
    targets = np.where(labels >= 0, match.targets[labels], -1).tolist()
    pairs = zip(targets, prediction.tolist(), strict=True)
    return np.array([target >= 0 and found not in match.groups[target] for target, found in pairs]), ""


def project(features: Tensor) -> tuple[np.ndarray, float]:
    """The first two principal components of [N, D], each scaled to 0 ... 1, and their share of the variance."""
    centered = (features - features.mean(0)).double()
    _, singular, axes = torch.linalg.svd(centered, full_matrices=False)
    axes = torch.cat([axes, torch.zeros(2, axes.shape[1], dtype=axes.dtype)])[:2]
    axes = axes * torch.sign(axes.gather(1, axes.abs().argmax(1, keepdim=True)))  # the sign is arbitrary
    points = centered @ axes.T
    low, high = points.amin(0), points.amax(0)
    scaled = torch.where(high > low, (points - low) / (high - low).clamp(min=1e-12), torch.full_like(points, 0.5))
    variance = singular.square()
    return scaled.float().numpy(), float(variance[:2].sum() / variance.sum().clamp(min=1e-12))
