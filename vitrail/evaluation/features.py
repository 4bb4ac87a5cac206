"""Features of a model for every image of a source: one vector per image, with its labels and its index."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.image_loader import ImageLoader
from vitrail.data.loader import Batch, Problem
from vitrail.data.source import Labels, Source
from vitrail.errors import UserError
from vitrail.evaluation.model import Model, compute_logits, decode_side, device_of
from vitrail.evaluation.predict import DecodedImages, read_batches
from vitrail.heads.embedding import EmbeddingHead
from vitrail.layers.layout import Layout
from vitrail.models.evaluation_mode import evaluation_mode
from vitrail.models.vision_transformer import Features, VisionTransformer
from vitrail.teachers.teacher import Teacher

VECTORS = {
    "pooled": "the input of the classifier",
    "class": "the class token",
    "mean": "the mean of the patch tokens",
    "class_mean": "class token and mean of the patch tokens, concatenated",
    "distillation": "the distillation token",
    "penultimate": "the input of the last linear layer: after the pre-logits, if any",
    "logits": "the output of the classifier",
    "projected": "the embedding of the projector, of weights trained by Grafit",
}
OTHER_VECTORS = ("pooled", "penultimate", "logits")  # of networks that are not vision transformers of Vitrail


class FeatureKind(NamedTuple):
    """Which vector is used as the features of an image."""

    vector: str = "pooled"
    before_norm: bool = False  # without the final norm of the backbone
    normalize: bool = False  # L2-normalized
    bf16: bool = False  # computed in bfloat16, returned in float32


POOLED = FeatureKind()


class Embedding(NamedTuple):
    """One row per readable image, in the order of the source."""

    vectors: Tensor  # float32 [N, D]
    image: Tensor  # int64 [N]: indices in the source
    labels: Tensor | None  # int64 [N], -1: unknown
    extra: dict[str, Tensor]  # further label columns, int64 [N] each
    problems: list[Problem]  # unreadable images

    def select(self, rows: Tensor) -> "Embedding":
        labels = self.labels[rows] if self.labels is not None else None
        extra = {name: values[rows] for name, values in self.extra.items()}
        return Embedding(self.vectors[rows], self.image[rows], labels, extra, self.problems)

    def to(self, device: torch.device) -> "Embedding":
        labels = self.labels.to(device) if self.labels is not None else None
        extra = {name: values.to(device) for name, values in self.extra.items()}
        return Embedding(self.vectors.to(device), self.image.to(device), labels, extra, self.problems)


@torch.no_grad()
def embed(
    model: Model,
    source: Source | ImageLoader,
    kind: FeatureKind = POOLED,
    batch_size: int = 64,
    workers: int | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> Embedding:
    """The features of all images, with the preprocessing of the model's validation.

    They stay on the model's device if they take less than half of its free memory, and are moved to the CPU otherwise. The device
    is not synchronized before the last batch.
    """
    check_kind(model, kind)
    device = device_of(model)
    problems: list[Problem] = []
    batches: Iterator[Batch] | Iterator[DecodedImages]
    if isinstance(source, ImageLoader):
        data, batches = source.source, source.iterate(batch_size)
    else:
        data, batches = source, readable_batches(source, device, decode_side(model), batch_size, workers, problems)
    vectors: Tensor | None = None
    indices: list[Tensor] = []
    count = 0
    with evaluation_mode(model):
        for batch in batches:
            images = model.preprocessing.apply(batch.pixels, batch.sizes)
            with torch.autocast(device.type, torch.bfloat16, enabled=kind.bf16):
                features = compute_features(model, images, kind)
            features = F.normalize(features.float(), dim=1) if kind.normalize else features.float()
            if vectors is None:
                vectors = allocate(len(data), features.shape[1], device)
            vectors[count : count + len(features)] = features
            count += len(features)
            indices.append(torch.as_tensor(batch.index))
            advance(len(features))
    if vectors is None:
        first = f" ({problems[0].location}: {problems[0].reason})" if problems else ""
        raise UserError(f"No image of {data.name or 'the given images'} could be read{first}.")
    vectors = vectors[:count]
    broken = int((~vectors.isfinite().all(1)).sum())
    if broken:
        raise UserError(
            f"The features of {broken} of {count} images are NaN or Inf: the weights are damaged or overflow"
            f"{' in bfloat16, so remove --bf16' if kind.bf16 else ''}."
        )
    return with_labels(vectors, torch.cat(indices).to(vectors.device), data, problems)


def with_labels(vectors: Tensor, image: Tensor, source: Source, problems: list[Problem]) -> Embedding:
    """The features [N, D] of the images `image` [N] together with their labels."""
    index = image.cpu().numpy()

    def select(labels: Labels) -> Tensor:
        return torch.from_numpy(labels.values[index].astype(np.int64)).to(vectors.device)

    labels = select(source.label) if source.label is not None else None
    return Embedding(vectors, image, labels, {name: select(column) for name, column in source.extra.items()}, problems)


def readable_batches(
    source: Source, device: torch.device, min_side: int | None, batch_size: int, workers: int | None, problems: list[Problem]
) -> Iterator[DecodedImages]:
    """The readable images of a source; the others are appended to `problems`."""
    for batch in read_batches(source, device, min_side, batch_size, workers):
        problems += batch.problems.values()
        if len(batch.index):
            yield batch


def allocate(rows: int, width: int, device: torch.device) -> Tensor:
    """Uninitialized float32 [rows, width], on the CPU if it would take more than half of the GPU's free memory."""
    if device.type == "cuda" and rows * width * 4 > torch.cuda.mem_get_info(device)[0] // 2:
        device = torch.device("cpu")
    return torch.empty(rows, width, device=device)


def compute_features(model: Model, images: Tensor, kind: FeatureKind) -> Tensor:
    """[B, 3, height, width] to [B, D]."""
    if isinstance(model, Teacher):
        return compute_logits(model, images) if kind.vector == "logits" else model.network.features(model.adapt(images))
    x, layout = model.encode(*model.embed(images))
    features = read_without_norm(model, x, layout) if kind.before_norm else model.read(x, layout)
    a = model.architecture
    # Models that pool before the norm have no normalized patch tokens: their normalized mean is the input of the classifier.
    mean = features.pooled if a.pool_norm and not kind.before_norm else features.tokens.mean(1)
    match kind.vector:
        case "class":
            return features.prefix[:, 0]
        case "mean":
            return mean
        case "class_mean":
            return torch.cat([features.prefix[:, 0], mean], 1)
        case "distillation":
            return features.prefix[:, 1]
        case "penultimate":
            out: Tensor = model.pre_logits(features.pooled)
            return out
        case "logits":
            return model.classify(features).logits
        case "projected":
            embedding: Tensor = model.task_head(features.pooled)  # type: ignore[misc]  # `check_kind` has found it
            return embedding
    # One query per class gives one vector per class: take their mean.
    return features.pooled.mean(1) if features.pooled.ndim == 3 else features.pooled


def read_without_norm(model: VisionTransformer, x: Tensor, layout: Layout) -> Features:
    """The features of `VisionTransformer.read` before the final norm."""
    prefix, patches = x[:, : layout.prefix], x[:, layout.prefix :]
    if model.pooling is not None:
        prefix = model.pooling(x, layout)
    if model.architecture.pooling == "mean":
        return Features(patches, layout.grid, prefix, patches.mean(1))
    pooled = prefix if model.architecture.pooling == "per_class" else prefix[:, 0]
    return Features(patches, layout.grid, prefix, pooled)


def check_kind(model: Model, kind: FeatureKind) -> None:
    if kind.vector not in VECTORS:
        raise UserError(f"There is no vector called {kind.vector!r}: choose from {', '.join(VECTORS)}.")
    if isinstance(model, Teacher):
        if kind.vector not in OTHER_VECTORS or kind.before_norm:
            raise UserError(
                f"{model.name} is not a vision transformer of Vitrail: choose {', '.join(OTHER_VECTORS[:-1])} or "
                f"{OTHER_VECTORS[-1]} as the vector, without --before-norm."
            )
        return
    a = model.architecture
    if kind.before_norm and kind.vector in ("penultimate", "logits", "projected"):
        raise UserError(f"The vector {kind.vector} is computed after the final norm: remove --before-norm.")
    no_token = a.pooling == "per_class" or (a.pooling == "mean" and not a.keep_class_token)
    missing = {
        "class": ("class token", no_token),
        "class_mean": ("class token", no_token),
        "distillation": ("distillation token", not a.distillation),
        "penultimate": ("single input vector of its last layer", a.pooling == "per_class"),
        "logits": ("classifier", not a.classes),
        "projected": ("projector", not isinstance(model.task_head, EmbeddingHead)),
    }
    part, is_missing = missing.get(kind.vector, ("", False))
    if is_missing:
        raise UserError(f"This model has no {part}: choose another vector, such as pooled.")
