"""Images by what they are: a digest of their encoded bytes, so that a file that is moved, renamed or packed is still known."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitrail.data.source import Encoded, Source
from vitrail.data.workers import Workers, usual_workers

WIDTH = 16  # bytes of a key
CHUNK = 64  # images per task
FEW = 2048  # images that are read sooner than a process that helps is started


def key_of(encoded: Encoded) -> bytes:
    """16 bytes of BLAKE2b of a file's bytes; of the shape and the pixels where the data set stores pixels."""
    if isinstance(encoded, bytes):
        return hashlib.blake2b(encoded, digest_size=WIDTH).digest()
    digest = hashlib.blake2b(repr(encoded.shape).encode(), digest_size=WIDTH)
    digest.update(np.ascontiguousarray(encoded).data)
    return digest.digest()


@dataclass(frozen=True)
class Addressing:
    """All that a worker process needs to know."""

    source: Source

    def __call__(self, span: tuple[int, int]) -> tuple[bytes, list[int]]:
        """The keys of the images `start` ... `stop`, one after the other, and which of them have no bytes to read."""
        keys, lost = [], []
        for index in range(*span):
            try:
                keys.append(key_of(self.source.encoded(index)))
            except (OSError, ValueError):
                keys.append(bytes(WIDTH))
                lost.append(index)
        return b"".join(keys), lost


def keys_of(
    source: Source, workers: int | None = None, advance: Callable[[int], Any] = lambda count: None
) -> tuple[np.ndarray, np.ndarray]:
    """Keys uint8 [N, 16] of a source's images, and which could be read, bool [N]; the others' keys are zero."""
    count = len(source)
    if workers is None:
        workers = usual_workers() if count > FEW else 0
    pool = Workers(Addressing(source), workers)
    spans = [(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK)]
    keys, readable = np.zeros((count, WIDTH), dtype=np.uint8), np.ones(count, dtype=bool)
    try:
        for (start, stop), (found, lost) in zip(spans, pool.run(spans), strict=True):
            keys[start:stop] = np.frombuffer(found, dtype=np.uint8).reshape(-1, WIDTH)
            readable[lost] = False
            advance(stop - start)
    finally:
        pool.close()
    return keys, readable


def as_words(keys: np.ndarray) -> np.ndarray:
    """[N, 16] bytes as [N] strings, which numpy can sort and search."""
    return np.ascontiguousarray(keys).view(f"S{WIDTH}").reshape(-1)


def first_of_each(keys: np.ndarray) -> np.ndarray:
    """int64: of equal keys [N, 16] the first, in their order."""
    return np.sort(np.unique(as_words(keys), return_index=True)[1])


def find(keys: np.ndarray, known: np.ndarray) -> np.ndarray:
    """int64 [N]: where each of `keys` [N, 16] stands among `known` [M, 16]; -1 where it does not."""
    words, ours = as_words(keys), as_words(known)
    if not len(ours):
        return np.full(len(words), -1, dtype=np.int64)
    order = np.argsort(ours, kind="stable")
    place = np.searchsorted(ours, words, sorter=order).clip(max=len(ours) - 1)
    found = order[place]
    return np.where(ours[found] == words, found, -1)
