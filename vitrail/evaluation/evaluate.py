"""Evaluation of a model on a source: accuracy, precision and recall, confusion and calibration; other image sizes and crops."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.data.class_matching import OTHER, Among, ClassMatch
from vitrail.data.datasets.folder import SPLITS
from vitrail.data.datasets.lookup import open_sources, open_splits
from vitrail.data.image_loader import ImageLoader
from vitrail.data.source import Source
from vitrail.errors import UserError
from vitrail.evaluation.accuracy import TOP5_CLASSES
from vitrail.evaluation.calibration import (
    Bin,
    adaptive_bins,
    calibration_error,
    equal_bins,
    fit_temperature,
    measure_confidence,
)
from vitrail.evaluation.confusion import Predictions, average_metrics, class_metrics, confusion
from vitrail.evaluation.model import Head, Model, check_head, compute_logits, decode_side, device_of
from vitrail.evaluation.multilabel import MultilabelAccuracy, multilabel_accuracy
from vitrail.evaluation.statistics import wilson
from vitrail.evaluation.threshold_curves import Threshold, ThresholdCurve, trace_thresholds, tune_thresholds
from vitrail.evaluation.verdict import Verdict, make_verdict
from vitrail.models.config import format_size
from vitrail.models.vision_transformer import VisionTransformer

TOP = 5
PRECISION = 0.95  # that a threshold is found for
MAX_CURVES = 20  # classes with a precision-recall and an ROC curve
NO_TEMPERATURE = "the loss has no minimum, as when every prediction is correct or all logits are equal"


class EvaluationData(NamedTuple):
    """The images to evaluate, the name of their split, and other images of the data to fit the temperature on, if any."""

    source: Source
    split: str
    calibration: Source | None


class HeldOut(NamedTuple):
    """How a training on this data chose its validation images: arguments of `open_splits`."""

    class_order: Sequence[str]
    validation_fraction: float = 0.0
    fold: tuple[int, int] | None = None


@dataclass(frozen=True)
class WrongImage:
    """A wrong prediction."""

    index: int  # in the source
    image: str  # path, or where it is in an archive or a table
    label: str
    prediction: str
    probability: float  # of the prediction
    label_probability: float
    predicted_class: int  # of the model; -1 where the prediction stands for several


class ClassCurve(NamedTuple):
    """The curve of one class against all others."""

    name: str
    curve: ThresholdCurve


class Thresholds(NamedTuple):
    """Thresholds for the probability of one class of two."""

    positive: str
    rows: list[Threshold]


@dataclass(frozen=True)
class EvaluationOptions:
    among: Among = "subset"  # predict among the classes of the data, or among all classes of the model
    head: Head = "both"  # of a distilled model
    batch_size: int = 64
    workers: int | None = None


OPTIONS = EvaluationOptions()


@dataclass(frozen=True)
class Scores:
    """Logits of the readable images of a source: the first T columns are the target classes, further ones other classes."""

    image: np.ndarray  # [N] index in the source
    label: np.ndarray  # [N] target class, -1 if unknown
    values: Tensor  # float32 [N, T or more], on the CPU
    images: int  # of the source, including unreadable ones

    @property
    def prediction(self) -> np.ndarray:
        return self.values.argmax(1).numpy()

    def labeled(self) -> "Scores":
        """The scores of the images with a label."""
        rows = np.flatnonzero(self.label >= 0)
        return Scores(self.image[rows], self.label[rows], self.values[torch.from_numpy(rows)], self.images)


@dataclass(frozen=True)
class Calibration:
    """Calibration errors without and with a temperature; the bins have equal width."""

    confidence: float  # mean over the images
    ece: float
    adaptive_ece: float
    bins: list[Bin]
    temperature: float | None = None
    fitted_on: str = ""  # or why there is no temperature
    ece_after: float | None = None
    adaptive_ece_after: float | None = None
    loss_after: float | None = None
    bins_after: list[Bin] | None = None


@dataclass(frozen=True)
class Evaluation:
    """The results of a model on one source; accuracies are in [0, 1]."""

    source: str
    split: str
    images: int
    unreadable: int
    unlabeled: int
    classes: int
    matched: str  # how the classes of model and data were matched
    among: Among
    top1: float
    top1_error: float  # standard error from the number of images
    top1_interval: tuple[float, float]  # 95 % confidence
    majority: float  # share of the most frequent class
    top5: float | None  # None for fewer than 10 classes
    mean_per_class: float
    loss: float
    per_class: list[dict[str, Any]]  # of classes with images
    averages: dict[str, dict[str, float]]  # of precision, recall and F1
    confusion: dict[str, Any]
    calibration: Calibration
    multilabel: MultilabelAccuracy | None
    curves: list[ClassCurve]  # empty for more than 20 classes
    thresholds: Thresholds | None  # of two classes

    @property
    def verdict(self) -> Verdict:
        return make_verdict(self.top1, self.images, self.classes, {"majority": self.majority})

    def to_dict(self) -> dict[str, Any]:
        content = asdict(replace(self, curves=[], thresholds=None))
        content["multilabel"] = self.multilabel._asdict() if self.multilabel else None
        content["curves"] = [{"name": each.name} | each.curve.to_dict() for each in self.curves]
        if self.thresholds is not None:
            rows = [row._asdict() for row in self.thresholds.rows]
            content["thresholds"] = {"positive": self.thresholds.positive, "rows": rows}
        for name in ("bins", "bins_after"):
            bins = getattr(self.calibration, name)
            content["calibration"][name] = [each._asdict() for each in bins] if bins is not None else None
        return content


def open_evaluation_data(
    path: str, split: str | None = None, held_out: HeldOut | None = None, column: str = ""
) -> EvaluationData:
    """The given split; by default test, else validation, else all images.

    `held_out`: the model was trained on this data, so that data without splits is evaluated on the images that the training held
    out. They are also the `validation` split of data without one. A `column` is a label whatever its name.
    """
    sources = open_sources(path, column)
    if split is None:
        split = next((name for name in ("test", "validation") if name in sources), "validation" if held_out else "")
        if not split:
            return EvaluationData(sources["train"], "everything", None)
    name = SPLITS.get(split.lower())
    if name is None:
        raise UserError(f"There is no split called {split}: choose train, validation or test.")
    arguments = held_out._asdict() if held_out else {}
    if name == "validation" and name not in sources and "train" in sources:
        return EvaluationData(open_splits(path, **arguments).validation, name, None)
    if name not in sources:
        raise UserError(f"{path} has no {name} split, only {', '.join(sources)}.")
    calibration = sources.get("validation") if name == "test" else None
    if name == "test" and calibration is None and held_out:  # other models may have been trained on these images
        calibration = open_splits(path, **arguments).validation
    return EvaluationData(sources[name], name, calibration)


@contextmanager
def open_loader(model: Model, source: Source, workers: int | None = None) -> Iterator[ImageLoader]:
    """A loader of the source on the model's device, with images decoded at the size that the model needs."""
    if not len(source):
        raise UserError(f"{source.name} contains no images: add some.")
    loader = ImageLoader(source, device_of(model), workers, decode_side(model), log=lambda message: None)
    try:
        yield loader
    finally:
        loader.close()


@torch.inference_mode()
def collect_scores(
    model: Model,
    loader: ImageLoader,
    matching: ClassMatch,
    options: EvaluationOptions = OPTIONS,
    advance: Callable[[int], None] = lambda count: None,
) -> Scores:
    """The logits of all images, moved to the CPU batch by batch: together they may not fit on the device."""
    check_head(model, options.head)
    model.eval()
    batches: list[tuple[Tensor, Tensor, Tensor]] = []
    try:
        for batch in loader.iterate(options.batch_size):
            logits = compute_logits(model, model.preprocessing.apply(batch.pixels, batch.sizes), options.head)
            scores = matching.scores(logits.float(), options.among)
            labels = batch.labels if batch.labels is not None else torch.full_like(batch.index, -1)
            batches.append((batch.index.cpu(), labels.cpu(), scores.cpu()))
            advance(len(labels))
    except torch.OutOfMemoryError:
        raise UserError(f"Out of GPU memory with a batch size of {options.batch_size}: give a smaller --batch-size.") from None
    if not batches:
        raise UserError(f"None of the images of {loader.source.name} could be read.")
    index, labels, values = (torch.cat(column) for column in zip(*batches, strict=True))
    broken = int((~values.isfinite().all(1)).sum())
    if broken:
        raise UserError(f"The logits of {broken:,} of {len(values):,} images are NaN or Inf: the model's weights are damaged.")
    given = labels.numpy()
    if given.max() >= len(matching.targets):
        raise UserError(f"{loader.source.name} has the label {given.max()}, but only {len(matching.targets)} classes.")
    return Scores(index.numpy(), np.where(given >= 0, matching.targets[given], -1), values, len(loader.source))


def summarize_scores(
    scores: Scores,
    matching: ClassMatch,
    source: str,
    split: str,
    among: Among = "subset",
    calibration: Scores | None = None,
    valid_labels: Sequence[frozenset[int]] | None = None,
    positive: str | None = None,
    precision: float = PRECISION,
) -> Evaluation:
    """All metrics of the scores.

    `calibration` are the model's scores on images to fit the temperature on, `valid_labels` the sets of valid classes per image
    for the multi-label accuracy. With two classes, thresholds are for the class `positive` (default: the second) and for this
    precision.
    """
    labeled = scores.labeled()
    labels = labels_of(labeled, source)
    classes = labeled.values.shape[1]
    hits = labeled.values.topk(min(TOP, classes), 1).indices == labels[:, None]
    names, prediction = name_predictions(labeled, matching)
    confidences = measure_confidence(labeled.values, labels)
    predictions = Predictions(labeled.image, labeled.label, prediction, confidences.confidence)
    per_class = class_metrics(predictions, names)
    top1 = float(hits[:, 0].double().mean())
    multilabel = None
    if valid_labels is not None:
        multilabel = multilabel_accuracy(scores.image, scores.prediction, valid_labels, matching.targets)
    return Evaluation(
        source=source,
        split=split,
        images=len(labels),
        unreadable=scores.images - len(scores.label),
        unlabeled=len(scores.label) - len(labels),
        classes=len(matching.names),
        matched=matching.method,
        among=among,
        top1=top1,
        top1_error=(top1 * (1 - top1) / len(labels)) ** 0.5,
        top1_interval=wilson(top1, len(labels)),
        majority=max(each["images"] for each in per_class) / len(labels),
        top5=float(hits.any(1).double().mean()) if classes >= TOP5_CLASSES else None,
        mean_per_class=float(np.mean([each["top1"] for each in per_class])),
        loss=confidences.loss,
        per_class=per_class,
        averages=average_metrics(per_class),
        confusion=confusion(predictions, names),
        calibration=calibrate(labeled, calibration),
        multilabel=multilabel,
        curves=trace_classes(labeled, matching.names),
        thresholds=tune_positive(labeled, matching.names, positive, precision),
    )


def name_predictions(labeled: Scores, matching: ClassMatch) -> tuple[list[str], np.ndarray]:
    """Class names and predictions [N] as indices of them; classes that the data does not have are one class at the end."""
    names, prediction = matching.names, labeled.prediction
    if (prediction >= len(names)).any():
        names, prediction = [*names, OTHER], prediction.clip(max=len(names))
    return names, prediction


def trace_classes(labeled: Scores, names: Sequence[str]) -> list[ClassCurve]:
    """The curves of all classes that have images, if there are at most 20 classes."""
    if len(names) > MAX_CURVES:
        return []
    probabilities = labeled.values.double().softmax(1).numpy()
    present = [index for index in range(len(names)) if 0 < (labeled.label == index).sum() < len(labeled.label)]
    return [ClassCurve(names[index], trace_thresholds(probabilities[:, index], labeled.label == index)) for index in present]


def tune_positive(labeled: Scores, names: Sequence[str], positive: str | None, precision: float) -> Thresholds | None:
    """Thresholds for one of two classes; None if there are more classes, or images of one class only."""
    if labeled.values.shape[1] != 2 or len(np.unique(labeled.label)) < 2:
        return None
    index = 1 if positive is None else list(names).index(positive)
    probability = labeled.values.double().softmax(1)[:, index].numpy()
    return Thresholds(names[index], tune_thresholds(probability, labeled.label == index, precision))


def check_positive(names: Sequence[str], positive: str | None) -> None:
    if positive is not None and len(names) != 2:
        raise UserError(f"--positive is for data with two classes, and there are {len(names)}: remove it.")
    if positive is not None and positive not in names:
        raise UserError(f"--positive {positive} is not a class: choose {names[0]} or {names[1]}.")


def list_wrong(scores: Scores, matching: ClassMatch, source: Source) -> list[WrongImage]:
    """The wrong predictions, highest probability first."""
    labeled = scores.labeled()
    names, prediction = name_predictions(labeled, matching)
    rows = np.flatnonzero(prediction != labeled.label)
    labels = labeled.label[rows]
    probabilities = labeled.values[torch.from_numpy(rows)].double().softmax(1)
    highest = probabilities.max(1).values.tolist()
    of_labels = probabilities.gather(1, torch.from_numpy(labels)[:, None])[:, 0].tolist()
    classes = [group[0] if len(group) == 1 else -1 for group in matching.groups] + [-1]  # the last: classes that the data lack
    wrong = [
        WrongImage(index, source.location(index), names[label], names[predicted], probability, of_label, classes[predicted])
        for index, label, predicted, probability, of_label in zip(
            labeled.image[rows].tolist(), labels.tolist(), prediction[rows].tolist(), highest, of_labels, strict=True
        )
    ]
    return sorted(wrong, key=lambda each: -each.probability)


def labels_of(labeled: Scores, source: str) -> Tensor:
    if not len(labeled.label):
        raise UserError(f"None of the readable images of {source} has a label.")
    return torch.from_numpy(labeled.label)


def calibrate(labeled: Scores, calibration: Scores | None = None) -> Calibration:
    """Calibration errors without a temperature, and with one fitted on other images.

    Without other images, or if all of them are classified correctly so that the loss has no minimum, each half of the images is
    measured with the temperature of the other half; the reported temperature is that of all images.
    """
    labels = torch.from_numpy(labeled.label)
    before = measure_confidence(labeled.values, labels)
    bins = equal_bins(before.confidence, before.correct)
    plain = Calibration(
        float(before.confidence.mean()),
        calibration_error(bins),
        calibration_error(adaptive_bins(before.confidence, before.correct)),
        bins,
    )
    temperature, fitted_on, per_image = _choose_temperature(labeled, labels, calibration)
    if temperature is None:
        return replace(plain, fitted_on=fitted_on)
    after = measure_confidence(labeled.values, labels, per_image)
    bins_after = equal_bins(after.confidence, after.correct)
    return replace(
        plain,
        temperature=temperature,
        fitted_on=fitted_on,
        ece_after=calibration_error(bins_after),
        adaptive_ece_after=calibration_error(adaptive_bins(after.confidence, after.correct)),
        loss_after=after.loss,
        bins_after=bins_after,
    )


def _choose_temperature(labeled: Scores, labels: Tensor, calibration: Scores | None) -> tuple[float | None, str, Tensor]:
    """The temperature, what it was fitted on, and the temperature of every image [N]."""
    if calibration is not None:
        others = calibration.labeled()
        temperature = fit_temperature(others.values, torch.from_numpy(others.label)) if len(others.label) else None
        if temperature is not None:
            per_image = torch.full((len(labels),), temperature, dtype=torch.float64)
            return temperature, f"{len(others.label):,} validation images", per_image
    per_image = torch.ones(len(labels), dtype=torch.float64)
    half = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)) % 2 == 0)
    for part in (half, ~half):
        temperature = fit_temperature(labeled.values[~part], labels[~part]) if bool(part.any() and (~part).any()) else None
        if temperature is None:
            return None, NO_TEMPERATURE, per_image
        per_image[part] = temperature
    fitted_on = "two halves of the images, each for the other"
    fitted_on += ", since it cannot be fitted on the validation images" if calibration is not None else ""
    return fit_temperature(labeled.values, labels), fitted_on, per_image


def adapt_model(model: Model, size: tuple[int, int] | None, crop_ratio: float | None) -> Model:
    """The model with another image size or crop ratio; the given model is not changed, so that tables are resampled once."""
    if size is not None and size != model.preprocessing.image_size:
        model = resize_model(model, size)
    elif crop_ratio is not None:
        model = copy.copy(model)  # shares the weights
    if crop_ratio is not None:
        if not 0.0 < crop_ratio <= 1.0:
            raise UserError(f"A crop ratio is above 0 and at most 1, not {crop_ratio:g}.")
        if model.preprocessing.resize == "square":
            raise UserError("This model's images are resized to a square and not cropped: remove --crop-ratios.")
        model.preprocessing = model.preprocessing._replace(crop_ratio=crop_ratio)
    return model


def resize_model(model: Model, size: tuple[int, int]) -> Model:
    if isinstance(model, VisionTransformer):
        return copy.deepcopy(model).resize(*size)
    if model.size is not None:
        raise UserError(f"{model.name} supports only images of {format_size(model.size)} pixels: remove --sizes.")
    model = copy.copy(model)
    model.preprocessing = model.preprocessing._replace(image_size=size)
    return model


def sweep_sizes(
    model: Model,
    source: Source,
    matching: ClassMatch,
    sizes: Sequence[tuple[int, int]],
    crop_ratios: Sequence[float],
    options: EvaluationOptions = OPTIONS,
    advance: Callable[[int], None] = lambda count: None,
) -> Iterator[dict[str, Any]]:
    """The accuracy for every size with every crop ratio; the model's own for an empty list."""
    for size in sizes or [model.preprocessing.image_size]:
        resized = adapt_model(model, size, None)
        with open_loader(resized, source, options.workers) as loader:
            for ratio in crop_ratios or [resized.preprocessing.crop_ratio]:
                adapted = adapt_model(resized, None, ratio) if crop_ratios else resized
                labeled = collect_scores(adapted, loader, matching, options, advance).labeled()
                labels = labels_of(labeled, source.name)
                hits = labeled.values.topk(min(TOP, labeled.values.shape[1]), 1).indices == labels[:, None]
                yield {
                    "size": format_size(size),
                    "crop_ratio": adapted.preprocessing.crop_ratio,
                    "top1": float(hits[:, 0].double().mean()),
                    "top5": float(hits.any(1).double().mean()) if labeled.values.shape[1] >= TOP5_CLASSES else None,
                    "loss": measure_confidence(labeled.values, labels).loss,
                    "images": len(labels),
                }
