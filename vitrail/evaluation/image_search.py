"""Index images and search them: `vitrail.index_images` and `vitrail.search_images`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitrail.checkpoints.bundled import find_bundled
from vitrail.checkpoints.hub import locate
from vitrail.checkpoints.model_io import find_weights
from vitrail.data.decode import decode
from vitrail.data.loader import Problem
from vitrail.data.progress import Progress, no_progress
from vitrail.data.source import Source
from vitrail.errors import UserError
from vitrail.evaluation.image_index import (
    ImageIndex,
    Match,
    build_index,
    choose_kind,
    embed_with_thumbnails,
    label_all,
    match_queries,
    merge,
    model_digest,
    without_known,
)
from vitrail.evaluation.index_file import load_index, save_index
from vitrail.evaluation.model import Model, open_model
from vitrail.evaluation.probes.protocol import label_columns, open_embedding_source

VOTERS = 20  # neighbors that vote for the class of an image


def index_images(
    source: str | Path | Sequence[str],
    weights: str | Path | None = None,
    out: str | Path | None = None,
    add: str | Path | None = None,
    *,
    class_name: str | None = None,
    split: str | None = None,
    vector: str | None = None,
    device: str | None = None,
    batch_size: int = 64,
    workers: int | None = None,
    progress: Progress = no_progress,
) -> tuple[ImageIndex, list[Problem]]:
    """The index of a data set or of image files, written to `out`, and the images that cannot be read.

    >>> index, problems = vitrail.index_images("photos/", "runs/photos", "photos.index")

    With `add`, the images are added to that index, whose weights are used; it is replaced if `out` is None. Images that it has
    already are left out. `class_name` is the label of all images.
    """
    paths = [os.fspath(source)] if isinstance(source, str | Path) else list(source)
    images, problems = open_embedding_source(paths, split)
    if class_name is not None:
        images = label_all(images, class_name)
    known = load_index(add) if add is not None else None
    if known is None and (weights is None or out is None):
        raise UserError("An index needs weights and a file to write: give both, or an index to add to.")
    if known is not None:
        if vector not in (None, known.kind.vector):
            raise UserError(f"The index {add} has {known.kind.vector} vectors, not {vector}: add images without --vector.")
        vector = known.kind.vector
        images = without_known(images, known)
        if not len(images):
            raise UserError(f"All images of {', '.join(paths)} are in the index {add} already: there is nothing to add.")
    model, location, digest = open_weights(weights, known, vector, device)
    with progress("embedding", len(images)) as advance:
        index, unreadable = build_index(images, model, digest, location, vector, batch_size, workers, advance)
    index = index if known is None else merge(known, index)
    target = out or add
    assert target is not None
    save_index(index, target)
    return index, [*problems, *unreadable]


def open_weights(
    weights: str | Path | None, index: ImageIndex | None, vector: str | None, device: str | None
) -> tuple[Model, str, str]:
    """A model, its location and its digest, which must be that of the index.

    The location in an index, which may come from anywhere, is used if it is a local file or bundled: nothing is downloaded.
    """
    if weights is None:
        assert index is not None
        if not find_bundled(index.weights) and not os.path.isfile(index.weights):
            raise UserError(f"The weights of the index are not at {index.weights or 'a known place'} any more: give --weights.")
        weights = index.weights
    model = open_model(weights, device)
    digest = model_digest(model, choose_kind(model, vector))
    if index is not None and digest != index.digest:
        raise UserError(f"The index was not made with the weights {weights}: give those that it was made with.")
    return model, locate(str(find_weights(weights))), digest


class Search(NamedTuple):
    """The result of a search: matches, the pixels and the known labels of the queries, and those that cannot be read."""

    matches: list[Match]
    queries: list[np.ndarray]
    labels: list[dict[str, str]]  # of each query: column -> class name
    problems: list[Problem]


def search_images(
    index: str | Path | ImageIndex,
    images: str | Path | Sequence[str],
    k: int = 10,
    *,
    weights: str | Path | None = None,
    voters: int = VOTERS,
    split: str | None = None,
    max_images: int = 1000,
    device: str | None = None,
    batch_size: int = 64,
    workers: int | None = None,
) -> Search:
    """The k most similar images of an index for each of the given images, and their classes by the votes of `voters` neighbors.

    >>> found = vitrail.search_images("photos.index", "query.jpg")
    >>> found.matches[0].neighbors[0].location, found.matches[0].classes["label"][0]
    """
    if k < 1 or voters < 1:
        raise UserError("k and voters are numbers of neighbors: at least 1.")
    collection = index if isinstance(index, ImageIndex) else load_index(index)
    source, problems = open_embedding_source([os.fspath(images)] if isinstance(images, str | Path) else list(images), split)
    if not len(source):
        first = f" ({problems[0].location}: {problems[0].reason})" if problems else ""
        raise UserError(f"There is no query image{first}: give an image file, a folder or a data set.")
    if len(source) > max_images:
        raise UserError(f"{len(source):,} queries are more than {max_images:,}: give fewer images.")
    model, _, _ = open_weights(weights, collection, collection.kind.vector, device)
    found = embed_with_thumbnails(model, source, collection.kind, batch_size, workers, lambda count: None)
    rows = found.images.tolist()
    matches = match_queries(collection, [source.location(row) for row in rows], found.vectors, k, voters)
    return Search(
        matches,
        [decode(each) for each in found.thumbnails],
        [known_labels(source, row) for row in rows],
        problems + found.problems,
    )


def known_labels(source: Source, row: int) -> dict[str, str]:
    columns = label_columns(source).items()
    return {name: labels.names[labels.values[row]] for name, labels in columns if labels.values[row] >= 0}
