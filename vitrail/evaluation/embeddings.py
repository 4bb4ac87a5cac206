"""Embedded images as files that other programs read: a Parquet table, or a NumPy array with a JSON file beside it."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.atomic_files import write_aside
from vitrail.data.source import Labels, Source
from vitrail.errors import UserError
from vitrail.evaluation.features import Embedding, Readout
from vitrail.evaluation.probes.protocol import MAIN

ENDINGS = (".parquet", ".npy")


def check_ending(path: Path) -> None:
    if path.suffix.lower() not in ENDINGS:
        raise UserError(f"Features are written as .parquet or .npy, not as {path.name!r}: give --out features.parquet.")


def write_embedding(embedding: Embedding, source: Source, path: Path, pooling: Readout, weights: str) -> list[Path]:
    """The files written. Parquet: columns image, number, label and further labels (null: unknown), features [D] float32."""
    check_ending(path)
    numbers = embedding.image.cpu().numpy()
    images = [source.where(int(number)) for number in numbers]
    labels = {name: values.values[numbers].astype(np.int64) for name, values in columns(source).items()}
    about = {
        "weights": weights,
        "source": source.name,
        **pooling._asdict(),
        "classes": {name: values.names for name, values in columns(source).items()},
    }
    vectors = embedding.vectors.cpu().numpy()
    if path.suffix.lower() == ".npy":
        beside = path.with_suffix(".json")
        content = about | {
            "images": [plain(text) for text in images],
            "numbers": numbers.tolist(),
            "labels": {name: [None if value < 0 else value for value in values.tolist()] for name, values in labels.items()},
        }
        write_aside(path, lambda side: save_array(side, vectors))
        write_aside(beside, lambda side: side.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8"))
        return [path, beside]
    write_aside(path, lambda side: save_table(side, images, numbers, labels, vectors, about))
    return [path]


def columns(source: Source) -> dict[str, Labels]:
    return ({MAIN: source.label} if source.label is not None else {}) | source.extra


def plain(text: str) -> str:
    """File names of bytes that are no text are spelled with question marks."""
    return text.encode("utf-8", "replace").decode()


def save_array(path: Path, vectors: np.ndarray) -> None:
    with open(path, "wb") as file:
        np.save(file, vectors)


def save_table(
    path: Path,
    images: list[str],
    numbers: np.ndarray,
    labels: dict[str, np.ndarray],
    vectors: np.ndarray,
    about: dict[str, Any],
) -> None:
    import pyarrow
    from pyarrow import parquet

    data = {"image": pyarrow.array([plain(text) for text in images], pyarrow.string()), "number": pyarrow.array(numbers)}
    for name, values in labels.items():
        data[name] = pyarrow.array(values, mask=values < 0)
    data["features"] = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(vectors.reshape(-1)), vectors.shape[1])
    table = pyarrow.table(data).replace_schema_metadata({"vitrail": json.dumps(about, ensure_ascii=False)})
    parquet.write_table(table, path)
