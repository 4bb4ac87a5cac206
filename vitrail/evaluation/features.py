"""A model over every image of a source: one vector per image, with its labels and its number."""

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
from vitrail.models.vision_transformer import Features, VisionTransformer

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
    """Which vector stands for an image."""

    vector: str = "pooled"
    before_norm: bool = False  # without the trunk's final norm
    unit: bool = False  # scaled to length one
    bf16: bool = False  # computed in bfloat16; the vectors are float32 all the same


POOLED = Readout()


class Embedding(NamedTuple):
    """One row per image that could be read, in the order of the source."""

    vectors: Tensor  # float32 [N, D]
    image: Tensor  # int64 [N]: numbers in the source
    labels: Tensor | None  # int64 [N], -1: unknown
    extra: dict[str, Tensor]  # further columns of labels, int64 [N] each
    problems: list[Problem]  # images that could not be read

    def pick(self, rows: Tensor) -> "Embedding":
        labels = self.labels[rows] if self.labels is not None else None
        extra = {name: values[rows] for name, values in self.extra.items()}
        return Embedding(self.vectors[rows], self.image[rows], labels, extra, self.problems)


@torch.no_grad()
def embed(
    model: VisionTransformer,
    source: Source | Feed,
    pooling: Readout = POOLED,
    batch: int = 64,
    workers: int | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> Embedding:
    """The vectors of all images, seen as the model is tested. Nothing waits for the device before the end.

    They stay on the model's device while they take up less than half of its free memory, and go to the host otherwise.
    """
    check_readout(model, pooling)
    device = next(model.parameters()).device
    view = test_view(model.preprocessing)
    problems: list[Problem] = []
    if isinstance(source, Feed):
        raw, batches = source.source, source.sweep(batch)
    else:
        raw, batches = source, sweep(source, device, detail(model), batch, workers, problems)
    vectors: Tensor | None = None
    numbers, labels = [], []
    extra: dict[str, list[Tensor]] = {name: [] for name in raw.extra}
    before, count = model.training, 0
    model.eval()
    try:
        for part in batches:
            images = augment(part.pixels, part.sizes, torch.zeros_like(part.index), view).images
            with torch.autocast(device.type, torch.bfloat16, enabled=pooling.bf16):
                found = read_vectors(model, images, pooling)
            found = F.normalize(found.float(), dim=1) if pooling.unit else found.float()
            if vectors is None:
                vectors = make_room(len(raw), found.shape[1], device)
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
        raise UserError(f"No image of {raw.name or 'those given'} could be read{first(problems)}.")
    vectors = vectors[:count]
    bad = int((~vectors.isfinite().all(1)).sum())
    if bad:
        raise UserError(
            f"The features of {bad} of {count} images are not finite: the weights are damaged or overflow"
            f"{' in bfloat16, so leave --bf16 out' if pooling.bf16 else ''}."
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
    """Every readable image once, decoded as it is needed; a `Feed` would first keep all of them."""
    if workers is None:
        workers = usual_workers() if len(source) > FEW else 0
    pool = Workers(Reader(source, at_least, False).images, workers)
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
    """Uninitialized float32 [rows, width] where there is room for it."""
    if device.type == "cuda" and rows * width * 4 > torch.cuda.mem_get_info(device)[0] // 2:
        device = torch.device("cpu")
    return torch.empty(rows, width, device=device)


def read_vectors(model: VisionTransformer, images: Tensor, pooling: Readout) -> Tensor:
    """[B, 3, height, width] to [B, D]."""
    x, layout = model.encode(*model.embed(images))
    features = bare(model, x, layout) if pooling.before_norm else model.read(x, layout)
    a = model.architecture
    # Models that pool before they norm have no normed patches: their normed mean is what the classifier reads.
    mean = features.pooled if a.pool_norm and not pooling.before_norm else features.tokens.mean(1)
    match pooling.vector:
        case "class":
            return features.prefix[:, 0]
        case "mean":
            return mean
        case "class_mean":
            return torch.cat([features.prefix[:, 0], mean], 1)
        case "distillation":
            return features.prefix[:, 1]
        case "penultimate":
            return model.pre_logits(features.pooled)
        case "logits":
            return model.classify(features).logits
    # One query per class gives one vector per class; their mean is what all of them saw.
    return features.pooled.mean(1) if features.pooled.ndim == 3 else features.pooled


def bare(model: VisionTransformer, x: Tensor, layout: Layout) -> Features:
    """What `VisionTransformer.read` gives, without the final norm."""
    prefix, patches = x[:, : layout.prefix], x[:, layout.prefix :]
    if model.pooling is not None:
        prefix = model.pooling(x, layout)
    if model.architecture.pooling == "mean":
        return Features(patches, layout.grid, prefix, patches.mean(1))
    pooled = prefix if model.architecture.pooling == "per_class" else prefix[:, 0]
    return Features(patches, layout.grid, prefix, pooled)


def check_readout(model: VisionTransformer, pooling: Readout) -> None:
    a = model.architecture
    if pooling.vector not in VECTORS:
        raise UserError(f"There is no vector called {pooling.vector!r}: choose from {', '.join(VECTORS)}.")
    if pooling.before_norm and pooling.vector in ("penultimate", "logits"):
        raise UserError(f"The {pooling.vector} come after the final norm: ask for them without --before-norm.")
    missing = {
        "class": a.pooling in ("mean", "per_class"),
        "class_mean": a.pooling in ("mean", "per_class"),
        "distillation": not a.distillation,
        "penultimate": a.pooling == "per_class",
        "logits": not a.classes,
    }
    if missing.get(pooling.vector):
        what = "classifier" if pooling.vector == "logits" else VECTORS[pooling.vector].split(":")[0].removeprefix("the ")
        if pooling.vector == "penultimate":
            what = "single vector that its last layer reads"
        elif pooling.vector == "class_mean":
            what = "class token"
        raise UserError(f"This model has no {what}: ask for another vector, such as pooled.")
