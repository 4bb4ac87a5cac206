"""Features on disk, found by content: probes after the first one with the same weights and images do not run the model.

A file's name is a hash of everything its features depend on: weights, images, preprocessing, kind of features, versions. The
folder is features/ in the cache. Above MAX_BYTES the files that were not used for longest are removed.
"""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import PIL
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vitrail.atomic_files import WriteError, atomic_write
from vitrail.cache import cache_folder
from vitrail.data.image_formats import readable_formats
from vitrail.data.loader import Problem
from vitrail.data.source import Source
from vitrail.evaluation.features import Embedding, FeatureKind, check_kind, embed, with_labels
from vitrail.evaluation.model import Model, decode_side, device_of, digest_weights
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.teachers.image_digests import image_keys
from vitrail.teachers.network import ConvNetwork, TransformerNetwork
from vitrail.version import __version__

MAX_BYTES = 2_000_000_000  # of all files


def cached_embed(
    model: Model,
    source: Source,
    kind: FeatureKind,
    batch_size: int = 64,
    workers: int | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> Embedding:
    """The result of `embed`, read from the cache if it is there. A cache that cannot be read or written is ignored."""
    check_kind(model, kind)
    key = content_hash(model, source, kind, workers)
    if key is None:
        return embed(model, source, kind, batch_size, workers, advance)
    file = cache_folder("features") / f"{key}.safetensors"
    found = read_features(file, model, source)
    if found is not None:
        advance(len(source))
        return found
    embedding = embed(model, source, kind, batch_size, workers, advance)
    with contextlib.suppress(WriteError, OSError):
        write_features(file, embedding, source)
        remove_oldest(file.parent)
    return embedding


def content_hash(model: Model, source: Source, kind: FeatureKind, workers: int | None = None) -> str | None:
    """A hash of everything that features depend on; None for networks whose program is not known from their weights."""
    if isinstance(model, VisionTransformer):
        network = json.dumps(model.architecture.to_dict(), sort_keys=True)
    elif isinstance(model.network, TransformerNetwork):
        described = json.dumps(model.network.model.architecture.to_dict(), sort_keys=True)
        network = f"{described} {model.channel_order} {model.size}"
    elif isinstance(model.network, ConvNetwork):
        network = f"{model.network} {model.channel_order} {model.size}"
    else:
        return None
    versions = (__version__, torch.__version__, PIL.__version__, readable_formats())
    settings = [network, model.preprocessing.to_dict(), kind, decode_side(model), device_of(model).type, versions]
    digest = digest_weights(model, settings)
    digest.update(image_keys(source, workers)[0].tobytes())
    return digest.hexdigest()[:32]


def read_features(file: Path, model: Model, source: Source) -> Embedding | None:
    """The features in a file on the model's device, with the labels of the source; None if it is missing or damaged."""
    try:
        with safe_open(file, "pt", device=str(device_of(model))) as content:
            vectors, image = content.get_tensor("vectors"), content.get_tensor("image")
            problems = json.loads((content.metadata() or {}).get("problems", "[]"))
        os.utime(file)  # used now
        unreadable = [Problem(source.location(int(index)), str(reason)) for index, reason in problems]
        return with_labels(vectors, image, source, unreadable)
    except (OSError, ValueError, TypeError, IndexError, SafetensorError, RuntimeError):
        return None


def write_features(file: Path, embedding: Embedding, source: Source) -> None:
    readable = set(embedding.image.tolist())
    unreadable = [index for index in range(len(source)) if index not in readable]
    reasons = [problem.reason for problem in embedding.problems]  # in the order of the images
    metadata = {"problems": json.dumps(list(zip(unreadable, reasons, strict=True)))}
    tensors = {"vectors": embedding.vectors.cpu().contiguous(), "image": embedding.image.cpu()}
    atomic_write(file, lambda side: save_file(tensors, side, metadata))


def remove_oldest(folder: Path) -> None:
    """Remove the files that were not used for longest until all together have at most MAX_BYTES."""
    entries = [(entry.stat().st_mtime, entry.stat().st_size, entry) for entry in folder.glob("*.safetensors")]
    total = sum(size for _, size, _ in entries)
    for _, size, entry in sorted(entries, key=lambda each: each[0]):
        if total <= MAX_BYTES:
            return
        entry.unlink(missing_ok=True)
        total -= size
