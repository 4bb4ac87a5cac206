"""Keys of images: digests of their encoded bytes, which do not depend on file names, folders or archives."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitrail.data.source import Encoded, Source
from vitrail.data.workers import Workers, default_workers

KEY_BYTES = 16
CHUNK = 64  # images per task
MIN_FOR_WORKERS = 2048  # starting worker processes takes longer than reading fewer images


def image_key(encoded: Encoded) -> bytes:
    """16 bytes of BLAKE2b of the encoded file, or of shape and pixels if the data set stores pixels."""
    if isinstance(encoded, bytes):
        return hashlib.blake2b(encoded, digest_size=KEY_BYTES).digest()
    digest = hashlib.blake2b(repr(encoded.shape).encode(), digest_size=KEY_BYTES)
    digest.update(np.ascontiguousarray(encoded).data)
    return digest.digest()


@dataclass(frozen=True)
class KeyReader:
    """Computes keys; sent to the worker processes."""

    source: Source

    def __call__(self, span: tuple[int, int]) -> tuple[bytes, list[int]]:
        """The concatenated keys of the images start, ..., stop - 1, and the indices of unreadable files."""
        keys, unreadable = [], []
        for index in range(*span):
            try:
                keys.append(image_key(self.source.encoded(index)))
            except (OSError, ValueError):
                keys.append(bytes(KEY_BYTES))
                unreadable.append(index)
        return b"".join(keys), unreadable


def image_keys(
    source: Source, workers: int | None = None, advance: Callable[[int], Any] = lambda count: None
) -> tuple[np.ndarray, np.ndarray]:
    """Keys uint8 [N, 16] of all images, and whether they are readable, bool [N]; keys of unreadable files are zero."""
    count = len(source)
    if workers is None:
        workers = default_workers() if count > MIN_FOR_WORKERS else 0
    pool = Workers(KeyReader(source), workers)
    spans = [(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK)]
    keys, readable = np.zeros((count, KEY_BYTES), dtype=np.uint8), np.ones(count, dtype=bool)
    try:
        for (start, stop), (joined, unreadable) in zip(spans, pool.run(spans), strict=True):
            keys[start:stop] = np.frombuffer(joined, dtype=np.uint8).reshape(-1, KEY_BYTES)
            readable[unreadable] = False
            advance(stop - start)
    finally:
        pool.close()
    return keys, readable


def as_strings(keys: np.ndarray) -> np.ndarray:
    """uint8 [N, 16] as byte strings [N], which numpy can sort and search."""
    return np.ascontiguousarray(keys).view(f"S{KEY_BYTES}").reshape(-1)


def first_occurrences(keys: np.ndarray) -> np.ndarray:
    """int64: the index of the first of equal keys [N, 16], in increasing order."""
    return np.sort(np.unique(as_strings(keys), return_index=True)[1])


def find_keys(keys: np.ndarray, stored: np.ndarray) -> np.ndarray:
    """int64 [N]: the index of each of `keys` [N, 16] in `stored` [M, 16]; -1 if it is missing."""
    wanted, available = as_strings(keys), as_strings(stored)
    if not len(available):
        return np.full(len(wanted), -1, dtype=np.int64)
    order = np.argsort(available, kind="stable")
    position = np.searchsorted(available, wanted, sorter=order).clip(max=len(available) - 1)
    index = order[position]
    return np.where(available[index] == wanted, index, -1)
