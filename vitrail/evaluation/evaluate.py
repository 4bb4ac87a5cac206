"""Everything that is measured of a model on one source: from its answers to accuracy, confusion and calibration."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.data.datasets.folder import SPLITS
from vitrail.data.datasets.lookup import open_parts, open_splits
from vitrail.data.feed import Feed
from vitrail.data.source import Source
from vitrail.data.transforms.pipeline import augment
from vitrail.errors import UserError
from vitrail.evaluation.accuracy import test_view
from vitrail.evaluation.calibration import Bin, adaptive_bins, calibration_error, certainty, equal_bins, fit_temperature
from vitrail.evaluation.class_matching import OTHER, Among, Matching
from vitrail.evaluation.confusion import Answers, class_accuracies, confusion
from vitrail.evaluation.multilabel import Agreement, agreement
from vitrail.evaluation.predict import detail
from vitrail.models.config import show_size
from vitrail.models.vision_transformer import VisionTransformer

Head = Literal["both", "class", "distillation"]
HEADS: tuple[Head, ...] = ("both", "class", "distillation")
FIVE = 5
WITHOUT = "the loss has no least value, as when every image to fit it on is recognized or the answers say nothing"


class Part(NamedTuple):
    """The images to measure on: of which split, and others of the same data to fit the temperature on, if there are."""

    source: Source
    split: str
    fitting: Source | None


@dataclass(frozen=True)
class Scores:
    """A model's scores for the readable images of a source: the first T columns are answers, further ones other classes."""

    image: np.ndarray  # [N] number in the source
    truth: np.ndarray  # [N] right answer, -1 where unknown
    values: Tensor  # float32 [N, T or more], on the CPU
    asked: int  # images of the source

    @property
    def guess(self) -> np.ndarray:
        return self.values.argmax(1).numpy()

    def known(self) -> "Scores":
        """Those of images whose answer is known."""
        rows = np.flatnonzero(self.truth >= 0)
        return Scores(self.image[rows], self.truth[rows], self.values[torch.from_numpy(rows)], self.asked)


@dataclass(frozen=True)
class Calibration:
    """Calibration errors before and after the temperature; the bins are those of equal width."""

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
    """What is known about a model on one source; shares are of 1."""

    source: str
    split: str
    images: int
    unread: int
    unlabelled: int
    classes: int
    matched: str
    among: Among
    top1: float
    top1_error: float  # standard error of the share, from the number of images
    top5: float | None  # None where there are no more than five answers
    mean_per_class: float
    loss: float
    per_class: list[dict[str, Any]]
    confusion: dict[str, Any]
    calibration: Calibration
    multilabel: Agreement | None

    def to_dict(self) -> dict[str, Any]:
        content = asdict(self)
        content["multilabel"] = self.multilabel._asdict() if self.multilabel else None
        for name in ("bins", "bins_after"):
            bins = getattr(self.calibration, name)
            content["calibration"][name] = [each._asdict() for each in bins] if bins is not None else None
        return content


def open_part(path: str, split: str | None = None, trained_here: bool = False) -> Part:
    """The split asked for; else test, validation, or everything where there are no splits.

    `trained_here`: the model saw this data, so where there are no splits those images count that its training set aside. Where
    the data has no validation split, `validation` means them too.
    """
    parts = open_parts(path)
    if split is None:
        split = next((name for name in ("test", "validation") if name in parts), "validation" if trained_here else "")
        if not split:
            return Part(parts["train"], "everything", None)
    wanted = SPLITS.get(split.lower())
    if wanted is None:
        raise UserError(f"There is no split called {split}: ask for train, validation or test.")
    if wanted == "validation" and wanted not in parts and "train" in parts:
        return Part(open_splits(path).validation, wanted, None)
    if wanted not in parts:
        raise UserError(f"{path} has no {wanted} split, only {', '.join(parts)}.")
    fitting = parts.get("validation") if wanted == "test" else None
    if wanted == "test" and fitting is None and trained_here:  # of others' models nobody knows what they have seen
        fitting = open_splits(path).validation
    return Part(parts[wanted], wanted, fitting)


def check_head(model: VisionTransformer, head: Head) -> None:
    if head not in HEADS:
        raise UserError(f"--head {head} is not known: choose from {', '.join(HEADS)}.")
    if head == "distillation" and model.head_distillation is None:
        raise UserError(f"{model.name or 'This model'} has no distillation head: leave --head away.")


@contextmanager
def feed_of(model: VisionTransformer, source: Source, workers: int | None = None) -> Iterator[Feed]:
    """The source's images, decoded as large as this model needs them, on its device."""
    if not len(source):
        raise UserError(f"{source.name} holds no images: add some.")
    feed = Feed(source, next(model.parameters()).device, workers, detail(model), "skip", lambda sentence: None)
    try:
        yield feed
    finally:
        feed.close()


@torch.inference_mode()
def collect_scores(
    model: VisionTransformer,
    feed: Feed,
    matching: Matching,
    among: Among = "subset",
    head: Head = "both",
    batch: int = 64,
    advance: Callable[[int], None] = lambda count: None,
) -> Scores:
    """One sweep over all images; scores leave the device batch by batch, for all together may not fit there."""
    check_head(model, head)
    model.eval()
    view = test_view(model.preprocessing)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    try:
        for raw in feed.sweep(batch):
            images = augment(raw.pixels, raw.sizes, torch.zeros_like(raw.index), view).images
            scores = matching.scores(logits_of(model, images, head).float(), among)
            labels = raw.labels if raw.labels is not None else torch.full_like(raw.index, -1)
            found.append((raw.index.cpu(), labels.cpu(), scores.cpu()))
            advance(len(labels))
    except torch.OutOfMemoryError:
        raise UserError(f"The device's memory is too small for {batch} images at a time: give a smaller --batch.") from None
    if not found:
        raise UserError(f"Not one of the images of {feed.source.name} could be read.")
    index, label, values = (torch.cat(column) for column in zip(*found, strict=True))
    broken = int((~values.isfinite().all(1)).sum())
    if broken:
        raise UserError(f"The model's answers to {broken:,} of {len(values):,} images are no numbers: its weights are damaged.")
    given = label.numpy()
    if given.max() >= len(matching.answer):
        raise UserError(f"{feed.source.name} has the label {given.max()}, for {len(matching.answer)} classes.")
    return Scores(index.numpy(), np.where(given >= 0, matching.answer[given], -1), values, len(feed.source))


def logits_of(model: VisionTransformer, images: Tensor, head: Head) -> Tensor:
    outputs = model.outputs(images)
    if head == "distillation":
        assert outputs.distillation is not None
        return outputs.distillation
    return outputs.main if head == "class" else outputs.logits


def judge(
    scores: Scores,
    matching: Matching,
    source: str,
    split: str,
    among: Among = "subset",
    fitting: Scores | None = None,
    labels: Sequence[frozenset[int]] | None = None,
) -> Evaluation:
    """All measures of one set of scores; `fitting` are the same model's on images to fit the temperature on."""
    known = scores.known()
    if not len(known.truth):
        raise UserError(f"None of the readable images of {source} has a label to compare with.")
    truth = torch.from_numpy(known.truth)
    several = known.values.shape[1]
    best = known.values.topk(min(FIVE, several), 1).indices == truth[:, None]
    names = matching.names
    guess = known.guess
    if (guess >= len(names)).any():
        names, guess = [*names, OTHER], guess.clip(max=len(names))
    plain = certainty(known.values, truth)
    answers = Answers(known.image, known.truth, guess, plain.confidence)
    per_class = class_accuracies(answers, names)
    top1 = float(best[:, 0].double().mean())
    return Evaluation(
        source=source,
        split=split,
        images=len(truth),
        unread=scores.asked - len(scores.truth),
        unlabelled=len(scores.truth) - len(truth),
        classes=len(matching.names),
        matched=matching.how,
        among=among,
        top1=top1,
        top1_error=(top1 * (1 - top1) / len(truth)) ** 0.5,
        top5=float(best.any(1).double().mean()) if several > FIVE else None,
        mean_per_class=float(np.mean([each["top1"] for each in per_class])),
        loss=plain.loss,
        per_class=per_class,
        confusion=confusion(answers, names),
        calibration=calibrate(known, fitting),
        multilabel=agreement(scores.image, scores.guess, labels, matching.answer) if labels is not None else None,
    )


def calibrate(known: Scores, fitting: Scores | None = None) -> Calibration:
    """Errors as they are, and with a temperature from other images.

    Without others, or where they are all recognized and no temperature is the best, each half of the images is measured with
    the temperature of the other half; the one told is that of all.
    """
    truth = torch.from_numpy(known.truth)
    plain = certainty(known.values, truth)
    bins = equal_bins(plain.confidence, plain.right)
    before = Calibration(
        float(plain.confidence.mean()),
        calibration_error(bins),
        calibration_error(adaptive_bins(plain.confidence, plain.right)),
        bins,
    )
    heat, words, applied = _temperature(known, truth, fitting)
    if heat is None:
        return replace(before, fitted_on=words)
    mended = certainty(known.values, truth, applied)
    after = equal_bins(mended.confidence, mended.right)
    return Calibration(
        *(before.confidence, before.ece, before.adaptive_ece, bins),
        *(heat, words, calibration_error(after)),
        *(calibration_error(adaptive_bins(mended.confidence, mended.right)), mended.loss, after),
    )


def _temperature(known: Scores, truth: Tensor, fitting: Scores | None) -> tuple[float | None, str, Tensor]:
    """The temperature, what it was fitted on, and the one for every image [N]."""
    if fitting is not None:
        others = fitting.known()
        heat = fit_temperature(others.values, torch.from_numpy(others.truth)) if len(others.truth) else None
        if heat is not None:
            return heat, f"{len(others.truth):,} validation images", torch.full((len(truth),), heat, dtype=torch.float64)
    applied = torch.ones(len(truth), dtype=torch.float64)
    half = torch.from_numpy(np.random.default_rng(0).permutation(len(truth)) % 2 == 0)
    for part in (half, ~half):
        heat = fit_temperature(known.values[~part], truth[~part]) if bool(part.any() and (~part).any()) else None
        if heat is None:
            return None, WITHOUT, applied
        applied[part] = heat
    words = "the two halves of the images by turns" + (", for the validation images give none" if fitting is not None else "")
    return fit_temperature(known.values, truth), words, applied


def prepared(model: VisionTransformer, size: tuple[int, int] | None, crop_ratio: float | None) -> VisionTransformer:
    """A model for another size and crop; the given one stays as it is, so that tables are resampled once only."""
    if size is not None and size != model.preprocessing.image_size:
        model = copy.deepcopy(model).resize(*size)
    elif crop_ratio is not None:
        model = copy.copy(model)  # shares the weights
    if crop_ratio is not None:
        if not 0.0 < crop_ratio <= 1.0:
            raise UserError(f"A crop ratio is above 0 and at most 1, not {crop_ratio:g}.")
        if model.preprocessing.resize == "square":
            raise UserError("This model's images are squeezed into a square and not cropped: leave --crop-ratios away.")
        model.preprocessing = model.preprocessing._replace(crop_ratio=crop_ratio)
    return model


def sweep(
    model: VisionTransformer,
    source: Source,
    matching: Matching,
    sizes: Sequence[tuple[int, int]],
    crop_ratios: Sequence[float],
    among: Among = "subset",
    head: Head = "both",
    batch: int = 64,
    workers: int | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> Iterator[dict[str, Any]]:
    """Accuracy at every size with every crop ratio; the model's own where a list is empty."""
    for size in sizes or [model.preprocessing.image_size]:
        at_size = prepared(model, size, None)
        with feed_of(at_size, source, workers) as feed:
            for ratio in crop_ratios or [at_size.preprocessing.crop_ratio]:
                here = prepared(at_size, None, ratio) if crop_ratios else at_size
                known = collect_scores(here, feed, matching, among, head, batch, advance).known()
                if not len(known.truth):
                    raise UserError(f"None of the readable images of {source.name} has a label to compare with.")
                truth = torch.from_numpy(known.truth)
                best = known.values.topk(min(FIVE, known.values.shape[1]), 1).indices == truth[:, None]
                yield {
                    "size": show_size(size),
                    "crop_ratio": here.preprocessing.crop_ratio,
                    "top1": float(best[:, 0].double().mean()),
                    "top5": float(best.any(1).double().mean()) if known.values.shape[1] > FIVE else None,
                    "loss": certainty(known.values, truth).loss,
                    "images": len(truth),
                }
