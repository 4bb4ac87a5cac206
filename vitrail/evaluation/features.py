"""A model over every picture of a source: one vector per picture, with its labels and its number."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.feed import Feed
from vitrail.data.loader import Batch, Canvas, Problem, Reader, make_batch
from vitrail.data.sampler import Samples
from vitrail.data.source import Source
from vitrail.data.transforms.pipeline import augment
from vitrail.data.workers import Workers, usual_workers
from vitrail.errors import UserError
from vitrail.evaluation.accuracy import test_view
from vitrail.evaluation.predict import FEW, detail
from vitrail.layers.layout import Layout
from vitrail.models.vision_transformer import Features, Model

VECTORS = {
    "pooled": "what the classifier reads",
    "class": "the class token",
    "mean": "the mean of the patches",
    "class_mean": "class token and mean of the patches, one after the other",
    "distillation": "the distillation token",
    "penultimate": "what the last linear layer reads: after the pre-logits, where there are any",
    "logits": "the classifier's answer",
}


class Readout(NamedTuple):
    """Which vector stands for a picture."""

    vector: str = "pooled"
    before_norm: bool = False  # without the trunk's final norm
    unit: bool = False  # scaled to length one
    bf16: bool = False  # computed in bfloat16; the vectors are float32 all the same


POOLED = Readout()


class Embedding(NamedTuple):
    """One row per picture that could be read, in the order of the source."""

    vectors: Tensor  # float32 [N, D]
    picture: Tensor  # int64 [N]: numbers in the source
    labels: Tensor | None  # int64 [N], -1: unknown
    extra: dict[str, Tensor]  # further columns of labels, int64 [N] each
    problems: list[Problem]  # pictures that could not be read

    def pick(self, rows: Tensor) -> "Embedding":
        labels = self.labels[rows] if self.labels is not None else None
        extra = {name: values[rows] for name, values in self.extra.items()}
        return Embedding(self.vectors[rows], self.picture[rows], labels, extra, self.problems)


@torch.no_grad()
def embed(
    model: Model,
    source: Source | Feed,
    readout: Readout = POOLED,
    batch: int = 64,
    workers: int | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> Embedding:
    """The vectors of all pictures, seen as the model is tested. Nothing waits for the device before the end.

    They stay on the model's device while they take up less than half of its free memory, and go to the host otherwise.
    """
    check_readout(model, readout)
    device = next(model.parameters()).device
    view = test_view(model.preprocessing)
    problems: list[Problem] = []
    if isinstance(source, Feed):
        pictures, batches = source.source, source.sweep(batch)
    else:
        pictures, batches = source, sweep(source, device, detail(model), batch, workers, problems)
    vectors: Tensor | None = None
    numbers, labels = [], []
    extra: dict[str, list[Tensor]] = {name: [] for name in pictures.extra}
    before, count = model.training, 0
    model.eval()
    try:
        for part in batches:
            images = augment(part.pixels, part.sizes, torch.zeros_like(part.index), view).images
            with torch.autocast(device.type, torch.bfloat16, enabled=readout.bf16):
                found = read_vectors(model, images, readout)
            found = F.normalize(found.float(), dim=1) if readout.unit else found.float()
            if vectors is None:
                vectors = make_room(len(pictures), found.shape[1], device)
            vectors[count : count + len(found)] = found
            count += len(found)
            numbers.append(part.index)
            if part.labels is not None:
                labels.append(part.labels)
            for name, values in part.extra.items():
                extra[name].append(values)
            advance(len(found))
    finally:
        model.train(before)
    if vectors is None:
        raise UserError(f"No picture of {pictures.name or 'those given'} could be read{first(problems)}.")
    vectors = vectors[:count]
    bad = int((~vectors.isfinite().all(1)).sum())
    if bad:
        raise UserError(
            f"The features of {bad} of {count} pictures are not finite: the weights are damaged or overflow"
            f"{' in bfloat16, so leave --bf16 out' if readout.bf16 else ''}."
        )
    place = vectors.device
    columns = {name: torch.cat(values).to(place) for name, values in extra.items() if values}
    known = torch.cat(labels).to(place) if labels else None
    return Embedding(vectors, torch.cat(numbers).to(place), known, columns, problems)


def first(problems: list[Problem]) -> str:
    return f" ({problems[0].where}: {problems[0].reason})" if problems else ""


def sweep(
    source: Source, device: torch.device, at_least: int | None, batch: int, workers: int | None, problems: list[Problem]
) -> Iterator[Batch]:
    """Every readable picture once, decoded as it is needed; a `Feed` would first keep all of them."""
    if workers is None:
        workers = usual_workers() if len(source) > FEW else 0
    pool = Workers(Reader(source, at_least, False).pictures, workers)
    chunks = np.split(np.arange(len(source)), range(batch, len(source), batch)) if len(source) else []
    try:
        for canvas in pool.run(chunks):
            problems += canvas.problems
            good = np.flatnonzero(canvas.sizes[:, 0] > 0)
            if len(good):
                samples = Samples(canvas.samples.index[good], canvas.samples.repeat[good], canvas.samples.position[good])
                readable = Canvas(canvas.pixels[torch.from_numpy(good)], canvas.sizes[good], None, samples, [])
                yield make_batch(source, readable).to(device)
    finally:
        pool.close()


def make_room(rows: int, width: int, device: torch.device) -> Tensor:
    """Uninitialised float32 [rows, width] where there is room for it."""
    if device.type == "cuda" and rows * width * 4 > torch.cuda.mem_get_info(device)[0] // 2:
        device = torch.device("cpu")
    return torch.empty(rows, width, device=device)


def read_vectors(model: Model, images: Tensor, readout: Readout) -> Tensor:
    """[B, 3, height, width] to [B, D]."""
    x, layout = model.encode(*model.embed(images))
    features = bare(model, x, layout) if readout.before_norm else model.read(x, layout)
    a = model.architecture
    # Models that pool before they norm have no normed patches: their normed mean is what the classifier reads.
    mean = features.pooled if a.pool_norm and not readout.before_norm else features.tokens.mean(1)
    match readout.vector:
        case "class":
            return features.special[:, 0]
        case "mean":
            return mean
        case "class_mean":
            return torch.cat([features.special[:, 0], mean], 1)
        case "distillation":
            return features.special[:, 1]
        case "penultimate":
            return model.pre_logits(features.pooled)
        case "logits":
            return model.classify(features).logits
    # One query per class gives one vector per class; their mean is what all of them saw.
    return features.pooled.mean(1) if features.pooled.ndim == 3 else features.pooled


def bare(model: Model, x: Tensor, layout: Layout) -> Features:
    """What `Model.read` gives, without the final norm."""
    special, patches = x[:, : layout.special], x[:, layout.special :]
    if model.readout is not None:
        special = model.readout(x, layout)
    if model.architecture.readout == "mean":
        return Features(patches, layout.grid, special, patches.mean(1))
    pooled = special if model.architecture.readout == "per_class" else special[:, 0]
    return Features(patches, layout.grid, special, pooled)


def check_readout(model: Model, readout: Readout) -> None:
    a = model.architecture
    if readout.vector not in VECTORS:
        raise UserError(f"There is no vector called {readout.vector!r}: choose from {', '.join(VECTORS)}.")
    if readout.before_norm and readout.vector in ("penultimate", "logits"):
        raise UserError(f"The {readout.vector} come after the final norm: ask for them without --before-norm.")
    missing = {
        "class": a.readout in ("mean", "per_class"),
        "class_mean": a.readout in ("mean", "per_class"),
        "distillation": not a.distillation,
        "penultimate": a.readout == "per_class",
        "logits": not a.classes,
    }
    if missing.get(readout.vector):
        what = "classifier" if readout.vector == "logits" else VECTORS[readout.vector].split(":")[0].removeprefix("the ")
        if readout.vector == "penultimate":
            what = "single vector that its last layer reads"
        elif readout.vector == "class_mean":
            what = "class token"
        raise UserError(f"This model has no {what}: ask for another vector, such as pooled.")
