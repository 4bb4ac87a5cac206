"""The file of an image index: safetensors, with a JSON entry `vitrail_index` in its metadata.

A file may come from anywhere: nothing in it is executed, sizes are checked before they are used, and paths in it are shown, never
opened.
"""

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vitrail.atomic_files import atomic_write
from vitrail.data.source import Labels
from vitrail.errors import UserError
from vitrail.evaluation.features import VECTORS, FeatureKind
from vitrail.evaluation.image_index import ImageIndex

ENTRY, VERSION = "vitrail_index", 1
DTYPES = {
    "vectors": torch.float32,
    "labels": torch.int64,
    "locations": torch.uint8,
    "location_ends": torch.int64,
    "thumbnails": torch.uint8,
    "thumbnail_ends": torch.int64,
}
MAX_WIDTH, MAX_COLUMNS, MAX_CLASSES = 1 << 16, 64, 1 << 22


def save_index(index: ImageIndex, path: str | Path) -> None:
    """Write an index; a file that exists is replaced when the new one is complete."""
    names = list(index.columns)
    content = {
        "version": VERSION,
        "weights": index.weights,
        "digest": index.digest,
        "vector": index.kind.vector,
        "columns": [{"name": name, "classes": index.columns[name].names} for name in names],
    }
    locations, location_ends = pack([location.encode("utf-8", "surrogateescape") for location in index.locations])
    thumbnails, thumbnail_ends = pack(index.thumbnails)
    labels = [torch.from_numpy(np.ascontiguousarray(index.columns[name].values)) for name in names]
    tensors = {
        "vectors": index.vectors.cpu().contiguous(),
        "labels": torch.stack(labels, 1) if labels else torch.zeros(len(index), 0, dtype=torch.int64),
        "locations": locations,
        "location_ends": location_ends,
        "thumbnails": thumbnails,
        "thumbnail_ends": thumbnail_ends,
    }
    metadata = {ENTRY: json.dumps(content)}
    atomic_write(Path(path), lambda file: save_file(tensors, file, metadata))


def pack(parts: Sequence[bytes]) -> tuple[Tensor, Tensor]:
    """Byte strings as one tensor, and the end of each."""
    ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
    return torch.frombuffer(bytearray(b"".join(parts) or b"\0"), dtype=torch.uint8), torch.from_numpy(ends)


def unpack(data: Tensor, ends: Tensor) -> list[bytes]:
    content, limits = data.numpy().tobytes(), [0, *ends.tolist()]
    return [content[start:end] for start, end in itertools.pairwise(limits)]


def load_index(path: str | Path) -> ImageIndex:
    """Read an index; UserError for a file that is none, or a damaged one."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise UserError(f"There is no index at {path}: make one with vitrail index SOURCE --weights WEIGHTS --out {path}.")
    try:
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get(ENTRY)
            if text is None:
                raise UserError(f"{path} is not an image index: make one with vitrail index SOURCE --weights WEIGHTS --out FILE.")
            tensors = {name: file.get_tensor(name) for name in DTYPES}
        content = json.loads(text)
        check(content, tensors, os.path.getsize(path))
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, RecursionError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"The index {path} is damaged ({reason.rstrip('.')}): make it again with vitrail index.") from None
    columns = {
        entry["name"]: Labels(tensors["labels"][:, number].numpy(), list(entry["classes"]))
        for number, entry in enumerate(content["columns"])
    }
    locations = [each.decode("utf-8", "surrogateescape") for each in unpack(tensors["locations"], tensors["location_ends"])]
    thumbnails = unpack(tensors["thumbnails"], tensors["thumbnail_ends"])
    kind = FeatureKind(content["vector"], normalize=True)
    return ImageIndex(tensors["vectors"], locations, thumbnails, columns, content["weights"], content["digest"], kind)


def check(content: Any, tensors: dict[str, Tensor], size: int) -> None:
    """Raise ValueError for anything that `save_index` does not write."""
    expect(content["version"] == VERSION, "it has another version")
    expect(all(tensors[name].dtype == dtype for name, dtype in DTYPES.items()), "a tensor has another type")
    expect(sum(tensor.nbytes for tensor in tensors.values()) <= size, "its tensors are larger than the file")
    vectors, labels, columns = tensors["vectors"], tensors["labels"], content["columns"]
    expect(vectors.ndim == 2 and 1 <= vectors.shape[1] <= MAX_WIDTH, "its embeddings have another shape")
    expect(bool(vectors.isfinite().all()), "an embedding is NaN or Inf")
    lengths = vectors.norm(dim=1)
    expect(bool(((lengths - 1).abs() < 1e-3).all()), "an embedding does not have length 1")
    expect(content["vector"] in VECTORS and all(type(content[name]) is str for name in ("weights", "digest")), "its weights")
    expect(isinstance(columns, list) and len(columns) <= MAX_COLUMNS, "its label columns")
    expect(tuple(labels.shape) == (len(vectors), len(columns)), "its labels have another shape")
    names = [entry["name"] for entry in columns]
    expect(len(set(names)) == len(names), "two label columns have one name")
    for number, entry in enumerate(columns):
        classes = entry["classes"]
        texts = isinstance(classes, list) and all(type(name) is str for name in [entry["name"], *classes])
        expect(texts and 1 <= len(classes) <= MAX_CLASSES, "its class names")
        values = labels[:, number]
        expect(not len(values) or (int(values.min()) >= -1 and int(values.max()) < len(classes)), "a label has no class")
    for name in ("location", "thumbnail"):
        ends, data = tensors[f"{name}_ends"], tensors[f"{name}s"]
        expect(tuple(ends.shape) == (len(vectors),) and data.ndim == 1, f"its {name}s have another shape")
        inside = bool(((ends >= 0) & (ends <= len(data))).all())  # so that differences do not overflow
        expect(inside and bool((ends.diff() >= 0).all()), f"its {name}s are out of range")


def expect(holds: bool, reason: str) -> None:
    if not holds:
        raise ValueError(reason)
