"""Files of features: a Parquet table, or a NumPy array with a JSON file of the same name."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.atomic_files import atomic_write, atomic_write_text
from vitrail.data.source import Source
from vitrail.errors import UserError
from vitrail.evaluation.features import Embedding, FeatureKind
from vitrail.evaluation.probes.protocol import label_columns

SUFFIXES = (".parquet", ".npy")


def check_suffix(path: Path) -> None:
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"Features are written as .parquet or .npy, not as {path.name!r}: give --out features.parquet.")


def write_embedding(embedding: Embedding, source: Source, path: Path, kind: FeatureKind, weights: str) -> list[Path]:
    """Write the features and return the paths of the files.

    Parquet: the columns image, index, label, further labels (null: unknown) and features [D] float32.
    """
    check_suffix(path)
    indices = embedding.image.cpu().numpy()
    images = [source.location(int(index)) for index in indices]
    labels = {name: column.values[indices].astype(np.int64) for name, column in label_columns(source).items()}
    metadata = {
        "weights": weights,
        "source": source.name,
        **kind._asdict(),
        "classes": {name: column.names for name, column in label_columns(source).items()},
    }
    vectors = embedding.vectors.cpu().numpy()
    if path.suffix.lower() == ".npy":
        sidecar = path.with_suffix(".json")
        content = metadata | {
            "images": [replace_invalid(text) for text in images],
            "indices": indices.tolist(),
            "labels": {name: [None if value < 0 else value for value in values.tolist()] for name, values in labels.items()},
        }
        atomic_write(path, lambda file: save_array(file, vectors))
        atomic_write_text(sidecar, json.dumps(content))
        return [path, sidecar]
    atomic_write(path, lambda file: save_table(file, images, indices, labels, vectors, metadata))
    return [path]


def replace_invalid(text: str) -> str:
    """File names that are not valid UTF-8, with question marks."""
    return text.encode("utf-8", "replace").decode()


def save_array(path: Path, values: np.ndarray) -> None:
    with path.open("wb") as file:  # np.save would append .npy to the name
        np.save(file, values)


def save_table(
    path: Path,
    images: list[str],
    indices: np.ndarray,
    labels: dict[str, np.ndarray],
    vectors: np.ndarray,
    metadata: dict[str, Any],
) -> None:
    import pyarrow
    from pyarrow import parquet

    data = {
        "image": pyarrow.array([replace_invalid(text) for text in images], pyarrow.string()),
        "index": pyarrow.array(indices),
    }
    for name, values in labels.items():
        data[name] = pyarrow.array(values, mask=values < 0)
    data["features"] = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(vectors.reshape(-1)), vectors.shape[1])
    table = pyarrow.table(data).replace_schema_metadata({"vitrail": json.dumps(metadata)})
    parquet.write_table(table, path)
