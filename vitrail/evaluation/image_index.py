"""A searchable collection of images: their embeddings, labels and thumbnails.

Neighbors are found by an exact search. Images are classified by the votes of their neighbors (Grafit, arXiv 2011.12982, Equation
2.6), at any level of labels; images and classes can be added at any time, without training.
"""

import dataclasses
import io
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.decode import decode
from vitrail.data.loader import Problem
from vitrail.data.progress import Advance
from vitrail.data.source import Labels, Source, Subset
from vitrail.data.workers import default_workers
from vitrail.errors import UserError
from vitrail.evaluation.features import POOLED, FeatureKind, check_kind, compute_features, readable_batches
from vitrail.evaluation.model import Model, decode_side, device_of, digest_weights
from vitrail.evaluation.probes.protocol import label_columns
from vitrail.heads.embedding import EmbeddingHead
from vitrail.models.vision_transformer import VisionTransformer

BLOCK = 32  # neighboring rows whose largest similarity is compared first
MAX_SIMILARITIES = 1 << 22  # in memory at a time
QUERIES = 1024  # at a time
THUMBNAIL = 96  # pixels of the longer side
TEMPERATURE = 0.05  # of the votes
PATH_START = re.compile("^| of | in ")  # of locations: "a.png", "row 3 of a.parquet", "key in a.tar"


@dataclass
class ImageIndex:
    """N images: row i of every field belongs to image i."""

    vectors: Tensor  # float32 [N, D], of length 1
    locations: list[str]
    thumbnails: list[bytes]  # JPEG
    columns: dict[str, Labels] = field(default_factory=dict)  # by name; the main one is called label
    weights: str = ""  # where the weights were
    digest: str = ""  # of the weights and the kind of features
    kind: FeatureKind = POOLED

    def __len__(self) -> int:
        return len(self.vectors)

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Cosines [Q, k], largest first, and the images [Q, k], for queries [Q, D]."""
        if not len(self):
            raise UserError("The index has no images: add some with vitrail index --add.")
        if queries.ndim != 2 or queries.shape[1] != self.vectors.shape[1]:
            raise UserError(
                f"The index has embeddings of {self.vectors.shape[1]} numbers and the queries have {queries.shape[-1]}: they are "
                "of other weights."
            )
        return search(self.vectors, F.normalize(queries.float(), dim=1), k)

    def classify(self, cosines: Tensor, neighbors: Tensor, column: str, temperature: float = TEMPERATURE) -> Tensor:
        """The probabilities [Q, C] of the classes of a column, by the votes of labeled neighbors; 0 for all without any."""
        labels = torch.from_numpy(self.columns[column].values)[neighbors.cpu()]
        logits = (cosines.cpu() / temperature).masked_fill(labels < 0, -torch.inf)
        weight = logits.softmax(1).nan_to_num(0.0)  # NaN where no neighbor is labeled
        return weight.new_zeros(len(weight), len(self.columns[column].names)).scatter_add_(1, labels.clamp(min=0), weight)


def search(vectors: Tensor, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Inner products [Q, k], largest first, and rows [Q, k] of vectors [N, D], for queries [Q, D].

    Exact. Of each part of the vectors, the k largest of a query are in the k blocks of rows with the largest maxima, which is
    faster than sorting all. A part has many rows, and many queries are searched at a time: such matrix products are fast.
    """
    k, count = min(k, len(vectors)), len(queries)
    if count == 1:
        queries = queries.repeat(2, 1)  # a product with one column is slower than with two
    found = [_search(vectors, part, k) for part in queries.split(QUERIES)]
    return torch.cat([values for values, _ in found])[:count], torch.cat([rows for _, rows in found])[:count]


def _search(vectors: Tensor, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    count = len(queries)
    size = -(-min(MAX_SIMILARITIES // max(count, 1), len(vectors)) // BLOCK) * BLOCK
    # Of all parts: new memory takes longer than the comparisons. A column per query: matrix products of few columns are faster
    # than those of few rows.
    scores = queries.new_empty(size, count)
    values, rows = queries.new_empty(count, 0), torch.empty(count, 0, dtype=torch.int64, device=queries.device)
    for start in range(0, len(vectors), size):
        part = vectors[start : start + size]
        torch.mm(part, queries.T, out=scores[: len(part)])
        scores[len(part) :] = -torch.inf
        blocks = scores.view(size // BLOCK, BLOCK, count)
        chosen = blocks.amax(1).T.contiguous().topk(min(k, len(blocks)), 1).indices
        candidates = blocks[chosen, :, torch.arange(count, device=queries.device)[:, None]].flatten(1)
        best, order = candidates.topk(min(k, len(part)), 1)
        order = start + chosen.gather(1, order // BLOCK) * BLOCK + order % BLOCK
        values, rows = torch.cat([values, best], 1), torch.cat([rows, order], 1)
        if start:
            values, order = values.topk(min(k, values.shape[1]), 1)
            rows = rows.gather(1, order)
    return values, rows


def choose_kind(model: Model, vector: str | None = None) -> FeatureKind:
    """The features that are searched: the projector's, or the pooled vector of a model without one."""
    projected = isinstance(model, VisionTransformer) and isinstance(model.task_head, EmbeddingHead)
    return FeatureKind(vector or ("projected" if projected else "pooled"), normalize=True)


class Embedded(NamedTuple):
    """The readable images of a source."""

    vectors: Tensor
    images: np.ndarray  # their indices
    thumbnails: list[bytes]
    problems: list[Problem]


@torch.no_grad()
def embed_with_thumbnails(
    model: Model, source: Source, kind: FeatureKind, batch_size: int, workers: int | None, advance: Advance
) -> Embedded:
    check_kind(model, kind)
    problems: list[Problem] = []
    thumbnails: list[bytes] = []
    vectors, images = [], []
    model.eval()
    with ThreadPoolExecutor(default_workers()) as pool:
        for batch in readable_batches(source, device_of(model), decode_side(model), batch_size, workers, problems):
            crops = [
                pixels[:, :height, :width].permute(1, 2, 0).numpy()
                for pixels, (height, width) in zip(batch.pixels.cpu(), batch.sizes.tolist(), strict=True)
            ]
            encoded = pool.map(encode_thumbnail, crops)  # while the features are computed
            features = compute_features(model, model.preprocessing.apply(batch.pixels, batch.sizes), kind)
            vectors.append(F.normalize(features.float(), dim=1).cpu())
            images += [int(index) for index in batch.index]
            thumbnails += encoded
            advance(len(features))
    if not vectors:
        first = f" ({problems[0].location}: {problems[0].reason})" if problems else ""
        raise UserError(f"No image of {source.name or 'the given images'} could be read{first}.")
    found = torch.cat(vectors)
    if not bool(found.isfinite().all()):
        raise UserError("The embeddings of some images are NaN or Inf: the weights are damaged.")
    return Embedded(found, np.array(images), thumbnails, problems)


def encode_thumbnail(pixels: np.ndarray) -> bytes:
    image, file = Image.fromarray(np.ascontiguousarray(pixels)), io.BytesIO()
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    image.save(file, "JPEG", quality=85)
    return file.getvalue()


def build_index(
    source: Source,
    model: Model,
    digest: str,
    weights: str = "",
    vector: str | None = None,
    batch_size: int = 64,
    workers: int | None = None,
    advance: Advance = lambda count: None,
) -> tuple[ImageIndex, list[Problem]]:
    """The index of all readable images of a source with its label columns, and those that cannot be read."""
    if not len(source):
        raise UserError(f"{source.name} has no images: there is nothing to index.")
    kind = choose_kind(model, vector)
    embedded = embed_with_thumbnails(model, source, kind, batch_size, workers, advance)
    columns = {
        name: Labels(labels.values[embedded.images].astype(np.int64), list(labels.names))
        for name, labels in label_columns(source).items()
    }
    locations = [full_location(source, index) for index in embedded.images.tolist()]
    index = ImageIndex(embedded.vectors, locations, embedded.thumbnails, columns, weights, digest, kind)
    return index, embedded.problems


def full_location(source: Source, index: int) -> str:
    """The location with its path, which it consists of or ends with, as one that does not depend on the current directory."""
    location = source.location(index)
    for start in (match.end() for match in PATH_START.finditer(location)):
        if os.path.exists(location[start:]):
            return location[:start] + os.path.abspath(location[start:])
    return location


def without_known(source: Source, index: ImageIndex) -> Source:
    """The images of a source that are not in the index."""
    known = set(index.locations)
    new = [image for image in range(len(source)) if full_location(source, image) not in known]
    return source if len(new) == len(source) else Subset(source, np.array(new, dtype=np.int64))


def merge(first: ImageIndex, second: ImageIndex) -> ImageIndex:
    """Both collections in one: classes of the same name are the same class, others are added; missing labels are unknown."""
    if first.digest != second.digest:
        raise UserError("The embeddings are not of the same weights: index the new images with the weights of the index.")
    columns = {}
    for name in dict.fromkeys([*first.columns, *second.columns]):
        parts = [index.columns.get(name) or Labels(np.full(len(index), -1), []) for index in (first, second)]
        names = list(dict.fromkeys([*parts[0].names, *parts[1].names]))
        position = {each: number for number, each in enumerate(names)}
        values = [np.array([*(position[each] for each in part.names), -1])[part.values] for part in parts]
        columns[name] = Labels(np.concatenate(values).astype(np.int64), names)
    vectors = torch.cat([first.vectors, second.vectors])
    locations, thumbnails = first.locations + second.locations, first.thumbnails + second.thumbnails
    return dataclasses.replace(first, vectors=vectors, locations=locations, thumbnails=thumbnails, columns=columns)


def label_all(source: Source, name: str) -> Source:
    """The source with one class of this name for all its images."""
    source = Subset(source, np.arange(len(source)))
    source.label, source.extra = Labels(np.zeros(len(source), dtype=np.int64), [name]), {}
    return source


class Neighbor(NamedTuple):
    """An image that is similar to a query."""

    image: int  # in the index
    cosine: float
    location: str
    labels: dict[str, str]  # column -> class name


class Match(NamedTuple):
    """The neighbors of a query, and the probabilities of its classes by their votes, for every column of labels."""

    query: str
    neighbors: list[Neighbor]
    classes: dict[str, list[tuple[str, float]]]  # column -> (class name, probability), most probable first


def match_queries(index: ImageIndex, names: Sequence[str], queries: Tensor, k: int, voters: int, top: int = 5) -> list[Match]:
    """The k nearest images of each query, and its classes by the votes of the nearest `voters`."""
    cosines, rows = index.search(queries, max(k, voters))
    matches = []
    for number, query in enumerate(names):
        neighbors = [
            Neighbor(row, cosine, index.locations[row], labels_of(index, row))
            for row, cosine in zip(rows[number, :k].tolist(), cosines[number, :k].tolist(), strict=True)
        ]
        classes = {}
        for name in index.columns:  # one query at a time: there may be millions of classes
            (shares,) = index.classify(cosines[number : number + 1, :voters], rows[number : number + 1, :voters], name)
            best = shares.topk(min(top, len(shares)))
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            classes[name] = [(index.columns[name].names[place], share) for place, share in pairs if share > 0]
        matches.append(Match(query, neighbors, classes))
    return matches


def labels_of(index: ImageIndex, row: int) -> dict[str, str]:
    return {name: labels.names[labels.values[row]] for name, labels in index.columns.items() if labels.values[row] >= 0}


def read_thumbnail(index: ImageIndex, row: int) -> np.ndarray:
    """The pixels of a thumbnail, at most 96 x 96 whatever is in the file; a gray tile if its bytes are damaged."""
    try:
        image = Image.fromarray(decode(index.thumbnails[row], THUMBNAIL))
    except (OSError, ValueError):
        return np.full((THUMBNAIL, THUMBNAIL, 3), 200, dtype=np.uint8)
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    return np.asarray(image)


def model_digest(model: Model, kind: FeatureKind) -> str:
    """A hash of weights, preprocessing and kind of features: embeddings of different ones cannot be compared."""
    return digest_weights(model, [model.preprocessing.to_dict(), kind.vector, kind.before_norm]).hexdigest()[:32]
