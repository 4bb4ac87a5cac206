"""The predictions of a model on a source, the confusion matrix, the metrics of each class and the most confident mistakes."""

import base64
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import nn

from vitrail.data.image_loader import ImageLoader
from vitrail.evaluation.threshold_curves import Rates, rates_from_counts
from vitrail.models.preprocessing import Preprocessing

MAX_MATRIX_CLASSES = 40  # with more classes the most frequent confusions are stored instead of the matrix
MAX_PAIRS = 24


class Predictions(NamedTuple):
    """One entry per readable image with a label."""

    image: np.ndarray  # index in the source
    label: np.ndarray
    prediction: np.ndarray
    confidence: np.ndarray  # probability of the prediction

    @property
    def wrong(self) -> np.ndarray:
        wrong: np.ndarray = self.prediction != self.label
        return wrong


@torch.inference_mode()
def collect_predictions(model: nn.Module, loader: ImageLoader, preprocessing: Preprocessing, batch_size: int) -> Predictions:
    """The top-1 prediction of every image, without a synchronization of the device before the last batch."""
    batches = []
    for batch in loader.iterate(batch_size):
        assert batch.labels is not None
        logits = model(preprocessing.apply(batch.pixels, batch.sizes)).float().nan_to_num()
        confidence, prediction = logits.softmax(1).max(1)
        batches.append((batch.index, batch.labels, prediction, confidence))
    if not batches:
        return Predictions(*(np.zeros(0, dtype=dtype) for dtype in (np.int64, np.int64, np.int64, np.float32)))
    columns = [torch.cat(column).cpu().numpy() for column in zip(*batches, strict=True)]
    labeled = columns[1] >= 0
    return Predictions(*(column[labeled] for column in columns))


def confusion(predictions: Predictions, names: Sequence[str]) -> dict[str, Any]:
    """{"names", "matrix"} with a row per label for up to 40 classes, {"pairs"} of the most frequent mistakes for more."""
    if len(names) <= MAX_MATRIX_CLASSES:
        matrix = np.zeros((len(names), len(names)), dtype=np.int64)
        np.add.at(matrix, (predictions.label, predictions.prediction), 1)
        return {"names": list(names), "matrix": matrix.tolist()}
    totals = np.bincount(predictions.label, minlength=len(names))
    wrong = predictions.wrong
    keys, counts = np.unique(predictions.label[wrong] * len(names) + predictions.prediction[wrong], return_counts=True)
    order = np.argsort(-counts, kind="stable")[:MAX_PAIRS]
    pairs = [(*divmod(int(keys[row]), len(names)), int(counts[row])) for row in order]
    return {
        "pairs": [
            {"label": names[label], "prediction": names[prediction], "count": count, "of": int(totals[label])}
            for label, prediction, count in pairs
        ]
    }


def class_metrics(predictions: Predictions, names: Sequence[str]) -> list[dict[str, Any]]:
    """Name, precision, recall, F1 and number of images of every class that has images; `top1` is its recall."""
    totals, predicted = (np.bincount(column, minlength=len(names)) for column in (predictions.label, predictions.prediction))
    correct = np.bincount(predictions.label[~predictions.wrong], minlength=len(names))
    rows = []
    for index in np.flatnonzero(totals).tolist():
        rates = rates_from_counts(int(correct[index]), int(predicted[index]), int(totals[index]))
        rows.append({"name": names[index], "top1": rates.recall, "images": int(totals[index]), **rates._asdict()})
    return rows


def average_metrics(per_class: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Precision, recall and F1 averaged over the classes that have images: "macro", and "weighted" by their images."""
    images = [row["images"] for row in per_class]
    return {
        kind: {name: float(np.average([row[name] for row in per_class], weights=weights)) for name in Rates._fields}
        for kind, weights in (("macro", None), ("weighted", images))
    }


def worst_mistakes(predictions: Predictions, count: int = 16) -> Predictions:
    """The wrong predictions with the highest confidence, highest first."""
    wrong = np.flatnonzero(predictions.wrong)
    order = wrong[np.argsort(-predictions.confidence[wrong], kind="stable")[:count]]
    return Predictions(*(column[order] for column in predictions))


def thumbnail(pixels: np.ndarray, side: int = 96) -> str:
    """Return an image (uint8 [height, width, 3]) as base64 text for `run.json`, its longer side at most `side`."""
    image = Image.fromarray(np.asarray(pixels, dtype=np.uint8))
    image.thumbnail((side, side))
    file = io.BytesIO()
    image.save(file, "PNG" if max(image.size) <= 48 else "JPEG", quality=85)
    return base64.b64encode(file.getvalue()).decode()
